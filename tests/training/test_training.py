"""Loss scaling on trainers, on one context and on several, against plain FP32 steps."""
from __future__ import annotations

import copy
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import sequential

import gluon_amp as amp

pytestmark = pytest.mark.machine
ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
INF = float("inf")
BOTH = pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one", "two"])
GRAD_REQS = pytest.mark.parametrize("grad_req", ["write", "add"])


@pytest.fixture(autouse=True)
def _amp_on(_amp_off):
    amp.init()


def make(contexts=ONE, scaler=None, momentum=0.9, grad_req="write", **trainer_arguments):
    mx.random.seed(4)
    net = nn.HybridSequential()
    net.add(nn.Dense(16, in_units=8, activation="relu"), nn.Dense(2, in_units=16))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net.hybridize()
    net.collect_params().setattr("grad_req", grad_req)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": momentum},
                            **trainer_arguments)
    if scaler is not False:
        amp.init_trainer(trainer, scaler)
    return net, trainer


def plain(contexts=ONE, **options):
    """Return a network and a trainer that scales nothing."""
    return make(contexts, False, update_on_kvstore=False, **options)


def backward(net, trainer, contexts=ONE, poison=None):
    """Compute gradients, scaled where the trainer has a scaler, of data with an infinity on one context."""
    generator = np.random.RandomState(5)
    losses = []
    with autograd.record():
        for number, context in enumerate(contexts):
            data = mx.nd.array(generator.randn(4, 8), ctx=context)
            if number == poison:
                data[0, 0] = np.inf
            losses.append((net(data) ** 2).mean())
        if hasattr(trainer, "_amp_loss_scaler"):
            with amp.scale_loss(losses, trainer) as scaled_losses:
                autograd.backward(scaled_losses)
        else:
            autograd.backward(losses)


def step(net, trainer, contexts=ONE, poison=None):
    backward(net, trainer, contexts, poison)
    trainer.step(4 * len(contexts))


def weights(net, context=ONE[0]):
    return [parameter.data(context).asnumpy() for parameter in net.collect_params().values()]


def gradients(net):
    return [parameter.grad().asnumpy() for parameter in net.collect_params().values()]


def same(first, second):
    return all((a == b).all() for a, b in zip(first, second))


def told(caught):
    return [str(item.message) for item in caught if "skipped" in str(item.message)]


@BOTH
@pytest.mark.parametrize("scale", [None, 1024.0, "dynamic"])
def test_a_scaled_step_is_the_unscaled_one(contexts, scale):
    # Powers of two scale exactly, so that not a bit may differ.
    pairs = make(contexts, scale), plain(contexts)
    for net, trainer in pairs:
        for _ in range(3):
            step(net, trainer, contexts)
    (scaled, _), (reference, _) = pairs
    assert same(weights(scaled), weights(reference))
    assert all(same(weights(scaled), weights(scaled, context)) for context in contexts)


@pytest.mark.parametrize("poison", [0, 1])
def test_an_overflow_on_any_context_skips_the_step_on_all(poison):
    net, trainer = make(TWO, amp.DynamicLossScaler(init_scale=256))
    step(net, trainer, TWO)
    before, updates = weights(net), trainer.optimizer.num_update
    step(net, trainer, TWO, poison)
    assert all(same(before, weights(net, context)) for context in TWO)
    assert trainer.optimizer.num_update == updates
    scaler = amp.get_loss_scaler(trainer)
    assert (scaler.step_was_skipped, scaler.num_skipped, scaler.loss_scale) == (True, 1, 128)
    step(net, trainer, TWO)
    assert not scaler.step_was_skipped
    assert not same(before, weights(net))


@pytest.mark.parametrize(("layer", "value", "skips"), [
    (1, np.inf, True), (1, -np.inf, True), (1, np.nan, True), (0, 1e30, False)])
def test_one_bad_value_is_found_and_large_ones_are_none(layer, value, skips):
    """Their sum of squares overflows, the gradients do not."""
    net, trainer = make()
    assert trainer._amp_loss_scaler.loss_scale == 1  # bfloat16 and FP32 need none
    backward(net, trainer)
    net[layer].bias.grad()[1] = value
    trainer.step(1e30)
    assert trainer._amp_loss_scaler.step_was_skipped == skips
    assert trainer._amp_loss_scaler.loss_scale == 1


