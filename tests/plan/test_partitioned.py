"""Symbols that MXNet has partitioned: their subgraph nodes hold operators that AMP rewrites like others."""
from __future__ import annotations

from contextlib import contextmanager

import mxnet as mx
import numpy as np
import pytest
from mxnet.base import _LIB, c_str, c_str_array, check_call, mx_uint
from mxnet.gluon import nn
from networks import relative, sequential

import gluon_amp as amp
from gluon_amp._mxnet.symbols import to_graph

pytestmark = pytest.mark.machine
OPS = ["Convolution", "BatchNorm", "Activation", "FullyConnected", "square"]
SHAPE = (2, 4, 8, 8)


@contextmanager
def partitioner(backend="default", ops=OPS):
    """Let MXNet's partitioner for tests put these operators into subgraphs."""
    names = c_str_array(ops)
    check_call(_LIB.MXSetSubgraphPropertyOpNamesV2(c_str(backend), mx_uint(len(ops)), names))
    try:
        yield backend
    finally:
        check_call(_LIB.MXRemoveSubgraphPropertyOpNamesV2(c_str(backend)))


def network():
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=32, kernel=(3, 3), name="conv")
    x = mx.sym.Activation(mx.sym.BatchNorm(x, fix_gamma=False, name="norm"), act_type="relu", name="relu")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="avg", name="pool")
    y = mx.sym.FullyConnected(x, num_hidden=32, name="fc")
    return mx.sym.Group([mx.sym.FullyConnected(y, num_hidden=4, name="out"), mx.sym.square(y, name="square")])


def trained(symbol, how="simple_bind"):
    """Return the outputs, gradients and states of a step."""
    generator = np.random.RandomState(3)
    names, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    shapes, _, aux_shapes = network().infer_shape(data=SHAPE)
    known = dict(zip(network().list_arguments(), shapes))
    known.update(zip(network().list_auxiliary_states(), aux_shapes))
    arrays = {name: mx.nd.array(generator.uniform(0.1, 0.5, size=known[name])) for name in sorted(known)}
    if how == "bind":
        grads = {name: mx.nd.zeros_like(arrays[name]) for name in names}
        executor = symbol.bind(mx.cpu(), {name: arrays[name] for name in names}, grads, "write",
                               {name: arrays[name] for name in states})
    else:
        executor = symbol.simple_bind(mx.cpu(), "write", data=SHAPE)
        executor.copy_params_from({name: arrays[name] for name in names}, {name: arrays[name] for name in states})
    outputs = executor.forward(is_train=True)
    executor.backward([mx.nd.ones_like(output) for output in outputs])
    return {**{f"output {i}": output.asnumpy() for i, output in enumerate(executor.outputs)},
            **{name: array.asnumpy() for name, array in {**executor.grad_dict, **executor.aux_dict}.items()}}


@pytest.mark.parametrize("how", ["simple_bind", "bind"])
@pytest.mark.parametrize("mode", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_it_trains_as_the_symbol_before(mode, how):
    stock = trained(network(), how)
    with partitioner() as backend:
        partitioned = network().get_backend_symbol(backend)
    assert "_CachedOp" in partitioned.tojson()
    amp.init(mode)
    expected, found = trained(network(), how), trained(partitioned, how)
    assert found.keys() == expected.keys() == stock.keys()
    for name, values in expected.items():
        assert relative(values, found[name]) < 1e-5, name
    for name in ("output 0", "output 1", "fc_weight"):
        distance = relative(stock[name], found[name])
        assert (1e-4 < distance < 0.03) if mode == "bfloat16" else distance < 1e-5, name


@pytest.mark.bf16
@pytest.mark.parametrize("hybridize", [lambda net, backend, data: net.hybridize(backend=backend),
                                       lambda net, backend, data: net.optimize_for(data, backend=backend)],
                         ids=["hybridize", "optimize_for"])
def test_a_network_that_gluon_partitions(hybridize):
    net = sequential([nn.Conv2D(32, 3), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten(),
                      nn.Dense(8)], mx.init.Xavier(), active=False)
    data = mx.nd.random.normal(shape=SHAPE)
    expected = net(data).asnumpy()
    amp.init("bfloat16")
    with partitioner() as backend:
        hybridize(net, backend, data)
        found = net(data).asnumpy()
    assert 1e-5 < relative(expected, found) < 0.03


@pytest.mark.bf16
def test_it_can_be_converted():
    with partitioner() as backend:
        partitioned = network().get_backend_symbol(backend)
    converted = amp.convert_symbol(partitioned, "bfloat16")
    assert {"amp_cast", "Convolution"} <= {node.op for node in to_graph(converted).operators()}


@pytest.mark.bf16
def test_a_part_of_it_that_leaves_inputs_unread_runs_as_it_is():
    first = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=32, no_bias=True, name="first")
    second = mx.sym.FullyConnected(first, num_hidden=32, no_bias=True, name="second")
    with partitioner() as backend:
        both = mx.sym.Group([mx.sym.sin(first), mx.sym.sin(second)]).get_backend_symbol(backend)
    part = both[0]
    assert "second_weight" in part.list_inputs()
    arrays = [mx.nd.random.normal(scale=0.3, shape=(32, 32)) for _ in part.list_inputs()]
    expected = mx.nd.CachedOp(part)(*arrays).asnumpy()
    amp.init("bfloat16")
    np.testing.assert_array_equal(expected, mx.nd.CachedOp(part)(*arrays).asnumpy())
    assert 1e-5 < relative(expected, mx.nd.CachedOp(both)(*arrays)[0].asnumpy()) < 0.03
