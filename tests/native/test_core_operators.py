"""The C++ operators in one table: (operator, inputs, attributes, reference, tolerance), and what holds for all rows.

References are MXNet's own operators in float64, or in float32 where results have to have the same bits.
"""
from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import EMULATES_BFLOAT16
from mxnet import autograd, nd
from native_cases import BFLOAT16_ROUNDING, CACHED_OP_FLAGS, bfloat16, float32, normal, requires_core, rounded

from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke
from gluon_amp.machine.dtypes import BFLOAT16_DTYPE

ONEDNN = {"attention", "batch_dot", "convolution", "dense", "rnn"}
pytestmark = requires_core


@dataclass(frozen=True)
class Case:
    """A row: an operator on inputs, and a function of the same inputs that computes the same."""

    op: str
    inputs: tuple  # shapes of random numbers, or arrays as they are: int32 ones have no gradient
    attrs: dict
    reference: Any  # gives an array, or as many as ``outputs`` says
    tolerance: float = 1e-6  # as a share of the largest value of an array; 0 for the bits that MXNet gives in float32
    low: Any = BFLOAT16_ROUNDING  # in bfloat16, of the output and of gradients of inputs in bfloat16; None without
    low_inputs: tuple = (0,)  # the positions of those
    is_low_inside: bool = False  # so that the other gradients are no nearer
    exact: str = "float64"  # the type that the reference computes in
    outputs: int = 1
    mutated: tuple = ()  # the positions of inputs that are written
    gain: float = 0  # a gradient is a difference of values so many times as large as the output's gradient

    def __str__(self):
        sizes = "x".join(str(shape).replace(" ", "") if isinstance(shape, tuple) else "array" for shape in self.inputs)
        return f"{self.op}{sizes}{self.attrs}"

    def arrays(self, dtype="float32"):
        """Return the inputs in FP32; those that are in bfloat16 are rounded."""
        values = [numbers(each, seed) if isinstance(each, tuple) else each for seed, each in enumerate(self.inputs)]
        found = [nd.array(each, dtype=each.dtype) for each in values]
        return [rounded(each) if dtype == "bfloat16" and place in self.low_inputs else each
                for place, each in enumerate(found)]  # with their values in FP32

    def ours(self, dtype="float32"):
        """Return the operator as a function of arrays in FP32."""
        attrs = {name: str(value) for name, value in self.attrs.items()}
        if self.op == "rnn":
            attrs["dtype"] = dtype
        is_low = dtype == "bfloat16"

        def function(*inputs):
            given = [bfloat16(each) if is_low and place in self.low_inputs else each
                     for place, each in enumerate(inputs)]
            found = invoke(f"_gluon_amp_{self.op}", given, attrs)[:self.outputs]
            return [float32(each) if is_low and number == 0 else each for number, each in enumerate(found)]
        return function


def numbers(shape, seed=0, scale=1.0):
    """Return random numbers for NumPy; MXNet multiplies no empty arrays."""
    return (np.random.RandomState(seed).standard_normal(shape) * scale).astype("float32")


def results(function, inputs, mutated=(), out_grads=None):
    """Return a function's values, its gradients, and the inputs that it has written, as NumPy arrays."""
    inputs = [each.copy() for each in inputs]
    trained = [each for place, each in enumerate(inputs) if each.dtype != np.int32 and place not in mutated]
    for array in trained:
        array.attach_grad()
    with autograd.record():
        outs = function(*inputs)
        outs = outs if isinstance(outs, list) else [outs]
    if out_grads is None:
        out_grads = [rounded(normal(*out.shape, seed=90 + number)) for number, out in enumerate(outs)]
    autograd.backward(outs, [grad.astype(out.dtype) for grad, out in zip(out_grads, outs)])
    nd.waitall()
    return ([out.asnumpy() for out in outs], [array.grad.asnumpy() for array in trained],
            [inputs[place].asnumpy() for place in mutated])


def expected(case, inputs, exact=False):
    """Return what the reference gives."""
    dtype = "float32" if exact or case.tolerance == 0 else case.exact
    return results(case.reference, [each if each.dtype == np.int32 else each.astype(dtype) for each in inputs],
                   case.mutated)


def compare(case, received, wanted, dtype="float32"):
    def tolerance(is_low):
        if dtype == "float32":
            return case.tolerance
        return case.low if is_low or case.is_low_inside else max(case.tolerance, 1e-5)

    for number, (one, other) in enumerate(zip(received[0], wanted[0])):
        check(one, other, tolerance(number == 0))
    places = [place for place, each in enumerate(case.arrays()) if each.dtype != np.int32 and place not in case.mutated]
    for place, one, other in zip(places, received[1], wanted[1]):
        check(one, other, tolerance(place in case.low_inputs), case.gain)
    for one, other in zip(received[2], wanted[2]):
        check(one, other, max(case.tolerance, 1e-5))


def check(received, wanted, tolerance, floor=0.0):
    assert received.shape == wanted.shape
    if tolerance == 0:
        np.testing.assert_array_equal(received, wanted)
    else:
        scale = max(np.abs(wanted[np.isfinite(wanted)]).max(initial=0), floor)
        np.testing.assert_allclose(received, wanted, rtol=tolerance, atol=tolerance * scale)


# The table.

SHAPES = [(1,), (7,), (1, 1), (5, 1), (3, 17), (64, 96), (2, 3, 5, 31), (3, 20_000), (40_001,)]


def clip(shape, **attrs):
    attrs = {"a_min": -0.5, "a_max": 1.0, **attrs}
    return Case("clip", (shape,), attrs, lambda x: nd.clip(x, **attrs), 0, 0)


def gelu(shape, scale=1.0):
    return Case("gelu", (numbers(shape, scale=scale),), {}, lambda x: nd.LeakyReLU(x, act_type="gelu"))


def hard_swish(shape):
    return Case("hard_swish", (numbers(shape, scale=3),),
                {"shift": 3.0, "a_min": 0.0, "a_max": 6.0, "divisor": 6.0}, lambda x: x * (nd.clip(x + 3, 0, 6) / 6))


