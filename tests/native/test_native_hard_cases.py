"""Operators in C++ by oneDNN with odd sizes and values, views, threads, contexts, forks and sums of gradients."""
from __future__ import annotations

import json
import threading
from functools import partial
from typing import NamedTuple

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import EMULATES_BFLOAT16
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn, rnn
from native_cases import (
    BFLOAT16_ROUNDING,
    CACHED_OP_FLAGS,
    bfloat16,
    float32,
    normal,
    rounded,
    run,
    script,
    with_gradients,
)

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke
from gluon_amp.dtypes import BFLOAT16_DTYPE
from gluon_amp.plan.cached_op import prepared_operations

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)

TYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)]
# The largest distance of an array from that of FP32, as a share of its length; a recurrent layer rounds at every step.
BOUNDS = {"float32": 2e-6, "bfloat16": 4 * BFLOAT16_ROUNDING}


class Case(NamedTuple):
    """An operator in C++ and a function of MXNet's that computes the same of the same arrays."""

    op: str
    attrs: dict
    stock: object
    arrays: list  # the first is data, bfloat16 where the operator runs in it
    out_shape: tuple

    def attrs_in(self, dtype):
        return {**self.attrs, "dtype": dtype} if self.op == "_gluon_amp_rnn" else self.attrs

    def ours(self, dtype):
        """Return the operator in C++ as a function of arrays."""
        return lambda *inputs: invoke(self.op, inputs, self.attrs_in(dtype))[0]


def dense(rows=5, width=7, units=3):
    attrs = {"num_hidden": str(units)}
    return Case("_gluon_amp_dense", attrs, lambda *inputs: invoke("FullyConnected", inputs, attrs)[0],
                [normal(rows, width), normal(units, width, seed=1), normal(units, seed=2)], (rows, units))


def attention(batch=2, length=5, heads=3, width=5):
    attrs = {"layout": "joined", "heads": str(heads), "scale": repr(width ** -0.5),
             "operands": "projections,bias"}

    def by_head(x):
        return nd.transpose(nd.reshape(x, (0, 0, heads, -1)), (0, 2, 1, 3)).reshape((-1, 0, 0), reverse=True)

    def stock(projection, bias):
        queries, keys, values = map(by_head, nd.split(projection, num_outputs=3, axis=2))
        scores = nd.batch_dot(queries * width ** -0.5, keys, transpose_b=True)
        weights = nd.softmax(nd.broadcast_add(scores, nd.repeat(bias, repeats=heads, axis=0)), axis=-1)
        mixed = nd.batch_dot(weights, values).reshape((-1, heads, 0, 0), reverse=True)
        return nd.reshape(nd.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1))

    arrays = [normal(batch, length, 3 * heads * width), normal(batch, 1, length, seed=1)]
    return Case("_gluon_amp_attention", attrs, stock, arrays, (batch, length, heads * width))


def recurrent(mode, steps=4, batch=3, width=5, states=7, layers=2, directions=2):
    gates = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}[mode]
    sizes = [width, *[directions * states] * (layers - 1)]
    count = sum(directions * gates * states * (size + states + 2) for size in sizes)
    options = {"mode": mode, "state_size": states, "num_layers": layers, "bidirectional": directions == 2}
    state = (layers * directions, batch, states)
    arrays = [normal(steps, batch, width), normal(count, seed=1, scale=0.4), normal(*state, seed=2)]
    if mode == "lstm":
        arrays.append(normal(*state, seed=3))
    return Case("_gluon_amp_rnn", {name: str(value) for name, value in options.items()},
                lambda *inputs: nd.RNN(*inputs, **options), arrays, (steps, batch, directions * states))


MODES = ("lstm", "gru", "rnn_relu", "rnn_tanh")
KINDS = {"dense": dense, "attention": attention, **{mode: partial(recurrent, mode) for mode in MODES}}


def prepared(case, dtype):
    """Return the arrays for the operator in C++, and those for MXNet's in FP32."""
    data, *others = case.arrays
    if dtype == "float32":
        return case.arrays, case.arrays
    return [bfloat16(data), *others], [rounded(data), *others]


def out_gradient(case, dtype, values=None):
    values = rounded(normal(*case.out_shape, seed=9)) if values is None else values
    return bfloat16(values) if dtype == "bfloat16" else values


def assert_near(received, expected, bound):
    for one, other in zip(received, expected):
        assert one.shape == other.shape
        finite = np.isfinite(other)
        np.testing.assert_array_equal(np.isfinite(one), finite)
        assert np.linalg.norm(one[finite] - other[finite]) <= bound * max(np.linalg.norm(other[finite]), 1e-3)


