"""Graphs and arrays for the tests of the C++ operators."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock, nn

from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke
from gluon_amp.machine.dtypes import BFLOAT16_DTYPE
from gluon_amp.plan.cached_op import prepared_operations

ROOT = Path(__file__).parents[2]
BFLOAT16_ROUNDING = 2.0 ** -8
CACHED_OP_FLAGS = [(), (("static_alloc", True),), (("static_alloc", True), ("static_shape", True)),
                   (("inline_limit", 0),)]
requires_core = pytest.mark.skipif(not native.is_available("_gluon_amp_clip"), reason=native.load()[0].missing)


def script(text, **environment):
    """Run a program in a Python of its own, with more in its environment, and return what it printed."""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def bfloat16(array):
    return nd.amp_cast(array, dtype=BFLOAT16_DTYPE)


def float32(array):
    return nd.amp_cast(array, dtype="float32")


def rounded(array):
    return float32(bfloat16(array))


def normal(*shape, scale=1.0, seed=0):
    return nd.array(np.random.RandomState(seed).standard_normal(shape) * scale)


def run(op, inputs, **attrs):
    """Run an operator of one output."""
    return invoke(op, inputs, {name: str(value) for name, value in attrs.items()})[0]


def _differentiated(function, inputs, out_grad):
    """Return the value of a function of arrays, and its gradients."""
    for array in inputs:
        array.attach_grad()
    with autograd.record():
        out = function(*inputs)
    out.backward(out_grad)
    return [out, *(array.grad for array in inputs)]


def with_gradients(function, inputs, out_grad):
    """Return the value of a function of arrays and its gradients, as float32 in NumPy."""
    return [np.array(float32(array).asnumpy()) for array in _differentiated(function, inputs, out_grad)]


def results_of_batches(net, grad_req, batches):
    """Return what a network gives for each batch, and the gradients of two passes: with ``add`` those of both."""
    found = []
    for x in batches:
        x.attach_grad(grad_req)
        net.collect_params().zero_grad()
        for _ in range(2):
            with autograd.record():
                out = net(x)
            out.backward()
        found += [out.asnumpy(), x.grad.asnumpy(), *(each.grad().asnumpy() for each in net.collect_params().values())]
    return found


class SqueezeAndExcite(HybridBlock):
    """A convolution that is read twice: its means say how much of each channel another one is given."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first, self.last = nn.Conv2D(32, 3, padding=1, in_channels=16), nn.Conv2D(16, 1, in_channels=32)
            self.pool, self.squeeze = nn.GlobalAvgPool2D(), nn.Conv2D(32, 1, in_channels=32)

    def hybrid_forward(self, F, x):
        x = self.first(x)
        return self.last(F.broadcast_mul(x, F.sigmoid(self.squeeze(self.pool(x)))))


def kinds(net):
    """Return the operators that the hybridized parts of a network ran last."""
    return {node.op for _, operation in prepared_operations(net) for node in operation.latest.graph.operators()}


def assert_close(received, wanted, relative):
    """Compare with the scale of the whole array, as small results of large terms are all rounding."""
    scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    np.testing.assert_allclose(received, wanted, rtol=relative, atol=relative * scale)
