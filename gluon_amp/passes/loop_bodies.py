"""Keep oneDNN's operators away from the parts of arrays that loops read and write.

In each step of a loop MXNet hands its body one part of an array, forward and backward. An operator of oneDNN writes
such a part, or the gradient of one, in a layout of its own, where a part cannot lie: the step fails ("Check failed:
!is_view"), or gradients before the loop are wrong without a word. Here another operator stands between.

So it does before what a body or a branch adds to something. All steps add to its gradient, as passes do where a user
accumulates gradients, and MXNet lets the gradient of the sum be written there.
"""
from __future__ import annotations

from ..dtypes import FLOAT32, LOW_PRECISION
from ..graph import Entry, Graph, Node, guard, redirect, set_subgraphs, subgraphs_of
from ..graph.attrs import integer, integers
from .context import Context
from .place_casts import SUMS

# The graphs of loops, and of branches, that have a backward pass.
_BODIES = {"_foreach": (0,), "_while_loop": (1,), "_cond": (1, 2)}
_BRANCH = "_cond"
_FLOATS = (FLOAT32, *LOW_PRECISION)


def run(graph: Graph, context: Context) -> int:
    """Put an operator that changes nothing where it is needed; return how many."""
    holders = _holders(graph)
    parts = sum(_separate_parts(node) for node in holders if node.op != _BRANCH)
    return parts + sum(map(_separate_sums, holders))


def _holders(graph: Graph) -> list[Node]:
    return [node for node in graph.operators() if node.op in _BODIES]


def _separate_parts(node: Node) -> int:
    """Put one behind the parts that a loop's body reads, and behind those that it gives."""
    parts = subgraphs_of(node)
    body = parts[_BODIES[node.op][0]]
    read = integers(node.attrs, "in_data_locs")  # where its body reads parts of the first inputs; none for a while_loop
    variables = body.variables()
    moved = {}
    for location, entry in zip(read, node.inputs):
        if entry.dtype in _FLOATS:
            moved[Entry(variables[location]).key] = _behind(body, Entry(variables[location]))
    written = [position for position in range(integer(node.attrs, "num_out_data", 0))
               if node.dtypes[position] in _FLOATS]
    for position in written:
        body.heads[position] = _behind(body, body.heads[position])
    redirect(body, moved)
    set_subgraphs(node, parts)
    return len(moved) + len(written)


def _separate_sums(node: Node) -> int:
    """Put one before what a body, or one within it, adds to something, unless one is there."""
    parts = subgraphs_of(node)
    count = sum(_separate_sums_of(parts[position]) for position in _BODIES[node.op])
    set_subgraphs(node, parts)
    return count


def _separate_sums_of(body: Graph) -> int:
    moved: dict[tuple[int, int], Entry] = {}
    for node in body.operators():
        if node.op in SUMS:
            for entry in node.inputs:
                if entry.node.is_variable and entry.key not in moved:
                    moved[entry.key] = _behind(body, entry)
            node.inputs = [moved.get(entry.key, entry) for entry in node.inputs]
    return len(moved) + sum(map(_separate_sums, _holders(body)))


def _behind(body: Graph, entry: Entry) -> Entry:
    return guard(entry, body.new_name(f"{entry.node.name}_whole"))
