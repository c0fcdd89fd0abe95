"""Values and gradients of dense layers in C++, against MXNet's FullyConnected."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    assert_low_close,
    bfloat16,
    normal,
    rounded,
    run,
    with_gradients,
)

from gluon_amp import native

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_dense"), reason="oneDNN is missing")

CASES = [((1, 1), 1, False), ((3, 7), 5, True), ((2, 5, 33), 17, False), ((4, 3, 6), 9, True), ((70, 130), 129, False)]


def dense(*inputs, **attrs):
    return run("_gluon_amp_dense", inputs, **attrs)


def arrays(shape, units, flatten):
    width = int(np.prod(shape[1:])) if flatten else shape[-1]
    out = (shape[0], units) if flatten else (*shape[:-1], units)
    return [normal(*shape), normal(units, width, seed=1), normal(units, seed=2)], normal(*out, seed=3)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("shape", "units", "flatten"), CASES)
def test_equals_mxnet(shape, units, flatten, biased):
    inputs, out_grad = arrays(shape, units, flatten)
    inputs = inputs[:3 if biased else 2]
    attrs = {"num_hidden": units, "flatten": flatten, "no_bias": not biased}
    wanted = with_gradients(lambda *each: nd.FullyConnected(*each, **attrs), inputs, out_grad)
    received = with_gradients(lambda *each: dense(*each, **attrs), inputs, out_grad)
    assert len(received) == len(inputs) + 1
    for one, other in zip(received, wanted):
        assert one.shape == other.shape
        assert_close(one, other, 1e-6)


@pytest.mark.bf16
@pytest.mark.parametrize(("shape", "units", "flatten"), CASES)
def test_in_bfloat16(shape, units, flatten):
    (data, weight, bias), out_grad = arrays(shape, units, flatten)
    data, weight, out_grad = map(rounded, (data, weight, out_grad))
    attrs = {"num_hidden": units, "flatten": flatten}
    wanted = with_gradients(lambda *each: nd.FullyConnected(*each, **attrs), [data, weight, bias], out_grad)
    received = with_gradients(lambda *each: dense(*each, **attrs), [bfloat16(data), weight, bias], bfloat16(out_grad))
    assert_low_close(received, wanted)


@pytest.mark.bf16
def test_weights_are_rounded_to_nearest():
    weight = nd.array([[1 + 2 ** -8 + 2 ** -12, 1 + 2 ** -8, 1 + 3 * 2 ** -8]])
    received = dense(bfloat16(nd.array(np.eye(3))), weight, num_hidden=1, no_bias=True)
    assert_close(nd.amp_cast(received, dtype="float32").asnumpy(), rounded(weight).asnumpy().T, 0)


@pytest.mark.bf16
def test_weights_of_several_layers_do_not_mix():
    data, layers = bfloat16(normal(5, 8)), [normal(units, 8, seed=units) for units in (64, 3, 200)]
    alone = [dense(data, weight, num_hidden=len(weight), no_bias=True) for weight in layers]
    mx.nd.waitall()
    for weight, wanted in zip(layers, alone):
        assert_close(nd.amp_cast(wanted, dtype="float32").asnumpy(),
                     nd.amp_cast(data, dtype="float32").asnumpy() @ rounded(weight).asnumpy().T, BFLOAT16_ROUNDING)


def test_no_rows():
    with mx.util.np_shape(True):
        inputs = [nd.zeros((0, 6)), normal(4, 6), normal(4, seed=1)]
        for array in inputs:
            array.attach_grad()
        with autograd.record():
            out = dense(*inputs, num_hidden=4)
        out.backward(nd.zeros((0, 4)))
        nd.waitall()
        assert out.shape == (0, 4)
        assert not any(array.grad.asnumpy().any() for array in inputs[1:])


@pytest.mark.parametrize("values", [[1e38, 1e38], [1e-42, -1e-42], [np.nan, 1], [np.inf, 1]])
def test_special_values(values):
    inputs, out_grad = [nd.array([values]), normal(3, 2), normal(3, seed=1)], normal(1, 3, seed=3)
    wanted = with_gradients(lambda *each: nd.FullyConnected(*each, num_hidden=3), inputs, out_grad)
    received = with_gradients(lambda *each: dense(*each, num_hidden=3), inputs, out_grad)
    for one, other in zip(received, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_slices_need_not_be_aligned():
    data, weight = normal(65)[1:].reshape((8, 8)), normal(5 * 8 + 3, seed=1)[3:].reshape((5, 8))
    assert_close(dense(data, weight, num_hidden=5, no_bias=True).asnumpy(), data.asnumpy() @ weight.asnumpy().T, 1e-6)


def test_errors_say_what_was_expected():
    with pytest.raises(mx.MXNetError, match="weight of shape"):
        dense(normal(2, 3), normal(4, 5), normal(4), num_hidden=4)
    with pytest.raises(mx.MXNetError, match="two dimensions"):
        dense(normal(3), normal(4, 3), normal(4), num_hidden=4)
