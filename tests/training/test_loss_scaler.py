"""The update rule of the loss scale, without MXNet."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gluon_amp.training.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler

RULES = st.fixed_dictionaries({
    "init_scale": st.floats(1, 2**24), "growth_factor": st.floats(1, 16), "backoff_factor": st.floats(0.01, 1),
    "growth_interval": st.integers(1, 5)})


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
    ({"init_scale": 8, "growth_interval": 2.0}, [0, 0, 1], [8, 16, 8])])  # whole floats are taken
def test_the_scale_by_hand(options, overflows, expected):
    scaler = DynamicLossScaler(**options)
    assert scales(scaler, overflows) == expected
    assert (scaler.num_skipped, scaler.step_was_skipped) == (sum(overflows), bool(overflows[-1]))


def test_states_of_earlier_versions_are_read():
    scaler, state = DynamicLossScaler(16), {"scale": 8.0, "good_steps": 1, "bad_steps": 0, "num_skipped": 3}
    for more in ({}, {"overflows": 1}):
        scaler.load_state_dict({**state, **more})
        assert (scaler.loss_scale, scaler.num_skipped) == (8, 3)


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
    {"init_scale": True}, {"growth_factor": 0.5}, {"backoff_factor": 2}, {"growth_interval": 0},
    {"growth_interval": float("inf")}, {"growth_interval": 2.5},
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
