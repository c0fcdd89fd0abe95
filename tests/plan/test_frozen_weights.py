"""Biases that are trained while the weights are frozen: MXNet leaves their gradients out."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from networks import sequential

import gluon_amp as amp

DATA = np.random.RandomState(0).normal(size=(4, 16))
WAYS = {"hybridized": {}, "static": {"static_alloc": True}}
CLOSE = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}
dtypes = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16), "float16"])


def network(flags=None):
    net = sequential(lambda: [nn.Dense(16, in_units=16, activation="tanh"),
                              nn.Dense(16, in_units=16)], prefix="net_", active=False)
    random = np.random.RandomState(1)
    for one in net.collect_params().values():
        one.set_data(mx.nd.array(random.uniform(-0.3, 0.3, one.shape)))
    net.hybridize(active=flags is not None, **(flags or {}))
    return net


def litter():
    """Leave NaN in the memory that MXNet takes next."""
    for shape in ((16,), (4, 16), (16, 16)):
        arrays = [mx.nd.full(shape, np.nan) for _ in range(20)]
        mx.nd.waitall()
        del arrays


def slopes(net, requests):
    """Gradients of the parameters that have any."""
    for name, one in net.collect_params().items():
        one.grad_req = requests[name.rpartition("_")[2]]
        if one.grad_req != "null":
            one.zero_grad()
    litter()
    with autograd.record():
        value = net(mx.nd.array(DATA))
        loss = (value * value).sum()
    loss.backward()
    return {name: one.grad().asnumpy() for name, one in net.collect_params().items() if one.grad_req != "null"}


@pytest.fixture(scope="module")
def expected():
    return slopes(network(), {"weight": "write", "bias": "write"})


def check(found, expected, tolerance):
    for name, one in found.items():
        np.testing.assert_allclose(one, expected[name], atol=tolerance * np.abs(expected[name]).max(), err_msg=name)


@dtypes
@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:AMP will be slow")
def test_graphs(way, request_, dtype, expected):
    amp.init(dtype)
    net = network(WAYS[way])
    check(slopes(net, {"weight": "write", "bias": "write"}), expected, CLOSE[dtype])
    check(slopes(net, {"weight": "null", "bias": request_}), expected, CLOSE[dtype])
    check(slopes(net, {"weight": "write", "bias": "null"}), expected, CLOSE[dtype])


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.bf16), "float16"])
@pytest.mark.filterwarnings("ignore:AMP will be slow")
def test_blocks_that_are_not_hybridized(dtype, expected):
    amp.init(dtype)
    check(slopes(network(), {"weight": "null", "bias": "write"}), expected, CLOSE[dtype])


@dtypes
@pytest.mark.filterwarnings("ignore:AMP will be slow")
def test_executors(dtype, expected):
    symbol = network()(mx.sym.var("data"))
    amp.init(dtype)
    values = {name: one.data() for name, one in network().collect_params().items()}
    biases = {name: mx.nd.zeros(one.shape) for name, one in values.items() if name.endswith("bias")}
    executor = symbol.bind(mx.cpu(), {"data": mx.nd.array(DATA), **values}, biases)
    litter()
    output, = executor.forward(is_train=True)
    executor.backward(2 * output)
    check({name: one.asnumpy() for name, one in biases.items()}, expected, CLOSE[dtype])
