"""Imitate a low-precision type on a device without kernels for it.

Tensors are stored in the type; every operator on them computes in FP32, between a cast up and a cast down. Values and
gradients are rounded through the type at every edge, as kernels that accumulate in FP32 would round them.
"""
from __future__ import annotations

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, unique_name
from .context import Context, operator
from .place_casts import CAST

__all__ = ["run"]


def run(graph: Graph, context: Context) -> bool:
    """Surround every operator that reads or writes low precision with casts."""
    nodes = graph.nodes()
    names = {node.name for node in nodes}
    raised: dict[tuple[int, int], Entry] = {}
    lowered: dict[tuple[int, int], Entry] = {}
    for node in nodes:
        node.inputs = [lowered.get(entry.key, entry) for entry in node.inputs]
        if (node.decision is None and node.op == CAST) or node.is_variable:
            continue
        node.inputs = [_raised(entry, raised, names, context) for entry in node.inputs]
        if node.op != CAST:
            _round_outputs(node, lowered, names, context)
    graph.heads = [lowered.get(head.key, head) for head in graph.heads]
    return bool(raised)


def _raised(entry: Entry, made: dict[tuple[int, int], Entry], names: set[str], context: Context) -> Entry:
    if entry.dtype != context.target:
        return entry
    if entry.key not in made:
        made[entry.key] = Entry(_cast(entry, FLOAT32, unique_name(f"{entry.node.name}_raised", names)))
    return made[entry.key]


def _round_outputs(node: Node, made: dict[tuple[int, int], Entry], names: set[str], context: Context) -> None:
    for output, dtype in enumerate(node.planned or node.dtypes):
        if dtype == context.target:
            entry = Entry(node, output)
            made[entry.key] = Entry(_cast(entry, dtype, unique_name(f"{node.name}_rounded", names)))
    node.planned = [FLOAT32 if dtype == context.target else dtype for dtype in node.planned or node.dtypes]


def _cast(entry: Entry, dtype: str, name: str) -> Node:
    cast = operator(CAST, name, [entry], entry, dtype=dtype)
    cast.dtypes = [dtype]
    return cast
