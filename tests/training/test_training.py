"""Loss scaling on trainers, on one context and on several, against plain FP32 steps."""
from __future__ import annotations

import copy
import pickle
import threading
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp

pytestmark = pytest.mark.machine
ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]


@pytest.fixture(autouse=True)
def _amp_on(_amp_off):
    amp.init()


def make(contexts=ONE, scaler=None, momentum=0.9, **trainer_arguments):
    mx.random.seed(4)
    net = nn.HybridSequential()
    net.add(nn.Dense(16, in_units=8, activation="relu"), nn.Dense(2, in_units=16))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": momentum},
                            **trainer_arguments)
    if scaler is not False:
        amp.init_trainer(trainer, scaler)
    return net, trainer


def backward(net, trainer, contexts=ONE, poison=None, scaled=True):
    generator = np.random.RandomState(5)
    losses = []
    with autograd.record():
        for number, context in enumerate(contexts):
            data = mx.nd.array(generator.randn(4, 8), ctx=context)
            if number == poison:
                data[0, 0] = np.inf
            losses.append((net(data) ** 2).mean())
        if scaled:
            with amp.scale_loss(losses, trainer) as scaled_losses:
                autograd.backward(scaled_losses)
        else:
            autograd.backward(losses)


def weights(net, context=ONE[0]):
    return [parameter.data(context).asnumpy() for parameter in net.collect_params().values()]


def same(first, second):
    return all((a == b).all() for a, b in zip(first, second))


@pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("scale", [None, 1024.0, "dynamic"])
def test_a_scaled_step_is_the_unscaled_one(contexts, scale):
    # Powers of two scale exactly, so that not a bit may differ.
    scaled, trainer = make(contexts, scale)
    plain, reference = make(contexts, False, update_on_kvstore=False)
    for _ in range(3):
        backward(scaled, trainer, contexts)
        trainer.step(4 * len(contexts))
        backward(plain, reference, contexts, scaled=False)
        reference.step(4 * len(contexts))
    assert same(weights(scaled), weights(plain))
    assert all(same(weights(scaled), weights(scaled, context)) for context in contexts)


@pytest.mark.parametrize("poison", [0, 1])
def test_an_overflow_on_any_context_skips_the_step_on_all(poison):
    net, trainer = make(TWO, amp.DynamicLossScaler(init_scale=256))
    backward(net, trainer, TWO)
    trainer.step(8)
    before, updates = weights(net), trainer.optimizer.num_update
    backward(net, trainer, TWO, poison=poison)
    trainer.step(8)
    assert all(same(before, weights(net, context)) for context in TWO)
    assert trainer.optimizer.num_update == updates
    scaler = trainer._amp_loss_scaler.scaler
    assert (scaler.step_was_skipped, scaler.num_skipped, scaler.loss_scale) == (True, 1, 128)
    backward(net, trainer, TWO)
    trainer.step(8)
    assert not scaler.step_was_skipped
    assert not same(before, weights(net))


def test_an_inf_of_a_skipped_step_is_gone_when_the_next_step_does_not_use_its_layer():
    net, other = (nn.Dense(1, in_units=2) for _ in range(2))
    for block in (net, other):
        block.initialize()
    parameters = {**net.collect_params(), **other.collect_params()}
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, 4.0)
    for blocks, factor in (((net, other), float("inf")), ((net,), 1.0)):
        with autograd.record():
            loss = sum((block(mx.nd.ones((1, 2))) * factor).sum() for block in blocks)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        kept = weights(other)
        trainer.step(1, ignore_stale_grad=True)
    assert trainer._amp_loss_scaler.num_skipped == 1
    assert same(kept, weights(other))


def test_the_norm_of_float16_gradients_may_be_beyond_float16():
    net = nn.Dense(1, in_units=4, use_bias=False)
    net.cast("float16")
    net.initialize(mx.init.Zero())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 1.0)
    net.weight.grad()[:] = 4e4
    assert amp.clip_global_norm(trainer, 1e9) == pytest.approx(8e4, rel=1e-3)


