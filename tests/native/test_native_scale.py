"""A tensor times one number a row in C++, against MXNet's broadcast_mul; and in squeeze-and-excite networks."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import conv, describe, graph, op, rewrite, variable
from mxnet import nd
from mxnet.gluon import HybridBlock
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    bfloat16,
    kinds,
    normal,
    requires_core,
    rounded,
    run,
    shapes_of_empty,
    squeezed_and_excited,
    with_gradients,
)

import gluon_amp as amp
from gluon_amp.rules import Policy

NAME = "_gluon_amp_scale_rows"
SHAPES = [((1, 1), (1, 1)), ((3, 5), (3, 1)), ((2, 3, 7, 5), (2, 3, 1, 1)), ((4, 2, 1, 9), (4, 2, 1, 1)),
          ((2, 3, 130, 129), (2, 3, 1, 1)), ((5, 40_001), (5, 1)), ((3, 4, 5), (3, 4, 5)), ((1, 4, 33), (1, 1, 1))]


def scaled(data, factors):
    return run(NAME, [data, factors])


def arrays(shape, rows):
    return [normal(*shape), normal(*rows, seed=1)], normal(*shape, seed=2)


@requires_core
@pytest.mark.parametrize(("shape", "rows"), SHAPES)
def test_equals_mxnet(shape, rows):
    inputs, out_grad = arrays(shape, rows)
    received = with_gradients(scaled, inputs, out_grad)
    wanted = with_gradients(nd.broadcast_mul, inputs, out_grad)
    for one, other in zip(received[:2], wanted[:2]):
        np.testing.assert_array_equal(one, other)
    exact = (inputs[0].asnumpy().astype(np.float64) * out_grad.asnumpy())
    exact = exact.sum(axis=tuple(axis for axis, size in enumerate(rows) if size != shape[axis]), keepdims=True)
    assert received[2].shape == wanted[2].shape == rows
    assert_close(received[2], exact, 2e-6)


@requires_core
@pytest.mark.parametrize(("shape", "rows"), SHAPES)
def test_in_bfloat16(shape, rows):
    (data, factors), out_grad = arrays(shape, rows)
    data, out_grad = rounded(data), rounded(out_grad)
    wanted = with_gradients(nd.broadcast_mul, [data, factors], out_grad)
    received = with_gradients(scaled, [bfloat16(data), factors], bfloat16(out_grad))
    for one, other in zip(received[:2], wanted[:2]):
        assert_close(one, other, BFLOAT16_ROUNDING)
    assert_close(received[2], wanted[2], 1e-5)


@requires_core
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factors_first", [False, True])
@pytest.mark.parametrize("rectifies", [False, True])
@pytest.mark.parametrize(("shape", "rows"), SHAPES)
def test_a_sum_and_its_rectifier_are_mxnets(shape, rows, rectifies, factors_first, dtype):
    (data, factors), out_grad = arrays(shape, rows)
    others = [rounded(each) for each in (data, normal(*shape, seed=3), out_grad)]
    data, added, out_grad = others

    def stock(data, factors, added):
        made = nd.broadcast_mul(data, factors) + added
        return nd.relu(made) if rectifies else made

    def ours(*inputs):
        order = [inputs[1], inputs[0], inputs[2]] if factors_first else inputs
        return run(NAME, order, adds=True, rectifies=rectifies, factors_first=factors_first)

    wanted = with_gradients(stock, [data, factors, added], out_grad)
    if dtype == "bfloat16":
        data, added, out_grad = map(bfloat16, (data, added, out_grad))
    received = with_gradients(ours, [data, factors, added], out_grad)
    exact = dtype == "float32"
    for position in (0, 1, 3):
        assert_close(received[position], wanted[position], 1e-6 if exact else BFLOAT16_ROUNDING)
    assert_close(received[2], wanted[2], 1e-5)


@requires_core
def test_a_rectifier_without_a_sum_is_refused():
    with pytest.raises(mx.MXNetError, match="expected adds=True with rectifies=True"):
        run(NAME, [nd.ones((2, 3)), nd.ones((2, 1))], rectifies=True)


@requires_core
def test_special_values():
    values = [[np.nan, 1, 2], [np.inf, -np.inf, 0], [1e38, 1e38, -1e38], [1e-42, -1e-42, 3]]
    inputs, out_grad = [nd.array(values), nd.array([[2], [0], [10], [np.nan]])], nd.ones((4, 3))
    for one, other in zip(with_gradients(scaled, inputs, out_grad),
                          with_gradients(nd.broadcast_mul, inputs, out_grad)):
        np.testing.assert_array_equal(one, other)


@requires_core
@pytest.mark.parametrize(("shape", "rows"), [((0, 3, 4), (0, 3, 1)), ((2, 3, 0), (2, 3, 1))])
def test_no_values(shape, rows):
    with mx.util.np_shape(True):
        assert shapes_of_empty(scaled, [nd.zeros(shape), nd.ones(rows)], nd.zeros(shape)) == [shape, shape, rows]


@requires_core
def test_unaligned_views():
    data, factors = normal(7 * 9 + 1)[1:].reshape((7, 9)), normal(8)[1:].reshape((7, 1))
    np.testing.assert_array_equal(scaled(data, factors).asnumpy(), data.asnumpy() * factors.asnumpy())


@requires_core
@pytest.mark.parametrize("rows", [(3, 1, 1), (2, 1, 4), (2, 3), (1, 3, 1)])
def test_errors_say_what_was_expected(rows):
    with pytest.raises(mx.MXNetError, match="expected factors of the data's leading dimensions"):
        scaled(nd.ones((2, 3, 4)), nd.ones(rows))


DATA = (2, 32, 20, 20)


def lines(data, factors, kind="broadcast_mul", target="float32", available=frozenset({NAME})):
    shape = np.broadcast(np.empty(data), np.empty(factors)).shape
    node = op(kind, "product", op("relu", "x", variable("data", data), shape=data), variable("f", factors), shape=shape)
    result = graph(node)
    rewrite(result, Policy(target), native=available, check=True)
    return describe(result)


class TestGraphs:
    @pytest.mark.parametrize("kind", ["broadcast_mul", "_npi_multiply"])
    def test_rows(self, kind):
        assert f"product: {NAME}(x, f) -> float32" in lines(DATA, (2, 32, 1, 1), kind)

    @pytest.mark.parametrize("factors", [(1, 32, 1, 1), (2, 1, 1, 20), (1, 1, 1, 1), DATA, (32, 1, 1)])
    def test_others_stay(self, factors):
        assert "product: broadcast_mul(x, f) -> float32" in lines(DATA, factors)

    @pytest.mark.parametrize("data", [(2, 4, 20, 20), (8, 200, 3, 5)], ids=["small", "narrow"])
    def test_what_gains_little_stays(self, data):
        assert "product: broadcast_mul(x, f) -> float32" in lines(data, (*data[:2], 1, 1))

    @pytest.mark.parametrize(("settings", "joined"), [
        ({"trains": True}, "product: _gluon_amp_scale_rows(x, f, y) -> float32"),
        ({}, "product: _gluon_amp_scale_rows(x, f) -> float32")])
    def test_in_training_a_sum_and_its_rectifier_join_a_product(self, settings, joined):
        x = op("relu", "x", variable("data", DATA), shape=DATA)
        product = op("broadcast_mul", "product", x, variable("f", (2, 32, 1, 1)), shape=DATA)
        total = op("elemwise_add", "total", product, variable("y", DATA), shape=DATA)
        result = graph(op("Activation", "out", total, shape=DATA, act_type="relu"))
        rewrite(result, Policy("float32"), native=frozenset({NAME}), check=True, **settings)
        assert joined in describe(result)
        attrs = next(node.attrs for node in result.operators() if node.name == "product")
        assert (attrs.get("adds"), attrs.get("rectifies")) == (("True", "True") if settings else (None, None))

    @pytest.mark.parametrize("case", ["second", "twice", "output"])
    def test_sums_that_stay(self, case):
        x = op("relu", "x", variable("data", DATA), shape=DATA)
        product = op("broadcast_mul", "product", x, variable("f", (2, 32, 1, 1)), shape=DATA)
        terms = {"second": (variable("y", DATA), product), "twice": (product, product),
                 "output": (product, variable("y", DATA))}[case]
        total = op("elemwise_add", "total", *terms, shape=DATA)
        result = graph(total, *([product] if case == "output" else []))
        rewrite(result, Policy("float32"), native=frozenset({NAME}), check=True, trains=True)
        assert f"product: {NAME}(x, f) -> float32" in describe(result)

    def test_between_convolutions_in_bfloat16(self):
        before = conv("before", variable("data", DATA), 32, 32)
        before.shapes = [DATA]
        node = op("broadcast_mul", "product", before, variable("f", (2, 32, 1, 1)), shape=DATA)
        result = graph(conv("after", node, 32, 32))
        rewrite(result, Policy("bfloat16"), native=frozenset({NAME}), check=True)
        assert f"product: {NAME}(before, f) -> bfloat16" in describe(result)
        assert "after: Convolution(product, after_weight_bfloat16) -> bfloat16" in describe(result)


@requires_core
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_a_network(target, grad_req):
    _, expected = squeezed_and_excited(grad_req, static=True)
    amp.init(target)
    net, received = squeezed_and_excited(grad_req, static=True)
    assert NAME in kinds(net)
    for one, other in zip(received, expected):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error < (1e-5 if target == "float32" else 0.03)


@requires_core
def test_factors_for_all_images_are_mxnets_also_where_the_first_call_had_one_image():
    class Scaled(HybridBlock):
        def hybrid_forward(self, F, x, factors):
            return F.broadcast_mul(F.relu(x), factors)

    amp.init("float32")
    net, factors = Scaled(), normal(1, 64, 1, 1)
    net.hybridize()
    for batch in (1, 3, 1):
        x = nd.ones((batch, 64, 20, 20))
        np.testing.assert_array_equal(net(x, factors).asnumpy(), x.asnumpy() * factors.asnumpy())
        assert (NAME in kinds(net)) == (batch == 1)
