"""Activations on oneDNN's kernels: graphs written by hand, and values and gradients of MXNet's own operators."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import conv, op, rewritten, variable
from mxnet import autograd
from mxnet.gluon import nn
from networks import differentiate, sequential

import gluon_amp as amp
from gluon_amp.graph import Entry
from gluon_amp.rules import ANY_DEVICE, Device, Policy, make_policy

SHAPE = (2, 32, 8, 8)


def lowered():
    return conv("c", variable("data", (2, 16, 8, 8)), 32, 16)


def norm(data):
    parameters = [variable(f"bn_{part}", (32,)) for part in ("gamma", "beta", "mean", "var")]
    return Entry(op("BatchNorm", "bn", data, *parameters, outputs=3, shape=SHAPE))


def clip(data, a_min=0.0, a_max=6.0):
    return op("clip", "c6", data, shape=SHAPE, a_min=a_min, a_max=a_max)


def act(kind, data=None, shape=SHAPE, dtype="float32"):
    return op(kind, "a", variable("x", shape, dtype) if data is None else data, shape=shape, dtype=dtype)


class TestGraphs:
    @pytest.mark.parametrize(("target", "node", "line"), [
        *(("bfloat16", lambda name=name: act(name, lowered()), "a: Activation(c) -> bfloat16")
          for name in ("relu", "_npx_relu")),
        # Where oneDNN would hand it back.
        *(("bfloat16", lambda shape=shape: act("relu", lowered(), shape), "a: relu(c_float32) -> float32")
          for shape in (None, (0, 32, 8, 8), (1, 2, 2, 2, 4, 4))),
        ("bfloat16", lambda: act("relu"), "a: relu(x) -> float32"),
        ("float16", lambda: act("relu", lowered()), "a: relu(c) -> float16"),
        *(("float32", lambda name=name: act(name), "a: Activation(x) -> float32")
          for name in ("sigmoid", "_npx_sigmoid", "tanh", "_npi_tanh")),
        *(("float32", lambda shape=shape: act("tanh", shape=shape), "a: tanh(x) -> float32")
          for shape in (None, (0, 3), (1, 2, 2, 2, 4, 4))),
        *((target, lambda name=name, power=power: op(name, "a", variable("x", SHAPE), shape=SHAPE, scalar=power),
           f"a: {wanted}(x) -> float32")
          for target in ("float32", "bfloat16") for name, power, wanted in (
              ("_power_scalar", 2.0, "square"), ("_npi_power_scalar", 2.0, "_npi_square"),
              ("_power_scalar", 0.5, "_power_scalar"), ("_power_scalar", -2.0, "_power_scalar"))),
        ("float32", lambda: op("_power_scalar", "a", variable("x", SHAPE, "float64"), shape=SHAPE, scalar=2.0,
                               dtype="float64"), "a: _power_scalar(x) -> float64"),
        ("float32", lambda: act("tanh", dtype="float64"), "a: tanh(x) -> float64"),
        ("float32", lambda: act("relu"), "a: relu(x) -> float32"),  # it keeps a NaN
        # A clip is faster than a maximum and a minimum.
        ("float32", lambda: clip(variable("x", SHAPE), -1.0), "c6: clip(x) -> float32")])
    def test_by_themselves(self, target, node, line):
        assert line in rewritten(target, node())

    @pytest.mark.parametrize(("policy", "device"), [
        (make_policy("bfloat16", {"relu": "relu"}, fp32_ops=["relu"]), ANY_DEVICE),
        (Policy("bfloat16"), Device(imitated=True))])
    def test_where_users_or_the_device_want_others(self, policy, device):
        assert not any("Activation" in line for line in rewritten("bfloat16", act("relu", lowered()), policy=policy,
                                                                  device=device))

    def test_a_rectifier_takes_the_signs_out_of_relu6_behind_batch_norm(self):
        lines = rewritten("bfloat16", conv("next", Entry(clip(norm(lowered()))), 32, 32))
        assert "c6_relu: Activation(bn) -> bfloat16" in lines
        assert any(line.startswith("c6: clip(c6_relu") for line in lines)

    @pytest.mark.parametrize("head", [
        lambda: clip(norm(lowered()), -1.0, 1.0), lambda: clip(norm(lowered()), 1.0, 6.0),
        lambda: clip(lowered())])  # data that may be zero keeps its gradient there
    def test_other_limits_are_left_alone(self, head):
        assert not any("Activation" in line for line in rewritten("bfloat16", head()))


@pytest.mark.bf16
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_relu6_is_that_of_fp32(grad_req):
    """The same numbers as FP32, rounded: values exactly inside and at the bounds, and the gradient of what passes."""
    def run():
        net = sequential(lambda: [nn.Conv2D(32, 1, in_channels=32, use_bias=False),
                                  nn.BatchNorm(in_channels=32, scale=True),
                                  nn.HybridLambda(lambda F, x: F.clip(x, 0, 6))], prefix="net_", active=False)
        net[0].weight.set_data(mx.nd.eye(32).reshape((32, 32, 1, 1)))
        net[1].gamma.set_data(mx.nd.full(32, 4))
        net.collect_params().setattr("grad_req", grad_req)
        net.collect_params(".*running.*").setattr("grad_req", "null")
        net.hybridize()
        x = mx.nd.array(np.random.RandomState(0).normal(size=(4, 32, 9, 9)))
        x.attach_grad(grad_req)
        with autograd.record():
            y = net(x)
        y.backward(mx.nd.array(np.random.RandomState(1).normal(size=y.shape)))
        return y.asnumpy(), x.grad.asnumpy(), net[1].beta.grad().asnumpy()

    expected = run()
    amp.init("bfloat16")
    found = run()
    y = expected[0]
    assert 0.3 < (y == 0).mean() < 0.7
    assert 0.01 < (y == 6).mean() < 0.5
    np.testing.assert_array_less(np.abs(found[0] - y), 2.0 ** -6 * 6)
    assert found[0].max() == 6
    assert found[0].min() == 0
    for got, want in zip(found[1:], expected[1:]):
        assert np.abs(got - want).mean() <= 0.02 * np.abs(want).mean()


SPECIAL = [-np.inf, -7.0, -1.0, -1e-30, 0.0, 1e-30, 0.5, 2.0, 7.0, np.inf]


def values_and_gradient(function, grad_req):
    net = nn.HybridLambda(function)
    net.hybridize()
    data = mx.nd.array(SPECIAL)
    data.attach_grad(grad_req)
    data.grad[:] = 1
    out = differentiate(net, data, head=mx.nd.arange(1, len(SPECIAL) + 1))
    return out.asnumpy(), data.grad.asnumpy()


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize(("function", "tolerance"), [
    (lambda F, x: F.sigmoid(x), 2e-6), (lambda F, x: F.tanh(x), 4e-6),
    (lambda F, x: F.clip(x, -9, 9) ** 2, 1e-6)], ids=["sigmoid", "tanh", "square"])
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
