"""Bilinear resizing in C++ against MXNet's operator and a bilinear sum in NumPy."""
from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock, nn
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
    with_gradients,
)

import gluon_amp as amp
from gluon_amp.rules import Policy

NAME = "_gluon_amp_resize"
CASES = [((2, 3, 7, 5), (20, 11)), ((1, 2, 9, 9), (4, 3)), ((1, 2, 5, 6), (5, 6)), ((1, 1, 1, 1), (4, 4)),
         ((1, 1, 4, 4), (1, 1)), ((3, 1, 1, 33), (2, 66)), ((1, 4, 33, 1), (70, 5)), ((2, 21, 30, 31), (120, 17))]


def native(data, height, width, aligned):
    return run(NAME, [data], height=height, width=width, align_corners=aligned)


def stock(data, height, width, aligned):
    return nd.contrib.BilinearResize2D(data, height=height, width=width, align_corners=aligned)


def weights(given, made, aligned):
    """Return the matrix that blends an axis."""
    matrix = np.zeros((made, given))
    for row in range(made):
        if made == 1:
            place = 0.0
        elif aligned:
            place = row * (given - 1) / (made - 1)
        else:
            place = min(max((row + 0.5) * given / made - 0.5, 0.0), given - 1)
        first = int(place)
        matrix[row, first] += 1 - (place - first)
        matrix[row, min(first + 1, given - 1)] += place - first
    return matrix


@requires_core
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(("shape", "size"), CASES)
def test_equals_numpy_and_mxnet(shape, size, aligned):
    data, out_grad = normal(*shape), normal(*shape[:2], *size, seed=1)
    received = with_gradients(lambda x: native(x, *size, aligned), [data], out_grad)
    down, across = (weights(given, made, aligned) for given, made in zip(shape[2:], size))
    wanted = (np.einsum("ih,jw,nchw->ncij", down, across, data.asnumpy().astype(np.float64)),
              np.einsum("ih,jw,ncij->nchw", down, across, out_grad.asnumpy().astype(np.float64)))
    of_mxnet = with_gradients(lambda x: stock(x, *size, aligned), [data], out_grad)
    for one, other, exact in zip(received, of_mxnet, wanted):
        np.testing.assert_allclose(one, exact, rtol=1e-5, atol=2e-5 * np.abs(exact).max())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5 * np.abs(exact).max())


@requires_core
@pytest.mark.parametrize("aligned", [True, False])
def test_in_bfloat16(aligned):
    data, out_grad = rounded(normal(2, 3, 9, 17)), rounded(normal(2, 3, 20, 34, seed=1))
    wanted = with_gradients(lambda x: stock(x, 20, 34, aligned), [data], out_grad)
    received = with_gradients(lambda x: native(x, 20, 34, aligned), [bfloat16(data)], bfloat16(out_grad))
    for one, other in zip(received, wanted):
        assert_close(one, other, BFLOAT16_ROUNDING)


@requires_core
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [(4, 5), (4, 9), (7, 5), (3, 3)])
def test_infinities_reach_as_far_as_in_mxnet(size, aligned):
    """Maps that keep their size are copied."""
    data, out_grad = normal(1, 2, 4, 5), normal(1, 2, *size, seed=1)
    data[0, 0, 1, 2], data[0, 1, 2, 3], out_grad[0, 0, 1, 1] = np.inf, np.nan, -np.inf
    received = with_gradients(lambda x: native(x, *size, aligned), [data], out_grad)
    for one, other in zip(received, with_gradients(lambda x: stock(x, *size, aligned), [data], out_grad)):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    if size == (4, 5):
        low = with_gradients(lambda x: native(x, *size, aligned), [bfloat16(data)], bfloat16(out_grad))
        for one, other in zip(low, (data, out_grad)):
            np.testing.assert_array_equal(one, rounded(other).asnumpy())