ODD = [("dense", {"rows": 1, "width": 1, "units": 1}), ("dense", {"rows": 1, "width": 33, "units": 17}),
       ("dense", {"rows": 67, "width": 129, "units": 1}), ("dense", {"rows": 1025, "width": 3, "units": 31}),
       ("attention", {"batch": 1, "length": 1, "heads": 1, "width": 1}),
       ("attention", {"batch": 3, "length": 33, "heads": 1, "width": 1}),
       ("attention", {"batch": 1, "length": 17, "heads": 7, "width": 31}),
       *((mode, sizes) for mode in MODES for sizes in (
           {"steps": 1, "batch": 1, "width": 1, "states": 1, "layers": 1, "directions": 1},
           {"steps": 1, "batch": 1, "width": 1, "states": 1, "layers": 3, "directions": 2},
           {"steps": 3, "batch": 5, "width": 33, "states": 17, "layers": 1, "directions": 1},
           {"steps": 2, "batch": 1, "width": 3, "states": 65, "layers": 1, "directions": 2}))]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "sizes"), ODD)
def test_odd_sizes(kind, sizes, dtype):
    case = KINDS[kind](**sizes)
    ours, stock = prepared(case, dtype)
    expected = with_gradients(case.stock, stock, out_gradient(case, "float32"))
    received = with_gradients(case.ours(dtype), ours, out_gradient(case, dtype))
    assert_near(received, expected, BOUNDS[dtype] * (4 if dtype == "bfloat16" and kind in MODES else 1))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-40])
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(kind, value, dtype):
    """What is not finite is so in the same places, and all else has its value; in place of a number of the data."""
    if EMULATES_BFLOAT16 and dtype == "bfloat16" and kind == "rnn_relu" and np.isinf(value):
        pytest.skip("oneDNN's emulation makes infinities beside each other NaN, which this layer takes for 0")
    case = KINDS[kind]()
    case.arrays[0][(1,) * (case.arrays[0].ndim - 1) + (2,)] = value
    ours, stock = prepared(case, dtype)
    received = float32(case.ours(dtype)(*ours)).asnumpy()
    expected = case.stock(*stock).asnumpy()
    np.testing.assert_array_equal(np.isnan(received), np.isnan(expected))
    np.testing.assert_allclose(received, expected, rtol=40 * BOUNDS[dtype], atol=10 * BOUNDS[dtype])


@pytest.mark.bf16
@pytest.mark.parametrize("states", [1, 7, 8, 33])
@pytest.mark.parametrize("mode", MODES)
def test_a_direction_that_is_no_number_leaves_the_other_alone(mode, states):
    """Both lie beside each other."""
    case = recurrent(mode, layers=1, states=states)
    (data, parameters, *others), _ = prepared(case, "bfloat16")
    gates = parameters.size // (2 * (5 + states + 2))
    expected = float32(case.ours("bfloat16")(data, parameters, *others)).asnumpy()
    parameters[:gates * 5] = np.nan  # what the first direction multiplies the data by
    received = float32(case.ours("bfloat16")(data, parameters, *others)).asnumpy()
    np.testing.assert_array_equal(received[..., states:], expected[..., states:])
    if mode != "rnn_relu":  # MXNet's takes what is not a number for 0
        assert np.isnan(received[..., :states]).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_are_not_finite(kind, dtype):
    """A gradient that overflowed shows in every array of parameters: the loss scaler looks for it there."""
    case = KINDS[kind]()
    ours, _ = prepared(case, dtype)
    out_grad = out_gradient(case, dtype, nd.ones(case.out_shape) * np.nan)
    received = with_gradients(case.ours(dtype), ours, out_grad)
    assert all(np.isnan(gradient).any() for gradient in received[1:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_views_need_not_be_aligned(kind, dtype):
    case = KINDS[kind]()
    ours, _ = prepared(case, dtype)

    def view(array):
        whole = nd.concat(nd.zeros(1), float32(array).reshape(-1), dim=0)
        whole = bfloat16(whole) if array is ours[0] and dtype == "bfloat16" else whole
        return whole[1:].reshape(array.shape)

    received, expected = case.ours(dtype)(*map(view, ours)), case.ours(dtype)(*ours)
    np.testing.assert_array_equal(float32(received).asnumpy(), float32(expected).asnumpy())


EMPTY = [("dense", {"rows": 0}), ("attention", {"batch": 0}), *((mode, {"batch": 0}) for mode in MODES),
         *((mode, {"steps": 0}) for mode in MODES)]


def empty(shape, dtype):
    return nd.empty(shape, dtype=BFLOAT16_DTYPE if dtype == "bfloat16" else dtype)  # MXNet casts no empty arrays


def shapes_and_values(arrays):
    return [(array.shape, array.asnumpy().any() if array.size else False) for array in arrays]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "sizes"), EMPTY)
