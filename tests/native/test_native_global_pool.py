"""Means of channels in C++, against MXNet's Pooling; and in networks for whose gradient oneDNN has no kernel."""
from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import nd
from native_cases import (
    SqueezeAndExcite,
    kinds,
    normal,
    requires_core,
    run,
    shapes_of_empty,
    squeezed_and_excited,
    with_gradients,
)

import gluon_amp as amp
from gluon_amp.rules import Policy

NAME = "_gluon_amp_global_pool"
SHAPES = [(1, 1, 1, 1), (2, 3, 7, 5), (1, 5, 1, 33), (2, 3, 130, 129), (3, 4, 50), (2, 3, 4, 5, 6), (1, 1, 300, 301)]


def means(data):
    return run(NAME, [data])


def pooled(data):
    return nd.Pooling(data, global_pool=True, pool_type="avg")


def arrays(shape):
    return normal(*shape), normal(*shape[:2], *(1 for _ in shape[2:]), seed=1)


@requires_core
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_numpy_and_mxnet(shape):
    data, out_grad = arrays(shape)
    received = with_gradients(means, [data], out_grad)
    exact = data.asnumpy().astype(np.float64).mean(axis=tuple(range(2, len(shape))), keepdims=True)
    np.testing.assert_allclose(received[0], exact, rtol=1e-6, atol=1e-7)
    wanted = np.broadcast_to(out_grad.asnumpy().astype(np.float64) / np.prod(shape[2:]), shape)
    np.testing.assert_allclose(received[1], wanted, rtol=1e-7)
    for one, other in zip(received, with_gradients(pooled, [data], out_grad)):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=2e-7)  # MXNet adds one value after another


@requires_core
def test_special_values():
    data = nd.array([[[np.nan, 1], [np.inf, 0], [np.inf, -np.inf], [3e38, -3e38], [1e-45, 1e-45]]])
    expected = [[[np.nan], [np.inf], [np.nan], [0], [1e-45]]]
    np.testing.assert_array_equal(means(data).asnumpy(), np.array(expected, np.float32))


@requires_core
def test_no_images():
    with mx.util.np_shape(True):
        data, out_grad = nd.zeros((0, 3, 4, 4)), nd.zeros((0, 3, 1, 1))
        assert shapes_of_empty(means, [data], out_grad) == [(0, 3, 1, 1), (0, 3, 4, 4)]


@requires_core
def test_unaligned_views():
    data = normal(3 * 4 * 25 + 1)[1:].reshape((3, 4, 5, 5))
    np.testing.assert_allclose(means(data).asnumpy(), data.asnumpy().mean(axis=(2, 3), keepdims=True), rtol=1e-6,
                               atol=1e-7)


@requires_core
def test_errors_say_what_was_expected():
    with pytest.raises(mx.MXNetError, match="expected images, channels and one axis or more, received data of shape"):
        means(nd.ones((2, 3)))


def lines(shape, target="float32", recorded=True, values=8, **attrs):
    attrs = {"global_pool": True, "pool_type": "avg", "kernel": "(1, 1)", **attrs}
    out = (*shape[:2], 1, 1) if attrs.get("layout") != "NHWC" else (shape[0], 1, 1, shape[-1])
    result = graph(op("Pooling", "pool", variable("data", shape), shape=out, **attrs))
    rewrite(result, replace(Policy(target), channel_multiple=values), native=frozenset({NAME}), check=True,
                   recorded=recorded)
    return describe(result)


class TestGraphs:
    @pytest.mark.parametrize(("shape", "values"), [((4, 120, 28, 28), 8), ((4, 128, 8, 17), 8), ((2, 48, 56, 14), 8),
                                                   ((4, 128, 14, 14), 16)])
    def test_where_the_map_has_more_rows_than_there_are_blocks_of_channels(self, shape, values):
        assert f"pool: {NAME}(data) -> float32" in lines(shape, values=values)

    @pytest.mark.parametrize("change", [
        {"shape": (4, 128, 14, 14)}, {"shape": (4, 128, 16, 16)}, {"shape": (1, 8, 28, 28)}, {"recorded": False},
        {"pool_type": "max"}, {"pool_type": "sum"}, {"global_pool": False, "kernel": "(28, 28)"},
        {"layout": "NHWC", "shape": (4, 28, 28, 120)}])
    def test_others_stay(self, change):
        assert "pool: Pooling(data) -> float32" in lines(**{"shape": (4, 120, 28, 28), **change})


@requires_core
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("static", [False, True])
def test_a_network(grad_req, static):
    _, expected = squeezed_and_excited(grad_req, static)
    amp.init("float32")
    net, received = squeezed_and_excited(grad_req, static)
    assert NAME in kinds(net)
    for one, other in zip(received, expected):
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)


@requires_core
def test_a_report_says_so():
    net = SqueezeAndExcite()
    net.initialize()
    net.hybridize()
    amp.init("float32")
    found = amp.report(net, nd.ones((2, 16, 24, 24)), train=True)
    assert "Pooling" in {row.op for row in found.operators if row.native}
