"""Sparse tensors are never cast: what reads them runs as in MXNet, with gradients of the same storage."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import graph, op, variable
from mxnet import gluon
from mxnet.gluon import HybridBlock, nn
from networks import differentiate, relative

import gluon_amp as amp
from gluon_amp.graph import Role
from gluon_amp.passes.precisions import consumers_of_sparse

pytestmark = pytest.mark.machine
TYPES = ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.bf16)]
COUNT, WIDTH = 24, 100


def data():
    return mx.nd.array(np.random.RandomState(2).binomial(1, 0.2, (COUNT, WIDTH))).tostype("csr")


def symbol():
    x = mx.sym.var("data", stype="csr")
    weight, factors = (mx.sym.var(name, shape=(WIDTH, size), stype="row_sparse", init=mx.init.Normal(0.1))
                       for name, size in (("weight", 32), ("factors", 16)))
    wide = mx.sym.Activation(mx.sym.sparse.dot(x, weight), act_type="tanh", name="wide")
    squares = mx.sym.dot(mx.sym.square(x), mx.sym.square(factors), name="squares")
    joined = mx.sym.concat(wide, squares, dim=1)
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(joined, num_hidden=4, name="fc"), name="softmax")


def train():
    """Return weights, outputs and storage types of gradients of a Module, and its executor."""
    mx.random.seed(3)
    labels = mx.nd.array(np.arange(COUNT) % 4)
    iterator = mx.io.NDArrayIter(data(), labels, 8, last_batch_handle="discard", label_name="softmax_label")
    module = mx.mod.Module(symbol())
    module.bind(iterator.provide_data, iterator.provide_label)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 0.5, "momentum": 0.9})
    for batch in iterator:
        module.forward_backward(batch)
        module.update()
    executor = module._exec_group.execs[0]
    arguments, _ = module.get_params()
    storage = {name: None if array is None else array.stype for name, array in executor.grad_dict.items()}
    return {name: array.asnumpy() for name, array in arguments.items()}, storage, executor


@pytest.mark.parametrize("dtype", TYPES)
def test_a_module_of_sparse_data_and_weights(dtype):
    expected, storage, _ = train()
    amp.init(dtype)
    found, other_storage, executor = train()
    assert other_storage == storage
    for name, value in expected.items():
        assert relative(value, found[name]) < 0.02, name
    casts = [node for node in executor.plan.graph.operators() if node.role is Role.CAST]
    assert {"data", "weight", "factors"}.isdisjoint(node.inputs[0].node.name for node in casts)
    assert bool(casts) == (dtype != "float32")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", ["bind", "stype_dict"])
def test_arrays_tell_without_a_note_on_the_symbol(how, dtype):
    product = mx.sym.dot(mx.sym.var("data"), mx.sym.var("weight"), name="product")
    net = mx.sym.FullyConnected(product, num_hidden=4, name="fc")
    weight, fc = (mx.nd.array(np.random.RandomState(1).normal(size=shape)) for shape in ((WIDTH, 32), (4, 32)))
    values = {"data": data(), "weight": weight, "fc_weight": fc, "fc_bias": mx.nd.zeros(4)}

    def run():
        if how == "bind":
            executor = net.bind(mx.cpu(), values)
        else:
            storage = {**dict.fromkeys(values, "default"), "data": "csr"}
            executor = net.simple_bind(mx.cpu(), "null", stype_dict=storage, data=(COUNT, WIDTH), weight=weight.shape)
            for name, array in values.items():
                array.copyto(executor.arg_dict[name])
        return executor.forward()[0].asnumpy(), executor
    expected, _ = run()
    amp.init(dtype)
    found, executor = run()
    assert relative(expected, found) < 0.01
    reads = {node.name: [entry.node.name for entry in node.inputs] for node in executor.plan.graph.operators()}
    assert reads["product"] == ["data", "weight"]


class Product(HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(WIDTH, 32), grad_stype="row_sparse", init=mx.init.One())
            self.head = nn.Dense(4, in_units=32)

    def hybrid_forward(self, F, x, weight):
        return self.head(F.tanh(F.dot(x, weight) * 0.01))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("hybridize", [False, True])
def test_a_network_that_is_called_with_sparse_data(hybridize, dtype):
    def run():
        mx.random.seed(4)
        net = Product()
        net.initialize(mx.init.Xavier())
        net.hybridize(hybridize)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        for _ in range(2):
            loss = differentiate(lambda: (net(data()) ** 2).sum())
            trainer.step(COUNT)
        return net.weight.grad().stype, loss.asscalar(), net.weight.data().asnumpy()
    kind, loss, weight = run()
    amp.init(dtype)
    found = run()
    assert found[0] == kind
    assert found[1] == pytest.approx(loss, rel=0.02)
    assert relative(weight, found[2]) < 0.01


def test_which_operators_may_read_sparse_tensors():
    x, w, v = (variable(name) for name in ("x", "w", "v"))
    squared = op("square", "squared", x)
    nodes = {"squared": squared, "dense": op("dot", "dense", squared, w),
             "turned": op("dot", "turned", x, w, transpose_a="True"),
             "asked": op("dot", "asked", x, w, forward_stype="csr"), "second": op("dot", "second", w, x)}
    nodes["after"] = op("relu", "after", nodes["dense"])
    nodes["other"] = op("relu", "other", nodes["turned"])
    nodes["rows"] = op("Embedding", "rows", w, v)
    nodes["made"] = op("cast_storage", "made", w, stype="csr")
    nodes["unmade"] = op("cast_storage", "unmade", x, stype="default")
    nodes["read"] = op("dot", "read", nodes["made"], w)
    nodes["plain"] = op("dot", "plain", nodes["unmade"], w)
    whole = graph(*nodes.values())
    kept = consumers_of_sparse(whole, {"x", "v"})
    names = {node.name for node in whole.operators() if id(node) in kept}
    assert names == {"squared", "dense", "turned", "asked", "second", "other", "rows", "unmade", "read"}
    assert not consumers_of_sparse(graph(op("dot", "alone", w, w)), frozenset())
