"""Pooling in C++ against MXNet's and NumPy, and in networks that oneDNN has no kernels for."""
from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import take_for
from graphs import describe, graph, op, rewrite, variable
from mxnet import nd
from mxnet.gluon import HybridBlock, nn
from native_cases import (
    SqueezeAndExcite,
    kinds,
    normal,
    requires_core,
    results_of_batches,
    run,
    shapes_of_empty,
    squeezed_and_excited,
    with_gradients,
)

import gluon_amp as amp
from gluon_amp.rules import Policy

NAME = "_gluon_amp_pooling"
SHAPES = [(1, 1, 1, 1), (2, 3, 7, 5), (1, 5, 1, 33), (2, 3, 130, 129), (3, 4, 50), (2, 3, 4, 5, 6), (1, 1, 300, 301)]


def means(data):
    return run(NAME, [data], global_pool=True, pool_type="avg")


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
def test_the_kernel_of_global_means_is_not_read():
    data = normal(2, 3, 50)
    received = run(NAME, [data], global_pool=True, pool_type="avg", kernel=(1,))
    np.testing.assert_array_equal(received.asnumpy(), means(data).asnumpy())


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


# Kernel, stride and padding, for maps of which some are smaller than the padded kernel.
WINDOWS = [((1, 1), (1, 1), (0, 0)), ((1, 1), (2, 2), (0, 0)), ((2, 2), (2, 2), (0, 0)), ((3, 3), (1, 1), (1, 1)),
           ((3, 3), (2, 2), (1, 1)), ((3, 2), (2, 3), (1, 0)), ((5, 4), (1, 2), (2, 1)), ((3, 3), (3, 1), (2, 2)),
           ((7, 1), (1, 1), (3, 0)), ((2, 5), (4, 3), (1, 4))]
MAPS = [(2, 3, 9, 7), (1, 1, 7, 5), (2, 5, 30, 31), (1, 2, 7, 70), (3, 20, 8, 8)]


@requires_core
@pytest.mark.parametrize("kind", [{"pool_type": "max"}, {"pool_type": "avg"},
                                  {"pool_type": "avg", "count_include_pad": False}])
@pytest.mark.parametrize(("kernel", "stride", "pad"), WINDOWS)
@pytest.mark.parametrize("shape", MAPS)
def test_windows_equal_mxnet(shape, kernel, stride, pad, kind):
    attrs = {"kernel": kernel, "stride": stride, "pad": pad, **kind}
    data = nd.round(2 * normal(*shape))  # many maxima are met twice
    out_grad = normal(*nd.Pooling(data, **attrs).shape, seed=1)
    received = with_gradients(lambda each: run(NAME, [each], **attrs), [data], out_grad)
    for one, other in zip(received, with_gradients(lambda each: nd.Pooling(each, **attrs), [data], out_grad)):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@requires_core
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_windows_equal_numpy(kind):
    data = normal(2, 3, 10, 11)
    view = np.lib.stride_tricks.sliding_window_view(data.asnumpy().astype(np.float64), (3, 4), (2, 3))
    windows = view[:, :, ::2, ::3]
    expected = windows.max((4, 5)) if kind == "max" else windows.mean((4, 5))
    received = run(NAME, [data], kernel=(3, 4), stride=(2, 3), pool_type=kind)
    np.testing.assert_allclose(received.asnumpy(), expected, rtol=1e-6, atol=1e-7)


@requires_core
def test_special_values_in_windows():
    data = nd.array([[[[np.nan, 1], [2, -np.inf]], [[np.inf, 0], [1, 2]], [[-np.inf, -5], [-6, -np.inf]]]])
    for kind, expected in (("max", [2, np.inf, -5]), ("avg", [np.nan, np.inf, -np.inf])):
        received, grads = with_gradients(lambda each, kind=kind: run(NAME, [each], kernel=(2, 2), pool_type=kind),
                                         [data], nd.array([np.nan, 1, 2]).reshape((1, 3, 1, 1)))
        np.testing.assert_array_equal(received.ravel(), np.array(expected, np.float32))
        if kind == "max":
            np.testing.assert_array_equal(
                grads[0], np.array([[[0, 0], [np.nan, 0]], [[1, 0], [0, 0]], [[0, 2], [0, 0]]], np.float32))


