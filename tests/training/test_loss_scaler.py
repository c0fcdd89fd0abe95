"""The update rule of the loss scale, without MXNet."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluon_amp.training.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler

RULES = st.fixed_dictionaries({
    "init_scale": st.floats(1, 2**24), "growth_factor": st.floats(1, 16), "backoff_factor": st.floats(0.01, 1),
    "growth_interval": st.integers(1, 5), "hysteresis": st.integers(1, 3)})


def scales(scaler, overflows):
    found = []
    for overflow in overflows:
        scaler.update(overflow)
        found.append(scaler.loss_scale)
    return found


@pytest.mark.parametrize(("options", "overflows", "expected"), [
    ({"init_scale": 1024, "growth_interval": 3}, [1, 1, 0, 0, 0, 0, 0, 1], [512, 256, 256, 256, 512, 512, 512, 256]),
    ({"init_scale": 8, "growth_interval": 2}, [0, 1, 0, 0], [8, 4, 4, 8]),  # an overflow starts the interval anew
    ({"init_scale": 4, "min_scale": 2}, [1, 1, 1], [2, 2, 2]),
    ({"init_scale": 4, "max_scale": 8, "growth_interval": 1}, [0, 0, 0], [8, 8, 8]),
    ({"init_scale": 8, "growth_interval": 2.0, "hysteresis": 1.0}, [0, 0, 1], [8, 16, 8]),  # whole floats are taken
    ({"init_scale": 16, "hysteresis": 2}, [1, 0, 1, 1, 1], [16, 16, 8, 4, 2]),
    ({"init_scale": 16, "hysteresis": 2, "consecutive_hysteresis": True}, [1, 0, 1, 1, 1], [16, 16, 16, 8, 4]),
    ({"init_scale": 16, "hysteresis": 2, "growth_interval": 2}, [1, 1, 0, 0, 1, 1], [16, 8, 8, 16, 16, 8])])
def test_the_scale_by_hand(options, overflows, expected):
    scaler = DynamicLossScaler(**options)
    assert scales(scaler, overflows) == expected
    assert (scaler.num_skipped, scaler.step_was_skipped) == (sum(overflows), bool(overflows[-1]))


class DeepSpeed:
    """The rule of ``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler``, written down from its documentation."""

    def __init__(self, scale, window, hysteresis, consecutive):
        self.scale, self.window, self.hysteresis, self.consecutive = scale, window, hysteresis, consecutive
        self.left, self.step, self.last_overflow = hysteresis, 0, -1

    def update(self, overflow):
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, 1)
            else:
                self.left -= 1
            self.last_overflow = self.step
        else:
            grows = (self.step - self.last_overflow) % self.window == 0
            if self.consecutive or grows:
                self.left = self.hysteresis
            if grows:
                self.scale *= 2
        self.step += 1


class Megatron:
    """The rule of ``megatron.core.optimizer.grad_scaler.DynamicGradScaler``, likewise."""

    def __init__(self, scale, interval, hysteresis):
        self.scale, self.interval, self.hysteresis = scale, interval, hysteresis
        self.tracker, self.growth = hysteresis, 0

    def update(self, found_inf):
        if found_inf:
            self.growth = 0
            self.tracker -= 1
            if self.tracker <= 0:
                self.scale = max(self.scale * 0.5, 1)
        else:
            self.growth += 1
            if self.growth == self.interval:
                self.growth, self.tracker = 0, self.hysteresis
                self.scale *= 2


class TestHysteresis:
    def test_as_deepspeed_and_megatron(self):
        random = np.random.RandomState(0)
        for _ in range(10_000):
            hysteresis, interval = int(random.randint(1, 5)), int(random.randint(1, 8))
            overflows = random.random_sample(30) < random.random_sample()
            ours = [DynamicLossScaler(1024, growth_interval=interval, hysteresis=hysteresis, max_scale=2.0 ** 100,
                                      consecutive_hysteresis=consecutive) for consecutive in (False, True)]
            theirs = [DeepSpeed(1024, interval, hysteresis, consecutive) for consecutive in (False, True)]
            megatron = Megatron(1024, interval, hysteresis)
            for overflow in map(bool, overflows):
                for each in (*ours, *theirs, megatron):
                    each.update(overflow)
                assert [each.loss_scale for each in ours] == [each.scale for each in theirs]
                assert ours[0].loss_scale == megatron.scale

    def test_it_goes_through_states_and_states_without_it_are_read(self):
        first, second = (DynamicLossScaler(16, hysteresis=2) for _ in range(2))
        first.update(True)
        second.load_state_dict(first.state_dict())
        second.update(True)
        assert second.loss_scale == 8
        second.load_state_dict({"scale": 8.0, "good_steps": 1, "bad_steps": 0, "num_skipped": 3})
        assert (second.loss_scale, second.num_skipped) == (8, 3)


@pytest.mark.parametrize("scale", [0.25, 128, 2.0**30])
def test_a_static_scale_never_changes_but_counts(scale):
    for scaler in (StaticLossScaler(scale), LossScaler(scale, None)):
        assert set(scales(scaler, [1, *[0] * 2001, 1])) == {scale}
        assert (scaler.num_skipped, scaler.step_was_skipped) == (2, True)


def test_a_scale_that_cannot_fall_is_at_its_floor():
    assert StaticLossScaler(128).at_floor
    assert DynamicLossScaler(128, backoff_factor=1).at_floor
    assert DynamicLossScaler(1).at_floor
    assert not DynamicLossScaler(128).at_floor


@given(RULES, st.lists(st.booleans(), max_size=60))
def test_the_scale_never_leaves_its_bounds_nor_moves_the_wrong_way(rule, overflows):
    scaler = DynamicLossScaler(min_scale=1.0, max_scale=2.0**24, **rule)
    for overflow in overflows:
        before = scaler.loss_scale
        scaler.update(overflow)
        assert 1.0 <= scaler.loss_scale <= 2.0**24
        assert scaler.loss_scale <= before if overflow else scaler.loss_scale >= before
        assert scaler.step_was_skipped == overflow
    assert scaler.num_skipped == sum(overflows)


@pytest.mark.parametrize("arguments", [
    {"init_scale": 0}, {"init_scale": float("inf")}, {"init_scale": float("nan")}, {"init_scale": "big"},
    {"init_scale": True}, {"growth_factor": 0.5}, {"backoff_factor": 2}, {"growth_interval": 0}, {"hysteresis": 0},
    {"growth_interval": float("inf")}, {"growth_interval": 2.5}, {"hysteresis": float("inf")},
    {"min_scale": 4, "max_scale": 2}, {"init_scale": 2, "min_scale": 4}])
def test_wrong_parameters_are_refused_by_name(arguments):
    with pytest.raises(ValueError, match="expected a .*received (init_scale|" + list(arguments)[-1] + "|max_scale)="):
        DynamicLossScaler(**arguments)


@pytest.mark.parametrize("value", [0, -1, float("nan"), None, "1", 1e-320, 1e39, 10 ** 400])
def test_wrong_static_scales_are_refused(value):
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        StaticLossScaler(value)
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        LossScaler()._loss_scale = value


def test_a_scale_without_bounds_stays_where_float32_has_numbers():
    scaler = DynamicLossScaler(growth_factor=2.0**60, backoff_factor=2.0**-60, growth_interval=1, min_scale=2.0**-126,
                               max_scale=float("inf"))
    assert scales(scaler, [0] * 4)[-1] == 2.0**127
    assert scales(scaler, [1] * 6)[-1] == 2.0**-126
