"""Values and gradients of attention in C++, against the same from MXNet's operators."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import BFLOAT16_ROUNDING, assert_close, bfloat16, normal, rounded, run, with_gradients

from gluon_amp import native

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_attention"), reason="oneDNN is missing")

# batch, queries, keys, heads, width of a head
CASES = [(1, 1, 1, 1, 1), (2, 5, 5, 3, 4), (3, 17, 17, 2, 33), (1, 130, 130, 1, 8)]
LAYOUTS = ["joined", "interleaved", "separate"]


def native_attention(*inputs, **attrs):
    return run("_gluon_amp_attention", inputs, **attrs)


def attention(queries, keys, values, bias, heads, scale):
    """Attention by MXNet's operators, of (batch, length, units)."""
    def by_head(x):
        return nd.transpose(nd.reshape(x, (0, 0, heads, -1)), (0, 2, 1, 3)).reshape((-1, 0, 0), reverse=True)

    scores = nd.batch_dot(by_head(queries) * scale, by_head(keys), transpose_b=True)
    if bias is not None:
        scores = nd.broadcast_add(scores, nd.repeat(bias, repeats=heads, axis=0))
    mixed = nd.batch_dot(nd.softmax(scores, axis=-1), by_head(values)).reshape((-1, heads, 0, 0), reverse=True)
    return nd.reshape(nd.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1))


def reference(layout, heads, scale):
    def run_reference(*inputs):
        count = 3 if layout == "separate" else 1
        bias = inputs[count] if len(inputs) > count else None
        if layout == "separate":
            return attention(*inputs[:3], bias, heads, scale)
        if layout == "joined":
            return attention(*nd.split(inputs[0], num_outputs=3, axis=2), bias, heads, scale)
        parts = nd.reshape(nd.swapaxes(inputs[0], 0, 1), (0, 0, heads, 3, -1))
        parts = [nd.reshape(nd.slice_axis(parts, axis=3, begin=i, end=i + 1), (0, 0, -1)) for i in range(3)]
        return nd.swapaxes(attention(*parts, bias, heads, scale), 0, 1)
    return run_reference


def arrays(layout, batch, queries, keys, heads, width, bias=None):
    units = heads * width
    if layout == "separate":
        shapes = [(batch, queries, units), (batch, keys, units), (batch, keys, units)]
    else:
        shapes = [(batch, keys, 3 * units) if layout == "joined" else (keys, batch, 3 * units)]
    out = (queries, batch, units) if layout == "interleaved" else (batch, queries, units)
    inputs = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    if bias is not None:
        inputs.append(normal(batch, queries if bias == "rows" else 1, keys, seed=8))
    return inputs, normal(*out, seed=9)


def attributes(layout, heads, width, bias=None):
    return {"layout": layout, "heads": heads, "scale": width ** -0.5, "bias": bias is not None}


@pytest.mark.parametrize("bias", [None, "broadcast", "rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [*CASES, (2, 4, 7, 2, 5)])
def test_equals_mxnet(case, layout, bias):
    batch, queries, keys, heads, width = case
    if queries != keys and layout != "separate":
        queries = keys
    inputs, out_grad = arrays(layout, batch, queries, keys, heads, width, bias)
    wanted = with_gradients(reference(layout, heads, width ** -0.5), inputs, out_grad)
    attrs = attributes(layout, heads, width, bias)
    received = with_gradients(lambda *each: native_attention(*each, **attrs), inputs, out_grad)
    for one, other in zip(received, wanted):
        assert one.shape == other.shape
        assert_close(one, other, 2e-6)


@pytest.mark.bf16
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES[1:])
def test_in_bfloat16(case, layout):
    heads, width = case[3:]
    inputs, out_grad = arrays(layout, *case, "broadcast")
    inputs, out_grad = [*map(rounded, inputs[:-1]), inputs[-1]], rounded(out_grad)
    wanted = with_gradients(reference(layout, heads, width ** -0.5), inputs, out_grad)
    attrs = attributes(layout, heads, width, "broadcast")
    low = [*map(bfloat16, inputs[:-1]), inputs[-1]]
    received = with_gradients(lambda *each: native_attention(*each, **attrs), low, bfloat16(out_grad))
    for one, other in zip(received, wanted):
        assert_close(one, other, 3 * BFLOAT16_ROUNDING)


def test_large_batches_run_in_parts():
    case = (9, 300, 300, 2, 4)  # more than a million scores
    inputs, out_grad = arrays("joined", *case, "broadcast")
    wanted = with_gradients(reference("joined", 2, 0.5), inputs, out_grad)
    received = with_gradients(lambda *each: native_attention(*each, **attributes("joined", 2, 4, "broadcast")), inputs,
                              out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 2e-6)


@pytest.mark.parametrize("value", [1e30, -1e30, 1e-42, np.nan, np.inf])
def test_special_values(value):
    inputs, _ = arrays("joined", 2, 5, 5, 2, 3, "broadcast")
    inputs[0][1, 2, 4] = value
    wanted = reference("joined", 2, 1.0)(*inputs).asnumpy()
    received = native_attention(*inputs, layout="joined", heads=2, scale=1.0, bias=True).asnumpy()
    np.testing.assert_array_equal(np.isnan(received), np.isnan(wanted))
    np.testing.assert_allclose(received[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_masked_tokens_count_for_nothing():
    inputs, _ = arrays("joined", 2, 6, 6, 2, 4)
    bias = nd.zeros((2, 1, 6))
    bias[:, :, 4:] = -1e4
    other = inputs[0].copy()
    other[:, 4:, 8:] = 77  # keys and values
    attrs = attributes("joined", 2, 4, True)
    one, another = (native_attention(each, bias, **attrs)[:, :4].asnumpy() for each in (inputs[0], other))
    np.testing.assert_array_equal(one, another)


def test_errors_say_what_was_expected():
    with pytest.raises(mx.MXNetError, match="multiple of 6"):
        native_attention(normal(2, 3, 8), layout="joined", heads=2)
    with pytest.raises(mx.MXNetError, match="joined, interleaved or separate"):
        native_attention(normal(2, 3, 12), layout="other", heads=2)
    with pytest.raises(mx.MXNetError, match="one head"):
        native_attention(normal(2, 3, 12), layout="joined")
    with pytest.raises(mx.MXNetError, match="the bias"):
        native_attention(normal(2, 3, 12), normal(2, 1, 4), layout="joined", heads=2, bias=True)
