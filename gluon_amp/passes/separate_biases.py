"""Add the bias of a dense layer by an operator of its own, where the weight is frozen.

MXNet computes the gradient of the bias together with that of the weight: where nobody asks for the latter, it writes
neither. Biases that are trained alone keep an old gradient then, and behind a cast get whatever is in memory.
"""
from __future__ import annotations

from ..graph import Entry, Graph, operator, redirect
from ..graph.attrs import is_set, region_of
from .context import Context


def is_needed(context: Context) -> bool:
    """Tell whether weights of dense layers are frozen whose biases are not."""
    return context.facts.recorded and bool(context.facts.frozen)


def run(graph: Graph, context: Context) -> int:
    """Separate biases from frozen weights; return how many."""
    moved = {}
    for node in graph.operators():
        if (node.op != "FullyConnected" or is_set(node.attrs, "no_bias") or len(node.inputs) < 3
                or node.inputs[1].node.name not in context.facts.frozen):
            continue
        total = operator("broadcast_add", graph.new_name(f"{node.name}_biased"), [Entry(node), node.inputs[2]],
                         Entry(node))
        total.attrs = region_of(node.attrs)
        total.stands_for = node.name
        moved[Entry(node).key] = Entry(total)
        node.inputs, node.attrs = node.inputs[:2], {**node.attrs, "no_bias": "True"}
    redirect(graph, moved)
    return len(moved)