@requires_core
def test_no_images():
    with mx.util.np_shape(True):
        data, out_grad = nd.zeros((0, 3, 4, 4)), nd.zeros((0, 3, 8, 8))
        assert shapes_of_empty(lambda x: native(x, 8, 8, True), [data], out_grad) == [(0, 3, 8, 8), (0, 3, 4, 4)]


@requires_core
@pytest.mark.parametrize(("data", "attrs", "text"), [
    (nd.ones((2, 3)), {"height": 4, "width": 4}, "expected images, received data of shape"),
    (nd.ones((1, 1, 2, 2)), {"height": 0, "width": 4}, "positive number, received height=0"),
    (nd.ones((1, 1, 2, 2)), {"height": 4, "width": 4, "mode": "like"}, "expected mode='size'")])
def test_errors_say_what_was_expected(data, attrs, text):
    with pytest.raises(mx.MXNetError, match=text):
        run(NAME, [data], **attrs)


def lines(target="float32", inputs=1, **attrs):
    data = [variable(name, (2, 32, 16, 16)) for name in ("data", "like")[:inputs]]
    attrs = {"height": 32, "width": 32, **attrs}
    result = graph(op("_contrib_BilinearResize2D", "up", *data, shape=(2, 32, 32, 32), **attrs))
    rewrite(result, replace(Policy(target), channel_multiple=16), native=frozenset({NAME}), check=True)
    return describe(result)


class TestGraphs:
    @pytest.mark.parametrize("attrs", [{}, {"align_corners": False}, {"mode": "size", "scale_height": None}])
    def test_a_size_that_is_given(self, attrs):
        assert f"up: {NAME}(data) -> float32" in lines(**attrs)

    @pytest.mark.parametrize("attrs", [{"mode": "like", "inputs": 2}, {"scale_height": 2.0, "scale_width": 2.0},
                                       {"mode": "odd_scale"}, {"height": 0}])
    def test_others_stay(self, attrs):
        assert not any(NAME in line for line in lines(**attrs))

    def test_in_bfloat16_it_follows_its_data(self):
        image = variable("data", (2, 32, 16, 16))
        weight = variable("weight", (32, 32, 3, 3))
        conv = op("Convolution", "conv", image, weight, shape=(2, 32, 16, 16), kernel="(3, 3)", pad="(1, 1)",
                  num_filter=32, no_bias=True)
        result = graph(op("_contrib_BilinearResize2D", "up", conv, shape=(2, 32, 32, 32), height=32, width=32))
        rewrite(result, replace(Policy("bfloat16"), channel_multiple=16), native=frozenset({NAME}), check=True)
        assert f"up: {NAME}(conv) -> bfloat16" in describe(result)


class Head(HybridBlock):
    """A segmentation network's head and loss."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2D(21, 3, padding=1, in_channels=8)

    def hybrid_forward(self, F, x):
        maps = F.contrib.BilinearResize2D(self.conv(x), height=40, width=48)
        return F.log_softmax(maps, axis=1), F.softmax(maps, axis=1)


def head_results(hybridized, grad_req="write"):
    mx.random.seed(1)
    net, x = Head(), normal(2, 8, 10, 12)
    net.initialize(mx.init.Normal(0.1))
    net.collect_params().setattr("grad_req", grad_req)
    if hybridized:
        net.hybridize(static_alloc=True, static_shape=True)
    x.attach_grad()
    for _ in range(2):
        with autograd.record():
            log, share = net(x)
            loss = (log[:, 3] * share[:, 5]).mean()
        loss.backward()
    return net, [log.asnumpy(), share.asnumpy(), x.grad.asnumpy(),
                 *(parameter.grad().asnumpy() for parameter in net.collect_params().values())]


@requires_core
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("hybridized", [True, False])
def test_a_segmentation_head(hybridized, grad_req):
    _, expected = head_results(hybridized, grad_req)
    amp.init("float32")
    net, received = head_results(hybridized, grad_req)
    if hybridized:
        assert {NAME, "_gluon_amp_log_softmax", "_gluon_amp_softmax"} <= kinds(net)
    for one, other in zip(received, expected):
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)
