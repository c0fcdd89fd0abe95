"""float16 on devices without kernels for it, and a user's own float16 tensors.

``imitate`` stores tensors in the type, and lets every operator on them compute in FP32. Values and gradients are
rounded through the type at every edge, as kernels that accumulate in FP32 would round them::

    dot(x, y)   ->   amp_cast(dot(amp_cast(x, float32), amp_cast(y, float32)), float16)

``widen`` lets a user's float16 tensors meet FP32 ones, as MXNet's operators take inputs of one type::

    dot(x_float16, y_float32)   ->   dot(Cast(x_float16, float32), y_float32)
"""
from __future__ import annotations

from typing import Collection, Mapping

from ..graph import CAST, Entry, Graph, Role, cast, operator, redirect
from ..graph.attrs import DTYPE, TYPE_FLAGS
from ..machine.dtypes import FLOAT16, FLOAT32
from .context import Context
from .gradient_fixes import fix_behind_casts

_HALF = {FLOAT16, str(TYPE_FLAGS[FLOAT16])}


def imitate(graph: Graph, context: Context) -> int:
    """Surround every operator that reads or writes low precision with casts; return how many tensors are cast up."""
    raised: dict[tuple[int, int], Entry] = {}
    lowered: dict[tuple[int, int], Entry] = {}

    def up(entry: Entry) -> Entry:
        if entry.dtype != context.target:
            return entry
        if entry.key not in raised:
            name = graph.new_name(f"{entry.node.name}_raised")
            raised[entry.key] = cast(entry, FLOAT32, name, Role.ROUNDING)
        return raised[entry.key]

    for node in graph.nodes():
        node.inputs = [lowered.get(entry.key, entry) for entry in node.inputs]
        if node.role is Role.CAST or node.is_variable:
            continue
        node.inputs = list(map(up, node.inputs))
        if node.op == CAST:
            continue
        for output, dtype in enumerate(node.planned or node.dtypes):
            if dtype == context.target:
                entry = Entry(node, output)
                lowered[entry.key] = cast(entry, dtype, graph.new_name(f"{node.name}_rounded"), Role.ROUNDING)
        node.planned = [FLOAT32 if dtype == context.target else dtype for dtype in node.planned or node.dtypes]
    graph.heads = [lowered.get(head.key, head) for head in graph.heads]
    if context.policy.training:
        fix_behind_casts(graph, Role.ROUNDING)
    return len(raised)


def widen(graph: Graph, dtypes: Mapping[str, str], kept: Collection[str] = ()) -> int:
    """Cast every float16 tensor that enters a graph, or that one of its operators makes on request, to FP32."""
    moved, heads = {}, list(graph.heads)
    for node in graph.nodes():
        given = dtypes.get(node.name, node.attrs.get(DTYPE)) if node.is_variable else node.attrs.get("dtype")
        for output in range(node.num_outputs) if given in _HALF and node.name not in kept else ():
            entry, name = Entry(node, output), graph.new_name(f"{node.name}_{FLOAT32}")
            # By Cast, not amp_cast, which loses gradients that accumulate.
            moved[entry.key] = Entry(operator("Cast", name, [entry], entry, dtypes=[FLOAT32], dtype=FLOAT32))
    redirect(graph, moved)
    graph.heads = heads  # outputs keep the types that they had
    fix_behind_casts(graph)
    return len(moved)
