"""Let tensors of a type that the user chose meet FP32 ones: MXNet's operators take inputs of one type."""
from __future__ import annotations

from typing import Collection, Mapping

from ..dtypes import FLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, operator, redirect
from ..graph.attrs import DTYPE, TYPE_FLAGS
from .gradient_fixes import fix_behind_casts

_HALF = (FLOAT16, str(TYPE_FLAGS[FLOAT16]))


def widen(graph: Graph, dtypes: Mapping[str, str], kept: Collection[str] = ()) -> int:
    """Cast every float16 tensor that enters a graph, or that one of its operators makes on request, to FP32."""
    nodes = graph.nodes()
    half = [Entry(node, output) for node in nodes if _is_half(node, dtypes) and node.name not in kept
            for output in range(node.num_outputs)]
    casts = {entry.key: _cast(graph, entry) for entry in half}
    heads = list(graph.heads)
    redirect(graph, casts)
    graph.heads = heads  # outputs keep the types that they had
    fix_behind_casts(graph)
    return len(half)


def _is_half(node: Node, dtypes: Mapping[str, str]) -> bool:
    given = dtypes.get(node.name, node.attrs.get(DTYPE)) if node.is_variable else node.attrs.get("dtype")
    return given in _HALF


def _cast(graph: Graph, entry: Entry) -> Entry:
    # Not amp_cast, which loses gradients that accumulate.
    made = operator("Cast", graph.new_name(f"{entry.node.name}_{FLOAT32}"), [entry], entry, dtype=FLOAT32)
    made.dtypes = [FLOAT32]
    return Entry(made)
