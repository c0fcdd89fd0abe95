"""Replace operators that MXNet has no good CPU kernels for by operators in C++.

::

    LayerNorm(x, gamma, beta)   ->   _gluon_amp_layer_norm(x, gamma, beta)

MXNet's LayerNorm takes ten times as long as need be, mostly backward, its clip branches for every element, and its
products of many small matrices and recurrent layers use neither all threads nor the widest instructions. The operators
of :mod:`gluon_amp.native` take their place where they compute the same. The program's own symbol, from which files are
written, keeps MXNet's operators. Attention is in :mod:`~gluon_amp.passes.native_attention`.

MXNet does not tell operators of libraries that a gradient is to be added to another: an identity stands between
(:mod:`~gluon_amp.passes.identities`).
"""
from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import Callable, Mapping, NamedTuple, Sequence

from ..graph import WISHES, Consumers, Entry, Graph, Node, subgraphs_of
from ..graph.attrs import integer, integers, is_channels_last, is_set
from ..machine.dtypes import AVX2_VALUES, BFLOAT16, FLOAT32
from ..rules import FP32, NEUTRAL, Cause, Decision, Rule
from ..rules.shapes import BLOCK, has_avx2_kernel, is_slow_sum, lacks_softmax, pools_out_of_order, pools_to_means
from ..rules.tables.groups import SOFTMAX, SUMS
from . import channels_last, native_attention, native_recurrent
from .activations import HARD_SWISH, SWISH
from .context import Context
from .precisions import plan_outputs, propagate_dtypes, unknown_forward

_MANY_ROWS = 16  # of a dense layer's data, from which on MXNet's product of matrices is the slower one
_NARROW = 16  # values in a row, below which they cannot be vectorised
_SCALE_ROWS, _PRODUCTS = "_gluon_amp_scale_rows", ("broadcast_mul", "_npi_multiply")
_KEEP_LAYOUT = ("Activation", "relu", "clip", "LeakyReLU", "BatchNorm", "elemwise_add", "_copy")
Shapes = Sequence[Sequence[int]]


def _results(node: Node) -> int:
    return prod(node.shapes[0] or ())


def _operations(node: Node) -> int:
    """Return the multiplications and additions of a product of matrices."""
    return 2 * _results(node) * (node.inputs[0].shape or ())[-2 if is_set(node.attrs, "transpose_a") else -1]


class Replacement(NamedTuple):
    """An operator in C++ that may take the place of one of MXNet's."""

    op: str  # registered name
    types: tuple[str, ...]  # the types of data that it gains in
    least: int  # the work from which on it gains: a call of a library's operator takes longer
    fits: Callable[[Node, Consumers], bool] = lambda *_: True  # takes a node; whether the operator computes the same
    # takes a node of known shapes; what ``least`` is of, by default its data's values
    work: Callable[[Node], int] = lambda node: prod(node.inputs[0].shape or ())
    fp32_inputs: tuple[int, ...] = ()  # inputs that stay FP32 where the data is in low precision
    gains: Callable[[Node, Context], bool] = lambda *_: True  # takes a node; whether it is faster on this device
    rule: Rule | None = None  # how its precision is decided, where MXNet's operator has no bfloat16 kernel
    known: int = 2  # how many of its first inputs have to have a known shape before MXNet infers shapes backward
    integers: tuple[int, ...] = ()  # inputs that are int32, and have no gradient
    # takes a node and the shapes of its first two inputs; whether it may be replaced there. A graph of its own is made
    # where other calls decide otherwise.
    follows: Callable[[Node, Shapes], bool] | None = None


def _is_softmax_of_rows(node: Node, consumers: Consumers) -> bool:
    """Tell whether a temperature and lengths are heeded, these over the last axis, whatever the number of axes is."""
    return (node.attrs.get("dtype", "None") == "None" and 0 < _temperature(node) < inf
            and (not is_set(node.attrs, "use_length")
                 or (len(node.inputs) == 2 and len(node.inputs[0].shape or ()) > 1
                     and integer(node.attrs, "axis", -1) == -1)))


def _is_slow_softmax(node: Node, context: Context) -> bool:
    """Tell whether oneDNN runs it over the last axis only, not at all, or, without AVX512, no logarithm's gradient."""
    return (_temperature(node) != 1 or is_set(node.attrs, "use_length") or lacks_softmax(
        node.op, node.attrs, node.inputs[0].shape or (), _NARROW, context.facts.recorded,
        context.device.channel_multiple != AVX2_VALUES))