def test_bfloat16_is_not_scaled_but_skips():
    net, trainer = make()
    assert trainer._amp_loss_scaler.loss_scale == 1.0
    before = weights(net)
    backward(net, trainer, poison=0)
    trainer.step(4)
    assert same(before, weights(net))
    assert trainer._amp_loss_scaler.loss_scale == 1.0


def test_large_finite_gradients_are_no_overflow():
    # Their sum of squares overflows, the gradients do not.
    net, trainer = make(scaler=1.0)
    backward(net, trainer)
    net[0].weight.grad()[:] = 1e30
    trainer.step(1e30)
    assert not trainer._amp_loss_scaler.scaler.step_was_skipped


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_bad_value_is_found(value):
    net, trainer = make()
    backward(net, trainer)
    net[1].bias.grad()[1] = value
    trainer.step(4)
    assert trainer._amp_loss_scaler.scaler.step_was_skipped


def test_an_overflow_clears_accumulated_gradients():
    net, trainer = make()
    for parameter in net.collect_params().values():
        parameter.grad_req = "add"
    backward(net, trainer, poison=0)
    trainer.step(4)
    assert all((parameter.grad().asnumpy() == 0).all() for parameter in net.collect_params().values())


def test_row_sparse_and_missing_gradients_are_handled():
    net = nn.HybridSequential()
    net.add(nn.Embedding(50, 4, sparse_grad=True), nn.Dense(2, in_units=12))
    net.initialize()
    net[1].bias.grad_req = "null"
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer)
    before = net[0].weight.data().asnumpy()
    for fill, moved in ((1.0, True), (np.inf, False)):
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
    net = nn.Dense(2, in_units=2)
    net.initialize()
    net.collect_params().setattr("grad_req", "null")
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer)
    trainer.step(1)


def test_the_trainers_own_rescaling_is_kept():
    net, trainer = make(scaler=64.0, momentum=0)
    backward(net, trainer)
    before, gradient = net[1].bias.data().asnumpy(), net[1].bias.grad().asnumpy() / 64
    trainer._scale = 0.5
    trainer.step(2)
    assert np.allclose(net[1].bias.data().asnumpy(), before - 0.1 * 0.5 / 2 * gradient, rtol=1e-6, atol=0)


def test_unscale_gives_true_gradients_and_the_same_step():
    plain, reference = make(scaler=False, update_on_kvstore=False)
    backward(plain, reference, scaled=False)
    net, trainer = make(scaler=4096.0)
    backward(net, trainer)
    amp.unscale(trainer)
    assert same([p.grad().asnumpy() for p in net.collect_params().values()],
                [p.grad().asnumpy() for p in plain.collect_params().values()])
    trainer.step(4)
    reference.step(4)
    assert same(weights(net), weights(plain))


@pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one", "two"])
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
        trainer.allreduce_grads()
        gradient = np.zeros_like(weight)
        np.add.at(gradient, words, len(contexts) * 2 * weight[words])
        if max_norm is None:
            amp.unscale(trainer)
        else:
            norm = amp.clip_global_norm(trainer, max_norm)
            assert np.isclose(norm, np.linalg.norm(gradient), rtol=1e-5)
            gradient *= min(1.0, max_norm / norm)
        trainer.update(1)
        weight = weight - 0.1 * gradient
        for context in contexts:
            np.testing.assert_allclose(net.weight.data(context).asnumpy(), weight, rtol=1e-5, atol=1e-7)


def test_a_single_loss_and_a_tuple():
    _, trainer = make(scaler=8.0)
    with amp.scale_loss(mx.nd.ones(3), trainer) as scaled:
        assert (scaled.asnumpy() == 8).all()
    with amp.scale_loss((mx.nd.ones(1), mx.nd.ones(1)), trainer) as scaled:
        assert [value.asscalar() for value in scaled] == [8, 8]


def test_float16_losses_are_scaled_in_fp32():
    _, trainer = make(scaler=2.0**16)
    with amp.scale_loss(mx.nd.array([3.0], dtype="float16"), trainer) as scaled:
        assert scaled.asscalar() == 3 * 2**16


