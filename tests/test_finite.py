"""The check of gradients: every value counts, whatever the size of its array."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

import gluon_amp as amp
from gluon_amp._mxnet import finite

# In rows of 2048, 2000 and 64, with no divisor for rows, and too few for a call of its own.
SHAPES = [(100, 2048), (325, 20000), (64, 2003), (100_003,), (7,), ()]
BAD = [float("inf"), float("-inf"), float("nan")]


def array(shape, dtype="float32"):
    return np.random.RandomState(3).normal(size=shape).astype(dtype)


def found(*values):
    return finite.are_finite([mx.nd.array(each, dtype=each.dtype) for each in values])


@pytest.mark.parametrize("shape", SHAPES)
def test_one_bad_value_anywhere_is_seen(shape):
    values = array(shape)
    assert found(values)
    for place in (0, values.size // 2, values.size - 1):
        for bad in BAD:
            wrong = values.copy()
            wrong.reshape(-1)[place] = bad
            assert not found(array((5, 5)), wrong, array((300, 400)))


@pytest.mark.parametrize("shape", SHAPES)
def test_large_values_are_finite_though_their_sum_is_not(shape):
    assert found(np.full(shape, 3e38, "float32"))
    assert found(np.full(shape, -3e38, "float32"))


def test_infinities_that_cancel_are_seen():
    wrong = array((64, 2048))
    wrong[3, :2] = np.inf, -np.inf
    assert not found(wrong)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types(dtype):
    values = array((400, 512), dtype)
    assert found(values, array((3,), dtype), array((400, 512)))
    values[-1, -1] = np.nan
    assert not found(array((400, 512)), values)


def test_numpy_semantics():
    with mx.util.np_shape(True), mx.util.np_array(True):
        values = mx.np.ones((100, 2048))
        assert finite.are_finite([values.as_nd_ndarray()])
        values[99, 7] = float("nan")
        assert not finite.are_finite([values.as_nd_ndarray()])
        scalars = [mx.np.array(value) for value in (1.0, -2.0)]  # arrays without axes
        assert finite.are_finite(scalars)
        assert finite.norm(scalars) == pytest.approx(5 ** 0.5)
        assert not finite.are_finite([*scalars, mx.np.array(float("inf"))])
        assert not finite.all_finite([mx.np.array(float("nan"))])


def test_the_arrays_stay_as_they_are():
    values = array((325, 20000))
    kept = mx.nd.array(values)
    assert finite.are_finite([kept])
    np.testing.assert_array_equal(kept.asnumpy(), values)


@pytest.mark.bf16
def test_the_sum_is_not_rounded_while_amp_is_on():
    amp.init("bfloat16")
    values = np.full((64, 2048), 3.4e38, "float32")  # beyond bfloat16: it would be rounded to infinity
    assert found(np.concatenate([values, -values], axis=1))


def test_norm():
    values = [array(shape) for shape in SHAPES]
    expected = np.sqrt(sum((each.astype("float64") ** 2).sum() for each in values))
    assert finite.norm([mx.nd.array(each) for each in values]) == pytest.approx(expected, rel=2e-4)  # summed in FP32
