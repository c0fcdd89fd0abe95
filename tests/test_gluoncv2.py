"""A detection head as EfficientDet's: MXNet's gradient of resizing to a map of equal size is wrong."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from networks import relative

import gluon_amp as amp

BOUNDS = {"float32": 5e-3, LOW: 0.35}


def flat(outputs):
    return [one for item in outputs for one in flat(item)] if isinstance(outputs, (list, tuple)) else [outputs]


def slopes_of(net, data):
    """Return gradients by the parameter's name without the network's prefix."""
    found = net.collect_params()
    with autograd.record():
        outputs = flat(net(data))
        loss = sum((one * mx.nd.array(np.random.RandomState(7).normal(size=one.shape))).mean() for one in outputs)
    loss.backward()
    return {name[len(net.prefix):]: one.grad().asnumpy() for name, one in found.items() if one.grad_req != "null"}


class Fusion(HybridBlock):
    """Joins maps of three sizes from the top down with weights that are learned, and predicts from each."""

    def __init__(self, resize):
        super().__init__(prefix="head_")
        self.resize = resize
        with self.name_scope():
            self.weights = self.params.get("weights", shape=(2, 2), init=mx.init.One())
            self.down = [nn.Conv2D(16, 3, strides=2, padding=1, in_channels=16) for _ in range(2)]
            self.same = nn.Conv2D(16, 3, padding=1, groups=16, in_channels=16)
            self.predict = nn.Conv2D(8, 1, in_channels=16)
            for layer in self.down:
                self.register_child(layer)

    def hybrid_forward(self, F, x, weights):
        maps = [x, self.same(x)]
        maps += [layer(maps[-1]) for layer in self.down[:1]]
        joined = maps[-1]
        outputs = [self.predict(joined)]
        share = F.relu(weights)
        for number, one in enumerate(reversed(maps[:-1])):
            part = F.slice_axis(share, axis=0, begin=number, end=number + 1)
            part = F.broadcast_div(part, F.sum(part, axis=1, keepdims=True) + 1e-4)
            first, second = (F.reshape(F.slice_axis(part, axis=1, begin=i, end=i + 1), (1, 1, 1, 1)) for i in range(2))
            joined = F.broadcast_mul(one, first) + F.broadcast_mul(self.resize(F, joined, one), second)
            joined = joined * F.sigmoid(joined)
            outputs.append(self.predict(joined))
        return outputs


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("dtype", sorted(BOUNDS))
def test_a_head_that_resizes_to_maps_of_equal_size_learns_as_in_fp32(dtype, hybridize):
    def to_size(F, x, like):  # bilinear to an equal size is the map itself, and to twice the size this
        return F.contrib.BilinearResize2D(x, height=16, width=16) if x.shape[2] != 16 else x

    def to_map(F, x, like):
        return F.contrib.BilinearResize2D(x, like, mode="like")
    mx.random.seed(5)
    nets = [Fusion(to_size), Fusion(to_map)]
    data = mx.nd.random.normal(shape=(2, 16, 16, 16))
    for net in nets:
        net.initialize(mx.init.Xavier())
        net(data)
    for one, other in zip(*(net.collect_params().values() for net in nets)):
        other.set_data(one.data())
    expected = slopes_of(nets[0], data)
    amp.init(dtype)
    nets[1].hybridize(hybridize)
    found = slopes_of(nets[1], data)
    assert set(found) == set(expected)
    for name, want in expected.items():
        assert relative(want, found[name]) < BOUNDS[dtype], name
