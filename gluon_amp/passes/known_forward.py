"""Tell which tensors' shapes MXNet knows before it infers backward.

The first state of an unrolled recurrent cell is ``zeros(shape=(0, 50))``, whose batch MXNet finds from what reads it.
Operators of libraries are asked for shapes on the way forward, once, and see none of their outputs.
"""
from __future__ import annotations

from ..graph import Graph, Node
from ..graph.attrs import integers

WITHOUT_SHAPES = "_while_loop"  # with it in a graph MXNet knows no shapes behind it before it runs the operators
# What has one shape with all of its inputs, and takes it from any of them.
_OF_ONE_SHAPE = ("elemwise_add", "elemwise_sub", "elemwise_mul", "elemwise_div", "add_n")
# What says the shapes of its other inputs by that of its data, as those of its first states.
_OF_DATA = ("RNN",)


def unknown_forward(graph: Graph) -> set[Node]:
    """Return the operators whose outputs have no known shape on the way forward; all variables have one."""
    unknown: set[Node] = set()
    for node in graph.operators():
        lacking = [entry.node in unknown for entry in node.inputs[:1 if node.op in _OF_DATA else None]]
        if _is_open(node) or (all(lacking) and lacking if node.op in _OF_ONE_SHAPE else any(lacking)):
            unknown.add(node)
    return unknown


def behind_loops(graph: Graph) -> set[int]:
    """Return the ids of operators that read a while_loop's results, also through others."""
    found: set[int] = set()
    for node in graph.operators():
        if any(entry.node.op == WITHOUT_SHAPES or id(entry.node) in found for entry in node.inputs):
            found.add(id(node))
    return found


def _is_open(node: Node) -> bool:
    """Whether it makes a tensor whose shape it does not say in full."""
    if node.inputs or "shape" not in node.attrs:
        return False
    return min(integers(node.attrs, "shape"), default=0) <= 0