def swish(shape, scale=3, beta=1.0):
    return Case("swish", (numbers(shape, scale=scale),), {"beta": beta}, lambda x: x * nd.sigmoid(beta * x))


def prelu(shape, slopes):
    return Case("prelu", (shape, (slopes,)), {}, lambda x, slope: nd.LeakyReLU(x, slope, act_type="prelu"), 2e-6)


def layer_norm(shape, eps=1e-3, tolerance=1e-6):
    return Case("layer_norm", (shape, shape[-1:], shape[-1:]), {"eps": eps},
                lambda *each: nd.LayerNorm(*each, eps=eps), tolerance if shape[-1] > 1 else 1e-5)


def softmax(shape, kind="softmax", temperature=1.0, axis=-1, scale=1.0):
    attrs = {"temperature": temperature, "axis": axis}
    # Where a row is long its values are one sum, and the gradient in bfloat16 comes of rounded results.
    return Case(kind, (numbers(shape, scale=scale),), attrs, lambda x: getattr(nd, kind)(x, **attrs),
                1e-6 if shape[axis] < 100 else 1e-5, 4 * BFLOAT16_ROUNDING, gain=4 / temperature)


def softmax_with_length(shape, temperature=1.0):
    lengths = np.random.RandomState(4).randint(shape[-1] + 1, size=shape[:-1]).astype("int32")
    lengths.flat[0], lengths.flat[-1] = 0, shape[-1]
    attrs = {"use_length": True, "temperature": temperature}
    return Case("softmax", (shape, lengths), attrs, lambda x, length: nd.softmax(x, length, axis=-1, **attrs),
                1e-6 if shape[-1] < 100 else 1e-5, 4 * BFLOAT16_ROUNDING, gain=4 / temperature)


def scale_rows(shape, rows, adds=False, rectifies=False, factors_first=False):
    def reference(*each):
        made = nd.broadcast_mul(*each[:2]) + each[2] if adds else nd.broadcast_mul(*each)
        return nd.relu(made) if rectifies else made

    inputs = (rows, shape) if factors_first else (shape, rows)
    return Case("scale_rows", (*inputs, *([shape] if adds else [])),
                {"adds": adds, "rectifies": rectifies, "factors_first": factors_first}, reference, 2e-6,
                low_inputs=(int(factors_first), 2))


def sum_over(shape, axis, keepdims=False, kind="sum"):
    attrs = {"axis": axis, "keepdims": keepdims}
    return Case(kind, (shape,), attrs, lambda x: getattr(nd, kind)(x, **attrs), low=None)


def global_pooling(shape):
    attrs = {"global_pool": True, "pool_type": "avg", "kernel": (1,) * (len(shape) - 2)}
    return Case("pooling", (shape,), attrs, lambda x: nd.Pooling(x, **attrs), low=None)


def pooling(shape, kernel=(2, 2), stride=(2, 2), pad=(0, 0), **kind):
    attrs = {"kernel": kernel, "stride": stride, "pad": pad, **kind}
    data = np.round(2 * numbers(shape))  # many maxima are met twice
    is_exact = kind["pool_type"] == "max"  # the first of equal values gets the gradient, as in oneDNN
    return Case("pooling", (data,), attrs, lambda x: nd.Pooling(x, **attrs), 0 if is_exact else 1e-6, None)


def resize(shape, size, aligned):
    attrs = {"height": size[0], "width": size[1], "align_corners": aligned}
    return Case("resize", (shape,), attrs, lambda x: nd.contrib.BilinearResize2D(x, **attrs), 2e-5)


FIRST, LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def turned(shape):
    """Return the shape of a map with the channels last."""
    return (shape[0], *shape[2:], shape[1])


def in_first(function):
    """Compute with the channels first of maps that have them last."""
    def reference(data, *others):
        return nd.transpose(function(nd.transpose(data, FIRST), *others), LAST)
    return reference


def batch_norm(shape, limits="none", fix_gamma=False, adds=False, low=BFLOAT16_ROUNDING):
    channels = shape[1]
    attrs = {"eps": 1e-5, "momentum": 0.7, "fix_gamma": fix_gamma}
    bounds = {"none": {}, "relu6": {"a_min": 0.0, "a_max": 6.0}, "relu": {"a_min": 0.0, "rectifies": True},
              "narrow": {"a_min": -0.5, "a_max": 0.25}}[limits]

    def reference(data, *others):
        made = nd.BatchNorm(data, *others[:4], **attrs)
        made = made + nd.transpose(others[4], FIRST) if adds else made
        return nd.relu(made) if limits == "relu" else nd.clip(made, **bounds) if bounds else made

    variance = np.abs(numbers(channels, 4)) + 0.5
    data = turned(shape)
    return Case("batch_norm", (3 * numbers(data) + 2, (channels,), (channels,), (channels,), variance,
                               *([data] if adds else [])), {**attrs, **bounds, "adds": adds}, in_first(reference),
                2e-5, 2 * low, low_inputs=(0, 5), mutated=(3, 4), gain=1.0)