def test_an_inf_of_a_skipped_step_is_gone_when_the_next_step_does_not_use_its_layer():
    net, other = (nn.Dense(1, in_units=2) for _ in range(2))
    for block in (net, other):
        block.initialize()
    trainer = gluon.Trainer({**net.collect_params(), **other.collect_params()}, "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, 4.0)
    for blocks, factor in (((net, other), INF), ((net,), 1.0)):
        with autograd.record():
            loss = sum((block(mx.nd.ones((1, 2))) * factor).sum() for block in blocks)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        kept = weights(other)
        trainer.step(1, ignore_stale_grad=True)
    assert trainer._amp_loss_scaler.num_skipped == 1
    assert same(kept, weights(other))


def test_row_sparse_and_missing_gradients_are_handled():
    net = sequential([nn.Embedding(50, 4, sparse_grad=True), nn.Dense(2, in_units=12)], active=False)
    net[1].bias.grad_req = "null"
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer)
    before = net[0].weight.data().asnumpy()
    for fill, moved in ((1.0, True), (INF, False)):
        with autograd.record(), amp.scale_loss((net(mx.nd.array([[1, 2, 3]])) * fill).sum(), trainer) as loss:
            loss.backward()
        assert net[0].weight.grad().stype == "row_sparse"
        trainer.step(1)
        after = net[0].weight.data().asnumpy()
        assert (before != after).any() == moved
        before = after


def test_numpy_style_parameters_are_handled():
    with mx.util.np_shape(True), mx.util.np_array(True):
        net = nn.Dense(2, in_units=3)
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        amp.init_trainer(trainer, 8.0)
        before = net.weight.data().asnumpy()
        for fill in (1.0, np.inf):
            with autograd.record(), amp.scale_loss((net(mx.np.ones((1, 3))) * fill).sum(), trainer) as loss:
                loss.backward()
            norm = amp.clip_global_norm(trainer, 100.0)
            trainer.step(1)
        assert not np.isfinite(norm)
        assert trainer._amp_loss_scaler.num_skipped == 1
        assert np.allclose(net.weight.data().asnumpy(), before - 0.1)


def test_a_trainer_without_gradients_is_no_error():
    make(grad_req="null")[1].step(1)


def test_the_trainers_own_rescaling_is_kept():
    net, trainer = make(scaler=64.0, momentum=0)
    backward(net, trainer)
    before, gradient = net[1].bias.data().asnumpy(), net[1].bias.grad().asnumpy() / 64
    trainer._scale = 0.5
    trainer.step(2)
    assert np.allclose(net[1].bias.data().asnumpy(), before - 0.1 * 0.5 / 2 * gradient, rtol=1e-6, atol=0)


def test_unscale_gives_true_gradients_and_the_same_step():
    (reference, its), (net, trainer) = plain(), make(scaler=4096.0)
    backward(reference, its)
    backward(net, trainer)
    amp.unscale(trainer)
    assert same(gradients(net), gradients(reference))
    trainer.step(4)
    its.step(4)
    assert same(weights(net), weights(reference))


@BOTH
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unscale", "clip"])
def test_row_sparse_gradients_are_unscaled_and_clipped(max_norm, contexts):
    net = nn.Embedding(10, 4, sparse_grad=True)
    net.initialize(mx.init.Uniform(0.5), ctx=contexts)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, 256.0)
    weight = net.weight.data(contexts[0]).asnumpy()
    for words in ([1, 3, 3], [7, 1, 2], [5]):  # other rows in each step
        with autograd.record():
            losses = [(net(mx.nd.array(words, ctx=context)) ** 2).sum() for context in contexts]
            with amp.scale_loss(losses, trainer) as scaled_losses:
                autograd.backward(scaled_losses)
        gradient = np.zeros_like(weight)
        np.add.at(gradient, words, len(contexts) * 2 * weight[words])
        if max_norm is None:
            amp.unscale(trainer)
        else:
            norm = amp.clip_global_norm(trainer, max_norm)
            assert np.isclose(norm, np.linalg.norm(gradient), rtol=1e-5)
            gradient *= min(1.0, max_norm / norm)
        trainer.step(1)
        weight = weight - 0.1 * gradient
        for context in contexts:
            np.testing.assert_allclose(net.weight.data(context).asnumpy(), weight, rtol=1e-5, atol=1e-7)


