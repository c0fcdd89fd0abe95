"""Edit graphs: make nodes, find consumers and replace their inputs, read and write the graphs that nodes hold."""
from __future__ import annotations

import json
from collections import defaultdict
from typing import Callable, Mapping

from .graph import Entry, Graph, Node, Role

MULTICAST = "amp_multicast"  # casts several tensors to one type
CAST = "amp_cast"
_SUBGRAPHS = "subgraphs"
# Loops and branches, and which of the graphs that they hold have a backward pass: bodies, and both branches.
BODIES: Mapping[str, tuple[int, ...]] = {"_foreach": (0,), "_while_loop": (1,), "_cond": (1, 2)}


def operator(op: str, name: str, inputs: list[Entry], like: Entry, role: Role = Role.HELPER, *,
             dtypes: list[str | None] | None = None, shapes: list[tuple[int, ...] | None] | None = None,
             **attrs: object) -> Node:
    """Make a single-output operator node with the data type and shape of ``like``, but for those that are given."""
    return Node(op, name, {key: str(value) for key, value in attrs.items()}, inputs, dtypes=dtypes or [like.dtype],
                shapes=shapes or [like.shape], role=role)


def cast(entry: Entry, dtype: str, name: str, role: Role = Role.CAST) -> Entry:
    """Make a cast of a tensor."""
    return Entry(operator(CAST, name, [entry], entry, role, dtypes=[dtype], dtype=dtype))


def identity(entry: Entry, name: str) -> Entry:
    """Make an operator that oneDNN does not run, and that changes nothing: a multiplication by 1."""
    return Entry(operator("_mul_scalar", name, [entry], entry, Role.IDENTITY, scalar=1.0))


def cast_nodes(graph: Graph) -> list[Node]:
    """All casts in a graph."""
    return [node for node in graph.operators() if node.op == CAST]


class Consumers:
    """The operators that read each tensor, and the graph's outputs."""

    def __init__(self, graph: Graph):
        self._operators: dict[tuple[int, int], list[Node]] = defaultdict(list)
        self._heads = {head.key for head in graph.heads}
        for node in graph.nodes():
            for entry in node.inputs:
                self._operators[entry.key].append(node)

    def of(self, entry: Entry) -> list[Node]:
        """Return the operators that read a tensor, once per use."""
        return self._operators[entry.key]

    def is_head(self, entry: Entry) -> bool:
        """Tell whether a tensor is an output of the graph."""
        return entry.key in self._heads

    def is_read_once(self, entry: Entry) -> bool:
        """Tell whether one operator reads a tensor, once, and it is no output of the graph."""
        return len(self.of(entry)) == 1 and not self.is_head(entry)

    def is_first_only(self, node: Node) -> bool:
        """Tell whether nothing reads the outputs of a node behind its first."""
        others = [Entry(node, output) for output in range(1, node.num_outputs)]
        return not any(self.of(entry) or self.is_head(entry) for entry in others)


def redirect(graph: Graph, moved: dict[tuple[int, int], Entry]) -> None:
    """Replace tensors for all their consumers, also through chains of replacements."""
    def target(entry: Entry) -> Entry:
        while entry.key in moved:
            entry = moved[entry.key]
        return entry

    for node in graph.nodes():
        node.inputs = [target(entry) for entry in node.inputs]
    graph.heads = [target(head) for head in graph.heads]


def inline_cached_ops(graph: Graph) -> Graph:
    """Replace every ``_CachedOp`` by the operators that it runs; return the graph."""
    # MXNet's own partitioners make such nodes. Their text holds their operators, which MXNet does not read out of it: a
    # symbol that is read with such a node fails in every use.
    for node in graph.operators():
        if node.op == "_CachedOp" and _SUBGRAPHS in node.extra:
            inner = inline_cached_ops(subgraphs_of(node)[0])
            redirect(inner, {Entry(variable).key: entry for variable, entry in zip(inner.variables(), node.inputs)})
            redirect(graph, {Entry(node, output).key: head for output, head in enumerate(inner.heads)})
    return graph


def loops_and_branches(graph: Graph) -> list[Node]:
    """All loops and branches of a graph, without those that their bodies hold."""
    return [node for node in graph.operators() if node.op in BODIES]


def has_control_flow(graph: Graph) -> bool:
    """Tell whether a graph has loops or branches."""
    return bool(loops_and_branches(graph))


def subgraphs_of(node: Node) -> list[Graph]:
    """Read the graphs that a node holds, if any."""
    return [Graph.from_json(json.dumps(part)) for part in node.extra.get(_SUBGRAPHS, ())]


def edit_bodies(node: Node, edit: Callable[[int, Graph], int]) -> int:
    """Edit the bodies of a loop or branch, by position and graph; return the sum of the changes that ``edit`` made."""
    parts = subgraphs_of(node)
    count = sum(edit(position, parts[position]) for position in BODIES[node.op])
    if count:
        node.extra = {**node.extra, _SUBGRAPHS: [json.loads(part.to_json()) for part in parts]}
    return count
