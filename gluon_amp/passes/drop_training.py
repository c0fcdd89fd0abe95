"""Drop operators that do nothing in inference: Dropout in its training mode, and identities."""
from __future__ import annotations

from ..graph import Entry, Graph, Node, redirect
from .context import Context

_IDENTITIES = ("_copy", "BlockGrad", "make_loss")


def run(graph: Graph, context: Context) -> int:
    """Let the readers of such operators read their input; return how many were dropped."""
    heads = {id(head.node) for head in graph.heads}
    dropped = [node for node in graph.operators() if _does_nothing(node) and id(node) not in heads]
    redirect(graph, {Entry(node).key: node.inputs[0] for node in dropped})
    return len(dropped)


def _does_nothing(node: Node) -> bool:
    if node.op == "Dropout":
        return node.attrs.get("mode", "training") == "training"
    return node.op in _IDENTITIES