def convolution(shape, filters, kernel=(1, 1), stride=(1, 1), pad=(0, 0), dilate=(1, 1), groups=1, biased=True):
    attrs = {"num_filter": filters, "kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate,
             "num_group": groups, "no_bias": not biased}
    inputs = (turned(shape), (filters, shape[1] // groups, *kernel), *([(filters,)] if biased else []))
    return Case("convolution", inputs, attrs, in_first(lambda *each: nd.Convolution(*each, **attrs)), 2e-6)


def channel_means(shape):
    def reference(x):
        return nd.Pooling(nd.transpose(x, FIRST), global_pool=True, pool_type="avg", kernel=(1, 1))
    return Case("channel_means", (turned(shape),), {}, reference, 2e-6)


def scale_channels(shape):
    return Case("scale_channels", (turned(shape), (*shape[:2], 1, 1)), {}, in_first(nd.broadcast_mul), 2e-6)


def dense(shape, units, flatten=False, biased=True):
    width = int(np.prod(shape[1:])) if flatten else shape[-1]
    attrs = {"num_hidden": units, "flatten": flatten, "no_bias": not biased}
    return Case("dense", (shape, (units, width), *([(units,)] if biased else [])), attrs,
                lambda *each: nd.FullyConnected(*each, **attrs))


def batch_dot(first, second, alpha=1.0, **flags):
    def reference(a, b):
        if b.ndim == 2:
            return nd.dot(a, b, **flags) * alpha
        if a.ndim == 3:
            return nd.batch_dot(a, b, **flags) * alpha
        made = nd.batch_dot(a.reshape((-3, 0, 0)), b.reshape((-3, 0, 0)), **flags) * alpha
        return made.reshape((*first[:2], *made.shape[1:]))

    return Case("batch_dot", (first, second), {**flags, "alpha": alpha}, reference, low_inputs=(0, 1))


def mixed(queries, keys, values, heads, scale, bias=None, mask=None, lengths=None, factors=None):
    """Attention by MXNet's operators, of (batch, length, units)."""
    def by_head(x):
        return nd.transpose(nd.reshape(x, (0, 0, heads, -1)), (0, 2, 1, 3)).reshape((-1, 0, 0), reverse=True)

    def of_all(x):
        return nd.repeat(x, repeats=heads, axis=0)

    scores = nd.batch_dot(by_head(queries) * scale, by_head(keys), transpose_b=True)
    if bias is not None:
        scores = nd.broadcast_add(scores, of_all(bias))
    if mask is not None:
        scores = nd.where(of_all(mask), scores, -1e4 * nd.ones_like(scores))
    if lengths is None:
        weights = nd.softmax(scores, axis=-1)
    else:
        weights = nd.softmax(scores, of_all(lengths), axis=-1, use_length=True)
    weights = weights if mask is None else weights * of_all(mask)
    weights = weights if factors is None else weights * factors
    out = nd.batch_dot(weights, by_head(values)).reshape((-1, heads, 0, 0), reverse=True)
    return nd.reshape(nd.transpose(out, (0, 2, 1, 3)), (0, 0, -1))


def attention(layout, batch, queries, keys, heads, width, *extras, rows=True):
    """A row of attention: ``layout`` also names whether keys and values lie apart from queries."""
    units, scale = heads * width, width ** -0.5
    layout, _, memory = layout.partition(" ")
    is_interleaved = layout == "interleaved"
    random = np.random.RandomState(3)
    mask = (random.uniform(size=(batch, queries, keys)) < 0.7).astype(np.float32)
    mask[:1, 0] = 0  # all positions off
    known = {"bias": (batch, queries if rows else 1, keys), "mask": mask,
             "lengths": random.randint(keys + 1, size=(batch, queries)).astype("int32")}

    def shape(length, parts):
        return (length, batch, parts * units) if is_interleaved else (batch, length, parts * units)

    if layout == "separate":
        names, inputs = ["queries", "keys", "values"], [shape(queries, 1), shape(keys, 1), shape(keys, 1)]
    elif memory:
        names, inputs = ["queries", "keys_values"], [shape(queries, 1), shape(keys, 2)]
    else:
        names, inputs = ["projections"], [shape(keys, 3)]

    def split(array, parts):
        if not is_interleaved:
            return nd.split(array, num_outputs=parts, axis=2) if parts > 1 else [array]
        array = nd.reshape(nd.swapaxes(array, 0, 1), (0, 0, heads, parts, -1))
        return [nd.reshape(nd.slice_axis(array, axis=3, begin=i, end=i + 1), (0, 0, -1)) for i in range(parts)]

    def reference(*given):
        projections = [part for array, count in zip(given, [3] if len(names) == 1 else [1, 2] if memory else [1] * 3)
                       for part in split(array, count)]
        out = mixed(*projections, heads, scale, **dict(zip(extras, given[len(names):])))
        return nd.swapaxes(out, 0, 1) if is_interleaved else out

    attrs = {"layout": layout, "heads": heads, "scale": scale, "masked": -1e4, "operands": ",".join([*names, *extras])}
    return Case("attention", (*inputs, *(known[name] for name in extras)), attrs, reference, 4e-6,
                4 * BFLOAT16_ROUNDING, tuple(range(len(names))), is_low_inside=True, gain=0.1)


GATES = {"lstm": 4, "gru": 3, "rnn_relu": 1, "rnn_tanh": 1}


def rnn(mode, steps=4, batch=3, width=5, states=7, layers=2, directions=2):
    sizes = [width, *[directions * states] * (layers - 1)]
    count = sum(directions * GATES[mode] * states * (size + states + 2) for size in sizes)
    options = {"mode": mode, "state_size": states, "num_layers": layers, "bidirectional": directions == 2}
    state = (layers * directions, batch, states)
    parameters = numbers(count, 1, 0.4)
    low = None if mode == "rnn_relu" and layers > 2 else 24 * BFLOAT16_ROUNDING  # where rounding changes a sign
    return Case("rnn", ((steps, batch, width), parameters, state, *([state] if mode == "lstm" else [])), options,
                lambda *each: list(nd.RNN(*each, state_outputs=True, **options)), 2e-6, low,
                is_low_inside=True, exact="float32", outputs=3 if mode == "lstm" else 2)  # float64 has faults


def boxes(samples, count, ties=False):
    """Return rows of class, score and box; some boxes have a negative width."""
    random = np.random.RandomState(0)
    corner, size = random.uniform(0, 8, (samples, count, 2)), random.uniform(-0.2, 3, (samples, count, 2))
    scores = random.randint(0, 5, (samples, count, 1)) / 5 if ties else random.uniform(-0.1, 1, (samples, count, 1))
    rows = [random.randint(-1, 3, (samples, count, 1)), scores, corner, corner + size]
    return np.concatenate(rows, -1).astype("float32")


def box_nms(data, **attrs):
    return Case("box_nms", (data,), attrs, lambda x: nd.contrib.box_nms(x, **attrs), 0, None)


WINDOWS = [((1, 1), (1, 1), (0, 0)), ((1, 1), (2, 2), (0, 0)), ((2, 2), (2, 2), (0, 0)), ((3, 3), (1, 1), (1, 1)),
           ((3, 3), (2, 2), (1, 1)), ((3, 2), (2, 3), (1, 0)), ((5, 4), (1, 2), (2, 1)), ((3, 3), (3, 1), (2, 2)),
           ((7, 1), (1, 1), (3, 0)), ((2, 5), (4, 3), (1, 4))]
KINDS_OF_POOLING = [{"pool_type": "max"}, {"pool_type": "avg"}, {"pool_type": "avg", "count_include_pad": False}]
ROWS = [((1, 1), (1, 1)), ((3, 5), (3, 1)), ((2, 3, 7, 5), (2, 3, 1, 1)), ((4, 2, 1, 9), (4, 2, 1, 1)),
        ((2, 3, 130, 129), (2, 3, 1, 1)), ((5, 40_001), (5, 1)), ((3, 4, 5), (3, 4, 5)), ((1, 4, 33), (1, 1, 1))]
MAPS = [(1, 1, 1, 2), (2, 5, 3, 3), (3, 32, 4, 4), (2, 70, 9, 8), (4, 96, 28, 28)]
CHANNELS = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 65, 1, 9), (2, 64, 12, 11), (3, 130, 4, 4), (1, 16, 120, 113)]
# batch, queries, keys, heads, width of a head
HEADS = [(1, 1, 1, 1, 1), (2, 5, 5, 3, 4), (3, 17, 17, 2, 33), (1, 130, 130, 1, 8)]
LAYOUTS = ["joined", "interleaved", "separate"]
SUPPRESSION = [{}, {"id_index": 0}, {"id_index": 0, "force_suppress": True}, {"id_index": 0, "topk": 12}, {"topk": 3},
               {"topk": 1000}, {"id_index": 0, "background_id": 1, "valid_thresh": 0.3}, {"valid_thresh": 5},
               {"id_index": 0, "in_format": "center", "out_format": "center", "overlap_thresh": 0.1},
               {"overlap_thresh": 0.95}, {"score_index": 5, "coord_start": 0, "id_index": 4}]

