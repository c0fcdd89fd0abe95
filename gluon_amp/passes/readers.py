"""Who reads each tensor of a graph."""
from __future__ import annotations

from collections import defaultdict

from ..graph import Entry, Graph, Node

__all__ = ["Readers", "redirect"]


class Readers:
    """The operators that read each tensor, and the graph's outputs.

    Parameters
    ----------
    graph : Graph
        Must not change while this is in use.
    """

    def __init__(self, graph: Graph):
        self._operators: dict[tuple[int, int], list[Node]] = defaultdict(list)
        self._nodes: dict[int, int] = defaultdict(int)
        self._heads = {head.key for head in graph.heads}
        for node in graph.nodes():
            for entry in node.inputs:
                self._operators[entry.key].append(node)
                self._nodes[id(entry.node)] += 1

    def of(self, entry: Entry) -> list[Node]:
        """Return the operators that read a tensor, once per use."""
        return self._operators[entry.key]

    def is_head(self, entry: Entry) -> bool:
        """Whether a tensor is an output of the graph."""
        return entry.key in self._heads

    def only(self, entry: Entry) -> Node | None:
        """Return the one operator that reads a tensor, when nothing else reads anything of its producer."""
        others = [head for head in self._heads if head[0] == id(entry.node)]
        readers = self.of(entry)
        return readers[0] if len(readers) == 1 and self._nodes[id(entry.node)] == 1 and not others else None


def redirect(graph: Graph, moved: dict[tuple[int, int], Entry]) -> None:
    """Let the readers of some tensors read others instead, through chains of replacements."""
    def target(entry: Entry) -> Entry:
        while entry.key in moved:
            entry = moved[entry.key]
        return entry

    for node in graph.nodes():
        node.inputs = [target(entry) for entry in node.inputs]
    graph.heads = [target(head) for head in graph.heads]