def test_scaling_outside_of_record_still_reaches_the_loss():
    net, trainer = make(scaler=16.0)
    with autograd.record():
        loss = net(mx.nd.ones((1, 8))).sum()
    with amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    assert (net[1].bias.grad().asnumpy() == 16).all()


def test_updates_that_began_on_the_kvstore_move_to_the_trainer_with_their_state():
    net, trainer = make(TWO, False)
    other, reference = make(TWO, False, update_on_kvstore=False)
    for one, its in ((net, trainer), (other, reference)):
        backward(one, its, TWO, scaled=False)
        its.step(8)
    assert trainer._update_on_kvstore
    amp.init_trainer(trainer)
    for one, its in ((net, trainer), (other, reference)):
        backward(one, its, TWO, scaled=False)
        its.step(8)
    assert not trainer._update_on_kvstore
    assert all(np.allclose(a, b, rtol=1e-6) for a, b in zip(weights(net), weights(other)))


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
        net, first = make(scaler=scaler, momentum=0)
        other, second = make(scaler=scaler, momentum=0)
        plain, reference = make(scaler=False, momentum=0, update_on_kvstore=False)
        backward(net, first, poison=0)
        backward(other, second)
        backward(plain, reference, scaled=False)
        first.step(4)
        assert scaler.loss_scale == 32
        second.step(4)
        reference.step(4)
        assert same(weights(other), weights(plain))

    def test_several_losses_on_one_trainer(self):
        net, trainer = make(scaler=16.0)
        for parameter in net.collect_params().values():
            parameter.grad_req = "add"
        plain, reference = make(scaler=False, update_on_kvstore=False)
        for parameter in plain.collect_params().values():
            parameter.grad_req = "add"
        for _ in range(2):
            backward(net, trainer)
            backward(plain, reference, scaled=False)
        trainer.step(4)
        reference.step(4)
        assert same(weights(net), weights(plain))

    def test_switched_off(self):
        _, trainer = make(scaler=16.0)
        with amp.scale_loss(mx.nd.ones(1), trainer, enabled=False) as scaled:
            assert scaled.asscalar() == 1


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
    net, plain = make(scaler=False, update_on_kvstore=False)
    other, _ = make(scaler=False)
    trainer = AveragingTrainer(other.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    amp.init_trainer(trainer, 256.0)
    for _ in range(2):
        backward(net, plain, scaled=False)
        plain.step(4)
        backward(other, trainer)
        trainer.step(4)
    assert same(weights(net), weights(other))


def test_losses_may_be_scaled_in_several_threads():
    net, trainer = make(TWO, 32.0)
    plain, reference = make(TWO, False, update_on_kvstore=False)

    start = threading.Barrier(2)

    def work(number):
        data = mx.nd.ones((4, 8), ctx=TWO[number])
        start.wait()  # both trace the network at once
        with autograd.record():
            loss = (net(data) ** 2).mean()
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with autograd.record():
        losses = [(plain(mx.nd.ones((4, 8), ctx=context)) ** 2).mean() for context in TWO]
    autograd.backward(losses)
    trainer.step(8)
    reference.step(8)
    assert same(weights(net), weights(plain))


def clip(net, trainer):
    assert amp.clip_global_norm(trainer, 0.125) > 0.25


def clip_by_hand(net, trainer):
    for context in TWO:
        gluon.utils.clip_global_norm([p.grad(context) for p in net.collect_params().values()], 0.125)


LINES = {"clip": clip, "unscale": lambda net, trainer: amp.unscale(trainer), "clip by hand": clip_by_hand,
         "reduce": lambda net, trainer: trainer.allreduce_grads(),
         "step": lambda net, trainer: trainer.step(1), "update": lambda net, trainer: trainer.update(1)}


class TestClipping:
    @pytest.mark.parametrize("scale", [None, 4096.0])
    @pytest.mark.parametrize("contexts", [ONE, TWO], ids=["one", "two"])
    def test_it_is_the_clipping_of_unscaled_gradients(self, scale, contexts):
        plain, reference = make(contexts, False, update_on_kvstore=False)
        backward(plain, reference, contexts, scaled=False)
        reference.allreduce_grads()
        gradients = [parameter.grad(contexts[0]).asnumpy() for parameter in plain.collect_params().values()]
        expected = np.sqrt(sum((gradient.astype("float64") ** 2).sum() for gradient in gradients))
        net, trainer = make(contexts, scale)
        backward(net, trainer, contexts)
        trainer.allreduce_grads()
        norm = amp.clip_global_norm(trainer, expected / 2)
        assert np.isclose(norm, expected, rtol=1e-5)
        trainer.update(1)
        start = weights(make(contexts, False)[0])
        for before, parameter, gradient in zip(start, net.collect_params().values(), gradients):
            for context in contexts:
                moved = parameter.data(context).asnumpy() - before
                assert np.allclose(moved, -0.1 * gradient / 2, rtol=1e-4, atol=1e-7)

    def clipped(self, net, trainer, lines, contexts=TWO):
        """Run lines of a training loop twice, and check how far the weights move."""
        for _ in range(2):
            net.collect_params().zero_grad()
            before = weights(net)
            backward(net, trainer, contexts)
            for line in lines.split(", "):
                LINES[line](net, trainer)
            self.moved(net, before, contexts)

    def moved(self, net, before, contexts, distance=0.125):
        found = np.sqrt(sum(((one - other) ** 2).sum() for one, other in zip(weights(net), before)))
        assert found == pytest.approx(distance, rel=1e-4)
        assert all(same(weights(net), weights(net, context)) for context in contexts)

    def made(self, grad_req, kind=gluon.Trainer, contexts=TWO, **options):
        net, _ = make(contexts, False)
        net.collect_params().setattr("grad_req", grad_req)
        return net, kind(net.collect_params(), "sgd", {"learning_rate": 1.0}, **options)

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    @pytest.mark.parametrize("lines", ["clip, step", "unscale, clip, step", "clip, reduce, update",
                                       "reduce, clip, update", "unscale, clip by hand, step"])
    def test_gradients_of_several_devices_are_added_up_first(self, lines, grad_req):
        """As in the lines of Apex and torch, which do not know of ``allreduce_grads``."""
        net, trainer = self.made(grad_req)
        amp.init_trainer(trainer, 256.0)
        self.clipped(net, trainer, lines)

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_and_those_of_trainers_that_scale_nothing(self, grad_req):
        net, trainer = self.made(grad_req, update_on_kvstore=False)
        amp.deinit()
        amp.initialize(net, trainer, "O0", verbosity=0)
        self.clipped(net, trainer, "clip, step")

    def test_and_those_of_trainers_that_reduce_in_their_own_way(self):
        net, trainer = self.made("write", AveragingTrainer, ONE)
        trainer._scale *= 2
        amp.init_trainer(trainer, 256.0)
        self.clipped(net, trainer, "clip, step", ONE)

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_and_those_of_a_grad_scaler(self, grad_req):
        net, trainer = self.made(grad_req)
        scaler = amp.GradScaler()
        for _ in range(2):
            net.collect_params().zero_grad()
            before = weights(net)
            with autograd.record():
                losses = [(net(mx.nd.ones((4, 8), ctx=context)) ** 2).sum() for context in TWO]
            autograd.backward(scaler.scale(losses))
            scaler.unscale_(trainer)
            clip(net, trainer)
            scaler.step(trainer, 1)
            scaler.update()
            self.moved(net, before, TWO)

    def test_adding_up_twice_is_refused(self):
        net, trainer = make(TWO, 256.0)
        backward(net, trainer, TWO)
        trainer.allreduce_grads()
        amp.clip_global_norm(trainer, 1.0)
        with pytest.raises(amp.StateError, match=r"call trainer.update\(\), not trainer.step"):
            trainer.step(1)

    def test_a_batch_may_be_dropped_after_the_norm_was_read(self):
        (net, trainer), (reference, its) = make(TWO, 256.0), make(TWO, 256.0)
        backward(net, trainer, TWO, poison=1)
        assert not np.isfinite(amp.clip_global_norm(trainer, 1.0))
        for one, each in ((net, trainer), (reference, its)):
            backward(one, each, TWO)
            amp.clip_global_norm(each, 1.0)
            each.step(1)
        assert same(weights(net), weights(reference))

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
        amp.clip_global_norm(trainer, 1.0)
        trainer.step(1)
        assert len(list(amp.master_params(trainer))) == 4

    def test_small_gradients_are_left_alone(self):
        net, trainer = make(scaler=8.0)
        backward(net, trainer)
        before = [parameter.grad().asnumpy() for parameter in net.collect_params().values()]
        amp.clip_global_norm(trainer, 1e6)
        assert same(before, [parameter.grad().asnumpy() for parameter in net.collect_params().values()])

    def test_the_published_pattern_with_the_threshold_times_the_scale(self):
        net, trainer = make(scaler=512.0)
        backward(net, trainer)
        trainer.allreduce_grads()
        gluon.utils.clip_global_norm([parameter.grad() for parameter in net.collect_params().values()],
                                     0.01 * trainer._amp_loss_scaler.loss_scale)
        other, ours = make(scaler=512.0)
        backward(other, ours)
        ours.allreduce_grads()
        amp.clip_global_norm(ours, 0.01)
        trainer.update(4)
        ours.update(4)
        assert all(np.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(weights(net), weights(other)))

    def test_an_overflow_is_reported_and_skipped(self):
        net, trainer = make(scaler=8.0)
        before = weights(net)
        backward(net, trainer, poison=0)
        assert not np.isfinite(amp.clip_global_norm(trainer, 1.0))
        trainer.step(4)
        assert same(before, weights(net))

    @pytest.mark.parametrize("max_norm", [0, -1, float("nan")])
    def test_a_wrong_norm(self, max_norm):
        with pytest.raises(ValueError, match="expected a number above 0, received max_norm="):
            amp.clip_global_norm(make()[1], max_norm)


class TestAccumulation:
    def run(self, scale, batches, poison=None):
        net, trainer = make(scaler=scale, momentum=0)
        for parameter in net.collect_params().values():
            parameter.grad_req = "add"
        generator = np.random.RandomState(8)
        data = generator.randn(12, 8).astype("float32")
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

    def test_an_overflow_in_the_middle_of_the_window_skips_all_of_it(self):
        net, trainer = self.run(1024.0, 4, poison=1)
        assert trainer._amp_loss_scaler.step_was_skipped
        assert same(weights(net), weights(make(scaler=False)[0]))
        assert all((parameter.grad().asnumpy() == 0).all() for parameter in net.collect_params().values())


def test_a_warning_names_the_parameters_after_many_skips_and_says_what_to_try():
    net, trainer = make(scaler=False)
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=4), warn_after=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            backward(net, trainer)
            net[1].bias.grad()[0] = np.nan
            trainer.step(4)
    messages = [str(item.message) for item in caught if "in a row" in str(item.message)]
    assert len(messages) == 1
    assert "3 steps in a row were skipped" in messages[0]
    assert net[1].bias.name in messages[0]
    assert net[0].weight.name not in messages[0]
    assert "learning rate" in messages[0]