TABLE = [
    *map(clip, SHAPES),
    *(gelu(shape, scale) for shape in SHAPES for scale in (1e-3, 1.0, 20.0)),
    *map(hard_swish, [*SHAPES, (2, 16, 60, 61)]),
    *(swish(shape, scale, beta) for shape in SHAPES for scale, beta in ((1e-3, 1.0), (3, 1.0), (40, 1.0), (1, -1.702))),
    *(prelu(*each) for each in (((3, 5), 1), ((3, 5), 5), ((2, 7, 33), 7), ((40_001,), 1), ((5, 3, 30, 31), 3),
                                ((70, 3, 2, 2), 3), ((33, 9, 1, 15), 9), ((2, 4, 1, 16), 4))),
    *map(layer_norm, [*SHAPES, (200, 33), (1, 768)]), layer_norm((100_000, 4), 1e-5, 3e-6),
    *(softmax(shape, kind, temperature, scale=scale) for kind in ("softmax", "log_softmax")
      for shape in ((1,), (1, 1), (3, 5), (2, 7, 33), (5, 4001), (40_001, 2)) for temperature in (1.0, 0.3, 7.0)
      for scale in (1e-3, 1.0, 20.0)),
    *(softmax(shape, kind, temperature, axis) for kind in ("softmax", "log_softmax") for temperature in (1.0, 0.3)
      for shape, axis in (((3, 5), 0), ((2, 7, 33), 1), ((2, 7, 33), -2), ((4, 21, 9, 13), 1), ((3, 5, 1), 1),
                          ((3, 5, 1, 1), -3), ((2, 3, 65), 2), ((130, 70), 0))),
    *(softmax_with_length(shape, temperature) for temperature in (1.0, 2.5)
      for shape in ((1, 1), (3, 5), (2, 7, 33), (5, 4001), (40_001, 2))),
    *(scale_rows(*each) for each in ROWS),
    *(scale_rows(*each, True, rectifies, first) for each in ROWS for rectifies in (False, True)
      for first in (False, True)),
    *(sum_over(shape, axis, keepdims, kind) for kind in ("sum", "mean") for keepdims in (False, True)
      for shape, axis in (((4, 2, 64, 7, 7), 1), ((3, 5), 0), ((3, 5), 1), ((7,), 0), ((2, 3, 1030), 1),
                          ((3, 5), None), ((9, 7, 1030), ()), ((7,), None),
                          ((1, 300, 17), -2), ((513, 2, 3), 0), ((2, 1, 40), 1), ((5, 4, 3, 2), -1))),
    *map(global_pooling, [(1, 1, 1, 1), (2, 3, 7, 5), (1, 5, 1, 33), (2, 3, 130, 129), (3, 4, 50), (2, 3, 4, 5, 6)]),
    *(pooling(shape, *window, **kind) for kind in KINDS_OF_POOLING for window in WINDOWS
      for shape in ((2, 3, 9, 7), (1, 1, 7, 5), (2, 5, 30, 31), (1, 2, 7, 70), (3, 20, 8, 8))),
    *(resize(*each, aligned) for aligned in (True, False) for each in (
        ((2, 3, 7, 5), (20, 11)), ((1, 2, 9, 9), (4, 3)), ((1, 2, 5, 6), (5, 6)), ((1, 1, 1, 1), (4, 4)),
        ((1, 1, 4, 4), (1, 1)), ((3, 1, 1, 33), (2, 66)), ((1, 4, 33, 1), (70, 5)), ((2, 21, 30, 31), (120, 17)))),
    *(batch_norm(shape, limits, fix) for shape in MAPS for limits in ("none", "relu6", "relu", "narrow")
      for fix in (False, True)),
    *(batch_norm(shape, limits, adds=True) for shape in MAPS for limits in ("none", "relu")),
    *map(channel_means, CHANNELS), *map(scale_channels, CHANNELS),
    *(convolution(*each) for each in (
        ((1, 1, 1, 1), 1), ((2, 16, 8, 8), 32, (1, 1), (1, 1), (0, 0), (1, 1), 1, False),
        ((2, 3, 9, 7), 5, (3, 3), (2, 2), (1, 1)), ((2, 17, 8, 5), 33, (1, 1), (2, 1), (0, 0), (1, 1), 1, False),
        ((2, 12, 9, 11), 8, (3, 2), (1, 2), (2, 0), (2, 1)),
        ((3, 24, 7, 7), 24, (3, 3), (1, 1), (1, 1), (1, 1), 24, False),
        ((3, 19, 8, 9), 19, (3, 3), (2, 2), (1, 1), (1, 1), 19),
        ((2, 96, 13, 11), 96, (3, 3), (2, 2), (1, 1), (1, 1), 96, False),
        ((1, 32, 12, 15), 32, (5, 5), (2, 1), (2, 2), (1, 1), 32),
        ((1, 32, 11, 9), 32, (3, 3), (2, 2), (2, 2), (2, 2), 32, False),
        ((2, 12, 6, 6), 8, (3, 3), (1, 1), (1, 1), (1, 1), 4),
        ((2, 8, 5, 5), 16, (5, 5), (1, 1), (2, 2), (1, 1), 8, False),
        # Large products of pixels: their weight's gradient is a dense layer's; with a stride or padding it is none.
        ((2, 136, 6, 5), 256), ((3, 728, 5, 5), 45, (1, 1), (1, 1), (0, 0), (1, 1), 1, False),
        ((2, 136, 6, 5), 256, (1, 1), (2, 2)), ((2, 136, 6, 5), 256, (1, 1), (1, 1), (1, 0), (1, 1), 1, False))),
    *(dense(*each, biased) for biased in (True, False) for each in (
        ((1, 1), 1, False), ((3, 7), 5, True), ((2, 5, 33), 17, False), ((4, 3, 6), 9, True), ((70, 130), 129, False),
        ((1, 33), 17, False), ((67, 129), 1, False), ((1025, 3), 31, False))),
    *(batch_dot((count, *((k, m) if a else (m, k))), (count, *((n, k) if b else (k, n))), alpha, transpose_a=a,
                transpose_b=b) for a in (False, True) for b in (False, True)
      for count, m, k, n, alpha in ((1, 1, 1, 1, 1.0), (6, 7, 5, 9, 0.25), (3, 64, 33, 48, 1.0))),
    batch_dot((2, 3, 7, 5), (2, 3, 5, 9)), batch_dot((6, 7, 5), (5, 9), 0.5),
    batch_dot((6, 7, 5), (9, 5), transpose_b=True),
    *(attention(layout, *case, *extras, rows=rows) for layout in LAYOUTS for case in HEADS
      for extras, rows in (((), True), (("bias",), False), (("bias",), True))),
    attention("separate", 2, 4, 7, 2, 5), attention("separate", 2, 4, 7, 2, 5, "bias"),
    attention("joined", 9, 300, 300, 2, 4, "bias", rows=False),  # more than a million scores: in parts
    attention("joined memory", 2, 4, 7, 3, 4),
    *(attention("interleaved memory", *case) for case in (*HEADS, (2, 4, 7, 2, 5), (3, 9, 2, 4, 8))),
    *(attention("separate", *case, *extras) for case in ((2, 5, 5, 3, 4), (3, 4, 17, 2, 33))
      for extras in (("mask",), ("lengths",), ("mask", "lengths"))),
    *(rnn(mode, **sizes) for mode in GATES for sizes in (
        {}, {"steps": 1, "batch": 1, "width": 1, "states": 1, "layers": 1, "directions": 1},
        {"steps": 1, "batch": 1, "width": 1, "states": 1, "layers": 3}, {"layers": 1, "directions": 1},
        {"steps": 3, "batch": 5, "width": 33, "states": 17, "layers": 1, "directions": 1}, {"layers": 3},
        {"steps": 2, "batch": 1, "width": 3, "states": 65, "layers": 1}, {"layers": 2, "directions": 1})),
    *(box_nms(boxes(3, count, ties), **attrs) for attrs in SUPPRESSION for count in (1, 7, 500)
      for ties in (False, True)), box_nms(boxes(1, 30)[0]), box_nms(boxes(6, 30).reshape(2, 3, 30, 6))]
