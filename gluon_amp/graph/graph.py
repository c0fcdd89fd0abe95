"""Graph and Node: an editable form of MXNet's symbol JSON, lossless in both directions; and a node's precision.

The format is nnvm's: a topologically sorted list of nodes whose inputs are ``[node, output, version]``
triples, and heads of the same form. Here inputs point at :class:`Node` objects, so that a rewrite needs no
renumbering; the order of the list is restored when the graph is written.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from ..errors import GraphError

VARIABLE = "null"
_AFTER = "control_deps"  # what nnvm calls it


class Cause(str, Enum):
    """Why an operator runs in the precision that it runs in."""

    TABLE = "table"  # the operator table says so
    CHANNELS = "channels"  # it has too few input channels to gain
    LAYOUT = "layout"  # there are no fast kernels for its layout, or its neighbours share one
    USER_LIST = "user_list"  # it is in one of the user's lists
    NOT_LISTED = "not_listed"  # the user's list of low-precision operators leaves it out
    REGISTERED = "registered"  # the user's register_op says so
    EXCLUSION = "exclusion"  # the policy excludes its node
    REGION = "region"  # it is in a region without AMP, or in an excluded block
    OUTSIDE = "outside"  # it is outside of every region with AMP
    STORAGE = "storage"  # it reads sparse tensors
    CONSTANT = "constant"  # the low-precision type cannot hold a constant that it computes with
    SHAPE = "shape"  # there is no sound or fast kernel for its shape
    DEVICE = "device"  # the device is faster in FP32
    CONSUMERS = "readers"  # all its consumers run in low precision
    INT8 = "int8"  # it runs in INT8
    DEFAULT = "default"  # nothing is known of it


# The user's wishes, on one operator or on its surroundings.
WISHES = (Cause.USER_LIST, Cause.NOT_LISTED, Cause.REGISTERED, Cause.EXCLUSION, Cause.REGION, Cause.OUTSIDE)


@dataclass(frozen=True)
class Decision:
    """The precision of one operator, and why."""

    rule: str  # ``'LOWER'``, ``'FP32'``, ``'WIDEST'``, ``'NEUTRAL'`` or ``'KEEP'``
    cause: Cause  # the kind of reason, for programs
    note: str  # the reason, for people
    fp32_inputs: tuple[int, ...] = ()  # positions of inputs that stay FP32 whatever the data runs in
    safe: bool = True  # False where a low-precision kernel is missing or wrong


class Role(Enum):
    """Who put a node into a graph, and what for."""

    OWN = "own"  # the program
    CAST = "cast"  # a pass: its producer and its consumers differ in precision
    IDENTITY = "identity"  # a pass: MXNet's cast would fail, or lose a gradient, without it
    ROUNDING = "rounding"  # a pass: it imitates a type that the device has no kernels for
    HELPER = "helper"  # a pass: anything else, such as the zeros of padded filters


class Entry(NamedTuple):
    """One output of a node, as an operator reads it."""

    node: Node  # the producer
    output: int = 0  # which of the producer's outputs
    version: int = 0  # nnvm's version of a mutable variable; copied, never interpreted

    @property
    def key(self) -> tuple[int, int]:
        """A hashable identity of the tensor (producer and output number)."""
        return id(self.node), self.output

    @property
    def label(self) -> str:
        """What nodes that serve the tensor are called after: its producer, and its number behind the first output."""
        return f"{self.node.name}{self.output or ''}"

    @property
    def dtype(self) -> str | None:
        """The tensor's data type as planned, else as analysed; None when neither knows it."""
        known = self.node.planned or self.node.dtypes
        return known[self.output] if self.output < len(known) else None

    @property
    def is_lowered(self) -> bool:
        """Whether the plan gives the tensor another type than it had."""
        return self.dtype != self.node.dtypes[self.output]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The tensor's shape, None when the analysis does not know it."""
        return self.node.shapes[self.output] if self.output < len(self.node.shapes) else None


