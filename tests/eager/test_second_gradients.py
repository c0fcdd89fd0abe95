"""Gradients of gradients, as gradient penalties need them, which MXNet has of dense layers that run in FP32."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import gluon_amp as amp

DATA = np.random.RandomState(1).normal(size=(8, 16))
WAYS = {"eager": None, "plain block": "plain", "layers": {}}


class Critic(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(32, in_units=16), nn.Dense(1, in_units=32)

    def hybrid_forward(self, F, x):
        return self.second(F.sigmoid(self.first(x)))


def critic(way):
    if way is None:
        net = Critic()
    else:
        net = nn.Sequential()
        net.add(nn.Dense(32, in_units=16), nn.HybridLambda("sigmoid"), nn.Dense(1, in_units=32))
    net.initialize()
    random = np.random.RandomState(0)
    for one in net.collect_params().values():
        one.set_data(mx.nd.array(random.normal(scale=0.3, size=one.shape)))
    if isinstance(way, dict):
        net.hybridize(**way)
    return net


def penalised(net):
    """Return the gradients of a loss with a gradient penalty."""
    data = mx.nd.array(DATA)
    data.attach_grad()
    with autograd.record():
        value = net(data)
        slope = autograd.grad(value, [data], create_graph=True, retain_graph=True)[0]
        loss = (slope * slope).mean() + value.mean()
    loss.backward()
    return [data.grad.asnumpy(), *(one.grad().asnumpy() for one in net.collect_params().values())]


@pytest.mark.filterwarnings("ignore:All children of this Sequential")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.bf16
def test_a_gradient_penalty_is_that_of_fp32(dtype, way):
    expected = penalised(critic(WAYS[way]))
    amp.init(dtype)
    for found, wanted in zip(penalised(critic(WAYS[way])), expected):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.bf16
def test_two_dense_layers_in_a_hybridized_block():
    def made():
        net = nn.HybridSequential()
        net.add(nn.Dense(32, in_units=16), nn.Dense(1, in_units=32))
        net.initialize(mx.init.One())
        net.hybridize()
        return net
    expected = penalised(made())
    amp.init("bfloat16")
    for found, wanted in zip(penalised(made()), expected):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.bf16
def test_operators_outside_of_blocks():
    def slopes():
        data, weight = mx.nd.array(DATA), mx.nd.ones((4, 16)) / 7
        data.attach_grad()
        weight.attach_grad()
        with autograd.record():
            value = mx.nd.FullyConnected(data, weight, num_hidden=4, no_bias=True)
            slope = autograd.grad(value, [data], create_graph=True, retain_graph=True)[0]
        slope.backward()
        return weight.grad.asnumpy()
    expected = slopes()
    amp.init("bfloat16")
    np.testing.assert_allclose(slopes(), expected, rtol=1e-5)


def of_weights():
    """Differentiate what gradients of weights are, as in MAML."""
    data, weight = mx.nd.array(DATA), mx.nd.ones((4, 16)) / 7
    weight.attach_grad()
    with autograd.record():
        value = mx.nd.sigmoid(mx.nd.FullyConnected(data, weight, num_hidden=4, no_bias=True))
        slope = autograd.grad(value, [weight], create_graph=True, retain_graph=True)[0]
    slope.backward()
    return weight.grad.asnumpy()


@pytest.mark.bf16
def test_gradients_of_gradients_of_weights_need_a_region_in_fp32():
    expected = of_weights()
    amp.init("bfloat16")
    with pytest.raises(mx.MXNetError, match=r"AMP is on.*autocast\(enabled=False\)"):
        of_weights()
    with amp.autocast(enabled=False):
        np.testing.assert_allclose(of_weights(), expected, rtol=1e-5)


@pytest.mark.bf16
def test_layers_stay_in_low_precision_where_only_weights_have_gradients():
    net = critic(None)
    amp.init("bfloat16")
    rounded = critic(None)
    with autograd.record():
        found = rounded(mx.nd.array(DATA))
    with amp.autocast(enabled=False):
        exact = net(mx.nd.array(DATA))
    assert 1e-6 < float(mx.nd.abs(found - exact).max().asscalar()) < 0.05
