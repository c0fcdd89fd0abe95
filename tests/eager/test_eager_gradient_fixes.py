"""Gradients in code that is not hybridized that MXNet gets wrong behind casts, or has in FP32 alone."""
from __future__ import annotations

import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn

import gluon_amp as amp

DATA = np.random.RandomState(1).normal(size=(8, 16))
BF16 = pytest.param("bfloat16", marks=pytest.mark.bf16)


class Critic(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(32, in_units=16), nn.Dense(1, in_units=32)

    def hybrid_forward(self, F, x):
        return self.second(F.sigmoid(self.first(x)))


def layers(*, hybridize):
    net = nn.Sequential()
    net.add(nn.Dense(32, in_units=16), nn.HybridLambda("sigmoid"), nn.Dense(1, in_units=32))
    if hybridize:
        net.hybridize()
    return net


def two_dense_layers():
    net = nn.HybridSequential()
    net.add(nn.Dense(32, in_units=16), nn.Dense(1, in_units=32))
    net.hybridize()
    return net


WAYS = {"eager": Critic, "plain block": lambda: layers(hybridize=False), "layers": lambda: layers(hybridize=True),
        "two in a graph": two_dense_layers}


def filled(net):
    net.initialize()
    random = np.random.RandomState(0)
    for one in net.collect_params().values():
        one.set_data(mx.nd.array(random.normal(scale=0.3, size=one.shape)))
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


def slopes_of(array, run):
    """Differentiate the gradient of data, or as in MAML that of a weight."""
    arrays = {"data": mx.nd.array(DATA), "weight": mx.nd.ones((4, 16)) / 7}
    for name in {"weight", array}:  # with one of data, dense layers run in FP32
        arrays[name].attach_grad()
    with autograd.record():
        value = run(mx.nd.FullyConnected(*arrays.values(), num_hidden=4, no_bias=True))
        slope = autograd.grad(value, [arrays[array]], create_graph=True, retain_graph=True)[0]
    slope.backward()
    return arrays["weight"].grad.asnumpy()


@pytest.mark.bf16
class TestSecondGradients:
    @pytest.mark.filterwarnings("ignore:All children of this Sequential")
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_a_gradient_penalty_is_that_of_fp32(self, dtype, way):
        expected = penalised(filled(WAYS[way]()))
        amp.init(dtype)
        for found, wanted in zip(penalised(filled(WAYS[way]())), expected):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

    def test_operators_outside_of_blocks(self):
        expected = slopes_of("data", mx.nd.identity)
        amp.init("bfloat16")
        np.testing.assert_allclose(slopes_of("data", mx.nd.identity), expected, rtol=1e-5)

    def test_those_of_gradients_of_weights_need_a_region_in_fp32(self):
        expected = slopes_of("weight", mx.nd.sigmoid)
        amp.init("bfloat16")
        with pytest.raises(mx.MXNetError, match=r"AMP is on.*autocast\(enabled=False\)"):
            slopes_of("weight", mx.nd.sigmoid)
        with amp.autocast(enabled=False):
            np.testing.assert_allclose(slopes_of("weight", mx.nd.sigmoid), expected, rtol=1e-5)

    def test_layers_stay_in_low_precision_where_only_weights_have_gradients(self):
        amp.init("bfloat16")
        net = filled(Critic())
        with autograd.record():
            found = net(mx.nd.array(DATA))
        with amp.autocast(enabled=False):
            exact = net(mx.nd.array(DATA))
        assert 1e-6 < float(mx.nd.abs(found - exact).max().asscalar()) < 0.05


# Operators that have no gradient, behind casts: a defect of MXNet ends the process.
PROGRAM = '''
import sys, warnings
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
import gluon_amp as amp

warnings.simplefilter("ignore")
CASES = {
    "BlockGrad": lambda F, y: F.BlockGrad(y),
    "a chain": lambda F, y: F.BlockGrad(F.reshape(F.exp(y), (-1,))) * 2,
    "product": lambda F, y: F.FullyConnected(F.BlockGrad(y), F.ones((8, 8)), num_hidden=8, no_bias=True),
    "comparison": lambda F, y: F.broadcast_greater(y, F.zeros((1, 1))),
    "with a number": lambda F, y: (y > 0) + (y <= 0.5),
    "rounding": lambda F, y: F.round(y) + F.floor(y),
    "condition": lambda F, y: F.where(y, F.ones((4, 8)), F.zeros((4, 8))),
    "shape of another": lambda F, y: F.reshape_like(F.ones((32,)), y),
    "index": lambda F, y: F.pick(F.ones((4, 8)), F.sum(y, axis=1) * 0),
    "one hot": lambda F, y: F.one_hot(F.argmax(y, axis=1), depth=8),
    "largest": lambda F, y: F.topk(F.exp(y), k=2, axis=1),
    "switched off": lambda F, y: switched_off(F, y),
    "outside": lambda F, y: y,
}


def switched_off(F, y):
    with amp.autocast(enabled=False):
        return F.BlockGrad(y)


class Net(gluon.HybridBlock):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.w = self.params.get("w", shape=(8, 8))

    def hybrid_forward(self, F, x, w):
        return self.function(F, F.FullyConnected(x, w, num_hidden=8, no_bias=True))


def run(name, hybridized):
    net = Net(CASES[name])
    net.initialize()
    if hybridized:
        net.hybridize()
    x = mx.nd.random.uniform(shape=(4, 8))
    with autograd.record():
        y = net(x)
        y = mx.nd.BlockGrad(y) if name == "outside" else y
        loss = (y * 1.5).sum()
    if hybridized:
        (gradient,) = autograd.grad(loss, [net.w.data()], retain_graph=True)
        assert not gradient.asnumpy().any()
    net.w.grad()[:] = 7
    loss.backward()
    assert not net.w.grad().asnumpy().any(), net.w.grad()


def run_numpy():
    mx.npx.set_np()
    w = mx.np.ones((4, 4))
    w.attach_grad()
    with autograd.record():
        y = mx.npx.fully_connected(w, w, num_hidden=4, no_bias=True) * 2
        loss = (y > 1).astype("float32").sum() + mx.np.floor(y.reshape(-1)).sum()
    loss.backward()
    assert not w.grad.asnumpy().any()


amp.init(sys.argv[1])
for name in CASES:
    for hybridized in (False, True):
        print(name, "hybridized" if hybridized else "eager", end=" ", flush=True)
        run(name, hybridized)
        print("ok", flush=True)
run_numpy()
print("numpy ok")
'''


@pytest.mark.parametrize("dtype", ["float16", BF16])
def test_what_has_no_gradient_gets_zeros(dtype):
    done = subprocess.run([sys.executable, "-c", PROGRAM, dtype], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert "numpy ok" in done.stdout