# One of each, for what does not depend on sizes.
SAMPLES = {
    "clip": clip((3, 17)), "gelu": gelu((3, 17)), "hard_swish": hard_swish((3, 17)), "swish": swish((3, 17)),
    "prelu": prelu((2, 7, 33), 7),
    "one slope": prelu((2, 7, 33), 1), "narrow prelu": prelu((9, 7, 3), 7), "layer_norm": layer_norm((6, 17)),
    "softmax": softmax((6, 17), temperature=2.0), "log_softmax": softmax((6, 17), "log_softmax", 2.0),
    "softmax of columns": softmax((6, 5, 4), axis=1), "softmax with length": softmax_with_length((6, 17)),
    "scale_rows": scale_rows((4, 3, 5), (4, 3, 1)), "sum of rows": scale_rows((4, 3, 5), (4, 3, 1), True, True),
    "sum": sum_over((4, 5, 20), 1), "mean": sum_over((4, 5, 20), None, kind="mean"),
    "global pooling": global_pooling((4, 3, 5, 5)),
    "maxima": pooling((4, 3, 6, 6), pool_type="max"), "means": pooling((4, 3, 6, 6), pool_type="avg"),
    "resize": resize((4, 3, 4, 5), (7, 9), True), "batch_norm": batch_norm((4, 5, 3, 3), "relu6"),
    "batch_norm and sum": batch_norm((4, 5, 3, 3), "relu", adds=True), "channel_means": channel_means((4, 5, 3, 3)),
    "scale_channels": scale_channels((4, 5, 3, 3)), "convolution": convolution((4, 3, 5, 5), 6, (3, 3), pad=(1, 1)),
    "depthwise": convolution((4, 16, 5, 5), 16, (3, 3), pad=(1, 1), groups=16), "dense": dense((5, 7), 3),
    "batch_dot": batch_dot((4, 7, 5), (4, 5, 9)), "attention": attention("joined", 4, 5, 5, 3, 5, "bias", rows=False),
    "masked": attention("separate", 4, 5, 6, 3, 5, "mask", "lengths"), "box_nms": box_nms(boxes(4, 30)),
    **{mode: rnn(mode) for mode in GATES}}


