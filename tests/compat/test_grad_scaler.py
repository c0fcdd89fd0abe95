"""GradScaler: torch's loop, against its rules written down in Python."""
from __future__ import annotations

import math
import warnings

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp

INF = float("inf")


class Reference:
    """What torch documents of GradScaler, for weights in NumPy and gradients that are given."""

    def __init__(self, scale, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        self.scale, self.growth, self.backoff, self.interval = scale, growth_factor, backoff_factor, growth_interval
        self.tracker, self.found_inf = 0, False

    def step(self, weight, gradient, rate):
        """Return the weight after a step on a gradient, which may be infinite; the scale cancels out."""
        overflowed = not np.isfinite(gradient * self.scale).all()
        self.found_inf |= overflowed
        return weight if overflowed else weight - rate * gradient

    def update(self):
        if self.found_inf:
            self.scale, self.tracker = self.scale * self.backoff, 0
        else:
            self.tracker += 1
            if self.tracker == self.interval:
                self.scale, self.tracker = self.scale * self.growth, 0
        self.found_inf = False


def make(contexts=None, **options):
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One(), ctx=contexts)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25, **options})


def loss_of(net, gradient):
    """Return a loss whose gradient is known."""
    with autograd.record():
        return net(mx.nd.array([gradient])).sum()


def weight_of(net):
    return net.weight.data().asnumpy()[0]


@pytest.mark.parametrize("unscaled", [False, True])
def test_scales_and_weights_are_those_of_torch(unscaled):
    settings = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    scaler, reference = amp.GradScaler("cuda", init_scale=2.0 ** 10, **settings), Reference(2.0 ** 10, **settings)
    net, trainer = make()
    expected = weight_of(net)
    for bad in [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]:
        gradient = np.array([INF if bad else 0.5, 2.0], "float32")
        scaler.scale(loss_of(net, gradient)).backward()
        if unscaled:
            scaler.unscale_(trainer)
            np.testing.assert_array_equal(net.weight.grad().asnumpy()[0], gradient)
        before = scaler.get_scale()
        scaler.step(trainer, batch_size=2)
        assert scaler.get_scale() == before  # until update
        expected = reference.step(expected, gradient / 2, 0.25)
        scaler.update()
        reference.update()
        assert scaler.get_scale() == reference.scale
        assert scaler.state_dict()["_growth_tracker"] == reference.tracker
        np.testing.assert_array_equal(weight_of(net), expected)


def test_two_trainers_skip_on_their_own_and_share_the_scale():
    scaler = amp.GradScaler(init_scale=64.0)
    (good, first), (bad, second) = make(), make()
    losses = [loss_of(good, [1.0, 2.0]), loss_of(bad, [INF, 1.0])]
    autograd.backward(scaler.scale(losses))
    assert (scaler.step(first, 1), scaler.step(second, 1)) == (True, False)
    scaler.update()
    np.testing.assert_array_equal(weight_of(good), [0.75, 0.5])
    np.testing.assert_array_equal(weight_of(bad), [1.0, 1.0])
    assert scaler.get_scale() == 32.0
    assert amp.get_loss_scaler(first).num_skipped == 1