def test_losses_of_every_form():
    _, trainer = make(scaler=2.0 ** 16)
    for loss in (mx.nd.ones(3) * 3, (mx.nd.array([3.0]), mx.nd.array([3.0], dtype="float16"))):
        with amp.scale_loss(loss, trainer) as scaled:  # float16 losses in FP32
            for one in scaled if isinstance(scaled, list) else [scaled]:
                assert (one.asnumpy() == 3 * 2 ** 16).all()
    with amp.scale_loss(mx.nd.ones(1), trainer, enabled=False) as scaled:
        assert scaled.asscalar() == 1


def test_scaling_outside_of_record_still_reaches_the_loss():
    net, trainer = make(scaler=16.0)
    with autograd.record():
        loss = net(mx.nd.ones((1, 8))).sum()
    with amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    assert (net[1].bias.grad().asnumpy() == 16).all()


def test_updates_that_began_on_the_kvstore_move_to_the_trainer_with_their_state():
    pairs = make(TWO, False), plain(TWO)
    for net, trainer in pairs:
        step(net, trainer, TWO)
    assert pairs[0][1]._update_on_kvstore
    amp.init_trainer(pairs[0][1])
    for net, trainer in pairs:
        step(net, trainer, TWO)
    assert not pairs[0][1]._update_on_kvstore
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(*(weights(net) for net, _ in pairs)))


class TestSeveral:
    def test_trainers_that_share_a_scaler_scale_one_loss(self):
        scaler = amp.DynamicLossScaler(init_scale=64)
        net, first = make(scaler=scaler)
        second = gluon.Trainer(net[1].collect_params(), "sgd")
        amp.init_trainer(second, scaler)
        with amp.scale_loss(mx.nd.ones(1), [first, second]) as scaled:
            assert scaled.asscalar() == 64
        assert first._amp_loss_scaler.state == second._amp_loss_scaler.state == "SCALED"

    def test_trainers_with_other_scales_cannot_share_a_loss(self):
        (_, first), (_, second) = make(scaler=8.0), make(scaler=16.0)
        with pytest.raises(amp.StateError, match=r"different scales \(\[8.0, 16.0\]\)"), \
                amp.scale_loss(mx.nd.ones(1), [first, second]):
            pass

    def test_the_scale_that_a_gradient_carries_is_the_one_divided_out(self):
        # Two trainers share a scaler; the first one's overflow must not change what the second divides by.
        scaler = amp.DynamicLossScaler(init_scale=64)
        (net, first), (other, second) = (make(scaler=scaler, momentum=0) for _ in range(2))
        reference, its = plain(momentum=0)
        backward(net, first, poison=0)
        backward(other, second)
        backward(reference, its)
        first.step(4)
        assert scaler.loss_scale == 32
        second.step(4)
        its.step(4)
        assert same(weights(other), weights(reference))

    def test_several_losses_on_one_trainer(self):
        pairs = make(scaler=16.0, grad_req="add"), plain(grad_req="add")
        for net, trainer in pairs:
            backward(net, trainer)
            step(net, trainer)
        assert same(*(weights(net) for net, _ in pairs))

    def test_losses_may_be_scaled_in_several_threads(self):
        (net, trainer), (reference, its) = make(TWO, 32.0), plain(TWO)
        start = threading.Barrier(2)

        def work(context):
            start.wait()  # both trace the network at once
            with autograd.record():
                loss = (net(mx.nd.ones((4, 8), ctx=context)) ** 2).mean()
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, TWO))
        with autograd.record():
            losses = [(reference(mx.nd.ones((4, 8), ctx=context)) ** 2).mean() for context in TWO]
        autograd.backward(losses)
        trainer.step(8)
        its.step(8)
        assert same(weights(net), weights(reference))