def _temperature(node: Node) -> float:
    given = node.attrs.get("temperature", "None")
    return 1.0 if given == "None" else float(given)


def _is_plain_resize(node: Node, consumers: Consumers) -> bool:
    """Tell whether the size of the result is given, rather than a factor or another tensor."""
    attrs = node.attrs
    return (len(node.inputs) == 1 and attrs.get("mode", "size") == "size" and len(node.inputs[0].shape or ()) == 4
            and {attrs.get("scale_height", "None"), attrs.get("scale_width", "None")} == {"None"}
            and min(integer(attrs, "height", 0), integer(attrs, "width", 0)) > 0)


def _is_inner_layer(node: Node, shapes: Shapes) -> bool:
    """Tell whether rows and weights are many, and the gradient of the data, which is always computed, is of use."""
    # MXNet's takes data of one dimension for a column.
    data, weight = shapes
    return (len(data) > 1 and _rows(node, data) >= _MANY_ROWS and prod(weight) >= REPLACEMENTS["FullyConnected"].least
            and not node.inputs[0].node.is_variable)


def _rows(node: Node, data: Sequence[int]) -> int:
    return prod(data[:1] if is_set(node.attrs, "flatten", True) else data[:-1])


def _pools_windows(node: Node, consumers: Consumers) -> bool:
    """Tell whether means of whole channels are taken, or means or maxima of windows that lie on a padded image."""
    attrs = node.attrs
    if is_set(attrs, "global_pool"):
        return pools_to_means(attrs)
    kernel, pads = integers(attrs, "kernel"), integers(attrs, "pad")
    return (attrs.get("pool_type", "max") in ("max", "avg") and attrs.get("pooling_convention", "valid") == "valid"
            and len(kernel) == 2 and len(node.inputs[0].shape or ()) == 4 and not is_channels_last(attrs)
            and all(pad < side for pad, side in zip(pads, kernel)) and consumers.is_first_only(node))


def _is_slow_pooling(node: Node, context: Context) -> bool:
    """Tell whether oneDNN has no kernel for the gradient, or takes values one by one."""
    # A shape rule keeps pooling in FP32 for its gradient, for which oneDNN's FP32 has no kernel either in some layouts.
    device, data = context.device, node.inputs[0]
    if is_set(node.attrs, "global_pool"):
        return (context.facts.recorded
                and pools_out_of_order(node.attrs, data.shape or (), device.amx, device.channel_multiple or BLOCK))
    return device.channel_multiple == AVX2_VALUES and context.int8 is None and _lies_in_rows(data)


def _lies_in_rows(data: Entry) -> bool:
    """Tell whether a map is in no layout of oneDNN's without AVX512, which has blocks of 8 channels."""
    if (data.shape or (0, 0))[1] % AVX2_VALUES:
        return True
    node = data.node
    while node.op in _KEEP_LAYOUT:
        node = node.inputs[0].node
    # A convolution may be one that oneDNN's fusion holds.
    parts = subgraphs_of(node)[0].operators() if node.op == "_sg_mkldnn_conv" else [node]
    attrs = next((each.attrs for each in parts if each.op == "Convolution"), None)
    return node.op == "transpose" or (
        attrs is not None and not has_avx2_kernel(attrs, node.inputs[0].shape, node.shapes[0]))


def factors_come_first(node: Node, shapes: Shapes) -> bool:
    """Tell whether a node multiplies rows by factors, and these are its first input."""
    return node.op in _PRODUCTS and not _are_factors(*shapes) and _are_factors(*shapes[::-1])


def _are_factors(data: Sequence[int], factors: Sequence[int]) -> bool:
    """Tell whether rows of data are times one factor each, as channels in squeeze and excite."""
    axes = next((axis for axis in range(len(factors), 0, -1) if factors[axis - 1] != 1), 0)
    return len(data) == len(factors) and axes > 0 and data[:axes] == factors[:axes] and prod(data[axes:]) >= _NARROW


