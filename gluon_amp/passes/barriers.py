"""Put operators that change nothing between what MXNet gets wrong side by side.

The rows of :data:`.defect_table.BARRIERS` say which operators must not read some tensors themselves. In the bodies of
loops and branches every variable is such a tensor: all steps add to its gradient.

The body of a loop reads and writes one part of an array in each step, forward and backward. An operator of oneDNN
writes such a part, or the gradient of one, in a layout of its own, where a part cannot lie: the step fails ("Check
failed: !is_view"), or gradients before the loop are wrong without a word. There, too, another operator stands between.
"""
from __future__ import annotations

from collections import Counter
from typing import Callable, Collection, Mapping

from ..dtypes import FLOAT32, FLOAT64, LOW_PRECISION
from ..graph import BODIES, CAST, Entry, Graph, Node, guard, has_control_flow, redirect, set_subgraphs, subgraphs_of
from ..graph.attrs import integer, integers
from .context import Context
from .defect_table import BARRIERS, Tensor
from .summed_gradients import SharedGuards, most_summed, numbers

Tells = Mapping[Tensor, Callable[[Entry], bool]]  # whether a tensor is of a kind
_FLOATS = (FLOAT32, *LOW_PRECISION)


def is_needed(context: Context) -> bool:
    """Tell whether something may be lost: a converted graph has the barriers of inference already."""
    return not context.converted or context.facts.recorded


def run(graph: Graph, context: Context) -> int:
    """Follow the table; return how many operators were put in."""
    holders = _holders(graph) if context.facts.recorded else []
    guards = SharedGuards(lambda entry: guard(entry, graph.new_name(f"{entry.label}_guard")))
    _separate(graph, _kinds(graph, context), guards)
    return guards.count + sum(_separate_body(node, separates_parts=True) for node in holders)


def _separate(graph: Graph, kinds: Tells, guards: SharedGuards) -> None:
    nodes = graph.operators()
    for row in BARRIERS:
        concerned = kinds[row.of]
        for node in nodes:
            if node.op in row.ops:
                node.inputs = [guards.before(entry) if position not in row.states and concerned(entry) else entry
                               for position, entry in enumerate(node.inputs)]


def _kinds(graph: Graph, context: Context) -> Tells:
    accumulated = context.facts.accumulated if context.facts.recorded else frozenset()
    read_often = _read_often(graph) if context.facts.recorded else set()
    everywhere = context.facts.recorded and has_control_flow(graph)
    added = set(context.variables) if everywhere else accumulated
    grouped = _grouped_weights(graph)
    return {Tensor.ADDED: lambda entry: ((entry.key in read_often and entry.dtype in (*_FLOATS, FLOAT64))
                                         or _is_variable_of(entry, accumulated)),
            Tensor.ADDED_VARIABLE: lambda entry: _is_variable_of(entry, added),
            Tensor.GROUPED_WEIGHT: lambda entry: _is_variable_of(entry, grouped)}


def _is_variable_of(entry: Entry, names: Collection[str]) -> bool:
    return entry.node.is_variable and entry.node.name in names


def _read_often(graph: Graph) -> set[tuple[int, int]]:
    """Return the tensors whose readers are so many that MXNet asks for additions; equal casts become one of them."""
    number, most = numbers(graph), most_summed()
    operators = graph.operators()
    casts = {number[id(node)]: node.inputs[0] for node in operators if node.op == CAST}
    reads = [entry for node in operators if node.op != CAST for entry in node.inputs]
    counts = Counter((number[id(entry.node)], entry.output) for entry in (*reads, *casts.values(), *graph.heads))
    return {(id(node), output) for node in graph.nodes() for output in range(node.num_outputs)
            if counts[number[id(node)], output] > most}


def _grouped_weights(graph: Graph) -> set[str]:
    weights = [node.inputs[1].node for node in graph.operators()
               if node.op == "Convolution" and integer(node.attrs, "num_group", 1) > 1]
    return {(weight.inputs[0].node if weight.op == CAST else weight).name for weight in weights}


def _separate_body(node: Node, separates_parts: bool) -> int:
    """Separate what the bodies of a loop or branch do, and those within; of a loop within one no types are known."""
    graphs = subgraphs_of(node)
    bodies = [graphs[position] for position in BODIES[node.op]]
    count = _separate_parts(node, bodies[0]) if separates_parts else 0
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
    guards = SharedGuards(lambda entry: _behind(body, entry))
    _separate(body, {**dict.fromkeys(Tensor, lambda entry: entry.node.is_variable),
                     Tensor.GROUPED_WEIGHT: lambda entry: False}, guards)
    return guards.count + sum(_separate_body(node, separates_parts=False) for node in _holders(body))


def _holders(graph: Graph) -> list[Node]:
    return [node for node in graph.operators() if node.op in BODIES]


def _behind(body: Graph, entry: Entry) -> Entry:
    return guard(entry, body.new_name(f"{entry.node.name}_whole"))