def test_the_scale_is_shown_on_the_trainer_as_long_as_amp_is_on():
    _, trainer = make(scaler=32.0)
    assert trainer.amp_loss_scale == trainer._amp_loss_scaler.loss_scale == 32
    amp.deinit()
    assert not hasattr(gluon.Trainer, "amp_loss_scale")


def test_scripts_that_scale_by_hand_still_work():
    net, trainer = make(scaler=128.0, momentum=0)
    plain, reference = make(scaler=False, momentum=0, update_on_kvstore=False)
    data = mx.nd.ones((2, 8))
    for one, its, scale in ((net, trainer, trainer._amp_loss_scaler.loss_scale), (plain, reference, 1)):
        with autograd.record():
            loss = (one(data) ** 2).mean() * scale
        loss.backward()
        if scale != 1:
            its._scale = its._amp_original_scale / scale
        its.step(2)
    assert same(weights(net), weights(plain))


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
        half.weight.grad()[:] = 1
        half.bias.grad()[:] = 1
        low.step(1, ignore_stale_grad=True)
        for parameter in half.collect_params().values():
            parameter.data()._fresh_grad = True
        low.step(1)
        masters = list(amp.master_params(low))
        assert [value.dtype for value in masters] == [np.float32, np.float32]
        assert all(np.allclose(value.asnumpy(), parameter.data().asnumpy(), atol=1e-3)
                   for value, (_, parameter) in zip(masters, sorted(half.collect_params().items())))