@requires_core
def test_windows_of_no_images_and_of_unaligned_views():
    attrs = {"kernel": (2, 2), "pool_type": "max"}
    with mx.util.np_shape(True):
        shapes = shapes_of_empty(lambda each: run(NAME, [each], **attrs), [nd.zeros((0, 3, 4, 4))],
                                 nd.zeros((0, 3, 3, 3)))
        assert shapes == [(0, 3, 3, 3), (0, 3, 4, 4)]
    data = normal(3 * 4 * 25 + 1)[1:].reshape((3, 4, 5, 5))
    np.testing.assert_array_equal(run(NAME, [data], **attrs).asnumpy(), nd.Pooling(data, **attrs).asnumpy())


@requires_core
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("value", [-np.inf, np.nan, np.finfo("float32").min])
def test_windows_without_a_largest_value_keep_their_gradient(value, pad):
    data = normal(2, 3, 9, 7)
    data[:, 1:, 2:8] = value
    data[1, 2, 3, 3] = 7
    attrs = {"kernel": (3, 3), "stride": (2, 2), "pad": (pad, pad), "pool_type": "max"}
    out_grad = normal(*nd.Pooling(data, **attrs).shape, seed=1)
    wanted = with_gradients(lambda each: nd.Pooling(each, **attrs), [data], out_grad)
    received = with_gradients(lambda each: run(NAME, [each], **attrs), [data], out_grad)
    for one, other in zip(received, wanted):
        np.testing.assert_array_equal(one, other)


@requires_core
@pytest.mark.parametrize(("attrs", "message"), [
    ({"pool_type": "sum"}, "expected pool_type='avg', or 'max' of windows, received 'sum'"),
    ({"pool_type": "max", "global_pool": True}, "expected pool_type='avg', or 'max' of windows, received 'max'"),
    ({"pooling_convention": "full"}, "expected pooling_convention='valid', received 'full'"),
    ({"pad": (2, 0)}, r"expected a kernel and strides from 1 on, .* received kernel=\(2, 2\), stride=.*, pad=\(2, 0\)"),
    ({"stride": (0, 1)}, "expected a kernel and strides from 1 on"),
    ({"kernel": (2, 9)}, r"expected windows no larger than padded maps, received data of shape \(2, 3, 4, 4\)"),
    ({"kernel": (2,)}, r"expected two numbers, received kernel=\(2,\)")])
def test_errors_of_windows_say_what_was_expected(attrs, message):
    with pytest.raises(mx.MXNetError, match=message):
        run(NAME, [nd.ones((2, 3, 4, 4))], **{"kernel": (2, 2), "pool_type": "avg", **attrs})


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


