"""Values and gradients of the C++ operators for networks, against MXNet's."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from native_cases import (
    CACHED_OP_FLAGS,
    assert_close,
    assert_low_close,
    bfloat16,
    normal,
    replaced,
    requires_core,
    rounded,
    run,
    with_gradients,
)

pytestmark = requires_core

NATIVE = {"LayerNorm": "_gluon_amp_layer_norm", "clip": "_gluon_amp_clip"}
SHAPES = [(1,), (7,), (1, 1), (5, 1), (3, 17), (64, 96), (200, 33), (2, 3, 5, 31), (3, 20000), (1, 768)]


def layer_norm(*inputs, **attrs):
    return run("_gluon_amp_layer_norm", inputs, **attrs)


def clip(data):
    return run("_gluon_amp_clip", [data], a_min=-0.5, a_max=1.0)


def parameters(shape):
    return normal(shape[-1], seed=1), normal(shape[-1], seed=2)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_equals_mxnet(shape):
    inputs, out_grad = [normal(*shape), *parameters(shape)], normal(*shape, seed=3)
    wanted = with_gradients(lambda *arrays: nd.LayerNorm(*arrays, eps=1e-3), inputs, out_grad)
    received = with_gradients(lambda *arrays: layer_norm(*arrays, eps=1e-3), inputs, out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 1e-6 if shape[-1] > 1 else 1e-5)


@pytest.mark.parametrize("shape", SHAPES[3:])
def test_layer_norm_in_bfloat16(shape):
    data, out_grad = rounded(normal(*shape)), rounded(normal(*shape, seed=3))
    wanted = with_gradients(nd.LayerNorm, [data, *parameters(shape)], out_grad)
    received = with_gradients(layer_norm, [bfloat16(data), *parameters(shape)], bfloat16(out_grad))
    assert_low_close(received, wanted)


def test_layer_norm_of_many_rows_adds_up_exactly():
    rows, width = 100_000, 4
    data, out_grad = normal(rows, width), normal(rows, width, seed=1) + 1
    received = with_gradients(layer_norm, [data, nd.ones(width), nd.zeros(width)], out_grad)
    exact, grad = data.asnumpy().astype("float64"), out_grad.asnumpy().astype("float64")
    normalized = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    assert_close(received[2], (grad * normalized).sum(0), 1e-6)
    assert_close(received[3], grad.sum(0), 1e-6)


def test_zero_rows():
    with mx.util.np_shape(True):
        inputs = [nd.zeros((0, 3)), nd.ones(3), nd.ones(3)]
        for array in inputs:
            array.attach_grad()
        with autograd.record():
            out = clip(layer_norm(*inputs))
        out.backward(nd.zeros((0, 3)))
        nd.waitall()
        assert out.shape == inputs[0].grad.shape == (0, 3)
        assert inputs[1].grad.asnumpy().tolist() == inputs[2].grad.asnumpy().tolist() == [0, 0, 0]


@pytest.mark.parametrize("values", [[np.nan, 1, 2], [np.inf, 1, 2], [1e30, -1e30, 0], [1e-40, 2e-40, -1e-40],
                                    [3e38, 3e38, 3e38], [1, 1, 1], [1e8, 1e8 + 8, 1e8 - 8]])
def test_layer_norm_of_special_values(values):
    inputs, out_grad = [nd.array([values, [1, 2, 3]]), nd.ones(3), nd.zeros(3)], nd.array([[1, 2, 4], [0, 1, 0]])
    wanted = with_gradients(nd.LayerNorm, inputs, out_grad)
    received = with_gradients(layer_norm, inputs, out_grad)
    for one, other in zip(received, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_keeps_what_is_not_a_number():
    bits = nd.array(np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], "uint32").view("float32").reshape(1, 3))
    out = run("_gluon_amp_clip", [bfloat16(nd.array([[np.nan, 2, -2]]))], a_min=-1, a_max=1)
    assert rounded(nd.amp_cast(out, dtype="float32")).asnumpy().tolist()[0][1:] == [1, -1]
    assert np.isnan(nd.amp_cast(out, dtype="float32").asnumpy()[0, 0])
    out = layer_norm(bfloat16(nd.ones((1, 3))), nd.ones(3), bits[0])
    assert np.isnan(nd.amp_cast(out, dtype="float32").asnumpy()).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_clip_equals_mxnet_bit_by_bit(shape):
    data = normal(*shape)
    data[:1] = 1.0  # at a limit there is a gradient
    wanted = with_gradients(lambda x: nd.clip(x, -0.5, 1.0), [data], normal(*shape, seed=1))
    received = with_gradients(clip, [data], normal(*shape, seed=1))
    for one, other in zip(received, wanted):
        np.testing.assert_array_equal(one, other)


def test_clip_in_bfloat16_is_exact():
    data, out_grad = rounded(normal(77, 33)), rounded(normal(77, 33, seed=1))
    wanted = with_gradients(lambda x: nd.clip(x, -0.5, 1.0), [data], out_grad)
    received = with_gradients(clip, [bfloat16(data)], bfloat16(out_grad))
    for one, other in zip(received, wanted):
        np.testing.assert_array_equal(one, other)


def test_clip_of_special_values():
    values = nd.array([np.nan, np.inf, -np.inf, 1e-40, -0.0, 3e38])
    np.testing.assert_array_equal(clip(values).asnumpy(), nd.clip(values, -0.5, 1.0).asnumpy())


def test_slices_need_not_be_aligned():
    whole = normal(9 * 33 + 1)
    data = whole[1:].reshape((9, 33))
    gamma, beta = whole[3:36], whole[5:38]
    assert_close(layer_norm(data, gamma, beta).asnumpy(), nd.LayerNorm(data, gamma, beta).asnumpy(), 1e-6)
    np.testing.assert_array_equal(clip(whole[1:100]).asnumpy(), nd.clip(whole[1:100], -0.5, 1.0).asnumpy())


def test_layouts_of_onednn():
    """MXNet hands over what a convolution made in a plain layout."""
    def network(limit):
        return lambda x, w: limit(nd.Convolution(x, w, kernel=(3, 3), num_filter=32, no_bias=True))

    inputs, out_grad = [normal(2, 32, 9, 9), normal(32, 32, 3, 3, seed=1)], normal(2, 32, 7, 7, seed=2)
    wanted = with_gradients(network(lambda x: nd.clip(x, -0.5, 1.0)), inputs, out_grad)
    for one, other in zip(with_gradients(network(clip), inputs, out_grad), wanted):
        np.testing.assert_array_equal(one, other)


def _graph(guard):
    x = mx.sym.var("x")
    for index in range(3):
        inputs = [x, mx.sym.var(f"gamma{index}"), mx.sym.var(f"beta{index}")]
        normalized = mx.sym.LayerNorm(*(mx.sym.identity(entry) if guard else entry for entry in inputs))
        x = x + mx.sym.clip(mx.sym.tanh(normalized), -0.5, 0.5)
    return x


def _arguments(symbol):
    return [normal(*((8, 16) if name == "x" else (16,)), seed=seed)
            for seed, name in enumerate(symbol.list_arguments())]


def _train(symbol, flags, grad_req):
    op, arrays = mx.nd.CachedOp(symbol, flags), _arguments(symbol)
    for array in arrays:
        array.attach_grad(grad_req)
    for _ in range(2):
        with autograd.record():
            out = op(*arrays)
        out.backward(normal(8, 16, seed=99))
    return [out.asnumpy(), *(array.grad.asnumpy() for array in arrays)]


@pytest.mark.parametrize("flags", CACHED_OP_FLAGS)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_graphs_with_guards(flags, grad_req):
    """MXNet does not tell these operators that gradients accumulate: an identity between a variable and them does."""
    symbol = _graph(guard=grad_req == "add")
    received = _train(replaced(symbol, NATIVE), flags, grad_req)
    for one, other in zip(received, _train(symbol, flags, grad_req)):
        assert_close(one, other, 1e-6)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_executors_with_guards(grad_req):
    def train(symbol):
        arrays = _arguments(symbol)
        grads = [nd.zeros(array.shape) for array in arrays]
        executor = symbol.bind(mx.cpu(), arrays, args_grad=grads, grad_req=grad_req)
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward(normal(8, 16, seed=99))
        return [grad.asnumpy() for grad in grads]

    symbol = _graph(guard=True)
    for one, other in zip(train(replaced(symbol, NATIVE)), train(symbol)):
        assert_close(one, other, 1e-6)
