"""Operators in C++ that gain, or fit, for some shapes of a call: the choice follows the shapes, not the first call."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import plans_of
from mxnet.gluon import HybridBlock, nn
from native_cases import assert_close
from networks import differentiate, sequential

import gluon_amp as amp
from gluon_amp import native

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_dense"), reason=native.load()[1].missing)
FLAGS = [{"static_alloc": False}, {"static_alloc": True, "static_shape": True}]


def layers():
    mx.random.seed(2)
    return sequential(lambda: [nn.Dense(512, in_units=600, activation="relu"), nn.Dense(512, in_units=512),
                               nn.Dense(10, in_units=512)], mx.init.Xavier(), "net_", active=False)


def rows(count):
    return mx.nd.array(np.random.RandomState(count).normal(size=(count, 600)))


def kinds(net):
    """Return the operators of the dense layers that ran last, in order."""
    return [node.op for node in net._cached_op.latest.graph.operators() if node.kind == "FullyConnected"]


def gradients(net, x):
    out = differentiate(net, x)
    return [out.asnumpy(), *(each.grad().asnumpy() for each in net.collect_params().values())]


STOCK = ["FullyConnected"] * 3
IN_CPP = ["FullyConnected", "_gluon_amp_dense", "FullyConnected"]  # not the first, nor the small one
BATCHES = [(4, STOCK), (64, IN_CPP), (15, STOCK), (16, IN_CPP), (1, STOCK)]


@pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static"])
def test_dense_layers_follow_the_batch(flags):
    expected = [gradients(layers(), rows(count)) for count, _ in BATCHES]
    amp.init("float32")
    net = layers()
    net.hybridize(**flags)
    for (count, taken), wanted in zip(BATCHES, expected):
        for one, other in zip(gradients(net, rows(count)), wanted):
            assert_close(one, other, 2e-6)
        assert kinds(net) == taken, count
    assert len(plans_of(net)) == 2


def test_converted_networks_follow_the_batch():
    net = layers()
    net.hybridize()
    net(rows(2))
    expected = [net(rows(count)).asnumpy() for count, _ in BATCHES]
    converted = amp.convert_hybrid_block(net)
    for (count, _), wanted in zip(BATCHES, expected):
        assert_close(converted(rows(count)).asnumpy(), wanted, 0.03)


def test_executors_follow_the_batch():
    symbol, names = layers()(mx.sym.var("x")), set()
    amp.init("float32")
    executor = symbol.simple_bind(mx.cpu(), x=(4, 600))
    for count, taken in BATCHES:
        executor = executor.reshape(x=(count, 600), allow_up_sizing=True)
        executor.forward(is_train=True)
        names.add(tuple(node.op for node in executor.plan.graph.operators() if node.kind == "FullyConnected"))
        assert taken == [node.op for node in executor.plan.graph.operators() if node.kind == "FullyConnected"]
    mx.nd.waitall()
    assert len(names) == 2


class Branches(HybridBlock):
    """A branch, from which MXNet infers no shapes of weights, beside a layer that runs in C++."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Dense(16, in_units=64, flatten=False), nn.LayerNorm(in_channels=64)

    def hybrid_forward(self, F, data):
        branch = F.contrib.cond(F.max(data) > 100, lambda: self.layer(F.relu(data)), lambda: F.tanh(self.layer(data)))
        return branch, self.norm(data)


@pytest.mark.parametrize("partial", [False, True])
def test_executors_with_branches_are_reshaped(partial):
    net = Branches()
    net.initialize(mx.init.Normal(0.2))
    symbol = mx.sym.Group(list(net(mx.sym.var("x"))))
    data = mx.nd.random.normal(shape=(8, 16, 64))
    values = {**{name: one.data() for name, one in net.collect_params().items()}, "x": data}
    expected = [one.asnumpy() for one in symbol.bind(mx.cpu(), dict(values, x=data[:4])).forward()]
    amp.init("float32")
    executor = symbol.bind(mx.cpu(), values)
    assert executor.plan.is_native
    smaller = executor.reshape(partial_shaping=partial, x=(4, 16, 64))
    assert [one.shape for one in smaller.arg_arrays] == [values[name].shape if name != "x" else (4, 16, 64)
                                                         for name in symbol.list_arguments()]
    for wanted, found in zip(expected, smaller.forward(x=data[:4])):
        assert_close(found.asnumpy(), wanted, 1e-5)


@pytest.mark.parametrize("how", ["block", "executor"])
def test_products_of_numpy_whose_second_factor_has_one_batch(how):
    """They fit for one image, and no more for several."""
    class Product(HybridBlock):
        def hybrid_forward(self, F, x, w):
            return F.np.matmul(x, w)

    w = np.random.RandomState(0).normal(size=(1, 128, 256)).astype(np.float32)
    amp.init("float32")
    net = Product()
    net.hybridize()
    symbol = mx.sym.np.matmul(mx.sym.var("x").as_np_ndarray(), mx.sym.var("w").as_np_ndarray())
    executor = symbol.simple_bind(mx.cpu(), x=(1, 128, 128), w=w.shape)
    for count in (1, 3, 1):
        x = np.random.RandomState(count).normal(size=(count, 128, 128)).astype(np.float32)
        if how == "block":
            received = net(mx.np.array(x), mx.np.array(w)).asnumpy()
            taken = {node.op for node in net._cached_op.latest.graph.operators()}
        else:
            executor = executor.reshape(x=x.shape, w=w.shape, allow_up_sizing=True)
            received = executor.forward(x=mx.nd.array(x), w=mx.nd.array(w))[0].asnumpy()
            taken = {node.op for node in executor.plan.graph.operators()}
        assert_close(received, x @ w, 1e-6)
        assert ("_gluon_amp_batch_dot" in taken) == (count == 1)


@pytest.mark.parametrize("batches", [(1, 3), (3, 1)])
def test_attention_of_one_head_whose_bias_all_images_share(batches):
    class Attention(HybridBlock):
        def hybrid_forward(self, F, x, bias):
            x = F.tanh(x)
            shares = F.softmax(F.broadcast_add(F.batch_dot(x, x, transpose_b=True), bias))
            return F.reshape(F.batch_dot(shares, x), (0, 0, -1))

    def results():
        net, bias = Attention(), mx.nd.array(np.random.RandomState(0).normal(size=(1, 96, 96)))
        net.hybridize()
        return [net(mx.nd.array(np.random.RandomState(batch).normal(size=(batch, 96, 64))), bias).asnumpy()
                for batch in batches]

    expected = results()
    amp.init("float32")
    for one, other in zip(results(), expected):
        assert_close(one, other, 2e-6)