def test_trainers_stay_picklable():
    _, trainer = make()
    again = pickle.loads(pickle.dumps(trainer))
    assert again.learning_rate == trainer.learning_rate
    assert again._amp_loss_scaler.trainer is again


class TestMisuse:
    def test_a_step_without_a_scaled_loss(self):
        net, trainer = make(scaler=64.0)
        before = weights(net)
        backward(net, trainer, scaled=False)
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

    def test_init_trainer_before_init(self):
        amp.deinit()
        with pytest.raises(amp.StateError, match=r"call amp.init\(\) before"):
            make()

    def test_updates_on_the_kvstore(self):
        with pytest.raises(amp.StateError, match=r"update_on_kvstore=True.*update_on_kvstore=False"):
            make(update_on_kvstore=True)

    def test_compressed_gradients(self):
        with pytest.raises(amp.StateError, match=r"turns an infinite gradient into a finite one"):
            make(TWO, compression_params={"type": "2bit", "threshold": 0.5})

    def test_no_trainer(self):
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer, received trainer='sgd'"):
            amp.init_trainer("sgd")
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer"), amp.scale_loss(mx.nd.ones(1), None):
            pass

    def test_an_unusable_scaler(self):
        with pytest.raises(TypeError, match="expected a LossScaler, a number, 'dynamic' or None"):
            make(scaler="static")
        with pytest.raises(ValueError, match="expected a finite number above 0"):
            make(scaler=-1.0)

    def test_a_second_scaler(self):
        _, trainer = make()
        amp.init_trainer(trainer)
        with pytest.raises(amp.StateError, match="once per trainer"):
            amp.init_trainer(trainer, 8.0)

    def test_scale_loss_before_init_trainer(self):
        _, trainer = make(scaler=False)
        with pytest.raises(amp.StateError, match=r"call amp.init_trainer\(trainer\) first"), \
                amp.scale_loss(mx.nd.ones(1), trainer):
            pass

    def test_unscale_twice_or_without_a_scaled_loss(self):
        net, trainer = make(scaler=8.0)
        with pytest.raises(amp.StateError, match="no loss was scaled"):
            amp.unscale(trainer)
        backward(net, trainer)
        amp.unscale(trainer)
        with pytest.raises(amp.StateError, match="unscaled already"):
            amp.unscale(trainer)

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_a_batch_may_be_dropped_after_unscale(self, grad_req):
        found = []
        for drop in (False, True):
            net, trainer = make(scaler=64.0)
            net.collect_params().setattr("grad_req", grad_req)
            if drop:
                backward(net, trainer)
                amp.unscale(trainer)
                with pytest.raises(amp.StateError, match="zero_grad"):
                    backward(net, trainer)
                net.collect_params().zero_grad()
            net.collect_params().zero_grad()
            backward(net, trainer)
            amp.unscale(trainer)
            trainer.step(1)
            found.append(weights(net))
        assert same(*found)

    def test_unscale_inside_an_accumulation_window(self):
        net, trainer = make(scaler=8.0)
        backward(net, trainer)
        amp.unscale(trainer)
        with pytest.raises(amp.StateError, match="after the last micro-batch"):
            backward(net, trainer)


