"""Let the gradient of a Concat of feature maps come in plain layout.

MXNet cannot split a gradient that lies in blocks of 16 channels where the maps joined are not whole blocks: it raises
"could not construct a sub-memory", or ends the process. Behind an operator that is not oneDNN's the gradient is plain.
"""
from __future__ import annotations

from ..graph import Entry, Graph, Node, operator, redirect
from ..graph.attrs import region_of
from .context import Context

_BLOCK = 16  # channels in a block of oneDNN's widest layout; the others divide it


def run(graph: Graph, context: Context) -> int:
    """Put an operator that changes nothing behind such Concats; return how many."""
    moved = {}
    for node in graph.operators():
        if node.op == "Concat" and _splits_blocks(node):
            whole = with_plain_gradient(graph, Entry(node), node.name)
            whole.attrs.update(region_of(node.attrs))
            whole.stands_for = node.name
            moved[Entry(node).key] = Entry(whole)
    redirect(graph, moved)
    return len(moved)


def with_plain_gradient(graph: Graph, joined: Entry, name: str) -> Node:
    """Make an operator behind joined maps that passes all of them on, and their gradient in plain layout."""
    return operator("slice_axis", graph.new_name(f"{name}_plain"), [joined], joined, axis=1, begin=0, end=None)


def _splits_blocks(node: Node) -> bool:
    """Tell whether it joins the channels of feature maps, some of which are no whole blocks."""
    shapes = [entry.shape or () for entry in node.inputs]
    return (node.attrs.get("dim", "1") == "1" and all(len(shape) == 4 for shape in shapes)
            and any(shape[1] % _BLOCK for shape in shapes))
