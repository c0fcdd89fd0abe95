"""Values and gradients of attention in C++, against the same from MXNet's operators."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    bfloat16,
    normal,
    rounded,
    run,
    shapes_of_empty,
    with_gradients,
)

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


def attributes(layout, heads, width, *extras):
    names = ["queries", "keys", "values"] if layout == "separate" else ["projections"]
    return {"layout": layout, "heads": heads, "scale": width ** -0.5, "operands": ",".join([*names, *extras])}


@pytest.mark.parametrize("bias", [None, "broadcast", "rows"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [*CASES, (2, 4, 7, 2, 5)])
def test_equals_mxnet(case, layout, bias):
    batch, queries, keys, heads, width = case
    if queries != keys and layout != "separate":
        queries = keys
    inputs, out_grad = arrays(layout, batch, queries, keys, heads, width, bias)
    wanted = with_gradients(reference(layout, heads, width ** -0.5), inputs, out_grad)
    attrs = attributes(layout, heads, width, *["bias"] * (bias is not None))
    received = with_gradients(lambda *each: native_attention(*each, **attrs), inputs, out_grad)
    for one, other in zip(received, wanted):
        assert one.shape == other.shape
        assert_close(one, other, 2e-6)


def of_memory(heads, width):
    """MXNet's operators for attention to what an encoder gives."""
    def run_reference(queries, keys_values):
        scores = nd.contrib.interleaved_matmul_encdec_qk(queries, keys_values, heads=heads)
        return nd.contrib.interleaved_matmul_encdec_valatt(keys_values, nd.softmax(scores, axis=-1), heads=heads)
    return run_reference


@pytest.mark.parametrize("case", [*CASES, (2, 4, 7, 2, 5), (3, 9, 1, 4, 8)])
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_keys_and_values_of_another_length(case, target):
    batch, queries, keys, heads, width = case
    inputs = [normal(queries, batch, heads * width), normal(keys, batch, 2 * heads * width, seed=1)]
    out_grad = normal(queries, batch, heads * width, seed=2)
    is_low = target == "bfloat16"
    if is_low:
        inputs, out_grad = [*map(rounded, inputs)], rounded(out_grad)
    wanted = with_gradients(of_memory(heads, width), inputs, out_grad)
    attrs = {"layout": "interleaved", "heads": heads, "scale": width ** -0.5, "operands": "queries,keys_values"}
    if is_low:
        inputs, out_grad = [*map(bfloat16, inputs)], bfloat16(out_grad)
    received = with_gradients(lambda *each: native_attention(*each, **attrs), inputs, out_grad)
    for one, other in zip(received, wanted):
        assert one.shape == other.shape
        # With one key the gradients of scores are 0 but for rounding.
        if is_low and np.abs(other).max() < 1e-3:
            continue
        assert_close(one, other, 3 * BFLOAT16_ROUNDING if is_low else 2e-6)


def test_joined_keys_and_values():
    queries, keys, values = (normal(2, length, 12, seed=length) for length in (4, 7, 7))
    received = native_attention(queries, nd.concat(keys, values, dim=2), layout="joined", heads=3,
                                operands="queries,keys_values")
    expected = native_attention(queries, keys, values, layout="separate", heads=3)
    assert_close(received.asnumpy(), expected.asnumpy(), 1e-6)


def test_keys_and_values_that_do_not_fit():
    with pytest.raises(mx.MXNetError, match="keys or values"):
        native_attention(normal(4, 2, 12), normal(7, 2, 12), layout="interleaved", heads=3,
                         operands="queries,keys_values")


@pytest.mark.bf16
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES[1:])
def test_in_bfloat16(case, layout):
    heads, width = case[3:]
    inputs, out_grad = arrays(layout, *case, "broadcast")
    inputs, out_grad = [*map(rounded, inputs[:-1]), inputs[-1]], rounded(out_grad)
    wanted = with_gradients(reference(layout, heads, width ** -0.5), inputs, out_grad)
    attrs = attributes(layout, heads, width, "bias")
    low = [*map(bfloat16, inputs[:-1]), inputs[-1]]
    received = with_gradients(lambda *each: native_attention(*each, **attrs), low, bfloat16(out_grad))
    for one, other in zip(received, wanted):
        assert_close(one, other, 3 * BFLOAT16_ROUNDING)


