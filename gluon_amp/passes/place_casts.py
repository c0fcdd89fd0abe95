"""Insert an ``amp_cast`` where producer and consumer differ, once per tensor and data type."""
from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Sequence

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, cast, guard, has_control_flow
from ..graph.attrs import integer
from .assign_dtypes import input_dtypes
from .context import Context
from .summed_gradients import SUM, WRITES, SharedGuards, guard_readers, is_variable_of, most_summed, numbers


def run(graph: Graph, context: Context) -> int:
    """Make the data types of the graph agree; its outputs keep the types they had. Return how many nodes that took."""
    nodes = graph.nodes()
    asked = [_wanted(node, context) for node in nodes]
    casts = _Casts(graph, context, _grouped_weights(nodes), _read_often(graph, asked, context))
    for node, types in zip(nodes, asked):
        for position, wanted in enumerate(types):
            if wanted is not None:
                entry = node.inputs[position]
                if node.decision is not None and position in node.decision.rounded_inputs:
                    entry = casts.to(entry, context.target)
                node.inputs[position] = casts.to(entry, wanted)
    graph.heads = [casts.to(head, FLOAT32) if dtype == FLOAT32 else head
                   for head, dtype in zip(graph.heads, context.outputs)]
    everywhere = context.facts.recorded and has_control_flow(graph)
    guard_readers(nodes, {SUM}, is_variable_of(set(context.variables) if everywhere else context.facts.accumulated),
                  casts.guards.before)
    guard_readers(nodes, WRITES, casts.is_added, casts.guards.before)
    return len(casts.made) + casts.guards.count


def _wanted(node: Node, context: Context) -> list[str | None]:
    if node.decision is not None:
        return input_dtypes(node, context)
    # A pass that puts a node in may have planned its precision.
    return [node.planned[0]] * len(node.inputs) if node.planned else []


def _read_often(graph: Graph, asked: Sequence[Sequence[str | None]], context: Context) -> set[tuple[int, int]]:
    """Return the tensors whose readers are so many that MXNet asks for additions, which casts do not do."""
    if not context.facts.recorded:
        return set()
    nodes, number = graph.nodes(), numbers(graph)
    parts: Counter[tuple[int, int]] = Counter()
    casts = set()
    reads = [(entry, wanted) for node, types in zip(nodes, asked)
             for entry, wanted in zip_longest(node.inputs, types[:len(node.inputs)])]
    for entry, wanted in (*reads, *((head, dtype) for head, dtype in zip(graph.heads, context.outputs))):
        tensor = number[id(entry.node)], entry.output
        if wanted in (None, entry.dtype):
            parts[tensor] += 1
        else:
            casts.add((tensor, wanted))
    parts.update(tensor for tensor, _ in casts)
    most = most_summed()
    return {(id(node), output) for node in nodes for output in range(node.num_outputs)
            if parts[number[id(node)], output] > most}


def _grouped_weights(nodes: list[Node]) -> set[str]:
    return {node.inputs[1].node.name for node in nodes
            if node.op == "Convolution" and integer(node.attrs, "num_group", 1) > 1}


class _Casts:
    """Makes casts, one per tensor and type."""

    def __init__(self, graph: Graph, context: Context, grouped_weights: set[str], read_often: set[tuple[int, int]]):
        self.graph = graph
        self.read_often = read_often
        self.added, self.grouped = is_variable_of(context.facts.accumulated), is_variable_of(grouped_weights)
        # elementwise operators that oneDNN does not run, and that change nothing
        self.guards = SharedGuards(lambda entry: guard(entry, self._name(entry, "guard")))
        self.made: dict[tuple[tuple[int, int], str], Entry] = {}

    def to(self, entry: Entry, dtype: str) -> Entry:
        """Return the tensor in ``dtype``."""
        if entry.dtype == dtype:
            return entry
        key = (entry.key, dtype)
        if key not in self.made:
            # MXNet's CPU amp_cast ignores grad_req='add' and loses the gradient. It also fails on the weight of a
            # grouped convolution that inference in FP32 has left in oneDNN's five-dimensional layout.
            is_fragile = self.is_added(entry) or self.grouped(entry)
            self.made[key] = cast(self.guards.before(entry) if is_fragile else entry, dtype, self._name(entry, dtype))
        return self.made[key]

    def is_added(self, entry: Entry) -> bool:
        """Tell whether MXNet asks those who read a tensor to add their gradients to what is there."""
        return entry.key in self.read_often or self.added(entry)

    def _name(self, entry: Entry, suffix: str) -> str:
        output = str(entry.output) if entry.node.num_outputs > 1 and entry.output else ""
        return self.graph.new_name(f"{entry.node.name}{output}_{suffix}")
