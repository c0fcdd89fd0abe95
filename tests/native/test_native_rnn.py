"""Products of matrices and RNNs by oneDNN, against MXNet's operators."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import assert_close, bfloat16, float32, normal, rounded, run, shapes_of_empty, with_gradients

from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)

GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("count", "rows", "inner", "columns"), [(1, 1, 1, 1), (6, 7, 5, 9), (3, 64, 33, 48)])
def test_batch_dot(transpose_a, transpose_b, count, rows, inner, columns):
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    a = normal(count, *((inner, rows) if transpose_a else (rows, inner)))
    b = normal(count, *((columns, inner) if transpose_b else (inner, columns)), seed=1)
    out_grad = normal(count, rows, columns, seed=2)
    wanted = with_gradients(lambda *inputs: nd.batch_dot(*inputs, **flags), [a, b], out_grad)
    received = with_gradients(lambda *inputs: run("_gluon_amp_batch_dot", inputs, **flags), [a, b], out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 1e-6)


@pytest.mark.bf16
def test_batch_dot_in_bfloat16():
    arrays = [rounded(normal(*shape, seed=seed)) for seed, shape in enumerate([(4, 9, 20), (4, 20, 7), (4, 9, 7)])]
    wanted = with_gradients(nd.batch_dot, arrays[:2], arrays[2])
    received = with_gradients(lambda *inputs: run("_gluon_amp_batch_dot", inputs), list(map(bfloat16, arrays[:2])),
                              bfloat16(arrays[2]))
    for one, other in zip(received, wanted):
        assert_close(one, other, 2.0 ** -8)


def test_products_with_a_factor_over_several_dimensions():
    a, b = normal(2, 3, 5, 4), normal(2, 3, 6, 4, seed=1)
    received = run("_gluon_amp_batch_dot", [a, b], transpose_b=True, alpha=0.125)
    assert_close(received.asnumpy(), nd.linalg.gemm2(a, b, transpose_b=True, alpha=0.125).asnumpy(), 1e-6)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize(("shape", "columns"), [((1, 1), 1), ((5, 7), 3), ((3, 5, 7), 9), ((2, 3, 33, 16), 17)])
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_one_matrix_behind_a_pile(shape, columns, transpose_b, target):
    inner = shape[-1]
    arrays = [normal(*shape), normal(*((columns, inner) if transpose_b else (inner, columns)), seed=1)]
    out_grad = normal(*shape[:-1], columns, seed=2)
    if target == "bfloat16":
        arrays, out_grad = [*map(rounded, arrays)], rounded(out_grad)
    a, b, grad = (array.asnumpy().astype(np.float64) for array in (*arrays, out_grad))
    rows, grads = a.reshape(-1, inner), grad.reshape(-1, columns)
    b = b.T if transpose_b else b
    b_grad = rows.T @ grads
    wanted = [a @ b, grad @ b.T, b_grad.T if transpose_b else b_grad]
    if target == "bfloat16":
        arrays, out_grad = [*map(bfloat16, arrays)], bfloat16(out_grad)
    attrs = {"transpose_b": transpose_b}
    received = with_gradients(lambda *each: run("_gluon_amp_batch_dot", each, **attrs), arrays, out_grad)
    for one, other in zip(received, wanted):
        assert one.shape == other.shape
        assert_close(one, other, 1e-6 if target == "float32" else 2.0 ** -8)


@pytest.mark.parametrize("shapes", [((0, 3, 4), (4, 5)), ((2, 0, 4), (4, 5)), ((2, 3, 0), (0, 5)), ((2, 3, 4), (4, 0))])
def test_empty_products(shapes):
    with mx.util.np_shape(True):
        arrays = [nd.zeros(shape) for shape in shapes]
        out = (*shapes[0][:-1], shapes[1][1])
        assert shapes_of_empty(lambda *each: run("_gluon_amp_batch_dot", each), arrays, nd.zeros(out)) == [out, *shapes]


def test_products_that_do_not_fit():
    with pytest.raises(mx.MXNetError, match="the matrices do not fit"):
        run("_gluon_amp_batch_dot", [nd.ones((2, 3, 4)), nd.ones((2, 3, 4))])


def rnn_arrays(mode, layers, directions, steps=5, batch=3, inputs=7, states=6):
    width = 0
    for layer in range(layers):
        source = directions * states if layer else inputs
        width += directions * GATES[mode] * states * (source + states + 2)
    shape = (layers * directions, batch, states)
    arrays = [normal(steps, batch, inputs), normal(width, seed=1, scale=0.4), normal(*shape, seed=2)]
    return [*arrays, normal(*shape, seed=3)] if mode == "lstm" else arrays


def every_output(outputs):
    """Return one array that depends on all outputs in ways that differ."""
    return nd.concat(*(float32(out).reshape(-1) * (index + 1) for index, out in enumerate(outputs)), dim=0)


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_rnn(mode, layers, directions):
    inputs = rnn_arrays(mode, layers, directions)
    options = {"mode": mode, "state_size": 6, "num_layers": layers, "bidirectional": directions == 2}
    outputs = 3 if mode == "lstm" else 2
    out_grad = normal(5 * 3 * directions * 6 + (outputs - 1) * layers * directions * 3 * 6, seed=9)
    wanted = with_gradients(lambda *arrays: every_output(nd.RNN(*arrays, state_outputs=True, **options)), inputs,
                            out_grad)
    attrs = {name: str(value) for name, value in options.items()}
    received = with_gradients(lambda *arrays: every_output(invoke("_gluon_amp_rnn", arrays, attrs)[:outputs]), inputs,
                              out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 1e-6)
    inference = every_output(invoke("_gluon_amp_rnn", inputs, {**attrs, "training": "False"})).asnumpy()
    assert_close(inference, wanted[0], 1e-6)


def test_many_units():
    """The gradient of a state adds up many terms: as close to double precision as MXNet's."""
    inputs = rnn_arrays("lstm", 1, 1, 12, 16, 64, 650)
    inputs[1] *= 0.1
    options, out_grad = {"mode": "lstm", "state_size": 650, "num_layers": 1}, normal(12, 16, 650, seed=9)
    wanted = with_gradients(lambda *arrays: nd.RNN(*arrays, **options), inputs, out_grad)
    attrs = {name: str(value) for name, value in options.items()}
    received = with_gradients(lambda *arrays: invoke("_gluon_amp_rnn", arrays, attrs)[0], inputs, out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 1e-6)


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (3, 2)])
def test_separate_parameters(mode, layers, directions):
    """The same numbers as in one vector, from arrays of their own, and gradients there."""
    data, vector, *states = rnn_arrays(mode, layers, directions)
    rows, parts, start = GATES[mode] * 6, [], 0
    widths = [7, *[directions * 6] * (layers - 1)]
    weights = [(rows, width) for layer in widths for _ in range(directions) for width in (layer, 6)]
    for shape in [*weights, *[(rows,)] * len(weights)]:
        parts.append(vector[start:start + int(np.prod(shape))].reshape(shape))
        start += parts[-1].size
    assert start == vector.size
    attrs = {"mode": mode, "state_size": "6", "num_layers": str(layers), "bidirectional": str(directions == 2)}
    outputs = 3 if mode == "lstm" else 2
    out_grad = normal(5 * 3 * directions * 6 + (outputs - 1) * layers * directions * 3 * 6, seed=9)

    def run(attrs):
        return lambda *arrays: every_output(invoke("_gluon_amp_rnn", arrays, attrs)[:outputs])

    out, data_grad, vector_grad, *state_grads = with_gradients(run(attrs), [data, vector, *states], out_grad)
    received = with_gradients(run({**attrs, "separate": "True"}), [data, *parts, *states], out_grad)
    joined = np.concatenate([grad.reshape(-1) for grad in received[2:2 + len(parts)]])
    for one, other in zip([*received[:2], joined, *received[2 + len(parts):]],
                          [out, data_grad, vector_grad, *state_grads]):
        np.testing.assert_array_equal(one, other)