class AveragingTrainer(gluon.Trainer):
    """Does what Horovod's DistributedTrainer does: divides its scale at construction, reduces in its own way."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, kvstore=None, **kwargs)
        self._scale /= 2

    def _allreduce_grads(self):
        for parameter in self._params:
            if parameter.grad_req != "null":
                parameter.list_grad()[0][:] *= 2  # a second worker with the same gradients


def test_subclasses_that_reduce_in_their_own_way_are_fine():
    (net, its), (other, _) = plain(), make(scaler=False)
    trainer = AveragingTrainer(other.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    amp.init_trainer(trainer, 256.0)
    for _ in range(2):
        step(net, its)
        step(other, trainer)
    assert same(weights(net), weights(other))


def clip(net, trainer):
    assert amp.clip_global_norm(trainer, 0.125) > 0.25


def clip_by_hand(net, trainer):
    for context in TWO:
        gluon.utils.clip_global_norm([p.grad(context) for p in net.collect_params().values()], 0.125)


LINES = {"clip": clip, "unscale": lambda net, trainer: amp.unscale(trainer), "clip by hand": clip_by_hand,
         "reduce": lambda net, trainer: trainer.allreduce_grads(),
         "step": lambda net, trainer: trainer.step(1), "update": lambda net, trainer: trainer.update(1)}


class TestClipping:
    @BOTH
    @pytest.mark.parametrize("scale", [None, 4096.0])
    def test_it_is_the_clipping_of_unscaled_gradients(self, scale, contexts):
        reference, its = plain(contexts)
        backward(reference, its, contexts)
        its.allreduce_grads()
        wanted = [parameter.grad(contexts[0]).asnumpy() for parameter in reference.collect_params().values()]
        expected = np.sqrt(sum((gradient.astype("float64") ** 2).sum() for gradient in wanted))
        net, trainer = make(contexts, scale)
        before = weights(net)
        backward(net, trainer, contexts)
        assert np.isclose(amp.clip_global_norm(trainer, expected / 2), expected, rtol=1e-5)
        trainer.step(1)
        for start, parameter, gradient in zip(before, net.collect_params().values(), wanted):
            for context in contexts:
                moved = parameter.data(context).asnumpy() - start
                assert np.allclose(moved, -0.1 * gradient / 2, rtol=1e-4, atol=1e-7)

    def moved_by(self, net, trainer, lines, contexts=TWO):
        """Run lines of a training loop twice; check that the weights move by the norm, alike on all devices."""
        trainer.set_learning_rate(1.0)
        for _ in range(2):
            net.collect_params().zero_grad()
            before = weights(net)
            lines()
            moved = np.sqrt(sum(((one - other) ** 2).sum() for one, other in zip(weights(net), before)))
            assert moved == pytest.approx(0.125, rel=1e-4)
            assert all(same(weights(net), weights(net, context)) for context in contexts)

    def run(self, net, trainer, lines, contexts=TWO):
        def loop():
            backward(net, trainer, contexts)
            for line in lines.split(", "):
                LINES[line](net, trainer)
        self.moved_by(net, trainer, loop, contexts)

    @GRAD_REQS
    @pytest.mark.parametrize("lines", ["clip, step", "unscale, clip, step", "clip, reduce, update",
                                       "reduce, clip, update", "unscale, clip by hand, step"])
    def test_gradients_of_several_devices_are_added_up_first(self, lines, grad_req):
        """As in the lines of Apex and torch, which do not know of ``allreduce_grads``."""
        self.run(*make(TWO, 256.0, momentum=0, grad_req=grad_req), lines)

    @GRAD_REQS
    def test_and_those_of_trainers_that_scale_nothing(self, grad_req):
        net, trainer = plain(TWO, momentum=0, grad_req=grad_req)
        amp.deinit()
        amp.initialize(net, trainer, "O0", verbosity=0)
        self.run(net, trainer, "clip, step")

    def test_and_those_of_trainers_that_reduce_in_their_own_way(self):
        net, _ = plain()
        trainer = AveragingTrainer(net.collect_params(), "sgd")
        trainer._scale *= 2
        amp.init_trainer(trainer, 256.0)
        self.run(net, trainer, "clip, step", ONE)

    @GRAD_REQS
    def test_and_those_of_a_grad_scaler(self, grad_req):
        net, trainer = make(TWO, False, momentum=0, grad_req=grad_req)
        scaler = amp.GradScaler()

        def loop():
            with autograd.record():
                losses = [(net(mx.nd.ones((4, 8), ctx=context)) ** 2).sum() for context in TWO]
            autograd.backward(scaler.scale(losses))
            scaler.unscale_(trainer)
            clip(net, trainer)
            scaler.step(trainer, 1)
            scaler.update()
        self.moved_by(net, trainer, loop)

    @BOTH
    def test_a_batch_may_be_dropped_after_the_norm_was_read(self, contexts):
        pairs = make(contexts, 256.0), make(contexts, 256.0)
        backward(*pairs[0], contexts, poison=len(contexts) - 1)
        assert not np.isfinite(amp.clip_global_norm(pairs[0][1], 1.0))
        for net, trainer in pairs:
            backward(net, trainer, contexts)
            amp.clip_global_norm(trainer, 1.0)
            trainer.step(1)
        assert same(*(weights(net) for net, _ in pairs))

    def test_updates_on_the_kvstore_cannot_be_clipped(self):
        net, trainer = make(TWO, False)
        amp.deinit()
        amp.initialize(net, trainer, enabled=False)
        backward(net, trainer, TWO)
        with pytest.raises(amp.StateError, match=r"clip_global_norm: expected a trainer that updates locally"):
            amp.clip_global_norm(trainer, 1.0)

    @pytest.mark.parametrize(("contexts", "scale"), [(ONE, 128.0), (TWO, 1.0)], ids=["scaled", "several"])
    def test_gradients_of_masters_are_not_those_to_clip(self, contexts, scale):
        net, trainer = make(contexts, scale)
        assert len(list(amp.master_params(trainer))) == 4
        backward(net, trainer, contexts)
        with pytest.raises(amp.StateError, match=r"To clip, call amp\.clip_global_norm"):
            amp.master_params(trainer)
        trainer.step(1)
        assert len(list(amp.master_params(trainer))) == 4

    @pytest.mark.parametrize("max_norm", [1e6, INF])
    def test_small_gradients_are_left_alone(self, max_norm):
        net, trainer = make(scaler=256.0)
        backward(net, trainer)
        before = gradients(net)
        norm = np.linalg.norm(np.concatenate([gradient.ravel() for gradient in before])) / 256
        assert amp.clip_global_norm(trainer, max_norm) == pytest.approx(norm, rel=1e-5)
        assert same(before, gradients(net))

    def test_the_published_pattern_with_the_threshold_times_the_scale(self):
        (net, trainer), (other, ours) = make(scaler=512.0), make(scaler=512.0)
        backward(net, trainer)
        trainer.allreduce_grads()
        gluon.utils.clip_global_norm([parameter.grad() for parameter in net.collect_params().values()],
                                     0.01 * trainer._amp_loss_scaler.loss_scale)
        backward(other, ours)
        amp.clip_global_norm(ours, 0.01)
        trainer.update(4)
        ours.update(4)
        assert all(np.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(weights(net), weights(other)))

    def test_the_norm_of_float16_gradients_may_be_beyond_float16(self):
        net = nn.Dense(1, in_units=4, use_bias=False)
        net.cast("float16")
        net.initialize(mx.init.Zero())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
        amp.init_trainer(trainer, 1.0)
        net.weight.grad()[:] = 4e4
        assert amp.clip_global_norm(trainer, 1e9) == pytest.approx(8e4, rel=1e-3)

    @pytest.mark.parametrize("max_norm", [0, -1, float("nan")])
    def test_a_wrong_norm(self, max_norm):
        with pytest.raises(ValueError, match="expected a number above 0, received max_norm="):
            amp.clip_global_norm(make()[1], max_norm)


class TestAccumulation:
    def run(self, scale, batches, poison=None):
        net, trainer = make(scaler=scale, momentum=0, grad_req="add")
        data = np.random.RandomState(8).randn(12, 8).astype("float32")
        for number, part in enumerate(np.split(data, batches)):
            part = mx.nd.array(part)
            if number == poison:
                part[0, 0] = np.inf
            with autograd.record():
                loss = (net(part) ** 2).sum()
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
        amp.clip_global_norm(trainer, 1.0)
        trainer.step(12)
        return net, trainer

    @pytest.mark.parametrize("scale", [None, 1024.0])
    def test_micro_batches_equal_one_large_batch(self, scale):
        (large, _), (small, _) = self.run(scale, 1), self.run(scale, 4)
        start = weights(make(scaler=False)[0])
        for before, one, many in zip(start, weights(large), weights(small)):
            assert np.abs((one - before) - (many - before)).max() <= 2.0**-7 * np.abs(one - before).max()

    @pytest.mark.parametrize("scale", [None, 1024.0])
    @pytest.mark.parametrize(("batches", "poison"), [(1, 0), (4, 1)])
    def test_an_overflow_skips_and_clears_the_whole_window(self, scale, batches, poison):
        net, trainer = self.run(scale, batches, poison)
        assert trainer._amp_loss_scaler.step_was_skipped
        assert same(weights(net), weights(make(scaler=False)[0]))
        assert not any(gradient.any() for gradient in gradients(net))


class TestManySkippedSteps:
    def test_a_warning_names_the_parameters_and_says_what_to_try(self):
        net, trainer = make(scaler=False)
        amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=4), warn_after=3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                backward(net, trainer)
                net[1].bias.grad()[0] = np.nan
                trainer.step(4)
        (message,) = told(caught)
        assert message.startswith("3 steps in a row were skipped")
        assert net[1].bias.name in message
        assert net[0].weight.name not in message
        assert "learning rate" in message

    @pytest.mark.parametrize("scaler", [None, "dynamic", 8.0])
    @pytest.mark.parametrize(("period", "good", "warns"), [(4, 2, 1), (2, 1, 1), (3, 2, 0)])
    def test_half_of_the_last_ones_is_told_once(self, period, good, warns, scaler):
        net, trainer = make(scaler=scaler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(110):
                step(net, trainer, poison=None if number % period < good else 0)
        assert len(told(caught)) == warns
        assert all(text.startswith("25 of the last 50 steps were skipped") for text in told(caught))

    def test_a_run_ends(self):
        net, trainer = make(scaler=False)
        amp.init_trainer(trainer, 8.0, max_skipped=3)
        kept = weights(net)
        for _ in range(2):
            step(net, trainer, poison=0)
        with pytest.raises(amp.StateError, match=r"3 steps in a row were skipped.*max_skipped=3"):
            step(net, trainer, poison=0)
        assert same(kept, weights(net))
        assert not any(gradient.any() for gradient in gradients(net))

    @pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
    def test_bad_numbers(self, value):
        _, trainer = make(scaler=False)
        with pytest.raises((ValueError, TypeError), match="max_skipped"):
            amp.init_trainer(trainer, max_skipped=value)


def test_the_scale_is_shown_on_the_trainer_as_long_as_amp_is_on():
    _, trainer = make(scaler=32.0)
    assert trainer.amp_loss_scale == trainer._amp_loss_scaler.loss_scale == 32
    amp.deinit()
    assert not hasattr(gluon.Trainer, "amp_loss_scale")


def test_scripts_that_scale_by_hand_still_work():
    net, trainer = make(scaler=128.0, momentum=0)
    reference, its = plain(momentum=0)
    for one, each, scale in ((net, trainer, trainer._amp_loss_scaler.loss_scale), (reference, its, 1)):
        with autograd.record():
            loss = (one(mx.nd.ones((2, 8))) ** 2).mean() * scale
        loss.backward()
        if scale != 1:
            each._scale = each._amp_original_scale / scale
        each.step(2)
    assert same(weights(net), weights(reference))


def test_master_params_are_the_fp32_values_that_are_updated():
    net, trainer = make()
    ordered = [parameter.data().asnumpy() for _, parameter in sorted(net.collect_params().items())]
    assert same([value.asnumpy() for value in amp.master_params(trainer)], ordered)
    for optimizer in ("sgd", "adam"):
        half = nn.Dense(2, in_units=3)
        half.cast("float16")
        half.initialize()
        low = gluon.Trainer(half.collect_params(), optimizer, {"multi_precision": True})
        amp.init_trainer(low, 1.0)
        for parameter in half.collect_params().values():
            parameter.grad()[:] = 1
            parameter.data()._fresh_grad = True
        low.step(1)
        masters = list(amp.master_params(low))
        assert [value.dtype for value in masters] == [np.float32, np.float32]
        assert all(np.allclose(value.asnumpy(), parameter.data().asnumpy(), atol=1e-3)
                   for value, (_, parameter) in zip(masters, sorted(half.collect_params().items())))


class TestMisuse:
    def test_a_step_without_a_scaled_loss(self):
        net, trainer = make(scaler=64.0)
        before = weights(net)
        with autograd.record():
            loss = net(mx.nd.ones((1, 8))).sum()
        loss.backward()
        with pytest.raises(amp.StateError, match=r"step: no loss was scaled.*amp\.scale_loss"):
            trainer.step(4)
        assert same(before, weights(net))

    def test_the_loss_itself_is_differentiated_within_scale_loss(self):
        net, trainer = make(scaler=64.0)
        with mx.autograd.record():
            loss = net(mx.nd.ones((1, 8))).sum()
            with pytest.warns(UserWarning, match=r"divided by the scale 64 all the same.*scaled_loss\.back") as told, \
                    amp.scale_loss(loss, trainer):
                loss.backward()
        assert told[0].filename == __file__
        with mx.autograd.record():
            loss = net(mx.nd.ones((1, 8))).sum()
            with amp.scale_loss(loss, trainer) as scaled_loss:  # one beside it is nobody's mistake
                loss.backward(retain_graph=True)
                scaled_loss.backward()

    @pytest.mark.parametrize(("options", "error", "message"), [
        ({"update_on_kvstore": True}, amp.StateError, r"update_on_kvstore=True.*update_on_kvstore=False"),
        ({"contexts": TWO, "compression_params": {"type": "2bit", "threshold": 0.5}}, amp.StateError,
         "turns an infinite gradient into a finite one"),
        ({"scaler": "static"}, TypeError, "expected a LossScaler, a number, 'dynamic' or None"),
        ({"scaler": -1.0}, ValueError, "expected a finite number above 0")])
    def test_trainers_and_scalers_that_do_not_fit(self, options, error, message):
        with pytest.raises(error, match=message):
            make(**options)

    def test_calls_at_the_wrong_time(self):
        _, bare = make(scaler=False)
        for call in (lambda: amp.scale_loss(mx.nd.ones(1), bare).__enter__(), lambda: amp.unscale(bare),
                     lambda: amp.clip_global_norm(bare, 1), lambda: amp.get_loss_scaler(bare)):
            with pytest.raises(amp.StateError, match=r"call amp.init_trainer\(trainer\) first"):
                call()
        net, trainer = make(scaler=8.0)
        amp.init_trainer(trainer)
        with pytest.raises(amp.StateError, match="once per trainer"):
            amp.init_trainer(trainer, 8.0)
        with pytest.raises(amp.StateError, match="no loss was scaled"):
            amp.unscale(trainer)
        backward(net, trainer)
        amp.unscale(trainer)
        with pytest.raises(amp.StateError, match="unscaled already"):
            amp.unscale(trainer)
        with pytest.raises(amp.StateError, match="after the last micro-batch"):
            backward(net, trainer)
        amp.deinit()
        with pytest.raises(amp.StateError, match=r"call amp.init\(\) before"):
            make()

    def test_no_trainer(self):
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer, received trainer='sgd'"):
            amp.init_trainer("sgd")
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer"), amp.scale_loss(mx.nd.ones(1), None):
            pass

    @BOTH
    @GRAD_REQS
    def test_a_batch_may_be_dropped_after_unscale(self, grad_req, contexts):
        found = []
        for drop in (False, True):
            net, trainer = make(contexts, 64.0, grad_req=grad_req)
            if drop:
                backward(net, trainer, contexts)
                amp.unscale(trainer)
                with pytest.raises(amp.StateError, match="zero_grad"):
                    backward(net, trainer, contexts)
                net.collect_params().zero_grad()
            backward(net, trainer, contexts)
            amp.unscale(trainer)
            trainer.step(1)
            found.append(weights(net))
        assert same(*found)


class TestAnotherTrainersScale:
    """A loss that was scaled for some of the trainers whose parameters it reaches."""

    def nets(self, scaler=128.0):
        (body, first), head = make(scaler=scaler), nn.Dense(1, in_units=2)
        head.initialize(mx.init.One())
        return body, head, first, gluon.Trainer(head.collect_params(), "sgd", {"learning_rate": 0.1})

    def backward(self, body, head, trainer=None):
        """Differentiate a loss of both networks, or of one: scaled for trainers, or not."""
        with autograd.record():
            out = mx.nd.ones((4, 8)) if body is not None else mx.nd.ones((4, 2))
            for net in filter(None, (body, head)):
                out = net(out)
            loss = out.mean()
            with amp.scale_loss(loss, trainer, enabled=trainer is not None) as scaled_loss:
                autograd.backward(scaled_loss)

    @pytest.mark.parametrize("own", [None, 1.0], ids=["no scaler", "a scale of 1"])
    def test_the_one_left_out_is_named(self, own):
        body, head, first, second = self.nets()
        if own:
            amp.init_trainer(second, own)
        self.backward(body, head, first)
        first.step(1)
        with pytest.warns(UserWarning, match=rf"{head.bias.name}, {head.weight.name} carry the loss scale 128 of ano"):
            second.step(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            self.backward(body, head, first)
            second.step(1)  # told once

    @pytest.mark.parametrize("case", ["divided out", "scale of 1", "a loss of its own", "overwritten", "not reached",
                                      "deinit"])
    def test_nothing_is_said(self, case):
        body, head, first, second = self.nets(1.0 if case == "scale of 1" else 128.0)
        if case == "divided out":
            amp.init_trainer(second, loss_scaler=amp.get_loss_scaler(first))
        if case == "a loss of its own":
            self.backward(None, head)
        self.backward(body, None if case in ("a loss of its own", "not reached") else head,
                      [first, second] if case == "divided out" else first)
        if case == "overwritten":
            self.backward(None, head)
        if case == "deinit":
            amp.deinit()
            amp.init()
        first.step(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            second.step(1, ignore_stale_grad=case == "not reached")


class TestSharedScaler:
    """One scaler of several trainers reacts once per iteration."""

    def steps(self, factors, several=2):
        scaler = amp.DynamicLossScaler(init_scale=1024, growth_interval=4)
        nets = [nn.Dense(4, in_units=4) for _ in range(several)]
        trainers = []
        for net in nets:
            net.initialize()
            trainers.append(gluon.Trainer(net.collect_params(), "sgd"))
            amp.init_trainer(trainers[-1], scaler)
        scales = []
        for factor in factors:
            with autograd.record():
                value = mx.nd.ones((2, 4)) * (factor if np.isscalar(factor) else 1)
                for net in nets:
                    value = net(value)
                loss = value.mean()
                with amp.scale_loss(loss, trainers) as scaled:
                    autograd.backward(scaled)
            for number, trainer in enumerate(trainers):
                if not np.isscalar(factor) and not factor[number]:  # an overflow in this network's gradients alone
                    nets[number].weight.grad()[:] = np.inf
                trainer.step(1)
            scales.append(scaler.loss_scale)
        return scales, scaler, trainers

    @pytest.mark.parametrize("bad", [INF, (1, 0), (0, 1), (0, 0)])
    def test_one_overflow_is_one_event_in_whichever_trainer(self, bad):
        scales, scaler, trainers = self.steps([bad, (1, 1), (1, 1), (1, 1), (1, 1)])
        assert scales == [512, 512, 512, 512, 1024]
        assert scaler.num_skipped == 1
        assert [trainer._amp_loss_scaler.step_was_skipped for trainer in trainers] == [False, False]

    def test_a_trainer_knows_its_own_step(self):
        _, _, trainers = self.steps([(1, 0)])
        assert [trainer._amp_loss_scaler.step_was_skipped for trainer in trainers] == [False, True]

    def test_a_trainer_alone(self):
        assert self.steps([INF, INF, 1, 1, 1, 1], several=1)[0] == [512, 256, 256, 256, 256, 512]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
                         ids=["deepcopy", "pickle"])
@pytest.mark.parametrize(("name", "options"), [
    ("sgd", {}), ("sgd", {"momentum": 0.9}), ("nag", {"momentum": 0.9}), ("adam", {}), ("lamb", {})])
@pytest.mark.parametrize("before", [0, 2])
def test_copies_train_on_as_the_original(name, options, before, again):
    net, _ = make(scaler=False)
    trainer = gluon.Trainer(net.collect_params(), name, {"learning_rate": 0.1, **options})
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=8))
    for _ in range(before):
        step(net, trainer)
    mx.nd.waitall()
    other, its = again((net, trainer))
    other.collect_params().reset_ctx(mx.cpu())  # MXNet's copies have no gradients before
    assert its._amp_loss_scaler.trainer is its
    for _ in range(3):
        step(net, trainer)
        step(other, its)
    assert same(weights(net), weights(other))
    assert amp.get_loss_scaler(its) is not amp.get_loss_scaler(trainer)
