"""Drop operators that do nothing in inference: Dropout in its training mode, and identities.

What stops or replaces gradients goes only where there are none to ask for, because operators are to be fused.
"""
from __future__ import annotations

from ..graph import Entry, Graph, Node, redirect
from ..graph.attrs import INFERENCE
from .context import Context

_DROPOUT, _IDENTITY, _BARRIERS = "Dropout", "_copy", ("BlockGrad", "make_loss")


def run(graph: Graph, context: Context) -> int:
    """Let the readers of such operators read their input; return how many were dropped."""
    heads = {id(head.node) for head in graph.heads}
    dropped = [node for node in graph.operators() if _does_nothing(node, context) and id(node) not in heads]
    redirect(graph, {Entry(node).key: node.inputs[0] for node in dropped})
    dropouts = [node.name for node in dropped if node.op == _DROPOUT]
    for node in graph.variables() if dropouts else ():
        if context.weights is not None and node.name in context.weights:
            node.attrs = {**node.attrs, INFERENCE: f"the Dropout {dropouts[0]} is left out"}
    return len(dropped)


def _does_nothing(node: Node, context: Context) -> bool:
    if node.op == _DROPOUT:
        return node.attrs.get("mode", "training") == "training"
    return node.op == _IDENTITY or (node.op in _BARRIERS and not context.facts.recorded)
