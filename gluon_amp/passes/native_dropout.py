"""Dropout in C++, and in operators that contain it: the random bits that they make their choices of."""
from __future__ import annotations

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, Readers, Role
from ..rules import FP32, Cause, Decision

_COUNT = 64  # of bits
_BITS = Decision(FP32, Cause.TABLE, "random bits of dropout are FP32")


def is_plain_dropout(entry: Entry) -> bool:
    """Tell whether a tensor is what dropout of single values gives."""
    node = entry.node
    return (node.op == "Dropout" and entry.output == 0 and 0 < float(node.attrs.get("p", "0.5")) < 1
            and node.attrs.get("axes", "()") in ("()", "[]", "None"))


def fits(node: Node, readers: Readers) -> bool:
    """Tell whether single values are dropped, and nobody reads which."""
    return is_plain_dropout(Entry(node)) and readers.is_first_only(node)


def random_bits(graph: Graph, dropout: Node) -> Entry:
    """Make random bits by MXNet's Dropout, for its seed and in its mode; they are all ones where it drops nothing."""
    mode = {name: value for name, value in dropout.attrs.items() if name == "mode"}
    ones = _made(graph, "_ones", dropout, [], shape=f"({_COUNT},)", dtype=FLOAT32)
    drawn = _made(graph, "Dropout", dropout, [Entry(ones)], p=0.5, **mode)
    drawn.num_outputs, drawn.dtypes, drawn.shapes = 2, drawn.dtypes * 2, drawn.shapes * 2
    return Entry(_made(graph, "BlockGrad", dropout, [Entry(drawn)]))


def _made(graph: Graph, op: str, dropout: Node, inputs: list[Entry], **attrs: object) -> Node:
    name = graph.new_name(f"{dropout.name}_{op.strip('_').lower()}")
    return Node(op, name, {key: str(value) for key, value in attrs.items()}, inputs, dtypes=[FLOAT32],
                shapes=[(_COUNT,)], role=Role.HELPER, decision=_BITS)