def in_types(cases):
    """Return parameters of a test: cases, each in the types that its operator runs in."""
    named = cases.items() if isinstance(cases, dict) else [(str(case), case) for case in cases]
    found = []
    for name, case in named:
        for dtype in ["float32", *(["bfloat16"] if case.low is not None else [])]:
            marks = [pytest.mark.bf16] if dtype == "bfloat16" and case.op in ONEDNN else []
            if not native.is_available(f"_gluon_amp_{case.op}"):
                marks.append(pytest.mark.skip(reason=native.load()[1].missing))
            found.append(pytest.param(case, dtype, marks=marks, id=f"{name}-{dtype}"))
    return found


# What holds for all.

def test_every_operator_has_rows():
    others = {"dropout", "all_finite", *native.UPDATES}  # in test_results.py and test_finite.py
    assert {f"_gluon_amp_{op}" for op in {case.op for case in TABLE} | others} == native.OPERATORS


@pytest.mark.parametrize(("case", "dtype"), in_types(TABLE))
def test_values_and_gradients(case, dtype):
    inputs = case.arrays(dtype)
    compare(case, results(case.ours(dtype), inputs, case.mutated), expected(case, inputs), dtype)


# MXNet sorts NaN anywhere in box_nms: that has a test of its own.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-42])
@pytest.mark.parametrize(("case", "dtype"), in_types({name: SAMPLES[name] for name in SAMPLES if name != "box_nms"}))
def test_special_values(case, dtype, value):
    """In place of a number of the data: infinite or NaN is what is so in MXNet's operator, and the rest is as near."""
    if EMULATES_BFLOAT16 and dtype == "bfloat16" and case.attrs.get("mode") == "rnn_relu" and np.isinf(value):
        pytest.skip("oneDNN's emulation makes infinities beside each other NaN, which this layer takes for 0")
    if case.op == "batch_norm" and abs(value) == 1e30:
        value /= 1e15  # whose square is finite, as the variance is then
    inputs = case.arrays(dtype)
    place = case.low_inputs[0]
    inputs[place][tuple(min(1, size - 1) for size in inputs[place].shape)] = value
    if dtype == "bfloat16":
        inputs[place] = rounded(inputs[place])
    received = results(case.ours(dtype), inputs, case.mutated)[0][0]
    wanted = expected(case, inputs, exact=True)[0][0]
    np.testing.assert_array_equal(np.isnan(received), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(received), np.isinf(wanted))
    finite = np.isfinite(wanted)
    tolerance = 20 * BFLOAT16_ROUNDING if dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(received[finite], wanted[finite], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("case", "dtype"), in_types(SAMPLES))
def test_gradients_that_are_not_finite(case, dtype):
    """A gradient that overflowed shows in every array of parameters: the loss scaler looks for it there."""
    inputs = case.arrays(dtype)
    outs = results(case.ours(dtype), inputs, case.mutated)[0]
    grads = [nd.full(out.shape, np.nan) for out in outs]
    for place, grad in enumerate(results(case.ours(dtype), inputs, case.mutated, grads)[1]):
        if (case.op, place) not in {("clip", 0), ("batch_norm", 1)}:  # of values beyond a limit, and of a fixed gamma
            assert np.isnan(grad).any()


@pytest.mark.parametrize(("case", "dtype"), in_types(SAMPLES))
def test_views_need_not_be_aligned(case, dtype):
    def view(array):
        whole = nd.concat(nd.zeros(1, dtype=array.dtype), array.reshape(-1), dim=0)
        return whole[1:].reshape(array.shape)

    inputs = case.arrays(dtype)
    given = [each if place in case.mutated else view(each) for place, each in enumerate(inputs)]
    for one, other in zip(case.ours(dtype)(*given), case.ours(dtype)(*inputs)):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


