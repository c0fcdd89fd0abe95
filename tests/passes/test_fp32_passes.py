"""What the passes make faster in FP32: graphs written by hand, and values and gradients of MXNet's own operators."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import conv, op, rewritten, variable
from mxnet import autograd
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp.rules import Device, Policy

SHAPE = (2, 160, 16, 16)


def convolution(filters, channels=160, kernel=3, shape=(2, 160, 16, 16), **attrs):
    node = conv("c", variable("data", shape), filters, channels, kernel, **attrs)
    node.shapes = [(shape[0], filters, *shape[2:])]
    return node


def is_padded(node, policy=None, multiple=None):
    return any("_unpad" in line for line in rewritten("float32", node, policy=policy, device=Device(multiple)))


@pytest.mark.parametrize("filters", [20, 84, 126, 324])
def test_convolutions_that_would_run_as_matrix_products_are_padded(filters):
    assert is_padded(convolution(filters))


def test_multiples_of_eight_are_those_of_avx2_only():
    assert is_padded(convolution(24), multiple=16)
    assert not is_padded(convolution(24), multiple=8)


@pytest.mark.parametrize("node", [
    convolution(32), convolution(84, kernel=1), convolution(84, channels=64, shape=(2, 64, 16, 16)),
    convolution(84, shape=(1, 160, 8, 8)), convolution(84, channels=80, num_group=2),
], ids=["multiple of 16", "pointwise", "few input channels", "small map", "groups"])
def test_others_are_left_alone(node):
    assert not is_padded(node)


def test_converted_graphs_are_not_padded():
    assert not is_padded(convolution(324), Policy("float32", training=False))


def test_convolutions_of_unknown_shape_are_left_alone():
    node = convolution(84)
    node.shapes = [None]
    assert not is_padded(node)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_padded_convolution_gives_the_same(grad_req):
    """On integers, whose sums are exact in any order."""
    def run(under_amp):
        random = np.random.RandomState(3)
        net = nn.Conv2D(20, 3, padding=1, in_channels=128, prefix="net_")
        net.initialize()
        net.collect_params().setattr("grad_req", grad_req)
        for parameter in net.collect_params().values():
            parameter.set_data(mx.nd.array(random.randint(-3, 4, parameter.shape)))
        net.hybridize()
        data = mx.nd.array(random.randint(-3, 4, (2, 128, 14, 14)))
        data.attach_grad(grad_req)
        weights = mx.nd.array(random.randint(-3, 4, (2, 20, 14, 14)))
        if under_amp:
            amp.init("float32")
        for _ in range(2):
            with autograd.record():
                out = net(data)
            out.backward(weights)
        amp.deinit()
        return [out, data.grad, *(parameter.grad() for parameter in net.collect_params().values())]

    for one, other in zip(run(True), run(False)):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize(("name", "kind"), [("sigmoid", "sigmoid"), ("_npx_sigmoid", "sigmoid"), ("tanh", "tanh"),
                                            ("_npi_tanh", "tanh")])
def test_activations_run_onednns_kernels(name, kind):
    assert rewritten("float32", op(name, "a", variable("x", SHAPE), shape=SHAPE)) == [
        "a: Activation(x) -> float32", "out: a"]


@pytest.mark.parametrize("shape", [None, (0, 3), (1, 2, 2, 2, 4, 4)])
def test_activations_stay_where_onednn_has_none(shape):
    assert "a: tanh(x) -> float32" in rewritten("float32", op("tanh", "a", variable("x", shape), shape=shape))


def test_other_types_stay():
    node = op("tanh", "a", variable("x", SHAPE, "float64"), shape=SHAPE, dtype="float64")
    assert "a: tanh(x) -> float64" in rewritten("float32", node)


def test_relu_stays_because_it_keeps_a_nan():
    assert "a: relu(x) -> float32" in rewritten("float32", op("relu", "a", variable("x", SHAPE), shape=SHAPE))


def test_clip_stays_because_it_is_faster_than_a_maximum_and_a_minimum():
    clip = op("clip", "a", variable("x", SHAPE), shape=SHAPE, a_min=-1.0, a_max=6.0)
    assert rewritten("float32", clip) == ["a: clip(x) -> float32", "out: a"]


SPECIAL = [-np.inf, -7.0, -1.0, -1e-30, 0.0, 1e-30, 0.5, 2.0, 7.0, np.inf]


def values_and_gradient(function, grad_req):
    net = nn.HybridLambda(function)
    net.hybridize()
    data = mx.nd.array(SPECIAL)
    data.attach_grad(grad_req)
    data.grad[:] = 1
    with autograd.record():
        out = net(data)
    out.backward(mx.nd.arange(1, len(SPECIAL) + 1))
    return out.asnumpy(), data.grad.asnumpy()


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize(("function", "tolerance"), [
    (lambda F, x: F.sigmoid(x), 2e-6), (lambda F, x: F.tanh(x), 4e-6)], ids=["sigmoid", "tanh"])
def test_values_and_gradients_are_mxnets(function, tolerance, grad_req):
    """At zero and at infinity too."""
    values, gradient = values_and_gradient(function, "write")
    amp.init("float32")
    found, found_gradient = values_and_gradient(function, grad_req)
    np.testing.assert_allclose(found, values, rtol=0, atol=tolerance)
    np.testing.assert_allclose(found_gradient, gradient + (grad_req == "add"), rtol=0, atol=tolerance)


@pytest.mark.parametrize("function", [lambda F, x: F.sigmoid(x), lambda F, x: F.tanh(x)])
def test_a_nan_stays_one(function):
    net = nn.HybridLambda(function)
    net.hybridize()
    amp.init("float32")
    assert np.isnan(net(mx.nd.array([np.nan, 1.0])).asnumpy()).tolist() == [True, False]
