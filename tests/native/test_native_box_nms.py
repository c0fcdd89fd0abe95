"""The suppression of boxes in C++ against MXNet's operator, whose results it has to have bit by bit."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import nd
from mxnet.gluon import nn
from native_cases import requires_core, run, with_gradients

import gluon_amp as amp
from gluon_amp.rules import Device, Policy

NAME = "_gluon_amp_box_nms"
ATTRS = [{}, {"id_index": 0}, {"id_index": 0, "force_suppress": True}, {"id_index": 0, "topk": 12}, {"topk": 3},
         {"topk": 1000}, {"id_index": 0, "background_id": 1, "valid_thresh": 0.3}, {"valid_thresh": 5},
         {"id_index": 0, "in_format": "center", "out_format": "center", "overlap_thresh": 0.1},
         {"overlap_thresh": 0.95}, {"score_index": 5, "coord_start": 0, "id_index": 4}]


def boxes(samples, count, seed=0, ties=False, widest=3.0):
    """Return rows of class, score and box; some boxes have a negative width."""
    random = np.random.RandomState(seed)
    corner, size = random.uniform(0, 8, (samples, count, 2)), random.uniform(-0.2, widest, (samples, count, 2))
    scores = random.randint(0, 5, (samples, count, 1)) / 5 if ties else random.uniform(-0.1, 1, (samples, count, 1))
    return nd.array(np.concatenate([random.randint(-1, 3, (samples, count, 1)), scores, corner, corner + size], -1))


@requires_core
@pytest.mark.machine
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [1, 7, 500])
@pytest.mark.parametrize("attrs", ATTRS, ids=str)
def test_equals_mxnet(attrs, count, ties):
    data = boxes(3, count, ties=ties)
    np.testing.assert_array_equal(run(NAME, [data], **attrs).asnumpy(), nd.contrib.box_nms(data, **attrs).asnumpy())


@requires_core
@pytest.mark.parametrize("attrs", ATTRS, ids=str)
def test_gradients_equal_mxnets(attrs):
    data, out_grad = boxes(3, 60), nd.random.normal(shape=(3, 60, 6))
    found, wanted = (with_gradients(call, [data], out_grad)[1] for call in (
        lambda x: run(NAME, [x], **attrs), lambda x: nd.contrib.box_nms(x, **attrs)))
    np.testing.assert_array_equal(found, wanted)


@requires_core
def test_one_sample_without_a_batch_and_more_axes():
    for data in (boxes(1, 30).reshape((30, 6)), boxes(6, 30).reshape((2, 3, 30, 6))):
        np.testing.assert_array_equal(run(NAME, [data]).asnumpy(), nd.contrib.box_nms(data).asnumpy())


@requires_core
def test_scores_and_boxes_that_are_no_numbers():
    data = boxes(1, 40).asnumpy()
    data[0, ::5, 1], data[0, 3, 1], data[0, 1::7, 3] = np.nan, np.inf, np.nan
    found = run(NAME, [nd.array(data)]).asnumpy()
    assert (found[0, 0, 1], np.isfinite(found[0, :, 1]).sum()) == (np.inf, 39)
    assert not np.isnan(found[..., 1]).any()


@requires_core
@pytest.mark.parametrize(("shape", "attrs", "text"), [
    ((4, 5), {"id_index": 0}, "expected rows that hold a box from 2 on"), ((3,), {}, "received data of shape"),
    ((4, 6), {"score_index": 7}, "its score at 7"), ((4, 6), {"topk": 0}, "received topk=0"),
    ((4, 6), {"in_format": "center"}, "expected out_format to be in_format")])
def test_errors_say_what_was_expected(shape, attrs, text):
    with pytest.raises(mx.MXNetError, match=text):
        run(NAME, [nd.ones(shape)], **attrs)


def lines(**attrs):
    data = variable("data", (2, 4096, 6))
    result = graph(op("_contrib_box_nms", "nms", data, shape=(2, 4096, 6), **attrs))
    rewrite(result, Policy("float32"), Device(16), native=frozenset({NAME}), check=True)
    return describe(result)


@pytest.mark.parametrize(("attrs", "is_replaced"), [
    ({}, True), ({"topk": 400, "id_index": 0}, True), ({"in_format": "center", "out_format": "center"}, True),
    ({"out_format": "center"}, False), ({"topk": 0}, False)], ids=str)
def test_graphs(attrs, is_replaced):
    assert any(NAME in line for line in lines(**attrs)) is is_replaced


class Head(nn.HybridBlock):
    """The end of a detector."""

    def hybrid_forward(self, F, x):
        return F.contrib.box_nms(x * 1, overlap_thresh=0.45, valid_thresh=0.01, topk=400, id_index=0)


@requires_core
@pytest.mark.parametrize("convert", [False, True])
def test_networks(convert):
    data, net = boxes(2, 5000), Head()
    expected = net(data).asnumpy()
    if convert:
        net = amp.convert_hybrid_block(net, "float32", data_example=data)
    else:
        amp.init("float32")
        net.hybridize()
    np.testing.assert_array_equal(net(data).asnumpy(), expected)
    assert convert or "1 of the operators ran in C++" in str(amp.report(net, data))
