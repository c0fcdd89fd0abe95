"""Small networks of every kind, and comparisons with FP32."""
from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn, rnn

BF16_EPS = 2.0 ** -8


def conv_net():
    """Every kind of rewrite: a stem in FP32, aligned, padded and grouped convolutions, a dense head."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(32, 3, padding=1, in_channels=3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"),
                nn.MaxPool2D(2), nn.Conv2D(32, 3, padding=1, groups=4), nn.LeakyReLU(0.1),
                nn.Conv2D(44, 3, padding=1), nn.Activation("tanh"), nn.Dropout(0.0), nn.Flatten(), nn.Dense(10))
    return net


class Residual(HybridBlock):
    """Two branches that are added, one weight that both use, and an output taken from the middle."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first = nn.Conv2D(16, 1, in_channels=16)
            self.again = nn.Conv2D(16, 1, in_channels=16, params=self.first.params)
            self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        y = F.relu(self.norm(self.first(x)))
        z = self.again(y) + x
        return F.concat(z, y, dim=1), F.mean(y, axis=(2, 3))


class Attention(HybridBlock):
    """A transformer encoder block: attention, residuals, layer norm, feed forward."""

    def __init__(self, units=32, heads=4, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.scale = heads, (units // heads) ** -0.5
        with self.name_scope():
            self.qkv = nn.Dense(3 * units, flatten=False, in_units=units)
            self.out = nn.Dense(units, flatten=False, in_units=units)
            self.wide = nn.Dense(4 * units, flatten=False, in_units=units)
            self.narrow = nn.Dense(units, flatten=False, in_units=4 * units)
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=units), nn.LayerNorm(in_channels=units)

    def hybrid_forward(self, F, x):  # (batch, length, units)
        y = F.transpose(self.qkv(self.norm1(x)).reshape((0, 0, 3, self.heads, -1)), (2, 0, 3, 1, 4))
        q, k, v = (F.reshape(F.slice_axis(y, axis=0, begin=i, end=i + 1), (-1, 0, 0), reverse=True) for i in range(3))
        weights = F.softmax(F.batch_dot(q * self.scale, k, transpose_b=True))
        z = F.batch_dot(weights, v).reshape((-4, -1, self.heads, 0, 0))
        x = x + self.out(F.transpose(z, (0, 2, 1, 3)).reshape((0, 0, -1)))
        return x + self.narrow(F.LeakyReLU(self.wide(self.norm2(x)), act_type="gelu"))


class Recurrent(HybridBlock):
    """An unrolled cell, whose weights are used at every step, and a fused LSTM."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.cell = rnn.LSTMCell(16, input_size=8)
            self.fused = rnn.LSTM(16, input_size=16, layout="NTC")
            self.decode = nn.Dense(4, flatten=False, in_units=16)

    def hybrid_forward(self, F, x):  # (batch, 5, 8)
        outputs, _ = self.cell.unroll(5, x, layout="NTC", merge_outputs=True)
        return self.decode(self.fused(outputs))


NETWORKS = {"conv": (conv_net, (4, 3, 16, 16)), "residual": (Residual, (2, 16, 8, 8)),
            "attention": (Attention, (2, 6, 32)), "recurrent": (Recurrent, (2, 5, 8))}


def sequential(layers, init=None, prefix=None, **flags):
    """Return an initialized network of layers, or of those that a function makes in its name scope, and hybridize it.

    With ``active=False`` it is not hybridized.
    """
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(*(layers() if callable(layers) else layers))
    net.initialize(init or mx.init.Uniform())
    net.hybridize(**flags)
    return net


def ready(net, shape, **flags):
    """Initialize a network, run it once, and hybridize it unless flags is {'active': False}."""
    mx.random.seed(1)
    net.initialize(mx.init.Xavier(magnitude=2), force_reinit=True)
    data = mx.nd.random.normal(shape=shape)
    net(data)
    net.hybridize(**flags)
    return net, data


def differentiate(function, *arrays, head=None):
    """Return what a function gives, after its backward pass."""
    with autograd.record():
        result = function(*arrays)
    result.backward(head)
    return result


def gradients(net, data, passes=1, scale=1):
    """Gradients of the mean square of the outputs times a scale, by parameter."""
    for _ in range(passes):
        with autograd.record():
            outputs = net(data)
            outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            loss = sum((output ** 2).mean() for output in outputs) * scale
        loss.backward()
    return {name: parameter.grad().asnumpy() for name, parameter in net.collect_params().items()
            if parameter.grad_req != "null"}


def accumulated(net, data, passes):
    """Gradients added up over several passes, as `gradients` gives those of one."""
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad_req = "add"
    return gradients(net, data, passes)


def outputs_of(net, data):
    result = net(data)
    return [output.asnumpy() for output in (result if isinstance(result, (list, tuple)) else [result])]


def relative(expected, found):
    """Largest difference, relative to the largest expected value."""
    return float(np.abs(expected - found).max() / max(np.abs(expected).max(), 1e-12))


def worst(expected, found):
    """The worst relative difference over a dict of arrays, and where it is."""
    return max((relative(expected[name], found[name]), name) for name in expected)


class Computed(HybridBlock):
    """A convolution whose weight is computed from two parameters."""

    def __init__(self, compute, **kwargs):
        super().__init__(**kwargs)
        self.compute = compute
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(16, 16, 3, 3))
            self.other = self.params.get("other", shape=(16, 16, 1, 1))

    def hybrid_forward(self, F, x, weight, other):
        return F.Convolution(x, self.compute(F, x, weight, other), kernel=(3, 3), num_filter=16, no_bias=True)


def masked(F, x, weight, other):
    return F.broadcast_mul(weight, other)
