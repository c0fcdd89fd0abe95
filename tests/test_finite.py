"""The check of gradients: every value counts, whatever the size of its array."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from native_cases import requires_core
from networks import differentiate, sequential

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet import arrays

# In rows of 2048, 2000 and 64, with no divisor for rows, and too few for a call of its own.
SHAPES = [(100, 2048), (325, 20000), (64, 2003), (100_003,), (7,), ()]
BAD = [float("inf"), float("-inf"), float("nan")]


def array(shape, dtype="float32"):
    return np.random.RandomState(3).normal(size=shape).astype(dtype)


CHECKS = [None, pytest.param(native.all_finite, marks=requires_core)]  # MXNet's operators, and the one in C++


@pytest.fixture(params=CHECKS, ids=["MXNet", "C++"])
def check(request):
    return request.param


def found(check, *values):
    return arrays.are_finite([mx.nd.array(each, dtype=each.dtype) for each in values], check)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_bad_value_anywhere_is_seen(shape, check):
    values = array(shape)
    assert found(check, values)
    for place in (0, values.size // 2, values.size - 1):
        for bad in BAD:
            wrong = values.copy()
            wrong.reshape(-1)[place] = bad
            assert not found(check, array((5, 5)), wrong, array((300, 400)))


@pytest.mark.parametrize("shape", SHAPES)
def test_large_values_are_finite_though_their_sum_is_not(shape, check):
    assert found(check, np.full(shape, 3e38, "float32"))
    assert found(check, np.full(shape, -3e38, "float32"))


def test_infinities_that_cancel_are_seen(check):
    wrong = array((64, 2048))
    wrong[3, :2] = np.inf, -np.inf
    assert not found(check, wrong)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_types(dtype, check):
    values = array((400, 512), dtype)
    assert found(check, values, array((3,), dtype), array((400, 512)))
    values[-1, -1] = np.nan
    assert not found(check, array((400, 512)), values)


def test_the_ends_of_the_range_are_finite(check):
    ends = np.finfo("float32")
    assert found(check, np.array([ends.max, ends.min, ends.tiny, -1e-45, -0.0], "float32"))


def test_every_one_of_many_arrays_counts(check):
    arrays = [array((3,)) for _ in range(450)]
    assert found(check, *arrays)
    for place in (0, 199, 200, 449):
        assert not found(check, *arrays[:place], np.full(3, np.nan, "float32"), *arrays[place + 1:])


def test_a_part_of_an_array(check):
    values = array((200_003,))
    values[[0, -1]] = np.nan
    whole = mx.nd.array(values)
    assert arrays.are_finite([whole[1:-1], whole[1:70_000], whole[5:5 + 3]], check)
    assert not arrays.are_finite([whole[1:]], check)


def test_gradients_in_layouts_of_onednn(check):
    net = sequential([mx.gluon.nn.Conv2D(32, 3, in_channels=16), mx.gluon.nn.Conv2D(64, 3, in_channels=32)])
    data = mx.nd.array(array((2, 16, 12, 12)))
    for wrong in (False, True):
        if wrong:
            data[1, 3, 5, 7] = float("inf")
        differentiate(lambda: net(data).sum())
        gradients = [parameter.grad() for parameter in net.collect_params().values()]
        assert arrays.are_finite(gradients, check) is not wrong


def test_numpy_semantics(check):
    with mx.util.np_shape(True), mx.util.np_array(True):
        values = mx.np.ones((100, 2048))
        assert arrays.are_finite([values.as_nd_ndarray()], check)
        values[99, 7] = float("nan")
        assert not arrays.are_finite([values.as_nd_ndarray()], check)
        scalars = [mx.np.array(value) for value in (1.0, -2.0)]  # arrays without axes
        assert arrays.are_finite(scalars, check)
        assert arrays.norm(scalars) == pytest.approx(5 ** 0.5)
        assert not arrays.are_finite([*scalars, mx.np.array(float("inf"))], check)
        assert not arrays.are_finite([mx.np.array(float("nan"))], check)


@pytest.mark.bf16
def test_the_sum_is_not_rounded_while_amp_is_on(check):
    amp.init("bfloat16")
    values = np.full((64, 2048), 3.4e38, "float32")  # beyond bfloat16: it would be rounded to infinity
    assert found(check, np.concatenate([values, -values], axis=1))


def test_norm():
    values = [array(shape) for shape in SHAPES]
    expected = np.sqrt(sum((each.astype("float64") ** 2).sum() for each in values))
    assert arrays.norm([mx.nd.array(each) for each in values]) == pytest.approx(expected, rel=2e-4)  # summed in FP32