@dataclass(eq=False)
class Node:
    """An operator or a variable of a graph."""

    op: str  # registered operator name, ``'null'`` for a variable
    name: str  # the user's name of the node
    attrs: dict[str, str] = field(default_factory=dict)  # operator parameters and symbol attributes, all strings
    inputs: list[Entry] = field(default_factory=list)  # in the operator's order
    num_outputs: int = 1  # all outputs, hidden ones included
    # JSON fields that are carried along unread (``subgraphs`` of control flow operators)
    extra: dict[str, Any] = field(default_factory=dict)
    after: list[Node] = field(default_factory=list)  # nodes before it in the order, beside its inputs
    # per output, written by the analysis; empty until then
    dtypes: list[str | None] = field(default_factory=list)
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    # per output, the data types that the assignment pass decided on; empty until then. A node without a decision reads
    # its inputs in the first of them.
    planned: list[str | None] = field(default_factory=list)
    decision: Decision | None = None  # the precision of this operator, and why; written by the assignment pass
    role: Role = Role.OWN  # who put the node there
    replaced: str = ""  # the program's operator, where a pass has put another one in its place; empty otherwise
    # the program's node whose result this one gives, where a pass has changed what that one computes
    stands_for: str = ""

    @property
    def decided(self) -> Decision:
        """The decision of a node that has one."""
        if self.decision is None:
            raise GraphError(f"no precision was assigned to {self!r}: assign_dtypes has to run before")
        return self.decision

    @property
    def kind(self) -> str:
        """The operator that the program asked for."""
        return self.replaced or self.op

    @property
    def is_variable(self) -> bool:
        """Whether the node is an input of the graph rather than an operator."""
        return self.op == VARIABLE

    def __repr__(self) -> str:
        return f"Node({self.op} {self.name!r})"


class Graph:
    """A symbol graph."""

    def __init__(self, heads: list[Entry], attrs: dict[str, Any] | None = None):
        self.heads = heads
        self.attrs = attrs or {}
        self._names: set[str] = set()  # of all nodes that there are and were, once somebody has asked for a new one

    @classmethod
    def from_json(cls, text: str) -> Graph:
        """Read a graph from the text that ``Symbol.tojson`` writes."""
        try:
            raw = json.loads(text, strict=False)  # MXNet writes control characters as they are
            rows = raw.get("node_row_ptr")
            nodes: list[Node] = []
            for number, item in enumerate(raw["nodes"]):
                nodes.append(_read_node(item, nodes, rows[number + 1] - rows[number] if rows else 1))
            if not raw["heads"]:
                raise ValueError("no heads")
            return cls([_read_entry(head, nodes) for head in raw["heads"]], dict(raw.get("attrs", {})))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise GraphError(f"not the JSON text of an MXNet symbol, as tojson() and export() write it: "
                             f"{type(error).__name__}: {error}") from error

    def to_json(self) -> str:
        """Write the graph in the form that ``mx.sym.load_json`` reads."""
        nodes = self.nodes()
        number = {id(node): position for position, node in enumerate(nodes)}
        rows = [0]
        for node in nodes:
            rows.append(rows[-1] + node.num_outputs)

        def triple(entry: Entry) -> list[int]:
            return [number[id(entry.node)], entry.output, entry.version]

        items = []
        for node in nodes:
            item: dict[str, Any] = {"op": node.op, "name": node.name}
            if node.attrs:
                item["attrs"] = node.attrs
            item["inputs"] = [triple(entry) for entry in node.inputs]
            if node.after:
                item[_AFTER] = [number[id(each)] for each in node.after]
            item.update(node.extra)
            items.append(item)
        written = {"nodes": items, "arg_nodes": [i for i, node in enumerate(nodes) if node.is_variable],
                   "node_row_ptr": rows, "heads": [triple(head) for head in self.heads], "attrs": self.attrs}
        # MXNet reads escapes for quotes, backslashes, tabs and line ends only.
        return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _OTHER_ESCAPES.get(found[0], found[0]),
                           json.dumps(written, ensure_ascii=False))

    def nodes(self) -> list[Node]:
        """All nodes in nnvm's own order (depth first, inputs before their consumer, then its ``after``)."""
        order: list[Node] = []
        state: dict[int, bool] = {}  # False: being visited, True: done
        for head in self.heads:
            if id(head.node) in state:
                continue
            state[id(head.node)] = False
            stack = [(head.node, iter(_before(head.node)))]
            while stack:  # in line: graphs may have many thousands of nodes, and every pass asks for them
                node, pending = stack[-1]
                for entry in pending:
                    child = entry.node
                    done = state.get(id(child))
                    if done is None:
                        state[id(child)] = False
                        stack.append((child, iter(_before(child))))
                        break
                    if not done:
                        raise GraphError(f"the graph has a cycle through {child!r}")
                else:
                    stack.pop()
                    state[id(node)] = True
                    order.append(node)
        return order

    def new_name(self, base: str) -> str:
        """Return a name for a new node: ``base``, numbered when it is taken."""
        self._names = self._names or {node.name for node in self.nodes()}
        return unique_name(base, self._names)

    def copy(self) -> Graph:
        """Return a graph of the same nodes, each a copy, decisions and all."""
        made: dict[int, Node] = {}

        def entry(old: Entry) -> Entry:
            return old._replace(node=made[id(old.node)])

        for node in self.nodes():
            made[id(node)] = replace(node, attrs=dict(node.attrs), inputs=[entry(old) for old in node.inputs],
                                     after=[made[id(old)] for old in node.after], dtypes=list(node.dtypes),
                                     shapes=list(node.shapes), planned=list(node.planned))
        return Graph([entry(head) for head in self.heads], dict(self.attrs))

    def forget(self, attribute: str) -> None:
        """Take an attribute from all nodes, and from all nodes of the graphs that they hold."""
        for node in self.nodes():
            node.attrs, node.extra = _without(node.attrs, attribute), _without(node.extra, attribute)

    def operators(self) -> list[Node]:
        """All nodes that are operators, in order."""
        return [node for node in self.nodes() if not node.is_variable]

    def variables(self) -> list[Node]:
        """All nodes that are variables, in the order of ``Symbol.list_inputs``."""
        return [node for node in self.nodes() if node.is_variable]


