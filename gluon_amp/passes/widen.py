"""Let tensors of a type that the user chose meet FP32 ones: MXNet's operators take inputs of one type."""
from __future__ import annotations

from typing import Collection, Mapping

from ..dtypes import FLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, operator, redirect, unique_name
from ..graph.attrs import DTYPE, TYPE_FLAGS

__all__ = ["widen"]

_HALF = (FLOAT16, str(TYPE_FLAGS[FLOAT16]))


def widen(graph: Graph, dtypes: Mapping[str, str], kept: Collection[str] = ()) -> int:
    """Cast every float16 tensor that enters a graph, or that one of its operators makes on request, to FP32.

    Parameters
    ----------
    graph : Graph
        In which float16 meets FP32, so that MXNet cannot infer its types. Edited in place.
    dtypes : mapping of str to str
        Types of the inputs, by name.
    kept : collection of str
        Names of inputs that operators write to.

    Returns
    -------
    int
        How many casts there are.
    """
    nodes = graph.nodes()
    names = {node.name for node in nodes}
    half = [Entry(node, output) for node in nodes if _is_half(node, dtypes) and node.name not in kept
            for output in range(node.num_outputs)]
    casts = {entry.key: _cast(entry, names) for entry in half}
    heads = list(graph.heads)
    redirect(graph, casts)
    graph.heads = heads  # outputs keep the types that they had
    return len(half)


def _is_half(node: Node, dtypes: Mapping[str, str]) -> bool:
    given = dtypes.get(node.name, node.attrs.get(DTYPE)) if node.is_variable else node.attrs.get("dtype")
    return given in _HALF


def _cast(entry: Entry, names: set[str]) -> Entry:
    # Not amp_cast, which loses gradients that accumulate.
    name = unique_name(f"{entry.node.name}_float32", names)
    return Entry(operator("Cast", name, [entry], entry, dtype=FLOAT32))
