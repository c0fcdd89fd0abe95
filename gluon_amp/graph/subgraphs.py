"""The graphs that a node holds: those of loops and branches, and of partitions, whose operators are put back."""
from __future__ import annotations

import json
from typing import Mapping, Sequence

from .edit import redirect
from .graph import Entry, Graph, Node

_CACHED_OP = "_CachedOp"
_SUBGRAPHS = "subgraphs"
# Loops and branches, and which of the graphs that they hold have a backward pass: bodies, and both branches.
BODIES: Mapping[str, tuple[int, ...]] = {"_foreach": (0,), "_while_loop": (1,), "_cond": (1, 2)}


def inline_cached_ops(graph: Graph) -> Graph:
    """Replace every ``_CachedOp`` by the operators that it runs; return the graph."""
    # MXNet's own partitioners make such nodes. Their text holds what they run, but MXNet does not make it out of the
    # text again: a symbol that is read with such a node fails in every use.
    for node in graph.operators():
        if node.op == _CACHED_OP and _SUBGRAPHS in node.extra:
            redirect(graph, {Entry(node, output).key: head for output, head in enumerate(_heads_of(node))})
    return graph


def has_control_flow(graph: Graph) -> bool:
    """Tell whether a graph has loops or branches."""
    return any(node.op in BODIES for node in graph.operators())


def subgraphs_of(node: Node) -> list[Graph]:
    """Read the graphs that a node holds, if any."""
    return [Graph.from_json(json.dumps(part)) for part in node.extra.get(_SUBGRAPHS, ())]


def set_subgraphs(node: Node, parts: Sequence[Graph]) -> None:
    """Let a node hold other graphs."""
    node.extra = {**node.extra, _SUBGRAPHS: [json.loads(part.to_json()) for part in parts]}


def _heads_of(node: Node) -> list[Entry]:
    """Return the outputs of what a node runs, made to read the node's inputs."""
    inner = inline_cached_ops(subgraphs_of(node)[0])
    redirect(inner, {Entry(variable).key: entry for variable, entry in zip(inner.variables(), node.inputs)})
    return inner.heads
