"""Parts and other shapes of arrays inside of blocks that are not hybridized: MXNet makes them without an operator."""
import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from networks import relative

import gluon_amp as amp

VIEWS = {
    "joined": lambda F, y: F.concat(y.reshape((0, -3, 0)), y.reshape((0, -3, 0)), dim=1),
    "joined_flat": lambda F, y: F.concat(y.reshape((0, -1)), F.relu(y).reshape((0, -1)), dim=1),
    "added": lambda F, y: F.add_n(y.reshape((0, -3, 0)), y.reshape((0, -3, 0))),
    "identity": lambda F, y: F.identity(y.reshape((0, -3, 0))),
    "pooled": lambda F, y: F.Pooling(y.reshape((0, -3, 0)), kernel=(2,), stride=(2,), pool_type="avg"),
    "parts_joined": lambda F, y: F.concat(y[0:1], y[1:2], dim=1),
    "part_pooled": lambda F, y: F.Pooling(y[1:2], kernel=(2, 2), pool_type="avg"),
    "shuffled_and_pooled": lambda F, y: F.Pooling(y.reshape((0, -4, 2, -1, -2)).swapaxes(1, 2).reshape((0, -3, -2)),
                                                  kernel=(2, 2), pool_type="avg"),
    "normalized": lambda F, y: F.softmax(y.reshape((0, -1))), "one": lambda F, y: F.relu(y[1])}
BY_OPERATORS = {  # at those MXNet's pooling fails
    "pooled": lambda F, y: F.Pooling(F.reshape(y, (0, -3, 0)), kernel=(2,), stride=(2,), pool_type="avg"),
    "part_pooled": lambda F, y: F.Pooling(F.slice_axis(y, axis=0, begin=1, end=2), kernel=(2, 2), pool_type="avg")}


class Net(HybridBlock):
    def __init__(self, view):
        super().__init__()
        self.view = view
        self.convolution = nn.Conv2D(16, 1, in_channels=16)

    def hybrid_forward(self, F, x):
        return self.view(F, self.convolution(x))


def results(net, data):
    with autograd.record():
        output = net(data)
        loss = (output * mx.nd.array(np.random.RandomState(0).normal(size=output.shape))).sum()
    loss.backward()
    return output.asnumpy(), net.convolution.weight.grad().asnumpy()


@pytest.mark.machine
@pytest.mark.parametrize("view", VIEWS)
def test_values_and_gradients_are_those_of_fp32(view):
    mx.random.seed(2)
    net, data = Net(VIEWS[view]), mx.nd.random.normal(shape=(2, 16, 8, 8))
    net.initialize(mx.init.Normal(0.3))
    net.view = BY_OPERATORS.get(view, VIEWS[view])
    expected = results(net, data)
    net.view = VIEWS[view]
    amp.init(LOW)
    for one, other in zip(expected, results(net, data)):
        assert relative(one, other) < 0.02
