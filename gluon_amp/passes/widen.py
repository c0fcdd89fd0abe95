"""Let tensors of a type that the user chose meet FP32 ones: MXNet's operators take inputs of one type."""
from __future__ import annotations

from typing import Callable, Collection, Mapping

from ..dtypes import FLOAT16, FLOAT32, FLOAT64
from ..graph import Entry, Graph, Node, Role, operator, redirect
from ..graph.attrs import DTYPE, TYPE_FLAGS
from ..rules.shapes import is_of_volumes

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
    leave_onednn(graph)
    return len(half)


def computes_weight(node: Node) -> bool:
    """Tell whether a node is a Deconvolution whose weight is computed: oneDNN's backward ends the process there."""
    return (node.op == "Deconvolution" and not node.inputs[1].node.is_variable and node.inputs[1].dtype != FLOAT64
            and not is_of_volumes(node.attrs))  # MXNet has no other kernel for three dimensions


def in_float64(node: Node, cast: Callable[[Entry, str], Entry]) -> Entry:
    """Run an operator in float64, which oneDNN does not know, between casts; return its result in FP32."""
    node.inputs = [cast(entry, FLOAT64) for entry in node.inputs]
    node.planned = [FLOAT64] * node.num_outputs
    return cast(Entry(node), FLOAT32)


def leave_onednn(graph: Graph, role: Role = Role.HELPER) -> None:
    """Run Deconvolutions whose weight is cast in float64."""
    for node in graph.operators():
        if computes_weight(node):
            result = in_float64(node, lambda entry, dtype: _cast(graph, entry, dtype, role))
            redirect(graph, {Entry(node).key: result})


def _is_half(node: Node, dtypes: Mapping[str, str]) -> bool:
    given = dtypes.get(node.name, node.attrs.get(DTYPE)) if node.is_variable else node.attrs.get("dtype")
    return given in _HALF


def _cast(graph: Graph, entry: Entry, dtype: str = FLOAT32, role: Role = Role.HELPER) -> Entry:
    # Not amp_cast, which loses gradients that accumulate.
    made = operator("Cast", graph.new_name(f"{entry.node.name}_{dtype}"), [entry], entry, role, dtype=dtype)
    made.dtypes = [dtype]
    return Entry(made)