class TestGraphsOfWindows:
    """Without AVX512 oneDNN takes maps that lie in rows value by value: 17 times as long for maxima, 5 for means."""

    def lines(self, head, values=8, **attrs):
        attrs = {"kernel": "(3, 3)", "pad": "(1, 1)", "pool_type": "max", **attrs}
        result = graph(op("Pooling", "pool", head, shape=head.shapes[0], **attrs))
        rewrite(result, replace(Policy("float32"), channel_multiple=values), native=frozenset({NAME}), check=True,
                recorded=False)
        return describe(result)

    @pytest.mark.parametrize("attrs", [{}, {"pool_type": "avg"}, {"count_include_pad": "False", "pool_type": "avg"}])
    def test_of_odd_channels(self, attrs):
        assert f"pool: {NAME}(data) -> float32" in self.lines(variable("data", (4, 12, 28, 28)), **attrs)

    def test_behind_a_transposition(self):
        data = op("transpose", "turned", variable("data", (4, 28, 28, 16)), shape=(4, 16, 28, 28), axes="(0, 3, 1, 2)")
        assert f"pool: {NAME}(turned) -> float32" in self.lines(data)

    @pytest.mark.parametrize(("pad", "is_product"), [(4, True), (3, False)])
    def test_behind_a_product_of_matrices(self, pad, is_product):
        shape = (4, 16, 28, 28)
        layer = op("Convolution", "layer", variable("data", shape), variable("weight", (16, 16, 3, 3)), shape=shape,
                   num_filter=16, kernel=(3, 3), pad=(pad, pad), dilate=(pad, pad), no_bias=True)
        head = op("Activation", "relu", layer, shape=shape, act_type="relu")
        assert (f"pool: {NAME}(relu) -> float32" in self.lines(head)) == is_product

    @pytest.mark.parametrize("change", [
        {"values": 16}, {"shape": (4, 16, 28, 28)}, {"shape": (1, 12, 28, 28)}, {"pool_type": "sum"},
        {"pool_type": "lp", "p_value": 2}, {"pooling_convention": "full"}, {"kernel": "(1, 1)"}])
    def test_others_stay(self, change):
        shape = change.pop("shape", (4, 12, 28, 28))
        assert "pool: Pooling(data) -> float32" in self.lines(variable("data", shape), **change)


class Pools(HybridBlock):
    """Cells of pooling side by side, as in NASNet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.HybridSequential()
        for _ in range(2):
            self.layers.add(nn.Conv2D(12, 3, padding=1), nn.Activation("relu"))

    def hybrid_forward(self, F, x):
        for layer in self.layers:
            x = layer(x)
        most = F.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
        means = F.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="avg", count_include_pad=False)
        return F.concat(most, means + F.Pooling(x, kernel=(1, 1), stride=(2, 2), pool_type="avg"), dim=1)


def trained(grad_req, static):
    mx.random.seed(3)
    net = Pools()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=static, static_shape=static)
    net.collect_params().setattr("grad_req", grad_req)
    return net, results_of_batches(net, grad_req, [normal(4, 8, 34, 33, seed=seed) for seed in (1, 2)])


@requires_core
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("static", [False, True])
def test_a_network_of_windows(grad_req, static, monkeypatch):
    _, expected = trained(grad_req, static)
    take_for(monkeypatch, "AVX2")
    amp.init("float32")
    net, received = trained(grad_req, static)
    assert NAME in kinds(net)
    for one, other in zip(received, expected):
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)


def converted(net, data, monkeypatch):
    """Convert a network on a CPU with AVX2, and compare it: it pools in C++."""
    net.initialize(mx.init.Xavier())
    net.hybridize()
    expected = net(data).asnumpy()
    take_for(monkeypatch, "AVX2")
    made = amp.convert_hybrid_block(net, "float32", data_example=data)
    np.testing.assert_allclose(made(data).asnumpy(), expected, rtol=1e-4, atol=1e-5)
    assert NAME in kinds(made)
    return made


@requires_core
def test_a_converted_network_of_windows(monkeypatch):
    net = Pools()
    made = converted(net, normal(4, 8, 34, 33), monkeypatch)
    other = normal(2, 8, 20, 11, seed=5)  # another size than it was converted with
    np.testing.assert_allclose(made(other).asnumpy(), net(other).asnumpy(), rtol=1e-4, atol=1e-5)


@requires_core
def test_behind_a_product_of_matrices_that_was_fused(monkeypatch):
    """As in AlexNet."""
    net = nn.HybridSequential()
    net.add(nn.Conv2D(16, 11, strides=4, padding=2, in_channels=3), nn.Activation("relu"), nn.MaxPool2D(3, 2))
    converted(net, normal(4, 3, 131, 131), monkeypatch)


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