def test_good_batches_move_the_weights_after_many_bad_ones():
    """142 skipped steps brought the scale to 2^-126, where gradients are zero in FP32, too."""
    scaler, told = amp.GradScaler(), []
    net, trainer = make()
    net.weight.set_data(mx.nd.zeros((1, 2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        for number in range(143):
            scaler.scale(loss_of(net, [math.nan if number < 142 else 2.0 ** -30, 0.5])).backward()
            scaler.step(trainer, 1)
            scaler.update()
            told.append((len(caught), scaler.get_scale()))
    np.testing.assert_array_equal(weight_of(net), [-2.0 ** -32, -0.125])
    texts = [str(each.message) for each in caught]
    assert len(texts) == 2
    assert "20 steps in a row" in texts[0]
    assert "the loss scale is 2.98023e-08. Below 2^-24 float16" in texts[1]
    assert told[40:42] == [(1, 2.0 ** -25), (2, 2.0 ** -26)]
    assert told[-1] == (2, 2.0 ** -32)


@pytest.mark.parametrize(("first", "least"), [(2.0 ** 16, 2.0 ** -32), (2.0 ** -40, 2.0 ** -40),
                                              (2.0 ** -126, 2.0 ** -126)])
def test_no_factor_makes_the_scale_zero_or_denormal(first, least):
    scaler = amp.GradScaler(init_scale=first, backoff_factor=1e-30)
    net, trainer = make()
    for _ in range(3):
        scaler.scale(loss_of(net, [INF, 0.0])).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            scaler.step(trainer, 1)
        scaler.update()
        assert scaler.get_scale() == least >= np.finfo("float32").tiny


def test_a_scale_that_was_small_when_it_was_saved_is_told_of():
    scaler = amp.GradScaler()
    scaler.load_state_dict({**STATE, "scale": 2.0 ** -40})
    net, trainer = make()
    scaler.scale(loss_of(net, [1.0, 0.0])).backward()
    with pytest.warns(UserWarning, match=r"the loss scale is 9\.09495e-13"):
        scaler.step(trainer, 1)


def test_an_overflow_that_only_unscale_saw_lowers_the_scale():
    scaler = amp.GradScaler(init_scale=8.0)
    net, trainer = make()
    for gradient in (INF, 1.0):
        scaler.scale(loss_of(net, [gradient, 0.0])).backward()
        scaler.unscale_(trainer)
        scaler.update()
        assert scaler.get_scale() == 4.0
    scaler.scale(loss_of(net, [1.0, 0.0])).backward()
    scaler.step(trainer, 1)
    np.testing.assert_array_equal(weight_of(net), [0.75, 1.0])


def test_float16_losses_do_not_overflow():
    scaler = amp.GradScaler()
    scaled = scaler.scale(mx.nd.array([100.0], dtype="float16"))
    assert scaled.asscalar() == 6553600.0


class TestMisuse:
    """Calls in a wrong order are refused, as torch refuses them."""

    @pytest.fixture
    def parts(self):
        scaler = amp.GradScaler(init_scale=2.0)
        net, trainer = make()
        scaler.scale(loss_of(net, [1.0, 1.0])).backward()
        return scaler, net, trainer

    @pytest.mark.parametrize(("calls", "message"), [
        (("unscale_", "unscale_"), r"unscale_\(\) was called for this trainer already"),
        (("step", "unscale_"), r"unscale_\(\) is called after step\(\)"),
        (("step", "step"), r"step\(\) was called for this trainer already"),
        (("update",), "no trainer made a step"), (("step", "update", "update"), "no trainer made a step"),
        (("step", "update", "unscale_"), "no loss was scaled"), (("step", "update", "step"), "no loss was scaled"),
        (("step", "update", "scale", "the trainer's step"), "gradients lack the loss scale")])
    def test_the_order_of_calls(self, calls, message, parts):
        scaler, net, trainer = parts
        do = {"step": lambda: scaler.step(trainer, 1), "unscale_": lambda: scaler.unscale_(trainer),
              "update": scaler.update, "the trainer's step": lambda: trainer.step(1),
              "scale": lambda: scaler.scale(loss_of(net, [1.0, 1.0])).backward()}
        for call in calls[:-1]:
            do[call]()
        before = weight_of(net)
        with pytest.raises(amp.StateError, match=message):
            do[calls[-1]]()
        np.testing.assert_array_equal(weight_of(net), before)

    def test_a_trainer_with_another_scaler(self, parts):
        amp.init()
        _, trainer = make()
        amp.init_trainer(trainer, 4.0)
        with pytest.raises(amp.StateError, match="the trainer has another loss scaler"):
            parts[0].step(trainer, 1)

    def test_wrong_arguments(self, parts):
        scaler, net, trainer = parts
        with pytest.raises(TypeError, match="takes none"):
            scaler.step(trainer, 1, closure=lambda: None)
        with pytest.raises(TypeError, match="received outputs=3"):
            scaler.scale(3)
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer"):
            scaler.step(net, 1)
        with pytest.raises(TypeError, match="init_scale=1024"):
            amp.GradScaler(1024)

    @pytest.mark.parametrize("wrong", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0},
                                       {"init_scale": 0}, {"growth_factor": math.nan}])
    def test_settings_out_of_range(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            amp.GradScaler(**wrong)


def test_disabled():
    scaler = amp.GradScaler(enabled=False)
    net, trainer = make()
    loss = loss_of(net, [1.0, 2.0])
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(trainer)
    scaler.step(trainer, 1)
    scaler.update()
    np.testing.assert_array_equal(weight_of(net), [0.75, 0.5])
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    scaler.load_state_dict({})


STATE = {"scale": 512.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2, "_growth_tracker": 1}


class TestState:
    """The state has torch's names, so that one from there continues here."""

    def test_a_state_of_torch_continues(self):
        scaler = amp.GradScaler()
        net, trainer = make()
        scaler.scale(loss_of(net, [0.0, 0.0])).backward()
        scaler.step(trainer, 1)
        scaler.update()
        scaler.load_state_dict(STATE)
        assert scaler.state_dict() == STATE
        assert amp.get_loss_scaler(trainer).loss_scale == 512.0
        scaler.scale(loss_of(net, [0.0, 0.0])).backward()
        scaler.step(trainer, 1)
        scaler.update()
        assert scaler.get_scale() == 2048.0  # the second good step in a row

    @pytest.mark.parametrize("wrong", [{}, {"scale": 1.0}, {**STATE, "scale": 0}, {**STATE, "_growth_tracker": -1},
                                       {**STATE, "growth_factor": 0.5}, None])
    def test_malformed_states_change_nothing(self, wrong):
        scaler = amp.GradScaler()
        before = scaler.state_dict()
        with pytest.raises(ValueError, match="expected"):
            scaler.load_state_dict(wrong)
        assert scaler.state_dict() == before

    def test_update_takes_a_new_scale(self):
        scaler = amp.GradScaler()
        scaler.update(new_scale=8.0)
        assert scaler.get_scale() == 8.0

    def test_the_trainers_states_hold_the_scale(self, tmp_path):
        path = str(tmp_path / "states")
        for scale in (256.0, 2.0):  # a run, and the one that resumes it
            scaler = amp.GradScaler(init_scale=scale)
            net, trainer = make()
            scaler.scale(loss_of(net, [1.0, 0.0])).backward()
            scaler.step(trainer, 1)
            scaler.update()
            if scale == 256.0:
                amp.save_states(trainer, path)
        amp.load_states(trainer, path)
        assert scaler.get_scale() == 256.0


def test_get_loss_scaler():
    net, trainer = make()
    with pytest.raises(amp.StateError, match="the trainer has no loss scaler"):
        amp.get_loss_scaler(trainer)
    with pytest.raises(TypeError, match=r"expected a gluon\.Trainer"):
        amp.get_loss_scaler(net)
    net, trainer = amp.initialize(net, trainer, num_losses=2, loss_scale=4.0, verbosity=0)
    assert [amp.get_loss_scaler(trainer, number).loss_scale for number in (0, 1)] == [4.0, 4.0]
    with pytest.raises(ValueError, match="loss_id"):
        amp.get_loss_scaler(trainer, 2)