# Measured on an AMD EPYC with AVX512-BF16, 2 threads, in cached ops with static shapes: below these forward or training
# takes longer than with MXNet's operators (docs/design/native.md). The least work of attention is estimated.
# LeakyReLU is several operators: its form is part of the name.
REPLACEMENTS: Mapping[str, Replacement] = {
    "LayerNorm": Replacement(  # of the last axis: with other numbers of axes a positive one may not be the last
        "_gluon_amp_layer_norm", (FLOAT32,), 2048,
        lambda node, consumers: ((node.inputs[0].shape or (0,))[-1] >= _NARROW and consumers.is_first_only(node)
                                 and integer(node.attrs, "axis", -1) == -1),
        rule=Rule(NEUTRAL, fp32_inputs=(1, 2), note="statistics, scale and shift are FP32")),
    "clip": Replacement("_gluon_amp_clip", (FLOAT32, BFLOAT16), 16384),
    "batch_dot": Replacement("_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, work=_operations),
    "FullyConnected": Replacement("_gluon_amp_dense", (FLOAT32, BFLOAT16), 512 * 512, follows=_is_inner_layer,
                                  work=lambda node: prod(node.inputs[1].shape or ()), fp32_inputs=(1, 2)),
    "_npi_matmul": Replacement(  # a pile times another of the same leading dimensions, or times one matrix
        "_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, work=_operations,
        follows=lambda _, shapes: len(shapes[0]) > 2 and (len(shapes[1]) == 2 or shapes[0][:-2] == shapes[1][:-2])),
    "_linalg_gemm2": Replacement(
        "_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, work=_operations,
        fits=lambda node, _: len(node.inputs[0].shape or ()) > 2 and integer(node.attrs, "axis", -2) == -2),
    "LeakyReLU gelu": Replacement("_gluon_amp_gelu", (FLOAT32, BFLOAT16), 65536,
                                  gains=lambda _, context: context.facts.recorded),
    "LeakyReLU prelu": Replacement(  # of one slope, or one for each channel, which comes behind the batch
        "_gluon_amp_prelu", (FLOAT32,), 1024,
        follows=lambda _, shapes: len(shapes[1]) == 1 and shapes[1][0] in (1, *shapes[0][1:2]),
        rule=Rule(NEUTRAL, fp32_inputs=(1,), note="native bfloat16 kernel; slopes are FP32")),
    "Dropout": Replacement(
        "_gluon_amp_dropout", (FLOAT32,), 16384,
        lambda node, consumers: native_attention.is_plain_dropout(Entry(node)) and consumers.is_first_only(node),
        gains=lambda _, context: context.facts.recorded and native_attention.may_draw(context),
        rule=Rule(NEUTRAL, fp32_inputs=(1,), note="native bfloat16 kernel")),
    **{op: Replacement(f"_gluon_amp_{op}", (FLOAT32, BFLOAT16), 16384, _is_softmax_of_rows, gains=_is_slow_softmax,
                       known=1, integers=(1,))
       for op in SOFTMAX},
    **dict.fromkeys(_PRODUCTS, Replacement(
        _SCALE_ROWS, (FLOAT32,), 16384, work=_results,
        follows=lambda node, shapes: _are_factors(*shapes) or factors_come_first(node, shapes),
        rule=Rule(NEUTRAL, fp32_inputs=(1,), note="native bfloat16 kernel; factors are FP32"))),
    **{op: Replacement(f"_gluon_amp_{op}", (FLOAT32,), 16384,
                       lambda node, _: is_slow_sum(node.attrs, node.inputs[0].shape or ())) for op in SUMS},
    "Pooling": Replacement("_gluon_amp_pooling", (FLOAT32,), 16384, _pools_windows, gains=_is_slow_pooling),
    "_contrib_BilinearResize2D": Replacement("_gluon_amp_resize", (FLOAT32,), 16384, _is_plain_resize, work=_results,
                                             rule=Rule(NEUTRAL, note="native bfloat16 kernel")),
    "_contrib_box_nms": Replacement(  # of boxes that come and go in one format, and some of which are compared
        "_gluon_amp_box_nms", (FLOAT32,), 16384, lambda node, consumers: (
            node.attrs.get("in_format", "corner") == node.attrs.get("out_format", "corner")
            and integer(node.attrs, "topk", -1) != 0 and consumers.is_first_only(node))),
    "RNN": Replacement("_gluon_amp_rnn", (FLOAT32,), 128, native_recurrent.fits, known=1),
}
NATIVE = (frozenset(each.op for each in REPLACEMENTS.values()) | {native_attention.ATTENTION, HARD_SWISH, SWISH}
          | channels_last.NATIVE)


def native_operators(graph: Graph, context: Context) -> int:
    """Replace the operators that run faster in C++; return how many."""
    if context.target == BFLOAT16 and not context.converted:
        _widen_thin_layers(graph, context)
    unknown = unknown_forward(graph)
    fused = native_attention.fuse_attention(graph, context, unknown)
    consumers = Consumers(graph)
    found = [(node, each) for node in graph.operators() for each in [replacement_of(node)]
             if each is not None and _is_large(node, each) and each.fits(node, consumers) and each.gains(node, context)
             and may_replace(node, [entry.shape or () for entry in node.inputs[:2]])
             and not any(entry.node in unknown for entry in node.inputs[:each.known])
             and context.runs_natively(each.op)]
    for node, each in found:
        _replace(graph, node, each, context)
    if not context.policy.lowers and context.facts.trains and context.facts.recorded:
        # Products add a map that is added to them, and rectify the sum: a map less is kept for backward.
        channels_last.fuse_add(graph, graph.operators(), Consumers(graph), _SCALE_ROWS)
    if context.target == BFLOAT16:
        propagate_dtypes(graph, context)
    return len(found) + fused


def _widen_thin_layers(graph: Graph, context: Context) -> None:
    """Train dense layers of few rows in FP32: a cast of the weight, and of its gradient, costs more than it saves."""
    # The weight would also be kept twice: AlexNet took 1.4 times the memory of FP32.
    if not (context.facts.trains and context.facts.recorded and context.device.mixes):
        return
    consumers = Consumers(graph)
    for node in graph.operators():
        if node.op == "FullyConnected" and Entry(node).dtype == BFLOAT16 and node.decided.cause not in WISHES:
            (data, weight), least = node.inputs[:2], REPLACEMENTS["FullyConnected"].least
            if (data.shape and weight.node.is_variable and consumers.is_read_once(weight)
                    and prod(weight.shape or ()) >= least and _rows(node, data.shape) < _MANY_ROWS):
                node.decision = Decision(FP32, Cause.DEVICE, f"a cast of its weight takes longer than {BFLOAT16} saves "
                                                             "for few rows")
                plan_outputs(node, context)
    propagate_dtypes(graph, context)


def _replace(graph: Graph, node: Node, by: Replacement, context: Context) -> None:
    is_free = node.decision is not None and node.decision.cause is Cause.TABLE
    if by.rule is not None and context.target == BFLOAT16 and is_free:
        node.decision = by.rule.decision
    if factors_come_first(node, [entry.shape or () for entry in node.inputs]):  # variables have to keep their order
        node.attrs = {**node.attrs, "factors_first": "True"}
        if node.decision is not None and node.decision.fp32_inputs:
            node.decision = replace(node.decision, fp32_inputs=(0,))
    if node.op == "Dropout":
        node.inputs = [*node.inputs, native_attention.random_bits(graph, node)]
    node.replaced, node.op = node.op, by.op
    if by.fp32_inputs and Entry(node).dtype != FLOAT32 and node.decision is not None:
        node.decision = replace(node.decision, fp32_inputs=by.fp32_inputs)
    if node.replaced == "RNN":
        native_recurrent.fit(graph, node, context)
    else:
        node.num_outputs = 1
        node.dtypes, node.shapes, node.planned = node.dtypes[:1], node.shapes[:1], node.planned[:1]


def replacement_of(node: Node) -> Replacement | None:
    """Return the replacement of a node's operator; None where there is none."""
    return REPLACEMENTS.get(f"{node.op} {node.attrs.get('act_type')}" if node.op == "LeakyReLU" else node.op)


def following(graph: Graph) -> frozenset[str]:
    """Return the operators of a graph that :func:`may_replace` decides on at every call."""
    return frozenset(node.op for node in graph.operators() for each in [replacement_of(node)]
                     if each is not None and each.follows is not None)


def may_replace(node: Node, shapes: Shapes) -> bool:
    """Tell whether shapes of a node's first two inputs, which other calls may change, let C++ take its place."""
    each = replacement_of(node)
    return each is None or each.follows is None or (len(shapes) == 2 and each.follows(node, shapes))


def _is_large(node: Node, replacement: Replacement) -> bool:
    """Tell whether types are right and sizes known: MXNet ends the process where it infers shapes without them."""
    shapes = [entry.shape for entry in node.inputs]
    return (Entry(node).dtype in replacement.types and node.inputs[0].dtype in (FLOAT32, BFLOAT16)
            and all(entry.node.dtypes[entry.output] == ("int32" if position in replacement.integers else FLOAT32)
                    for position, entry in enumerate(node.inputs))
            and all(shapes) and node.shapes[0] is not None and replacement.work(node) >= replacement.least)
