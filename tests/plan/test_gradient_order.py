"""Gradients of weights are cast as soon as they are computed: the inputs of a graph that trains begin with the last."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from native_cases import script

import gluon_amp as amp
from gluon_amp.plan import cached_op
from gluon_amp.plan.cached_op import OrderedCachedOp

# Prints how many megabytes the training of 24 layers takes that share oneDNN's memory.
PROGRAM = """
import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn
import gluon_amp as amp
from gluon_amp.plan import cached_op

def written():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

{start}
amp.init("bfloat16")
before = written()
net = nn.HybridSequential()
net.add(*(nn.Conv2D(512, 3, padding=1, use_bias=False, in_channels=512) for _ in range(24)))
net.initialize()
net.hybridize(static_alloc=True, static_shape=True)
x = mx.nd.ones((1, 512, 7, 7))
for _ in range(3):
    with autograd.record():
        loss = net(x).mean()
    loss.backward()
    mx.nd.waitall()
print(written() - before)
"""
IN_THE_PROGRAMS_ORDER = "cached_op.cached_op = lambda plan, flags: cached_op.UpstreamCachedOp(plan.runs, flags)"


class Net(nn.HybridBlock):
    """Two inputs, a weight that two layers share, moving averages, and an output of each branch."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.stem = nn.Conv2D(32, 3, padding=1, in_channels=16)
            self.norm = nn.BatchNorm(in_channels=32)
            self.first = nn.Conv2D(32, 3, padding=1, in_channels=32, use_bias=False)
            self.second = nn.Conv2D(32, 3, padding=1, in_channels=32, params=self.first.params, use_bias=False)
            self.last = nn.Conv2D(16, 1, in_channels=32)

    def hybrid_forward(self, F, x, y):
        x = self.second(F.relu(self.first(F.relu(self.norm(self.stem(x))))))
        return self.last(x + F.broadcast_like(y, x)), x


def _trained(flags, request):
    """Return what is output, all gradients, and the moving averages after a second step."""
    net = Net()
    net.initialize()
    random = np.random.RandomState(0)
    for one in net.collect_params().values():
        one.set_data(mx.nd.array(random.normal(scale=0.3, size=one.shape) ** 2))
    net.collect_params().setattr("grad_req", request)
    net.hybridize(**flags)
    x, y = mx.nd.array(random.normal(size=(2, 16, 9, 9))), mx.nd.array(random.normal(size=(2, 1, 1, 1)))
    y.attach_grad()
    with amp.autocast():
        for _ in range(2):
            with autograd.record():
                one, two = net(x, y)
                loss = (one * one).mean() + two.mean()
            loss.backward()
    parameters = net.collect_params().values()
    return net, [array.asnumpy() for array in (
        one, two, y.grad, *(each.grad() if each.grad_req != "null" else each.data() for each in parameters))]


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}])
@pytest.mark.bf16
def test_training_gives_what_it_gives_in_the_programs_order(monkeypatch, flags, request_):
    amp.init("bfloat16")
    net, found = _trained(flags, request_)
    assert isinstance(_operation(net), OrderedCachedOp)
    monkeypatch.setattr(cached_op, "cached_op", lambda plan, flags: cached_op.UpstreamCachedOp(plan.runs, flags))
    _, expected = _trained(flags, request_)
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


def _operation(net):
    operation, = net._cached_op._operations.values()
    return operation


def _megabytes(start):
    return int(script(PROGRAM.format(start=start)))


@pytest.mark.bf16
def test_gradients_in_low_precision_do_not_stay():
    # Those of 23 layers take 4.5 MB each.
    assert _megabytes("") < _megabytes(IN_THE_PROGRAMS_ORDER) - 75