# With the shape of the result.
EMPTY = {
    "clip": (clip((0, 3)), (0, 3)), "gelu": (gelu((0, 3)), (0, 3)), "hard_swish": (hard_swish((0, 3)), (0, 3)),
    "prelu": (prelu((0, 7, 3), 7), (0, 7, 3)), "layer_norm": (layer_norm((0, 3)), (0, 3)),
    "softmax": (softmax((0, 3)), (0, 3)), "softmax of nothing": (softmax((3, 0)), (3, 0)),
    "log_softmax": (softmax((0, 3), "log_softmax"), (0, 3)), "columns": (softmax((0, 3), axis=0), (0, 3)),
    "columns of nothing": (softmax((3, 0), axis=0), (3, 0)),
    "scale_rows": (scale_rows((0, 3, 4), (0, 3, 1)), (0, 3, 4)),
    "rows of nothing": (scale_rows((2, 3, 0), (2, 3, 1)), (2, 3, 0)), "sum": (sum_over((0, 3, 20), 1), (0, 20)),
    "sum of nothing": (sum_over((2, 0, 20), 1), (2, 20)), "sums of nothing": (sum_over((2, 3, 0), 1), (2, 0)),
    "pooling": (global_pooling((0, 3, 4, 4)), (0, 3, 1, 1)),
    "windows": (pooling((0, 3, 4, 4), pool_type="max"), (0, 3, 2, 2)),
    "resize": (resize((0, 3, 4, 4), (8, 8), True), (0, 3, 8, 8)),
    "batch_norm": (batch_norm((0, 5, 3, 3)), (0, 3, 3, 5)),
    "batch_norm and sum": (batch_norm((0, 5, 3, 3), adds=True), (0, 3, 3, 5)),
    "channel_means": (channel_means((0, 5, 3, 3)), (0, 5, 1, 1)),
    "scale_channels": (scale_channels((0, 5, 3, 3)), (0, 3, 3, 5)),
    "convolution": (convolution((0, 3, 4, 4), 5), (0, 4, 4, 5)), "dense": (dense((0, 6), 4), (0, 4)),
    "batch_dot": (batch_dot((0, 3, 4), (0, 4, 5)), (0, 3, 5)),
    "attention": (attention("separate", 0, 5, 5, 3, 4, "bias"), (0, 5, 12)),
    "box_nms": (box_nms(np.zeros((0, 5, 6), "float32")), (0, 5, 6)),
    **{mode: (rnn(mode, batch=0), (4, 0, 14)) for mode in GATES},
    **{f"{mode} without a step": (rnn(mode, steps=0), (0, 3, 14)) for mode in GATES}}


@pytest.mark.parametrize(("case", "dtype"), in_types({name: case for name, (case, _) in EMPTY.items()}))
def test_nothing_to_do(case, dtype):
    """Values have their shape, gradients of parameters are 0, and what is written on the way stays as it was."""
    def given(array, place):
        if dtype == "float32" or place not in case.low_inputs:
            return array
        return bfloat16(array) if array.size else nd.empty(array.shape, dtype=BFLOAT16_DTYPE)  # MXNet casts no such

    with mx.util.np_shape(True):
        inputs = [given(array, place) for place, array in enumerate(case.arrays())]
        trained = [each for place, each in enumerate(inputs) if each.dtype != np.int32 and place not in case.mutated]
        for array in trained:
            array.attach_grad()
        attrs = {name: str(value) for name, value in case.attrs.items()}
        attrs.update({"dtype": dtype} if case.op == "rnn" else {})
        with autograd.record():
            out = invoke(f"_gluon_amp_{case.op}", inputs, attrs)[0]
        out.backward(nd.zeros(out.shape, dtype=out.dtype) if out.size else nd.empty(out.shape, dtype=out.dtype))
        nd.waitall()
        assert out.shape == next(shape for known, shape in EMPTY.values() if known is case)
        assert [array.grad.shape for array in trained] == [array.shape for array in trained]
        assert not any(array.grad.asnumpy().any() for array in trained if array.size)
        for place in case.mutated:
            np.testing.assert_array_equal(inputs[place].asnumpy(), case.arrays()[place].asnumpy())


def guarded(case, dtype):
    """Return a graph of an operator: what it reads comes through identities, in bfloat16 through casts, too."""
    nodes = [{"op": "null", "name": f"x{index}", "inputs": []} for index in range(len(case.inputs))]

    def added(op, inputs, **attrs):
        attrs = {name: str(value) for name, value in attrs.items()}
        nodes.append({"op": op, "name": f"node{len(nodes)}", "attrs": attrs, "inputs": [[at, 0, 0] for at in inputs]})
        return len(nodes) - 1

    inputs = [added("_copy", [index]) for index in range(len(case.inputs))]
    inputs = [added("amp_cast", [each], dtype=dtype) if place in case.low_inputs else each
              for place, each in enumerate(inputs)]
    attrs = {**case.attrs, "dtype": dtype} if case.op == "rnn" else case.attrs
    last = added("amp_cast", [added(f"_gluon_amp_{case.op}", inputs, **attrs)], dtype="float32")
    return mx.sym.load_json(json.dumps({"nodes": nodes, "arg_nodes": list(range(len(case.inputs))),
                                        "heads": [[last, 0, 0]]}))


def bound(symbol, arrays, grad_req):
    """Return a function that runs a symbol twice, forward and backward, and gives its gradients, by an executor."""
    executor = symbol.bind(mx.cpu(), arrays, args_grad=[array.grad for array in arrays], grad_req=grad_req)
    for _ in range(2):
        out, = executor.forward(is_train=True)
        executor.backward(rounded(normal(*out.shape, seed=9)))


def cached(flags):
    def run(symbol, arrays, grad_req):
        operation = mx.nd.CachedOp(symbol, flags)
        for _ in range(2):
            with autograd.record():
                out = operation(*arrays)
            out.backward(rounded(normal(*out.shape, seed=9)))
    return run


ACCUMULATED = {name: SAMPLES[name] for name in ("clip", "layer_norm", "scale_rows", "dense", "attention", *GATES)}


@pytest.mark.parametrize("run", [bound, *map(cached, CACHED_OP_FLAGS)], ids=["executor", *map(str, CACHED_OP_FLAGS)])
@pytest.mark.parametrize(("case", "dtype"), in_types(ACCUMULATED))
def test_sums_of_gradients_behind_an_identity(case, dtype, run):
    """MXNet does not tell these operators that gradients accumulate: an identity between a variable and them does."""
    found = []
    for grad_req in ("write", "add"):
        arrays = case.arrays()
        for array in arrays:
            array.attach_grad(grad_req)
        run(guarded(case, dtype), arrays, grad_req)
        found.append([array.grad.asnumpy() for array in arrays])
    for one, other in zip(*found):
        np.testing.assert_array_equal(2 * one, other)