class TestAnotherTrainersScale:
    """A loss that was scaled for some of the trainers whose parameters it reaches."""

    def nets(self, scaler=128.0):
        (body, first), (head, second) = make(scaler=scaler), (nn.Dense(1, in_units=2), None)
        head.initialize(mx.init.One())
        second = gluon.Trainer(head.collect_params(), "sgd", {"learning_rate": 0.1})
        return body, head, first, second

    def backward(self, body, head, trainer):
        with autograd.record():
            loss = head(body(mx.nd.ones((4, 8)))).mean()
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)

    def test_the_one_left_out_is_named(self):
        body, head, first, second = self.nets()
        self.backward(body, head, first)
        first.step(1)
        with pytest.warns(UserWarning, match=rf"{head.bias.name}, {head.weight.name} carry the loss scale 128 of ano"):
            second.step(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            self.backward(body, head, first)
            second.step(1)  # told once

    @pytest.mark.parametrize("scale", [None, 1.0])
    def test_one_with_a_scaler_of_its_own_that_does_not_scale(self, scale):
        body, head, first, second = self.nets()
        amp.init_trainer(second, loss_scaler=scale or 1)
        self.backward(body, head, first)
        with pytest.warns(UserWarning, match="carry the loss scale 128"):
            second.step(1)

    def test_several_losses_in_a_list(self):
        body, head, first, second = self.nets()
        with autograd.record():
            losses = [head(body(mx.nd.ones((4, 8)))).mean() for _ in range(2)]
            with amp.scale_loss(losses, first) as scaled_losses:
                for loss in scaled_losses:
                    loss.backward()
        with pytest.warns(UserWarning, match="carry the loss scale 128"):
            second.step(1)

    def silent(self, body, head, first, second):
        first.step(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            second.step(1)

    def test_nothing_is_said_where_the_scale_is_divided_out(self):
        body, head, first, second = self.nets()
        amp.init_trainer(second, loss_scaler=amp.get_loss_scaler(first))
        self.backward(body, head, [first, second])
        self.silent(body, head, first, second)

    def test_nothing_is_said_of_a_scale_of_one(self):
        nets = self.nets(1.0)
        self.backward(*nets[:3])
        self.silent(*nets)

    def test_nothing_is_said_of_gradients_of_a_loss_of_its_own(self):
        body, head, first, second = self.nets()
        with autograd.record():
            other = head(mx.nd.ones((4, 2))).mean()
        other.backward()
        with autograd.record():
            loss = body(mx.nd.ones((4, 8))).mean()
            with amp.scale_loss(loss, first) as scaled_loss:
                autograd.backward(scaled_loss)
        self.silent(body, head, first, second)

    def test_nothing_is_said_where_another_pass_may_have_overwritten_it(self):
        body, head, first, second = self.nets()
        self.backward(body, head, first)
        with autograd.record():
            other = head(mx.nd.ones((4, 2))).mean()
        other.backward()
        self.silent(body, head, first, second)

    def test_nothing_is_said_of_parameters_that_the_loss_does_not_reach(self):
        body, _, first, second = self.nets()
        with autograd.record():
            loss = body(mx.nd.ones((4, 8))).mean()
            with amp.scale_loss(loss, first) as scaled_loss:
                autograd.backward(scaled_loss)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            second.step(1, ignore_stale_grad=True)

    def test_nothing_is_remembered_after_deinit(self):
        body, head, first, second = self.nets()
        self.backward(body, head, first)
        amp.deinit()
        amp.init()
        self.silent(body, head, first, second)


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

    def test_one_overflow_is_one_event(self):
        scales, scaler, _ = self.steps([np.inf, 1, 1, 1, 1])
        assert scales == [512, 512, 512, 512, 1024]
        assert scaler.num_skipped == 1

    @pytest.mark.parametrize("bad", [(1, 0), (0, 1), (0, 0)])
    def test_in_whichever_trainer(self, bad):
        scales, scaler, _ = self.steps([bad, (1, 1), (1, 1), (1, 1), (1, 1)])
        assert scales == [512, 512, 512, 512, 1024]
        assert scaler.num_skipped == 1

    def test_a_trainer_knows_its_own_step(self):
        _, _, trainers = self.steps([(1, 0)])
        assert [trainer._amp_loss_scaler.step_was_skipped for trainer in trainers] == [False, True]

    def test_a_trainer_alone(self):
        scales, _, _ = self.steps([np.inf, np.inf, 1, 1, 1, 1], several=1)
        assert scales == [512, 256, 256, 256, 256, 512]

    def test_one_that_steps_more_often_ends_the_iteration(self):
        scaler = amp.DynamicLossScaler(init_scale=1024, growth_interval=2)
        assert [scaler.take_report(found_inf, last) for found_inf, last in
                [(False, None), (False, 1), (False, None), (True, 2)]] == [1, 2, 2, 3]
        assert scaler.loss_scale == 1024  # grown in the second, fallen in the third


class TestCopies:
    @pytest.mark.parametrize("again", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
                             ids=["deepcopy", "pickle"])
    @pytest.mark.parametrize(("name", "options"), [
        ("sgd", {}), ("sgd", {"momentum": 0.9}), ("nag", {"momentum": 0.9}), ("adam", {}), ("lamb", {})])
    @pytest.mark.parametrize("before", [0, 2])
    def test_they_train_on_as_the_original(self, name, options, before, again):
        def step(net, trainer):
            with autograd.record():
                loss = (net(mx.nd.ones((2, 4))) ** 2).sum()
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(1)

        net = nn.Dense(4, in_units=4)
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), name, {"learning_rate": 0.1, **options})
        amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=8))
        for _ in range(before):
            step(net, trainer)
        mx.nd.waitall()
        other, its = again((net, trainer))
        other.collect_params().reset_ctx(mx.cpu())  # MXNet's copies have no gradients before
        for _ in range(3):
            step(net, trainer)
            step(other, its)
        np.testing.assert_array_equal(net.weight.data().asnumpy(), other.weight.data().asnumpy())
        assert amp.get_loss_scaler(its) is not amp.get_loss_scaler(trainer)


