"""Put operators in C++ in the place of those that MXNet has no good CPU kernels for.

MXNet's LayerNorm takes ten times as long as need be, mostly backward, its clip branches for every element, and its
products of many small matrices and recurrent layers use neither all threads nor the widest instructions. The operators
of :mod:`gluon_amp.native` take their place where they compute the same in FP32, whatever the rest of the graph runs in.
The program's own symbol, from which files are written, keeps MXNet's operators. clip runs in bfloat16, too: between
convolutions that saves the casts that MXNet's needs.

Dense layers and attention (:mod:`~gluon_amp.passes.native_attention`) run in either type, LayerNorm and dropout in that
of their data.

MXNet does not tell operators of libraries that a gradient is to be added to what is there: an identity stands between
(:mod:`~gluon_amp.passes.identities`).
"""
from __future__ import annotations

from dataclasses import replace
from math import inf, prod
from typing import Callable, Mapping, NamedTuple

from ..dtypes import AVX2_VALUES, BFLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, Readers
from ..graph.attrs import integer, is_set, symbol_attributes
from ..graph.decision import WISHES
from ..rules import FP32, LOWER, NEUTRAL, Cause, Decision, Rule
from ..rules.shapes import values_behind
from ..rules.tables.groups import SOFTMAX
from . import channels_last, hard_swish, native_dropout, native_pooling, native_products, native_recurrent
from .assign_dtypes import decide, follow
from .context import Context
from .known_forward import unknown_forward
from .native_attention import Attention, find, listed
from .native_casts import Made, give_low, in_type
from .native_products import NARROW, Shapes

_FP32_INPUTS = ("bias", "mask", "bits")  # of attention
_ATTENTION, _LEAST_ATTENTION = "_gluon_amp_attention", 500_000
_MANY_ROWS = 16  # of a dense layer's data, from which on MXNet's product of matrices is the slower one


def is_needed(context: Context) -> bool:
    """Tell whether there are such operators for the device."""
    return context.native is not None and context.policy.runs_native(context.device)


def _values(node: Node) -> int:
    return prod(node.inputs[0].shape or ())


def _weights(node: Node) -> int:
    return prod(node.inputs[1].shape or ())


def _operations(node: Node) -> int:
    """Return the multiplications and additions of a product of matrices."""
    matrix = node.inputs[0].shape or ()
    return 2 * prod(node.shapes[0] or ()) * matrix[-2 if is_set(node.attrs, "transpose_a") else -1]


def _always(node: Node, of: Readers | Context) -> bool:
    return True


def _recorded(node: Node, context: Context) -> bool:
    """Whether gradients may be asked for, which is where it gains."""
    return context.facts.recorded


def _keeps_format(node: Node, readers: Readers) -> bool:
    """Whether boxes come and go in one format, and some are compared."""
    attrs = node.attrs
    return (attrs.get("in_format", "corner") == attrs.get("out_format", "corner") and integer(attrs, "topk", -1) != 0
            and readers.is_first_only(node))


class Replacement(NamedTuple):
    """What takes the place of an operator of MXNet's."""

    op: str  # registered name
    types: tuple[str, ...]  # the types of data that it gains in
    least: int  # the work from which on it gains: a call of a library's operator takes longer
    # takes a node and says whether the operator computes the same
    fits: Callable[[Node, Readers], bool] = _always
    # takes a node of known shapes; of what the least is meant. The values of its data by default.
    work: Callable[[Node], int] = _values
    fp32_inputs: tuple[int, ...] = ()  # those that stay FP32 where the data is in low precision
    gains: Callable[[Node, Context], bool] = _always  # takes a node and says whether it is faster on this device
    rule: Rule | None = None  # how its precision is decided, where MXNet's operator has no bfloat16 kernel
    known: int = 2  # how many of its first inputs have to have a known shape before MXNet infers shapes backward
    integers: tuple[int, ...] = ()  # inputs that are int32, and have no gradient
    # takes a node and the shapes of its first two inputs, and says whether it may be replaced there. A graph of its own
    # is made where other calls decide otherwise.
    follows: Callable[[Node, Shapes], bool] | None = None


def _is_simple_layer_norm(node: Node, readers: Readers) -> bool:
    """Whether the last axis is normalised; other numbers of axes may come, for which a positive one is not the last."""
    return ((node.inputs[0].shape or (0,))[-1] >= NARROW and integer(node.attrs, "axis", -1) == -1
            and readers.is_first_only(node))


def _is_sloped(node: Node, shapes: Shapes) -> bool:
    """Whether there is one slope, or one for each channel, which comes behind the batch."""
    data, slopes = shapes
    return len(slopes) == 1 and (slopes[0] == 1 or (len(data) > 1 and slopes[0] == data[1]))