@pytest.mark.bf16
def test_threads_on_several_contexts():
    """Each thread runs all operators on a context, with sizes of its own; memory between calls belongs to threads."""
    def work(index):
        cases = [layer_norm((2 + index, 96)), softmax((2 + index, 90), temperature=2.0), dense((2 + index, 7), 3),
                 attention("joined", 2 + index, 5, 5, 3, 5), *(rnn(mode, batch=2 + index) for mode in GATES)]
        found = []
        with mx.Context("cpu", index % 2):
            for _ in range(5):
                for case in cases:
                    values, grads, _ = results(case.ours("bfloat16"), case.arrays("bfloat16"))
                    found += [*values, *grads]
        return found

    with ThreadPoolExecutor(6) as pool:
        received = list(pool.map(work, range(6)))
    for index, together in enumerate(received):
        for one, other in zip(together, work(index)):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["clip", "gelu", "layer_norm", "hard_swish", "swish", "softmax"])
def test_between_convolutions(name):
    """Data and its gradient come in oneDNN's own layout; `make native-check` sees what is read of copies."""
    case = SAMPLES[name]
    x, *weights = (normal(*shape, seed=seed) for seed, shape in enumerate(((2, 32, 24, 24), *[(32, 32, 3, 3)] * 2)))
    others = [nd.ones(24), nd.zeros(24)] if name == "layer_norm" else []

    def between(function):
        def network(data, first, last):
            inner = nd.Convolution(data, first, kernel=(3, 3), pad=(1, 1), num_filter=32, no_bias=True)
            made = function(inner, *others)
            return nd.Convolution(made[0] if isinstance(made, list) else made, last, kernel=(3, 3), pad=(1, 1),
                                  num_filter=32, no_bias=True)
        return network

    found = [results(between(function), [x, *weights]) for function in (case.ours(), case.reference)]
    for one, other in zip(*([*values, *grads] for values, grads, _ in found)):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())


IMAGE = (2, 3, 4, 4)
FILTERS = {"num_filter": 4, "kernel": (3, 3), "no_bias": True}


@pytest.mark.parametrize(("op", "shapes", "attrs", "told"), [
    ("layer_norm", [(2, 3), (4,), (3,)], {}, "expected shape (3), received gamma of shape (4)"),
    ("layer_norm", [(2, 3), (3,), (3,)], {"eps": "small"}, "expected a number, received eps='small'"),
    ("clip", [(2, 3)], {"a_min": 0}, "the attribute a_max is missing"),
    ("prelu", [(2, 3), (2,)], {}, "expected one slope, or one for each channel"),
    ("dropout", [(3,), (64,)], {"p": 1.0}, "expected a probability below 1, received p=1"),
    ("dropout", [(3,), (3,)], {}, "the random bits"),
    ("sgd", [(2,), (3,)], {"lrs": [1], "wds": [0]}, "expected shape (2), received a gradient or a state of shape (3)"),
    ("sgd", [(2,), (2,)], {"lrs": [1, 2], "wds": [0]}, "received 2 lrs and 1 wds for 1 weights"),
    ("adamw", [(2,)] * 4, {"lrs": [1], "wds": [0], "etas": [1, 2]}, "as many etas as weights, received 2 for 1"),
    ("all_finite", [(2,)], {"num_arrays": -1}, "expected a positive number, received num_arrays=-1"),
    ("softmax", [(3, 4)], {"axis": 2}, "an axis of the data, received axis=2"),
    ("softmax", [(3, 4), (3,)], {"use_length": True}, "the lengths of float32"),
    *(("scale_rows", [(2, 3, 4), rows], {}, "expected factors of the data's leading dimensions")
      for rows in ((3, 1, 1), (2, 1, 4), (2, 3), (1, 3, 1))),
    ("sum", [(2, 3)], {"axis": -3}, "expected one axis of data of 2 axes, or all, received axis="),
    ("pooling", [IMAGE], {"kernel": (2, 9), "pool_type": "avg"}, "expected windows no larger than padded maps"),
    ("resize", [(2, 3)], {"height": 4, "width": 4}, "expected images, received data of shape"),
    ("batch_norm", [(2, 3, 3, 4), *[(4,)] * 4, (2, 3, 3, 5)], {"adds": True}, "the map to add of shape"),
    ("channel_means", [(2, 3, 4)], {}, "expected images, received data of shape"),
    ("scale_channels", [(2, 3, 4, 5), (2, 3, 1, 1)], {}, "received the factors of shape (2, 3, 1, 1)"),
    ("convolution", [(1, 5, 5, 2), (4, 3, 3, 3)], FILTERS, "weight of shape"),
    ("convolution", [(1, 2, 5, 2), (4, 2, 3, 3)], FILTERS, "as large as the kernel"),
    ("dense", [(2, 3), (4, 5), (4,)], {"num_hidden": 4}, "weight of shape"),
    ("batch_dot", [(2, 3, 4), (2, 5, 4)], {}, "the matrices do not fit: received shapes (2, 3, 4) and (2, 5, 4)"),
    ("batch_dot", [(2, 3, 4), (3, 4, 5)], {}, "expected equal leading dimensions"),
    ("attention", [(2, 3, 8)], {"layout": "joined", "heads": 2}, "multiple of 6"),
    ("attention", [(2, 3, 12), (2, 1, 4)], {"layout": "joined", "heads": 2, "operands": "projections,bias"},
     "the bias"),
    ("attention", [(4, 2, 12), (7, 2, 12)], {"layout": "interleaved", "heads": 3, "operands": "queries,keys_values"},
     "keys or values"),
    ("rnn", [(4, 3, 0), (5,), (1, 3, 2)], {"mode": "gru", "state_size": 2, "num_layers": 1}, "one input or more"),
    ("box_nms", [(3,)], {}, "received data of shape"), ("box_nms", [(4, 6)], {"score_index": 7}, "its score at 7")])
def test_errors_say_what_was_expected(op, shapes, attrs, told):
    if op in ONEDNN and native.load()[1].missing:
        pytest.skip(native.load()[1].missing)
    with mx.util.np_shape(True), pytest.raises(mx.MXNetError) as error:
        invoke(f"_gluon_amp_{op}", [nd.ones(shape) for shape in shapes],
               {name: str(value) for name, value in attrs.items()})[0].wait_to_read()
    assert told in str(error.value)