@pytest.mark.bf16
@pytest.mark.parametrize("mode", GATES)
def test_rnn_in_bfloat16(mode):
    inputs = [rounded(array) for array in rnn_arrays(mode, 2, 2)]
    options = {"mode": mode, "state_size": 6, "num_layers": 2, "bidirectional": True}
    outputs = 3 if mode == "lstm" else 2
    out_grad = normal(5 * 3 * 12 + (outputs - 1) * 4 * 3 * 6, seed=9)
    wanted = with_gradients(lambda *arrays: every_output(nd.RNN(*arrays, state_outputs=True, **options)), inputs,
                            out_grad)
    attrs = {name: str(value) for name, value in {**options, "dtype": "bfloat16"}.items()}
    low = [bfloat16(inputs[0]), *inputs[1:]]
    received = with_gradients(lambda *arrays: every_output(invoke("_gluon_amp_rnn", arrays, attrs)[:outputs]), low,
                              out_grad)
    for one, other in zip(received, wanted):
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)


def test_masks_between_layers():
    """Dropout is a mask: a mask of ones changes nothing, one of zeros hides the first layer."""
    inputs = rnn_arrays("lstm", 2, 1)
    attrs = {"mode": "lstm", "state_size": "6", "num_layers": "2"}
    ones = invoke("_gluon_amp_rnn", [*inputs, nd.ones((5, 3, 6))], {**attrs, "masks": "True"})[0]
    assert_close(ones.asnumpy(), invoke("_gluon_amp_rnn", inputs, attrs)[0].asnumpy(), 1e-6)
    received = with_gradients(
        lambda *arrays: invoke("_gluon_amp_rnn", [*arrays, nd.zeros((5, 3, 6))], {**attrs, "masks": "True"})[0], inputs,
        normal(5, 3, 6, seed=9))
    assert not received[1].any()
    assert received[2].any()
