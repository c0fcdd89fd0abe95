"""softmax and log_softmax in C++ against MXNet's own, with temperatures and lengths."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    bfloat16,
    normal,
    requires_core,
    rounded,
    run,
    shapes_of_empty,
    with_gradients,
)

pytestmark = requires_core

SHAPES = [(1,), (1, 1), (3, 5), (2, 7, 33), (5, 4001), (40_001, 2)]
KINDS = ["softmax", "log_softmax"]


def native(kind, *inputs, **attrs):
    return run(f"_gluon_amp_{kind}", inputs, **attrs)


def lengths_of(shape):
    """Return lengths from 0 to the whole row."""
    found = np.random.RandomState(4).randint(shape[-1] + 1, size=shape[:-1])
    found.flat[0], found.flat[-1] = 0, shape[-1]
    return nd.array(found, dtype="int32")


def exact(kind, data, out_grad, temperature):
    """Return value and gradient in double precision."""
    data, out_grad = data.astype(np.float64) / temperature, out_grad.astype(np.float64)
    log = data - data.max(axis=-1, keepdims=True)
    log -= np.log(np.exp(log).sum(axis=-1, keepdims=True))
    if kind == "log_softmax":
        return log, (out_grad - np.exp(log) * out_grad.sum(axis=-1, keepdims=True)) / temperature
    shares = np.exp(log)
    return shares, shares * (out_grad - (shares * out_grad).sum(axis=-1, keepdims=True)) / temperature


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [None, 0.3, 7.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_exact_and_as_mxnet(kind, shape, temperature, scale):
    data, out_grad = normal(*shape, scale=scale), normal(*shape, seed=1)
    attrs = {} if temperature is None else {"temperature": temperature}
    stock = with_gradients(lambda x: getattr(nd, kind)(x, axis=-1, **attrs), [data], out_grad)
    received = with_gradients(lambda x: native(kind, x, **attrs), [data], out_grad)
    wanted = exact(kind, data.asnumpy(), out_grad.asnumpy(), temperature or 1)
    # A gradient is a difference of values of this size.
    sizes = (np.abs(wanted[0]).max(), np.abs(out_grad.asnumpy()).max() / (temperature or 1))
    for one, other, precise, size in zip(received, stock, wanted, sizes):
        # Without vector instructions, as in a sanitizer's build, long rows are one sum of many values.
        close = 1e-6 if shape[-1] < 100 else 5e-6
        np.testing.assert_allclose(one, precise, rtol=close, atol=close * size)
        # MXNet adds long rows up one value after another, and oneDNN has logarithms to 1.4e-6.
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 + 1e-5 * size)


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("temperature", [None, 2.5])
def test_lengths(shape, temperature):
    data, out_grad, lengths = normal(*shape), normal(*shape, seed=1), lengths_of(shape)
    attrs = {"use_length": True, **({} if temperature is None else {"temperature": temperature})}
    wanted = with_gradients(lambda x: nd.softmax(x, lengths, axis=-1, **attrs), [data], out_grad)
    received = with_gradients(lambda x: native("softmax", x, lengths, **attrs), [data], out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 1e-6 if shape[-1] < 100 else 1e-5)
    assert not received[1].reshape(-1, shape[-1])[0].any()


def test_lengths_of_logarithms():
    data, out_grad, lengths = normal(6, 9), normal(6, 9, seed=1), lengths_of((6, 9))
    received = with_gradients(lambda x: native("log_softmax", x, lengths, use_length=True), [data], out_grad)
    for row, length in enumerate(lengths.asnumpy()):
        for one in received:
            assert not one[row, length:].any()
        if length:
            wanted = exact("log_softmax", *(array.asnumpy()[row, :length] for array in (data, out_grad)), 1)
            for one, other in zip(received, wanted):
                assert_close(one[row, :length], other, 1e-6)


def test_lengths_outside_of_the_row():
    data, lengths = normal(2, 5), nd.array([-3, 99], dtype="int32")
    received = native("softmax", data, lengths, use_length=True).asnumpy()
    np.testing.assert_array_equal(received[0], 0)
    assert_close(received[1], nd.softmax(data).asnumpy()[1], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16(kind, shape):
    data, out_grad = rounded(normal(*shape)), rounded(normal(*shape, seed=1))
    wanted = with_gradients(lambda x: getattr(nd, kind)(x, axis=-1, temperature=2.0), [data], out_grad)
    received = with_gradients(lambda x: native(kind, x, temperature=2.0), [bfloat16(data)], bfloat16(out_grad))
    assert_close(received[0], wanted[0], BFLOAT16_ROUNDING)
    # The gradient comes from the rounded result.
    assert np.linalg.norm(received[1] - wanted[1]) <= 0.02 * np.linalg.norm(wanted[1]) + 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axis"), [((3, 5), 0), ((2, 7, 33), 1), ((2, 7, 33), -2), ((4, 21, 9, 13), 1),
                                             ((3, 5, 1), 1), ((3, 5, 1, 1), -3), ((2, 3, 65), 2), ((130, 70), 0)])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_other_axes(kind, shape, axis, temperature):
    data, out_grad = normal(*shape), normal(*shape, seed=1)
    attrs = {"axis": axis, "temperature": temperature}
    wanted = [np.moveaxis(value, -1, axis) for value in exact(
        kind, *(np.moveaxis(array.asnumpy(), axis, -1) for array in (data, out_grad)), temperature)]
    stock = with_gradients(lambda x: getattr(nd, kind)(x, **attrs), [data], out_grad)
    received = with_gradients(lambda x: native(kind, x, **attrs), [data], out_grad)
    for one, other, precise in zip(received, stock, wanted):
        size = np.abs(precise).max()
        np.testing.assert_allclose(one, precise, rtol=2e-6, atol=2e-6 * size)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * size)
    low = with_gradients(lambda x: native(kind, x, **attrs), [bfloat16(data)], bfloat16(out_grad))
    for one, precise in zip(low, wanted):
        assert np.linalg.norm(one - precise) <= 0.02 * np.linalg.norm(precise) + 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-42])
def test_special_values_along_another_axis(kind, value):
    data = normal(9, 4)
    data[2, 1], data[:, 2] = value, value
    wanted = getattr(nd, kind)(data, axis=0, temperature=2.0).asnumpy()
    received = native(kind, data, axis=0, temperature=2.0).asnumpy()
    np.testing.assert_array_equal(np.isnan(received), np.isnan(wanted))
    np.testing.assert_allclose(received, wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_no_values(kind):
    with mx.util.np_shape(True):
        for shape in ((0, 3), (3, 0)):
            for axis in (-1, 0):
                assert shapes_of_empty(lambda x, axis=axis: native(kind, x, axis=axis), [nd.zeros(shape)],
                                       nd.zeros(shape)) == [shape] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-42])
def test_special_values(kind, value):
    data = normal(4, 9)
    data[1, 2], data[2] = value, value
    wanted = getattr(nd, kind)(data, temperature=2.0).asnumpy()
    received = native(kind, data, temperature=2.0).asnumpy()
    np.testing.assert_array_equal(np.isnan(received), np.isnan(wanted))
    np.testing.assert_allclose(received, wanted, rtol=2e-6, atol=1e-7)


def test_unaligned_views():
    data = normal(1001)[1:]
    assert_close(native("softmax", data, temperature=3.0).asnumpy(), nd.softmax(data, temperature=3.0).asnumpy(), 1e-6)


@pytest.mark.parametrize(("attrs", "text"), [
    ({"axis": 2}, "an axis of the data, received axis=2"), ({"axis": -3}, "an axis of the data"),
    ({"temperature": 0.0}, "a temperature above 0"), ({"temperature": "nan"}, "above 0")])
def test_errors_say_what_was_expected(attrs, text):
    with pytest.raises(mx.MXNetError, match=text):
        native("softmax", normal(3, 4), **attrs)


def test_lengths_that_do_not_fit():
    with pytest.raises(mx.MXNetError, match="the lengths"):
        native("softmax", normal(3, 4), nd.zeros(4, dtype="int32"), use_length=True)
    with pytest.raises(mx.MXNetError, match="the lengths"):
        native("softmax", normal(3, 4), nd.zeros(3), use_length=True)