def _is_pile(node: Node, readers: Readers) -> bool:
    """Whether the product is of the last two axes of more."""
    return len(node.inputs[0].shape or ()) > 2 and integer(node.attrs, "axis", -2) == -2


def _is_matmul(node: Node, shapes: Shapes) -> bool:
    """Whether a pile is times another of the same leading dimensions, or times one matrix."""
    left, right = shapes
    return len(left) > 2 and (len(right) == 2 or left[:-2] == right[:-2])


def _is_softmax_of_rows(node: Node, readers: Readers) -> bool:
    """Whether a temperature and lengths are heeded, these over the last axis, whatever the number of axes is."""
    return (node.attrs.get("dtype", "None") == "None" and 0 < _temperature(node) < inf
            and (not is_set(node.attrs, "use_length")
                 or (len(node.inputs) == 2 and len(node.inputs[0].shape or ()) > 1
                     and integer(node.attrs, "axis", -1) == -1)))


def _is_slow_softmax(node: Node, context: Context) -> bool:
    """Whether oneDNN runs it over the last axis only, not at all, or, of a logarithm without AVX512, no gradient."""
    behind = values_behind(node.inputs[0].shape or (), integer(node.attrs, "axis", -1))
    return (_temperature(node) != 1 or is_set(node.attrs, "use_length") or behind >= NARROW
            or (behind == 1 and node.op == "log_softmax" and context.facts.recorded
                and context.device.channel_multiple == AVX2_VALUES
                and (node.inputs[0].shape or (0,))[-1] >= AVX2_VALUES))


def _is_plain_resize(node: Node, readers: Readers) -> bool:
    """Whether the size of the result is given, rather than a factor or another tensor."""
    attrs = node.attrs
    return (len(node.inputs) == 1 and attrs.get("mode", "size") == "size" and len(node.inputs[0].shape or ()) == 4
            and {attrs.get("scale_height", "None"), attrs.get("scale_width", "None")} == {"None"}
            and min(integer(attrs, "height", 0), integer(attrs, "width", 0)) > 0)


def _results(node: Node) -> int:
    return prod(node.shapes[0] or ())


def _temperature(node: Node) -> float:
    given = node.attrs.get("temperature", "None")
    return 1.0 if given == "None" else float(given)


def _is_inner_layer(node: Node, shapes: Shapes) -> bool:
    """Whether rows and weights are many, and the gradient of the data, which is always computed, is of use.

    MXNet's takes data of one dimension for a column.
    """
    data, weight = shapes
    rows = data[:1] if is_set(node.attrs, "flatten", True) else data[:-1]
    return (len(data) > 1 and prod(rows) >= _MANY_ROWS and prod(weight) >= REPLACEMENTS["FullyConnected"].least
            and not node.inputs[0].node.is_variable)


def _is_slow_sum(node: Node, readers: Readers) -> bool:
    """Whether values are added up along one axis, with some behind it."""
    axes = [each for each in node.attrs.get("axis", "None").strip("()[]").split(",") if each.strip()]
    if len(axes) != 1 or axes[0].strip() == "None" or is_set(node.attrs, "exclude"):
        return False
    return values_behind(node.inputs[0].shape or (), int(axes[0])) >= NARROW


