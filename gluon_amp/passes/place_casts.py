"""Insert an ``amp_cast`` where producer and consumer differ, once per tensor and data type."""
from __future__ import annotations

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, cast
from .assign_dtypes import input_dtypes
from .context import Context


def run(graph: Graph, context: Context) -> int:
    """Make the data types of the graph agree; its outputs keep the types they had. Return how many nodes that took."""
    nodes = graph.nodes()
    asked = [_wanted(node, context) for node in nodes]
    casts = _Casts(graph)
    for node, types in zip(nodes, asked):
        for position, wanted in enumerate(types):
            if wanted is not None:
                entry = node.inputs[position]
                if node.decision is not None and position in node.decision.rounded_inputs:
                    entry = casts.to(entry, context.target)
                node.inputs[position] = casts.to(entry, wanted)
    graph.heads = [casts.to(head, FLOAT32) if dtype == FLOAT32 else head
                   for head, dtype in zip(graph.heads, context.outputs)]
    return len(casts.made)


def _wanted(node: Node, context: Context) -> list[str | None]:
    if node.decision is not None:
        return input_dtypes(node, context)
    # A pass that puts a node in may have planned its precision.
    return [node.planned[0]] * len(node.inputs) if node.planned else []


class _Casts:
    """Makes casts, one per tensor and type."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self.made: dict[tuple[tuple[int, int], str], Entry] = {}

    def to(self, entry: Entry, dtype: str) -> Entry:
        """Return the tensor in ``dtype``."""
        if entry.dtype == dtype:
            return entry
        key = (entry.key, dtype)
        if key not in self.made:
            self.made[key] = cast(entry, dtype, self._graph.new_name(f"{entry.label}_{dtype}"))
        return self.made[key]
