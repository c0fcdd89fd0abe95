"""GELU in C++ against MXNet's LeakyReLU, and against the definition in double precision."""
from __future__ import annotations

from math import erfc, sqrt

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

SHAPES = [(1,), (3, 5), (2, 7, 33), (40_001,)]


def native_gelu(data):
    return run("_gluon_amp_gelu", [data])


def stock(data):
    return nd.LeakyReLU(data, act_type="gelu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
def test_equals_mxnet(shape, scale):
    data, out_grad = normal(*shape, scale=scale), normal(*shape, seed=1)
    for one, other in zip(with_gradients(native_gelu, [data], out_grad), with_gradients(stock, [data], out_grad)):
        assert_close(one, other, 1e-6)


def test_close_to_the_definition_at_every_size():
    x = np.concatenate([np.linspace(-9, 9, 40_001), np.logspace(-30, 30, 61), -np.logspace(-30, 30, 61)])
    x = x.astype(np.float32)
    out, grad = with_gradients(native_gelu, [nd.array(x)], nd.ones(len(x)))
    exact = x.astype(np.float64)
    below = np.vectorize(lambda value: erfc(-value / sqrt(2)) / 2)  # how likely a normal number is to be below it
    density = np.exp(-exact ** 2 / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(out, exact * below(exact), rtol=5e-6, atol=1e-30)  # also where MXNet's cancels
    np.testing.assert_allclose(grad, below(exact) + exact * density, rtol=5e-6, atol=2e-7)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16(shape):
    data, out_grad = rounded(normal(*shape)), rounded(normal(*shape, seed=1))
    wanted = with_gradients(stock, [data], out_grad)
    received = with_gradients(native_gelu, [bfloat16(data)], bfloat16(out_grad))
    for one, other in zip(received, wanted):
        assert_close(one, other, BFLOAT16_ROUNDING)


def test_no_values():
    with mx.util.np_shape(True):
        assert shapes_of_empty(native_gelu, [nd.zeros((0, 3))], nd.zeros((0, 3))) == [(0, 3)] * 2


def test_special_values():
    values = [np.nan, np.inf, -1e30, 1e30, 1e-42, -1e-42, 0.0, -0.0]
    out, grad = with_gradients(native_gelu, [nd.array(values)], nd.ones(len(values)))
    np.testing.assert_array_equal(out[:2], [np.nan, np.inf])
    np.testing.assert_allclose(out[2:], [0, 1e30, 0, 0, 0, 0], atol=1e-41)
    np.testing.assert_allclose(grad[2:], [0, 1, 0.5, 0.5, 0.5, 0.5], rtol=1e-6)
    assert np.isnan(grad[0])


def test_unaligned_views():
    data = normal(1001)
    wanted = stock(data[1:]).asnumpy()
    assert_close(native_gelu(data[1:]).asnumpy(), wanted, 1e-6)


def test_errors_say_what_was_expected():
    with pytest.raises(mx.MXNetError, match="expected float32 or bfloat16, received data of float16"):
        native_gelu(nd.zeros(3, dtype="float16")).wait_to_read()