# Measured on an AMD EPYC with AVX512-BF16, 2 threads, in cached ops with static shapes: below these forward or training
# takes longer than with MXNet's operators. Dense layers of 16 rows and 512 x 512 weights or more are up to 4.9 times as
# fast in both types, of fewer rows 0.7 to 1.5 times. Attention was measured in whole steps of an encoder, 768 units,
# 128 tokens, batch 4: 14% of a step in bfloat16 and 7% in FP32. Its least work is estimated. Of 1.6M values, forward
# and backward, dropout takes 1.2 ms in FP32 and 0.8 ms in bfloat16 where MXNet's takes 6.0 ms, GELU 1.7 ms in either
# where MXNet's takes 2.1 ms. np.matmul of piles is 1.5 to 2.7 times as fast, of two matrices 0.9 to 1.3 times. oneDNN's
# softmax is as fast as that in C++ (0.5 to 1.2 times), but for the logarithm's gradient without AVX512: forward and
# backward takes 1.5 to 4.0 times as long on an AMD EPYC with AVX2, of rows of two values 0.8 times. MXNet's own one,
# for temperatures and lengths, takes 1.2 to 8.7 times as long from 16,384 values on. Channels times factors take MXNet
# 2 times as long at 16,384 values, 10 to 17 times from 225,000 on, forward and backward. Softmax over another axis than
# the last takes MXNet 2.4 to 5 times as long on an AMD EPYC with AVX2, of 16 values behind it or more. Sums over one
# axis, as in ResNeSt-50, take MXNet 34 times as long on an Intel Xeon with AVX512, their gradients 11 times.
# LeakyReLU is several operators: its form is part of the name.
REPLACEMENTS: Mapping[str, Replacement] = {
    "LayerNorm": Replacement("_gluon_amp_layer_norm", (FLOAT32,), 2048, _is_simple_layer_norm,
                             rule=Rule(NEUTRAL, fp32_inputs=(1, 2), note="statistics, scale and shift are FP32")),
    "clip": Replacement("_gluon_amp_clip", (FLOAT32, BFLOAT16), 16384),
    "batch_dot": Replacement("_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, work=_operations),
    "FullyConnected": Replacement("_gluon_amp_dense", (FLOAT32, BFLOAT16), 512 * 512, work=_weights, fp32_inputs=(1, 2),
                                  follows=_is_inner_layer),
    "_npi_matmul": Replacement("_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, work=_operations, follows=_is_matmul),
    "_linalg_gemm2": Replacement("_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, _is_pile, work=_operations),
    "LeakyReLU gelu": Replacement("_gluon_amp_gelu", (FLOAT32, BFLOAT16), 65536, gains=_recorded),
    "LeakyReLU prelu": Replacement("_gluon_amp_prelu", (FLOAT32,), 1024, follows=_is_sloped,
                                   rule=Rule(NEUTRAL, fp32_inputs=(1,),
                                             note="native bfloat16 kernel; slopes are FP32")),
    "Dropout": Replacement("_gluon_amp_dropout", (FLOAT32,), 16384, native_dropout.fits, gains=_recorded,
                           rule=Rule(NEUTRAL, fp32_inputs=(1,), note="native bfloat16 kernel")),
    **{op: Replacement(f"_gluon_amp_{op}", (FLOAT32, BFLOAT16), 16384, _is_softmax_of_rows, gains=_is_slow_softmax,
                       known=1, integers=(1,))
       for op in SOFTMAX},
    **dict.fromkeys(native_products.PRODUCTS, Replacement(
        native_products.OP, (FLOAT32,), 16384, work=_results, follows=native_products.follows,
        rule=Rule(NEUTRAL, fp32_inputs=(1,), note="native bfloat16 kernel; factors are FP32"))),
    "sum": Replacement("_gluon_amp_sum", (FLOAT32,), 16384, _is_slow_sum),
    "Pooling": Replacement("_gluon_amp_pooling", (FLOAT32,), 16384, native_pooling.fits, gains=native_pooling.gains),
    "_contrib_BilinearResize2D": Replacement("_gluon_amp_resize", (FLOAT32,), 16384, _is_plain_resize, work=_results,
                                             rule=Rule(NEUTRAL, note="native bfloat16 kernel")),
    "_contrib_box_nms": Replacement("_gluon_amp_box_nms", (FLOAT32,), 16384, _keeps_format),
    "RNN": Replacement("_gluon_amp_rnn", (FLOAT32,), 128, native_recurrent.fits, known=1),
}
NATIVE = frozenset(each.op for each in REPLACEMENTS.values()) | {_ATTENTION, hard_swish.OP} | channels_last.NATIVE


def run(graph: Graph, context: Context) -> int:
    """Replace what runs faster in C++; return how many operators."""
    unknown = unknown_forward(graph)
    fused = _fuse_attention(graph, context, unknown)
    readers = Readers(graph)
    found = [(node, each) for node in graph.operators() for each in [replacement_of(node)]
             if each is not None and _is_large(node, each) and each.fits(node, readers) and each.gains(node, context)
             and may_replace(node, [entry.shape or () for entry in node.inputs[:2]])
             and not any(entry.node in unknown for entry in node.inputs[:each.known])
             and context.runs_natively(each.op)]
    for node, each in found:
        is_free = node.decision is not None and node.decision.cause is Cause.TABLE
        if each.rule is not None and context.target == BFLOAT16 and is_free:
            node.decision = each.rule.decision
        if node.op == "RNN":
            native_recurrent.separate_parameters(node)
        native_products.note_order(node)
        if node.op == "Dropout":
            node.inputs = [*node.inputs, native_dropout.random_bits(graph, node)]
        node.replaced, node.op = node.op, each.op
        if each.fp32_inputs and Entry(node).dtype != FLOAT32 and node.decision is not None:
            node.decision = replace(node.decision, fp32_inputs=each.fp32_inputs)
        if node.replaced == "RNN":
            native_recurrent.fit(graph, node, context)
        else:
            node.num_outputs = 1
            node.dtypes, node.shapes, node.planned = node.dtypes[:1], node.shapes[:1], node.planned[:1]
    native_products.take_sums(graph, context)
    if context.target == BFLOAT16:
        follow(graph, context)
    return len(found) + fused


def replacement_of(node: Node) -> Replacement | None:
    """Return what may take the place of a node's operator; None where there is nothing."""
    return REPLACEMENTS.get(f"{node.op} {node.attrs.get('act_type')}" if node.op == "LeakyReLU" else node.op)


def following(graph: Graph) -> frozenset[str]:
    """Return the operators of a graph that :func:`may_replace` decides on at every call."""
    return frozenset(node.op for node in graph.operators() for each in [replacement_of(node)]
                     if each is not None and each.follows is not None)


def may_replace(node: Node, shapes: Shapes) -> bool:
    """Tell whether shapes of a node's first two inputs, which other calls may change, let C++ take its place."""
    each = replacement_of(node)
    return each is None or each.follows is None or (len(shapes) == 2 and each.follows(node, shapes))


def _fuse_attention(graph: Graph, context: Context, unknown: set[Node]) -> int:
    """Put one operator in the place of those that compute attention; return how many times."""
    readers = Readers(graph)
    found = [each for each in find(graph, readers) if _gains_as_one(each, context)
             and not any(entry.node in unknown for entry in each.inputs.values())]
    if not found or not context.runs_natively(_ATTENTION):
        return 0
    casts: Made = {}
    for each in found:
        node, inputs = each.node, dict(each.inputs)
        if each.dropout is not None:
            inputs["bits"] = native_dropout.random_bits(graph, each.dropout)
        kept = tuple(position for position, name in enumerate(inputs) if name in _FP32_INPUTS)
        decision = _decision_on(each, context, kept)
        dtype = BFLOAT16 if decision.rule == LOWER else FLOAT32
        if context.converted:
            inputs.update((name, in_type(graph, entry, dtype, casts, readers)) for name, entry in each.inputs.items()
                          if name not in (*_FP32_INPUTS, "lengths"))
        node.inputs = list(inputs.values())
        node.replaced, node.op = node.op, _ATTENTION
        attrs = {**each.attrs, "operands": ",".join(inputs)}
        node.attrs = {**symbol_attributes(node.attrs), **{name: str(value) for name, value in attrs.items()}}
        node.dtypes = [FLOAT32]
        if not context.converted:
            node.decision, node.planned = decision, [dtype]
        elif dtype == BFLOAT16:
            give_low(graph, node)
    return len(found)


def _gains_as_one(found: Attention, context: Context) -> bool:
    known = all(entry.shape and entry.node.dtypes[entry.output] in _types_of(name, context)
                for name, entry in found.inputs.items())
    shape, weights = found.node.shapes[0], found.softmax.shapes[0]
    if not known or shape is None or weights is None:
        return False
    return 2 * prod(weights) * shape[-1] // int(str(found.attrs["heads"])) >= _LEAST_ATTENTION


def _types_of(name: str, context: Context) -> tuple[str, ...]:
    """Return the types that an input of attention may have before casts are placed."""
    if name == "lengths":
        return ("int32",)
    return (FLOAT32, BFLOAT16) if context.converted and name not in _FP32_INPUTS else (FLOAT32,)


def _decision_on(found: Attention, context: Context, fp32_inputs: tuple[int, ...]) -> Decision:
    """Return low precision, unless nothing has it or the user wants FP32 of one of the operators."""
    nodes = (*found.products, found.softmax)
    # A converted graph has no decisions any more.
    decisions = [decide(replace(node, op=listed(node)), context) if context.converted else node.decided
                 for node in nodes]
    if not context.policy.lowers:
        return decisions[-1]
    for decision in decisions:
        if decision.cause in WISHES and decision.rule == FP32:
            return replace(decision, fp32_inputs=())
    if context.converted and (context.policy.training or context.target != BFLOAT16):
        return decisions[-1]
    return Decision(LOWER, Cause.TABLE, "attention in C++ keeps its scores in FP32", fp32_inputs)


def _is_large(node: Node, replacement: Replacement) -> bool:
    """Whether types are right and sizes known; MXNet ends the process when it infers shapes without any of them."""
    shapes = [entry.shape for entry in node.inputs]
    return (Entry(node).dtype in replacement.types and node.inputs[0].dtype in (FLOAT32, BFLOAT16)
            and all(entry.node.dtypes[entry.output] == ("int32" if position in replacement.integers else FLOAT32)
                    for position, entry in enumerate(node.inputs))
            and all(shapes) and node.shapes[0] is not None and replacement.work(node) >= replacement.least)
