"""Put operators in C++ in the place of those that MXNet has no good CPU kernels for.

MXNet's LayerNorm takes ten times as long as need be, mostly backward, its clip branches for every element, and its
products of many small matrices and recurrent layers use neither all threads nor the widest instructions. The operators
of :mod:`gluon_amp.native` take their place where they compute the same in FP32, whatever the rest of the graph runs in.
The program's own symbol, from which files are written, keeps MXNet's operators. In bfloat16 clip stays: a rectifier
before it (:mod:`~gluon_amp.passes.native_activations`) trains MobileNet v2 a tenth faster than the one in C++.

MXNet does not tell operators of libraries that a gradient is to be added to what is there. Where gradients of several
readers meet, or accumulate in the program's array, an identity in between does that.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Callable, Collection, Mapping, NamedTuple

from ..dtypes import BFLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, Readers
from ..graph.attrs import integer, is_set
from ..rules import NEUTRAL, WIDEST
from . import native_recurrent
from .assign_dtypes import data_precision, lower_outputs
from .context import Context
from .identities import behind_identity

__all__ = ["NATIVE", "REPLACEMENTS", "is_needed", "run"]

_NARROW = 16  # values in a row of a normalisation, below which its sums cannot be vectorised


def is_needed(context: Context) -> bool:
    """Tell whether there are such operators for the device."""
    return bool(context.native) and not context.policy.imitated


def _values(node: Node) -> int:
    return prod(node.inputs[0].shape or ())


def _dense_operations(node: Node) -> int:
    """Return the multiplications and additions of a dense layer."""
    return 2 * prod(node.shapes[0] or ()) * (node.inputs[1].shape or (0,))[-1]


def _operations(node: Node) -> int:
    """Return the multiplications and additions of a product of matrices."""
    matrix = node.inputs[0].shape or ()
    return 2 * prod(node.shapes[0] or ()) * matrix[-2 if is_set(node.attrs, "transpose_a") else -1]


class Replacement(NamedTuple):
    """What takes the place of an operator of MXNet's."""

    op: str  # registered name
    types: tuple[str, ...]  # the types of data that it gains in
    least: int  # the work from which on it gains: a call of a library's operator takes longer
    fits: Callable[[Node, Readers], bool]  # takes a node and says whether the operator computes the same
    # takes a node of known shapes; of what the least is meant. The values of its data by default.
    work: Callable[[Node], int] = _values
    fp32_inputs: tuple[int, ...] = ()  # those that stay FP32 where the data is in low precision


def _is_simple_layer_norm(node: Node, readers: Readers) -> bool:
    """Whether the last axis is normalised; other numbers of axes may come, for which a positive one is not the last."""
    if (node.inputs[0].shape or (0,))[-1] < _NARROW:
        return False
    hidden = [Entry(node, output) for output in range(1, node.num_outputs)]
    return integer(node.attrs, "axis", -1) == -1 and not any(
        readers.of(entry) or readers.is_head(entry) for entry in hidden)


def _always(node: Node, readers: Readers) -> bool:
    return True


def _is_inner_layer(node: Node, readers: Readers) -> bool:
    """Whether the gradient of the data is of use: the operator in C++ always computes it."""
    return not node.inputs[0].node.is_variable


# Measured on an AMD EPYC with AVX512-BF16, 2 threads, in cached ops with static shapes: below these forward or training
# takes longer than with MXNet's operators.
REPLACEMENTS: Mapping[str, Replacement] = {
    "LayerNorm": Replacement("_gluon_amp_layer_norm", (FLOAT32,), 2048, _is_simple_layer_norm),
    "clip": Replacement("_gluon_amp_clip", (FLOAT32,), 16384, _always),
    "batch_dot": Replacement("_gluon_amp_batch_dot", (FLOAT32,), 4_000_000, _always, _operations),
    "FullyConnected": Replacement("_gluon_amp_dense", (FLOAT32, BFLOAT16), 4_000_000, _is_inner_layer,
                                  _dense_operations, fp32_inputs=(1, 2)),
    "RNN": Replacement("_gluon_amp_rnn", (FLOAT32,), 128, native_recurrent.fits),
}
NATIVE = frozenset(each.op for each in REPLACEMENTS.values())


def run(graph: Graph, context: Context) -> int:
    """Replace what runs faster in C++; return how many operators."""
    recurrent = _replace(graph, context, ["RNN"])
    if recurrent and context.target == BFLOAT16 and not context.converted:
        _follow(graph, context)  # what reads a layer's output, and keeps its precision
    return recurrent + _replace(graph, context, [op for op in REPLACEMENTS if op != "RNN"])


def _follow(graph: Graph, context: Context) -> None:
    """Let operators take the precision of their data again, after others have changed theirs."""
    for node in graph.operators():
        if node.decision.rule in (NEUTRAL, WIDEST):
            node.planned = []
            if data_precision(node, context) == context.target:
                lower_outputs(node, context)


def _replace(graph: Graph, context: Context, ops: Collection[str]) -> int:
    nodes = graph.nodes()
    names, readers = {node.name for node in nodes}, Readers(graph)
    found = [(node, each) for node in nodes if node.op in ops for each in [REPLACEMENTS[node.op]]
             if each.op in context.native and _gains(node, each) and each.fits(node, readers)]
    for node, each in found:
        if node.op == "RNN":
            native_recurrent.separate_parameters(node)
        node.inputs = [_guarded(entry, readers, names, context) for entry in node.inputs]
        node.replaced, node.op = node.op, each.op
        if each.fp32_inputs and Entry(node).dtype != FLOAT32:
            node.decision = replace(node.decision, fp32_inputs=each.fp32_inputs)
        if node.replaced == "RNN":
            native_recurrent.fit(graph, node, names, context)
        else:
            node.num_outputs = 1
            node.dtypes, node.shapes, node.planned = node.dtypes[:1], node.shapes[:1], node.planned[:1]
    return len(found)


def _gains(node: Node, replacement: Replacement) -> bool:
    """Whether types are right and sizes known; MXNet ends the process when it infers shapes without any of them."""
    shapes = [entry.shape for entry in node.inputs]
    return (Entry(node).dtype in replacement.types and node.inputs[0].dtype in (FLOAT32, BFLOAT16)
            and all(entry.node.dtypes[entry.output] == FLOAT32 for entry in node.inputs)
            and all(shapes) and node.shapes[0] is not None and replacement.work(node) >= replacement.least)


def _guarded(entry: Entry, readers: Readers, names: set[str], context: Context) -> Entry:
    """Return the tensor behind an identity where its gradient may be a sum."""
    if not context.recorded:
        return entry
    accumulates = entry.node.is_variable and entry.node.name in context.guarded
    if not accumulates and len(readers.of(entry)) == 1 and not readers.is_head(entry):
        return entry
    return behind_identity(entry, names, context)