class TestManySkippedSteps:
    def test_a_run_ends(self):
        net, trainer = make(scaler=False)
        amp.init_trainer(trainer, 8.0, max_skipped=3)
        kept = weights(net)
        for _ in range(2):
            backward(net, trainer, poison=0)
            trainer.step(1)
        backward(net, trainer, poison=0)
        with pytest.raises(amp.StateError, match=r"3 steps in a row were skipped.*max_skipped=3"):
            trainer.step(1)
        assert same(kept, weights(net))

    def test_a_good_step_begins_again(self):
        net, trainer = make(scaler=False)
        amp.init_trainer(trainer, 8.0, max_skipped=2)
        for poison in (0, None, 0, None):
            backward(net, trainer, poison=poison)
            trainer.step(1)
        assert amp.get_loss_scaler(trainer).num_skipped == 2

    @pytest.mark.parametrize("scaler", [None, "dynamic", 8.0])
    def test_half_of_the_last_ones_is_told_once(self, scaler):
        net, trainer = make(scaler=scaler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(120):
                backward(net, trainer, poison=None if number % 4 < 2 else 0)
                trainer.step(1)
        texts = [str(each.message) for each in caught if "skipped" in str(each.message)]
        assert len(texts) == 1
        assert texts[0].startswith("25 of the last 50 steps were skipped")
        assert net[0].weight.name in texts[0]

    @pytest.mark.parametrize(("period", "warns"), [(2, 1), (3, 0)])
    def test_fewer_are_not_told(self, period, warns):
        net, trainer = make(scaler=8.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(100):
                backward(net, trainer, poison=None if number % period else 0)
                trainer.step(1)
        assert len([each for each in caught if "skipped" in str(each.message)]) == warns

    @pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
    def test_bad_numbers(self, value):
        _, trainer = make(scaler=False)
        with pytest.raises((ValueError, TypeError), match="max_skipped"):
            amp.init_trainer(trainer, max_skipped=value)


def test_the_norm_is_read_without_clipping():
    net, trainer = make(scaler=256.0)
    backward(net, trainer)
    gradients = np.concatenate([parameter.grad().asnumpy().ravel() for parameter in net.collect_params().values()])
    assert amp.clip_global_norm(trainer, float("inf")) == pytest.approx(np.linalg.norm(gradients) / 256, rel=1e-5)
    after = np.concatenate([parameter.grad().asnumpy().ravel() for parameter in net.collect_params().values()])
    np.testing.assert_array_equal(gradients, after)