def test_nothing_to_do(kind, sizes, dtype):
    with mx.util.np_shape(True):
        case = KINDS[kind](**sizes)
        inputs = [empty(case.arrays[0].shape, dtype), *case.arrays[1:]]
        for array in inputs:
            array.attach_grad()
        with autograd.record():
            out = case.ours(dtype)(*inputs)
        out.backward(empty(case.out_shape, dtype))
        mx.nd.waitall()
        assert shapes_and_values([out, *(array.grad for array in inputs)]) == [
            (shape, False) for shape in (case.out_shape, *(array.shape for array in inputs))]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("mode", MODES)
def test_no_step_leaves_states_as_they_are(mode, dtype, training):
    with mx.util.np_shape(True):
        case = recurrent(mode, steps=0)
        _, parameters, *states = case.arrays
        inputs = [empty(case.arrays[0].shape, dtype), parameters, *states]
        for state in states:
            state.attach_grad()
        with autograd.record(training):
            outputs = invoke(case.op, inputs, {**case.attrs_in(dtype), "training": str(training)})[1:1 + len(states)]
            loss = sum((output * (index + 2)).sum() for index, output in enumerate(outputs))
        for output, state in zip(outputs, states):
            np.testing.assert_array_equal(output.asnumpy(), state.asnumpy())
        if training:
            loss.backward()
            for index, state in enumerate(states):
                np.testing.assert_array_equal(state.grad.asnumpy(), np.full(state.shape, index + 2.0))


def test_data_without_a_value_is_refused():
    with mx.util.np_shape(True):
        case = recurrent("lstm", width=0)
        with pytest.raises(mx.MXNetError, match="expected one input or more"):
            case.ours("float32")(*case.arrays)


@pytest.mark.bf16
def test_threads_on_several_contexts():
    """Each thread runs all operators on a context, with sizes of its own; memory between calls belongs to threads."""
    def work(index):
        with mx.Context("cpu", index % 2):
            cases = [KINDS[kind](**({"batch": 2 + index} if kind != "dense" else {"rows": 2 + index}))
                     for kind in KINDS]
            for _ in range(5):
                found = []
                for case in cases:
                    ours = prepared(case, "bfloat16")[0]
                    assert all(array.context == mx.cpu(index % 2) for array in ours)
                    found += with_gradients(case.ours("bfloat16"), ours, out_gradient(case, "bfloat16"))
        received[index] = found

    received = [None] * 6
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(received))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = list(received)
    for index, found in enumerate(together):
        work(index)
        assert found is not None
        for one, other in zip(found, received[index]):
            np.testing.assert_array_equal(one, other)


FORKED = """
import gluon_amp, mxnet as mx
from mxnet import gluon, nd
from gluon_amp import native
native.load()
def through_all(value, dtype):
    x, = invoke("amp_cast", [nd.ones((64, 2, 96)) * value], {"dtype": dtype})
    x, = invoke("_gluon_amp_dense", [x, nd.ones((96, 96)) / 96], {"num_hidden": "96", "flatten": "False",
                "no_bias": "True"})
    x, = invoke("_gluon_amp_attention", [x], {"layout": "joined", "heads": "2"})
    parameters = nd.ones(64 * (32 + 64 + 2)) / 96
    x = invoke("_gluon_amp_rnn", [x, parameters, nd.zeros((1, 2, 64))], {"mode": "rnn_tanh", "state_size": "64",
               "num_layers": "1", "dtype": dtype})[0]
    return nd.amp_cast(x, dtype="float32").sum()

class Samples(gluon.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return through_all(index / 8, DTYPE)
wanted = [through_all(index / 8, DTYPE).asscalar() for index in range(8)]
for _ in range(2):
    found = [value for batch in gluon.data.DataLoader(Samples(), 2, num_workers=2) for value in batch.asnumpy()]
    assert found == wanted, (found, wanted)
assert through_all(0.5, DTYPE).asscalar() == wanted[4]
print("equal")
"""


@pytest.mark.parametrize("dtype", TYPES)
def test_forked_workers_of_a_data_loader(dtype):
    assert script(FORKED.replace("DTYPE", repr(dtype))) == "equal"