def test_large_batches_run_in_parts():
    case = (9, 300, 300, 2, 4)  # more than a million scores
    inputs, out_grad = arrays("joined", *case, "broadcast")
    wanted = with_gradients(reference("joined", 2, 0.5), inputs, out_grad)
    received = with_gradients(lambda *each: native_attention(*each, **attributes("joined", 2, 4, "bias")), inputs,
                              out_grad)
    for one, other in zip(received, wanted):
        assert_close(one, other, 2e-6)


@pytest.mark.parametrize("value", [1e30, -1e30, 1e-42, np.nan, np.inf])
def test_special_values(value):
    inputs, _ = arrays("joined", 2, 5, 5, 2, 3, "broadcast")
    inputs[0][1, 2, 4] = value
    wanted = reference("joined", 2, 1.0)(*inputs).asnumpy()
    received = native_attention(*inputs, layout="joined", heads=2, scale=1.0, operands="projections,bias").asnumpy()
    np.testing.assert_array_equal(np.isnan(received), np.isnan(wanted))
    np.testing.assert_allclose(received[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_masked_tokens_count_for_nothing():
    inputs, _ = arrays("joined", 2, 6, 6, 2, 4)
    bias = nd.zeros((2, 1, 6))
    bias[:, :, 4:] = -1e4
    other = inputs[0].copy()
    other[:, 4:, 8:] = 77  # keys and values
    attrs = attributes("joined", 2, 4, "bias")
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
        native_attention(normal(2, 3, 12), normal(2, 1, 4), layout="joined", heads=2, operands="projections,bias")


def random_bits(seed=0):
    return nd.array(np.random.RandomState(seed).randint(2, size=64) * 2)


def by_step(queries, keys, values, heads, scale, mask=None, lengths=None, factors=None):
    """Attention by MXNet's operators with all that may come between the products."""
    def by_head(x):
        return nd.transpose(nd.reshape(x, (0, 0, heads, -1)), (0, 2, 1, 3)).reshape((-1, 0, 0), reverse=True)

    scores = nd.batch_dot(by_head(queries) * scale, by_head(keys), transpose_b=True)
    if mask is not None:
        mask = nd.repeat(mask, repeats=heads, axis=0)
        scores = nd.where(mask, scores, -1e4 * nd.ones_like(scores))
    if lengths is None:
        weights = nd.softmax(scores, axis=-1)
    else:
        weights = nd.softmax(scores, nd.repeat(lengths, repeats=heads, axis=0), axis=-1, use_length=True)
    weights = weights if mask is None else weights * mask
    weights = weights if factors is None else weights * factors
    mixed = nd.batch_dot(weights, by_head(values)).reshape((-1, heads, 0, 0), reverse=True)
    return nd.reshape(nd.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1))


def factors_of(key, p, batch, queries, keys, heads, width):
    """Return what dropout multiplies weights by: with equal scores, and values that pick one key each."""
    picks = np.zeros((keys, batch, keys, heads * width), np.float32)
    found = np.zeros((batch * heads, queries, keys), np.float32)
    zeros = nd.zeros((batch, queries, heads * width))
    for index in range(keys):
        picks[index, :, index] = keys
        out = native_attention(zeros, nd.zeros((batch, keys, heads * width)), nd.array(picks[index]), key, p=p,
                               **attributes("separate", heads, width, "bits"))
        out = out.asnumpy().reshape(batch, queries, heads, width)[..., 0]
        found[:, :, index] = out.transpose(0, 2, 1).reshape(batch * heads, queries)
    return found


EXTRAS = [("mask",), ("lengths",), ("bits",), ("mask", "bits"), ("lengths", "bits"), ("mask", "lengths", "bits")]
SIZES = [(2, 5, 5, 3, 4), (3, 4, 17, 2, 33)]


@pytest.mark.parametrize("extras", EXTRAS, ids="+".join)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_masks_lengths_and_dropout_equal_mxnet(case, extras, target):
    batch, queries, keys, heads, width = case
    inputs, out_grad = arrays("separate", *case)
    if target == "bfloat16":
        inputs, out_grad = [*map(rounded, inputs)], rounded(out_grad)
    random, key = np.random.RandomState(3), random_bits()
    mask = (random.uniform(size=(batch, queries, keys)) < 0.7).astype(np.float32)
    mask[0, 1], mask[1, 0] = 0, 1  # all positions off, and on
    values = {"mask": nd.array(mask), "bits": key,
              "lengths": nd.array(random.randint(keys + 1, size=(batch, queries)), dtype="int32")}
    factors = nd.array(factors_of(key, 0.3, *case)) if "bits" in extras else None
    trained = ["mask"] if "mask" in extras else []
    wanted = with_gradients(
        lambda *each: by_step(*each[:3], heads, width ** -0.5, each[3] if trained else None,
                              values["lengths"] if "lengths" in extras else None, factors),
        [*inputs, *(values[name] for name in trained)], out_grad)
    low = [*map(bfloat16, inputs)] if target == "bfloat16" else inputs
    others = [name for name in extras if name not in trained]
    received = with_gradients(
        lambda *each: native_attention(*each, *(values[name] for name in others), p=0.3, masked=-1e4,
                                       **attributes("separate", heads, width, *trained, *others)),
        [*low, *(values[name] for name in trained)], bfloat16(out_grad) if target == "bfloat16" else out_grad)
    assert len(received) == 4 + len(trained)
    for one, other in zip(received, wanted):
        assert_close(one, other, 2e-6 if target == "float32" else 3 * BFLOAT16_ROUNDING)


def test_inputs_in_any_order():
    inputs, _ = arrays("separate", 2, 5, 5, 3, 4)
    mask = nd.array(np.random.RandomState(3).randint(2, size=(2, 5, 5)))
    attrs = {"layout": "separate", "heads": 3, "masked": -1e4}
    one = native_attention(*inputs, mask, operands="queries,keys,values,mask", **attrs).asnumpy()
    other = native_attention(mask, inputs[2], *inputs[:2], operands="mask,values,queries,keys", **attrs).asnumpy()
    np.testing.assert_array_equal(one, other)


def test_lengths_outside_of_the_row():
    inputs, _ = arrays("separate", 1, 2, 5, 1, 4)
    attrs = attributes("separate", 1, 4, "lengths")
    out = native_attention(*inputs, nd.array([[-3, 99]], dtype="int32"), **attrs).asnumpy()
    np.testing.assert_array_equal(out[0, 0], 0)
    np.testing.assert_array_equal(out[0, 1], native_attention(*inputs, **attributes("separate", 1, 4)).asnumpy()[0, 1])


def test_no_samples():
    with mx.util.np_shape(True):
        inputs = [*(nd.zeros((0, 5, 12)) for _ in range(3)), nd.zeros((0, 5, 5)), random_bits()]
        attrs = attributes("separate", 3, 4, "mask", "bits")
        shapes = shapes_of_empty(lambda *each: native_attention(*each, p=0.3, **attrs), inputs, nd.zeros((0, 5, 12)))
        assert shapes == [(0, 5, 12), *(array.shape for array in inputs)]


def test_ones_drop_no_weights():
    inputs, _ = arrays("joined", 2, 5, 5, 2, 3)
    one = native_attention(*inputs, nd.ones(64), p=0.5, **attributes("joined", 2, 3, "bits")).asnumpy()
    np.testing.assert_array_equal(one, native_attention(*inputs, **attributes("joined", 2, 3)).asnumpy())


@pytest.mark.parametrize("names", ["projections,other", "queries,keys", "bias"])
def test_names_of_operands(names):
    with pytest.raises(mx.MXNetError, match="operands='" + names):
        native_attention(normal(2, 3, 12), normal(2, 1, 3), layout="joined", heads=2, operands=names)
