"""Put the operators of partitioned subgraphs back in the places of the nodes that hold them."""
from __future__ import annotations

import json

from .edit import redirect
from .graph import Entry, Graph, Node

_CACHED_OP = "_CachedOp"
_SUBGRAPHS = "subgraphs"


def inline_cached_ops(graph: Graph) -> Graph:
    """Replace every ``_CachedOp`` by the operators that it runs; return the graph."""
    # MXNet's own partitioners make such nodes. Their text holds what they run, but MXNet does not make it out of the
    # text again: a symbol that is read with such a node fails in every use.
    for node in graph.operators():
        if node.op == _CACHED_OP and _SUBGRAPHS in node.extra:
            redirect(graph, {Entry(node, output).key: head for output, head in enumerate(_heads_of(node))})
    return graph


def _heads_of(node: Node) -> list[Entry]:
    """Return the outputs of what a node runs, made to read the node's inputs."""
    inner = inline_cached_ops(Graph.from_json(json.dumps(node.extra[_SUBGRAPHS][0])))
    redirect(inner, {Entry(variable).key: entry for variable, entry in zip(inner.variables(), node.inputs)})
    return inner.heads
