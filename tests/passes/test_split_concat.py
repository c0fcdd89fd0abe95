"""Joined feature maps whose channels are no whole blocks of oneDNN's: MXNet cannot split their gradient."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import ALL_ISAS, run_on
from mxnet.gluon import HybridBlock, nn
from networks import differentiate, relative

import gluon_amp as amp

DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16), "float16"]
CHANNELS = [(8, 8, 8), (8, 8, 16), (12, 12, 16), (20, 44, 32), (16, 16, 16)]

TRAINING = """
import mxnet as mx, gluon_amp as amp
from mxnet import autograd
from mxnet.gluon import contrib, nn
amp.init()
for one, two, out in {channels}:
    print(one, two, out, flush=True)
    net, branches = nn.HybridSequential(), contrib.nn.HybridConcurrent(axis=1)
    branches.add(nn.Conv2D(one, 3, padding=1), nn.Conv2D(two, 3, padding=1))
    net.add(branches, nn.Conv2D(out, 3, padding=1))
    net.initialize()
    net.hybridize(static_alloc=True)
    with autograd.record():
        loss = net(mx.nd.ones((2, 16, 8, 8))).sum()
    loss.backward()
    mx.nd.waitall()
print("done")
"""


@pytest.mark.machine
@pytest.mark.parametrize("isa", ALL_ISAS)
def test_no_process_ends(isa):
    child = run_on(isa, TRAINING.format(channels=CHANNELS[:3]))
    assert child.stdout.split()[-1] == "done", child.stdout + child.stderr


class Joined(HybridBlock):
    def __init__(self, one, two, out):
        super().__init__(prefix="joined_")
        with self.name_scope():
            self.one = nn.Conv2D(one, 3, padding=1, in_channels=16)
            self.two = nn.Conv2D(two, 3, padding=1, in_channels=16)
            self.weight = self.params.get("weight", shape=(out, one + two, 3, 3))
        self.join, self.first, self.out = True, one, out

    def hybrid_forward(self, F, data, weight):
        def last(maps, some):
            return F.Convolution(maps, some, kernel=(3, 3), pad=(1, 1), num_filter=self.out, no_bias=True)
        one, two = self.one(data), self.two(data)
        if self.join:
            return last(F.concat(one, two, dim=1), weight)
        # The same without a Concat.
        return (last(one, F.slice_axis(weight, axis=1, begin=0, end=self.first))
                + last(two, F.slice_axis(weight, axis=1, begin=self.first, end=None)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_gradients_are_those_of_the_parts(channels, dtype):
    net = Joined(*channels)
    net.initialize(mx.init.Xavier())
    data = mx.nd.random.normal(shape=(2, 16, 8, 8))
    data.attach_grad()

    def trained():
        differentiate(lambda: (net(data) ** 2).sum())
        return [data.grad.asnumpy(), *(one.grad().asnumpy() for one in net.collect_params().values())]

    net.join = False
    expected = trained()
    net.join = True
    net.hybridize(static_alloc=True, static_shape=True)
    amp.init(dtype)
    received = trained()
    bound = 1e-5 if dtype == "float32" else 0.03
    assert all(relative(one, other) < bound for one, other in zip(expected, received))
    assert all(np.isfinite(one).all() for one in received)
