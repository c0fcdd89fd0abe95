"""Edit graphs: make nodes, find readers, and replace what they read."""
from __future__ import annotations

from collections import defaultdict
from typing import Iterator, Sequence

from .graph import Entry, Graph, Node, Role

MULTICAST = "amp_multicast"  # casts several tensors to one type
CAST = "amp_cast"


def named_by(tensor: str) -> Iterator[str]:
    """Yield the possible names of a tensor's node: the engine appends the name of the output or input."""
    while "_" in tensor:
        tensor = tensor.rpartition("_")[0]
        yield tensor


def operator(op: str, name: str, inputs: list[Entry], like: Entry, role: Role = Role.HELPER, **attrs: object) -> Node:
    """Make a single-output operator node with the data type and shape of ``like``."""
    return Node(op, name, {key: str(value) for key, value in attrs.items()}, inputs,
                dtypes=[like.dtype], shapes=[like.shape], role=role)


def cast(entry: Entry, dtype: str, name: str, role: Role = Role.CAST) -> Entry:
    """Make a cast of a tensor."""
    made = operator(CAST, name, [entry], entry, role, dtype=dtype)
    made.dtypes = [dtype]
    return Entry(made)


def identity(entry: Entry, name: str) -> Entry:
    """Make an operator that oneDNN does not run, and that changes nothing: a multiplication by 1."""
    return Entry(operator("_mul_scalar", name, [entry], entry, Role.IDENTITY, scalar=1.0))


def cast_nodes(graph: Graph) -> list[Node]:
    """All casts in a graph."""
    return [node for node in graph.operators() if node.op == CAST]


class Readers:
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


def connected_parts(pairs: Sequence[tuple[int, int]], size: int) -> Sequence[int]:
    """Return the number of the part that each of so many things is in, where pairs of them hang together."""
    parent = list(range(size))

    def part(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]  # halves the way for those who come after
        return number

    for first, second in pairs:
        parent[part(first)] = part(second)
    return [part(number) for number in range(size)]


def redirect(graph: Graph, moved: dict[tuple[int, int], Entry]) -> None:
    """Replace tensors for all their readers, also through chains of replacements."""
    def target(entry: Entry) -> Entry:
        while entry.key in moved:
            entry = moved[entry.key]
        return entry

    for node in graph.nodes():
        node.inputs = [target(entry) for entry in node.inputs]
    graph.heads = [target(head) for head in graph.heads]
