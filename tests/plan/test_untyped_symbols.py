"""Symbols that are bound without types, with operators that insist on knowing them."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from networks import BF16_EPS, relative

import gluon_amp as amp

pytestmark = pytest.mark.machine


def embedding(data):
    found = mx.sym.Embedding(data, input_dim=10, output_dim=32, name="table")
    return mx.sym.FullyConnected(mx.sym.sum(found, axis=1), num_hidden=16, name="fc")


def take(data):
    return mx.sym.FullyConnected(mx.sym.take(mx.sym.var("table", shape=(10, 32)), data), num_hidden=8, name="fc")


def one_hot(data):
    return mx.sym.FullyConnected(mx.sym.one_hot(data, depth=32), num_hidden=16, flatten=False, name="fc")


def pick(data):
    wide = mx.sym.FullyConnected(mx.sym.var("values", shape=(4, 32)), num_hidden=16, name="fc")
    return mx.sym.pick(wide, mx.sym.slice_axis(data, axis=1, begin=0, end=1), keepdims=True)


def masked(data):
    values = mx.sym.FullyConnected(mx.sym.expand_dims(data, 2), num_hidden=16, flatten=False, name="fc")
    return mx.sym.SequenceMask(values, mx.sym.var("length", shape=(3,)), use_sequence_length=True)


def ctc(data):
    values = mx.sym.FullyConnected(mx.sym.expand_dims(data, 2), num_hidden=16, flatten=False, name="fc")
    return mx.sym.CTCLoss(mx.sym.transpose(values, (1, 0, 2)), mx.sym.var("label", shape=(4, 2)))


@pytest.mark.parametrize("make", [embedding, take, one_hot, pick, masked, ctc], ids=lambda make: make.__name__)
def test_simple_bind_with_shapes_alone(make):
    symbol = make(mx.sym.var("data"))
    found = []
    for on in (False, True):
        if on:
            amp.init(LOW)
        requests = {name: "write" if name.startswith("fc") else "null" for name in symbol.list_arguments()}
        executor = symbol.simple_bind(mx.cpu(), data=(4, 3), grad_req=requests)
        random = np.random.RandomState(1)
        for name, array in executor.arg_dict.items():
            values = random.randint(1, 3, array.shape) if name in ("data", "length", "label") else (
                random.normal(size=array.shape))
            array[:] = mx.nd.array(values)
            assert array.dtype == np.float32
        outputs = executor.forward(is_train=True)
        executor.backward([mx.nd.ones(output.shape) for output in outputs])
        found.append([outputs[0].asnumpy(), executor.grad_dict["fc_weight"].asnumpy()])
    assert all(relative(one, other) < 8 * BF16_EPS for one, other in zip(*found))


def test_a_type_that_is_given_is_obeyed():
    data = mx.sym.var("data", dtype="int32")
    amp.init(LOW)
    executor = embedding(data).simple_bind(mx.cpu(), data=(4, 3))
    assert executor.arg_dict["data"].dtype == np.int32
    executor = embedding(mx.sym.var("data")).simple_bind(mx.cpu(), data=(4, 3), type_dict={"data": "int32"})
    assert executor.arg_dict["data"].dtype == np.int32
