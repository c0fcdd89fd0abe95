"""Sums over one axis in C++, against MXNet's sum; and in networks that weigh groups of channels."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd, nd
from mxnet.gluon import nn
from native_cases import kinds, normal, requires_core, run, shapes_of_empty, with_gradients

import gluon_amp as amp
from gluon_amp.rules import Policy

NAME, PRODUCT = "_gluon_amp_sum", "_gluon_amp_scale_rows"
CASES = [((4, 2, 64, 7, 7), 1), ((3, 5), 0), ((3, 5), 1), ((7,), 0), ((2, 3, 1030), 1), ((1, 300, 17), -2),
         ((513, 2, 3), 0), ((2, 1, 40), 1), ((5, 4, 3, 2), -1)]


def summed(axis, keepdims=False):
    return lambda data: run(NAME, [data], axis=axis, keepdims=keepdims)


@requires_core
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_equals_numpy_and_mxnet(shape, axis, keepdims):
    data = normal(*shape)
    exact = data.asnumpy().astype(np.float64).sum(axis=axis, keepdims=keepdims or len(shape) == 1)
    out_grad = normal(*exact.shape, seed=1)
    received = with_gradients(summed(axis, keepdims), [data], out_grad)
    np.testing.assert_allclose(received[0], exact, rtol=1e-6, atol=1e-6)
    back = out_grad.asnumpy() if keepdims or len(shape) == 1 else np.expand_dims(out_grad.asnumpy(), axis)
    np.testing.assert_array_equal(received[1], np.broadcast_to(back, shape))
    stock = with_gradients(lambda x: nd.sum(x, axis=axis, keepdims=keepdims), [data], out_grad)
    for one, other in zip(received, stock):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@requires_core
def test_many_values_are_added_up_exactly():
    data = nd.full((100_000, 16), 0.1)
    exact = np.float64(np.float32(0.1)) * 100_000
    np.testing.assert_allclose(summed(0)(data).asnumpy(), np.full(16, exact), rtol=1e-7)


@requires_core
def test_special_values():
    data = nd.array([[np.nan, np.inf, np.inf, 3e38, 1e-45], [1, 0, -np.inf, 3e38, 1e-45]])
    expected = np.array([np.nan, np.inf, np.nan, np.inf, 3e-45], np.float32)
    np.testing.assert_array_equal(summed(0)(data).asnumpy(), expected)


@requires_core
@pytest.mark.parametrize("shape", [(0, 3, 20), (2, 0, 20), (2, 3, 0)])
def test_nothing_to_add_up(shape):
    result = (shape[0], shape[2])
    with mx.util.np_shape(True):
        assert shapes_of_empty(summed(1), [nd.zeros(shape)], nd.zeros(result)) == [result, shape]
        assert not summed(1)(nd.zeros((2, 0, 20))).asnumpy().any()


@requires_core
def test_unaligned_views():
    data = normal(3 * 4 * 25 + 1)[1:].reshape((3, 4, 25))
    np.testing.assert_allclose(summed(1)(data).asnumpy(), data.asnumpy().sum(axis=1), rtol=1e-6, atol=1e-6)


@requires_core
@pytest.mark.parametrize("axis", [2, -3, "(0, 1)"])
def test_errors_say_what_was_expected(axis):
    with pytest.raises(mx.MXNetError, match="expected one axis of data of 2 axes, received axis="):
        summed(axis)(nd.ones((2, 3)))


def lines(shape=(4, 2, 64, 28, 28), native=frozenset({NAME}), **attrs):
    axis = attrs.get("axis", 1)
    out = tuple(np.zeros(shape).sum(axis=axis if isinstance(axis, int) else None).shape)
    result = graph(op("sum", "total", op("relu", "before", variable("data", shape), shape=shape), shape=out or (1,),
                      **{"axis": 1, **attrs}))
    rewrite(result, Policy("float32"), native=native, check=True)
    return describe(result)


class TestGraphs:
    @pytest.mark.parametrize("axis", [1, "(1,)", "[1]", -4, 0])
    def test_along_one_axis_with_values_behind_it(self, axis):
        assert f"total: {NAME}(before) -> float32" in lines(axis=axis)

    @pytest.mark.parametrize("change", [
        {"axis": -1}, {"axis": 4}, {"axis": "(1, 2)"}, {"axis": "()"}, {"axis": "None"}, {"axis": 1, "exclude": True},
        {"axis": 1, "shape": (4, 2, 64, 2, 2)}, {"axis": 3, "shape": (4, 2, 64, 28, 15)}, {"native": frozenset()}])
    def test_others_stay(self, change):
        assert "total: sum(before) -> float32" in lines(**change)


class _Split(nn.HybridBlock):
    """Weighs two groups of channels and adds them up, as split attention does."""

    def __init__(self, factors_first=True):
        super().__init__()
        self.factors_first = factors_first
        with self.name_scope():
            self.conv, self.weigh = nn.Conv2D(32, 3, padding=1, in_channels=8), nn.Dense(32, in_units=16)

    def hybrid_forward(self, F, x):
        parts = F.reshape(F.expand_dims(F.relu(self.conv(x)), 1), (0, 2, 16, 0, 0))
        means = F.mean(F.sum(parts, axis=1), axis=(2, 3))
        factors = F.reshape(F.softmax(F.reshape(self.weigh(means), (0, 2, 16)), axis=1), (0, 2, 16, 1, 1))
        return F.sum(F.broadcast_mul(*((factors, parts) if self.factors_first else (parts, factors))), axis=1)


def _trained(factors_first, static, grad_req):
    mx.random.seed(3)
    net = _Split(factors_first)
    net.initialize(mx.init.Xavier())
    net.collect_params().setattr("grad_req", grad_req)
    net.hybridize(**({"static_alloc": True, "static_shape": True} if static else {}))
    data = normal(4, 8, 24, 24)
    data.attach_grad()
    for _ in range(2):
        net.collect_params().zero_grad()
        with autograd.record():
            result = net(data)
            loss = (result * result).mean()
        loss.backward()
    return net, [result.asnumpy(), data.grad.asnumpy(), *(each.grad().asnumpy()
                                                          for each in net.collect_params().values())]


@requires_core
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("factors_first", [False, True])
def test_a_network(factors_first, static, grad_req):
    _, expected = _trained(factors_first, static, grad_req)
    amp.init("float32")
    net, received = _trained(factors_first, static, grad_req)
    assert {NAME, PRODUCT} <= kinds(net)
    for one, other in zip(received, expected):
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)


class _Product(nn.HybridBlock):
    def hybrid_forward(self, F, x, y):
        return F.broadcast_mul(F.relu(x), F.relu(y))


@requires_core
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_factors_and_data_may_change_places_from_call_to_call(target):
    net = _Product()
    net.hybridize()
    amp.init(target)
    data, factors = normal(4, 32, 20, 20), normal(4, 32, 1, 1, seed=1)
    for inputs in ([data, factors], [factors, data], [data, factors]):
        out_grad = normal(4, 32, 20, 20, seed=2)
        received = with_gradients(net, inputs, out_grad)
        with amp.autocast(enabled=False):
            expected = with_gradients(_Product(), inputs, out_grad)
        assert PRODUCT in kinds(net)
        for one, other in zip(received, expected):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