def _without(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_without(item, key) for item in value]
    if isinstance(value, dict):
        return {name: _without(item, key) for name, item in value.items() if name != key}
    return value


def _before(node: Node) -> list[Entry]:
    return [*node.inputs, *map(Entry, node.after)] if node.after else node.inputs


def unique_name(base: str, taken: set[str]) -> str:
    """Return ``base``, numbered when it is in ``taken`` already, and note it there."""
    name, count = base, 1
    while name in taken:
        name, count = f"{base}{count}", count + 1
    taken.add(name)
    return name


_ESCAPE = re.compile(r"\\(?:u00([01][0-9a-f])|.)")
_OTHER_ESCAPES = {r"\b": "\b", r"\f": "\f"}


def _read_entry(raw: Any, nodes: list[Node]) -> Entry:
    node, index = raw[0], raw[1]
    if not (isinstance(node, int) and 0 <= node < len(nodes)):
        raise ValueError(f"an input refers to node {node}, which does not come before it")
    if not (isinstance(index, int) and 0 <= index < nodes[node].num_outputs):
        raise ValueError(f"an input refers to output {index} of {nodes[node]!r}, which has {nodes[node].num_outputs}")
    return Entry(nodes[node], index, raw[2] if len(raw) > 2 else 0)


def _read_node(raw: Any, nodes: list[Node], num_outputs: int) -> Node:
    # Files of MXNet before 1.0 say "param" or "attr" where later ones say "attrs".
    attrs = {**raw.get("param", {}), **raw.get("attr", {}), **raw.get("attrs", {})}
    known = {"op", "name", "attrs", "attr", "param", "inputs", _AFTER, "backward_source_id"}
    return Node(op=raw["op"], name=raw["name"], attrs=attrs,
                inputs=[_read_entry(entry, nodes) for entry in raw["inputs"]], num_outputs=num_outputs,
                after=[_read_entry((number, 0), nodes).node for number in raw.get(_AFTER, ())],
                extra={key: value for key, value in raw.items() if key not in known})
