"""Keep oneDNN's operators away from the parts of arrays that loops read and write.

In each step of a loop MXNet hands its body one part of an array, forward and backward. An operator of oneDNN writes
such a part, or the gradient of one, in a layout of its own, where a part cannot lie: the step fails ("Check failed:
!is_view"), or gradients before the loop are wrong without a word. Here another operator stands between.

So it does before what a body or a branch adds to something. All steps add to its gradient, as passes do where a user
accumulates gradients, and MXNet lets the gradient of the sum be written there. Other operators write theirs themselves.
"""
from __future__ import annotations

from ..dtypes import FLOAT32, LOW_PRECISION
from ..graph import BODIES, Entry, Graph, Node, guard, redirect, set_subgraphs, subgraphs_of
from ..graph.attrs import integer, integers
from .context import Context
from .summed_gradients import SUM, WRITES, SharedGuards, guard_readers, is_variable_of

_FLOATS = (FLOAT32, *LOW_PRECISION)


def run(graph: Graph, context: Context) -> int:
    """Put an operator that changes nothing where it is needed; return how many."""
    return sum(_separate(node, separate_parts=True) for node in _holders(graph))


def _holders(graph: Graph) -> list[Node]:
    return [node for node in graph.operators() if node.op in BODIES]


def _separate(node: Node, separate_parts: bool) -> int:
    # Of a loop within a body no types are known.
    graphs = subgraphs_of(node)
    bodies = [graphs[position] for position in BODIES[node.op]]
    count = _separate_parts(node, bodies[0]) if separate_parts else 0
    count += sum(map(_separate_sums, bodies))
    if count:
        set_subgraphs(node, graphs)
    return count


def _separate_parts(node: Node, body: Graph) -> int:
    """Put one behind the parts that a loop's body reads, and behind those that it gives; branches have none."""
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
    return len(moved) + len(written)


def _separate_sums(body: Graph) -> int:
    """Put one before what a body, or one within it, adds to something, or whose gradient it would write."""
    guards = SharedGuards(lambda entry: _behind(body, entry))
    guard_readers(body.operators(), {SUM, *WRITES}, is_variable_of({node.name for node in body.variables()}),
                  guards.before)
    return guards.count + sum(_separate(node, separate_parts=False) for node in _holders(body))


def _behind(body: Graph, entry: Entry) -> Entry:
    return guard(entry, body.new_name(f"{entry.node.name}_whole"))