def guarded(case, dtype):
    """Return a graph of an operator in C++: what it reads comes through identities, the data through a cast, too."""
    nodes = [{"op": "null", "name": f"x{index}", "inputs": []} for index in range(len(case.arrays))]

    def added(op, inputs, **attrs):
        nodes.append({"op": op, "name": f"node{len(nodes)}", "attrs": attrs, "inputs": [[at, 0, 0] for at in inputs]})
        return len(nodes) - 1

    inputs = [added("_copy", [index]) for index in range(len(case.arrays))]
    inputs[0] = added("amp_cast", inputs[:1], dtype=dtype)
    last = added("amp_cast", [added(case.op, inputs, **case.attrs_in(dtype))], dtype="float32")
    graph = {"nodes": nodes, "arg_nodes": list(range(len(case.arrays))), "heads": [[last, 0, 0]]}
    return mx.sym.load_json(json.dumps(graph))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("flags", CACHED_OP_FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_gradients_behind_an_identity(kind, flags, dtype):
    """Two backward passes that accumulate give twice the gradients of one."""
    case = KINDS[kind]()
    found = []
    for grad_req in ("write", "add"):
        for array in case.arrays:
            array.attach_grad(grad_req)
        cached = mx.nd.CachedOp(guarded(case, dtype), flags)
        for _ in range(2):
            with autograd.record():
                out = cached(*case.arrays)
            out.backward(out_gradient(case, "float32"))
        found.append([array.grad.asnumpy() for array in case.arrays])
    for one, other in zip(*found):
        np.testing.assert_array_equal(2 * one, other)


@pytest.mark.bf16
def test_a_network_on_several_contexts():
    """Halves of a batch on two contexts, from threads of their own, give the gradients of the whole batch."""
    def gradients(contexts):
        mx.random.seed(3)
        net = nn.HybridSequential()
        net.add(nn.Dense(512, flatten=False, in_units=64), nn.Dense(1024, flatten=False, in_units=512),
                rnn.LSTM(48, 2, bidirectional=True, input_size=1024))
        net.initialize(mx.init.Xavier(), ctx=contexts)
        net.hybridize(static_alloc=True, static_shape=True)
        parts = gluon.utils.split_and_load(normal(8, 32, 64), contexts, batch_axis=1)
        out_grads = gluon.utils.split_and_load(normal(8, 32, 96, seed=1), contexts, batch_axis=1)

        def work(part, out_grad):
            for _ in range(3):
                with autograd.record():
                    out = net(part)
                out.backward(out_grad)
            mx.nd.waitall()

        work(parts[0], out_grads[0])  # traces the network
        threads = [threading.Thread(target=work, args=each) for each in zip(parts, out_grads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        used = {node.op for _, operation in prepared_operations(net) for node in operation.latest.graph.operators()}
        assert {"_gluon_amp_dense", "_gluon_amp_rnn"} <= used
        return [sum(grad.as_in_context(mx.cpu(0)) for grad in parameter.list_grad()).asnumpy()
                for parameter in net.collect_params().values()]

    amp.init("bfloat16")
    for received, expected in zip(gradients([mx.cpu(0), mx.cpu(1)]), gradients([mx.cpu(0)])):
        assert np.linalg.norm(received - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.parametrize("op", ["_gluon_amp_clip", "_gluon_amp_gelu", "_gluon_amp_dropout", "_gluon_amp_layer_norm"])
def test_gradients_between_convolutions(op):
    """Data and its gradient come in oneDNN's own layout; `make native-check` sees what is read of copies."""
    x, *weights = (normal(*shape, seed=number) for number, shape in enumerate(((2, 32, 24, 24), *[(32, 32, 3, 3)] * 2)))
    key, scale, shift = nd.array(np.arange(64) % 3), nd.ones(24), nd.zeros(24)
    ours = {"_gluon_amp_clip": lambda y: run(op, [y], a_min=-0.5, a_max=0.5),
            "_gluon_amp_gelu": lambda y: run(op, [y]),
            "_gluon_amp_dropout": lambda y: run(op, [y, key], p=0.5),
            "_gluon_amp_layer_norm": lambda y: run(op, [y, scale, shift])}[op]
    mask = run("_gluon_amp_dropout", [nd.ones((2, 32, 24, 24)), key], p=0.5)
    stock = {"_gluon_amp_clip": lambda y: nd.clip(y, -0.5, 0.5),
             "_gluon_amp_gelu": lambda y: nd.LeakyReLU(y, act_type="gelu"),
             "_gluon_amp_dropout": lambda y: y * mask,
             "_gluon_amp_layer_norm": lambda y: nd.LayerNorm(y, scale, shift)}[op]

    def between(function):
        def network(data, first, last):
            inner = nd.Convolution(data, first, kernel=(3, 3), pad=(1, 1), num_filter=32, no_bias=True)
            return nd.Convolution(function(inner), last, kernel=(3, 3), pad=(1, 1), num_filter=32, no_bias=True)
        return network

    out_grad = normal(2, 32, 24, 24, seed=9)
    for one, other in zip(*(with_gradients(between(each), [x, *weights], out_grad) for each in (ours, stock))):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())
