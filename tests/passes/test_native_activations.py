"""Rectifiers on oneDNN's kernels: graphs written by hand, and ReLU6 against FP32."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import conv, graph, op, rewrite, rewritten, variable
from mxnet import autograd
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp.graph import Entry
from gluon_amp.rules import ANY_DEVICE, Device, Policy, make_policy

SHAPE = (2, 32, 8, 8)


def lowered():
    return conv("c", variable("data", (2, 16, 8, 8)), 32, 16)


def norm(data):
    parameters = [variable(f"bn_{part}", (32,)) for part in ("gamma", "beta", "mean", "var")]
    return Entry(op("BatchNorm", "bn", data, *parameters, outputs=3, shape=SHAPE))


def operators(*heads, policy=None):
    """What becomes of a graph."""
    return [line for line in rewritten("bfloat16", *heads, policy=policy) if "amp_cast" not in line]


@pytest.mark.parametrize("name", ["relu", "_npx_relu"])
def test_relu_runs_as_the_activation_that_onednn_has(name):
    assert "r: Activation(c) -> bfloat16" in operators(op(name, "r", lowered(), shape=SHAPE))


@pytest.mark.parametrize("shape", [None, (0, 32, 8, 8), (1, 2, 2, 2, 4, 4)])
def test_relu_stays_where_onednn_would_hand_it_back(shape):
    assert "r: relu(c_float32) -> float32" in operators(op("relu", "r", lowered(), shape=shape))


def test_relu_in_fp32_is_left_alone():
    assert rewritten("bfloat16", op("relu", "r", variable("x", SHAPE), shape=SHAPE)) == [
        "r: relu(x) -> float32", "out: r"]
    policy = make_policy("bfloat16", {"relu": "relu"}, fp32_ops=["relu"])
    assert "r: relu(c_float32) -> float32" in operators(op("relu", "r", lowered(), shape=SHAPE), policy=policy)


def test_a_rectifier_takes_the_signs_out_of_relu6_behind_batch_norm():
    clip = op("clip", "c6", norm(lowered()), shape=SHAPE, a_min=0.0, a_max=6.0)
    lines = operators(conv("next", Entry(clip), 32, 32))
    assert "c6_relu: Activation(bn) -> bfloat16" in lines
    assert any(line.startswith("c6: clip(c6_relu") for line in lines)


@pytest.mark.parametrize("bounds", [{"a_min": -1.0, "a_max": 1.0}, {"a_min": 1.0, "a_max": 6.0}])
def test_other_bounds_are_left_alone(bounds):
    assert not any("Activation" in line for line in operators(op("clip", "c6", norm(lowered()), shape=SHAPE, **bounds)))


def test_a_clip_of_data_that_may_be_zero_keeps_its_gradient_there():
    clip = op("clip", "c6", lowered(), shape=SHAPE, a_min=0.0, a_max=6.0)
    assert not any("Activation" in line for line in operators(clip))


@pytest.mark.parametrize(("target", "device"), [("float16", ANY_DEVICE), ("bfloat16", Device(imitated=True))])
def test_only_bfloat16_of_the_cpu_is_concerned(target, device):
    rewritten_graph = graph(op("relu", "r", lowered(), shape=SHAPE))
    rewrite(rewritten_graph, Policy(target), device)
    assert not any(node.op == "Activation" for node in rewritten_graph.nodes())


@pytest.mark.bf16
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_relu6_is_that_of_fp32(grad_req):
    """The same numbers as FP32, rounded: values exactly inside and at the bounds, and the gradient of what passes."""
    def run():
        net = nn.HybridSequential(prefix="net_")
        with net.name_scope():
            net.add(nn.Conv2D(32, 1, in_channels=32, use_bias=False), nn.BatchNorm(in_channels=32, scale=True),
                    nn.HybridLambda(lambda F, x: F.clip(x, 0, 6)))
        net.initialize()
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
