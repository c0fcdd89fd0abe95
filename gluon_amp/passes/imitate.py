"""Imitate a low-precision type on a device without kernels for it.

Tensors are stored in the type; every operator on them computes in FP32, between a cast up and a cast down. Values and
gradients are rounded through the type at every edge, as kernels that accumulate in FP32 would round them.
"""
from __future__ import annotations

from ..dtypes import FLOAT32
from ..graph import CAST, Entry, Graph, Node, Role, cast
from .context import Context
from .gradient_fixes import fix_behind_casts


def is_needed(context: Context) -> bool:
    """Tell whether the type is imitated."""
    return context.device.imitated


def run(graph: Graph, context: Context) -> int:
    """Surround every operator that reads or writes low precision with casts; return how many tensors are cast up."""
    raised: dict[tuple[int, int], Entry] = {}
    lowered: dict[tuple[int, int], Entry] = {}
    for node in graph.nodes():
        node.inputs = [lowered.get(entry.key, entry) for entry in node.inputs]
        if node.role is Role.CAST or node.is_variable:
            continue
        node.inputs = [_raised(graph, entry, raised, context) for entry in node.inputs]
        if node.op != CAST:
            _round_outputs(graph, node, lowered, context)
    graph.heads = [lowered.get(head.key, head) for head in graph.heads]
    if context.policy.training:
        fix_behind_casts(graph, Role.ROUNDING)
    return len(raised)


def _raised(graph: Graph, entry: Entry, made: dict[tuple[int, int], Entry], context: Context) -> Entry:
    if entry.dtype != context.target:
        return entry
    if entry.key not in made:
        made[entry.key] = cast(entry, FLOAT32, graph.new_name(f"{entry.node.name}_raised"), Role.ROUNDING)
    return made[entry.key]


def _round_outputs(graph: Graph, node: Node, made: dict[tuple[int, int], Entry], context: Context) -> None:
    for output, dtype in enumerate(node.planned or node.dtypes):
        if dtype == context.target:
            entry = Entry(node, output)
            made[entry.key] = cast(entry, dtype, graph.new_name(f"{node.name}_rounded"), Role.ROUNDING)
    node.planned = [FLOAT32 if dtype == context.target else dtype for dtype in node.planned or node.dtypes]
