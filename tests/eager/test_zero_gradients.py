"""Operators that have no gradient, behind casts, in code that is not hybridized: a defect of MXNet ends the process."""
from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_what_has_no_gradient_gets_zeros(dtype):
    done = subprocess.run([sys.executable, "-c", PROGRAM, dtype], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert "numpy ok" in done.stdout
