"""Put one operator in C++ in the place of those that values times their hard sigmoid are made of.

MobileNet v3 computes ``x * (clip(x + 3, 0, 6) / 6)`` by four operators, and its gradient by five: each reads and writes
a whole map. The one in C++ keeps nothing between, and takes maps in any order, so that it goes along with chains that
have the channels last.
"""
from __future__ import annotations

from math import prod
from typing import Iterator, NamedTuple

from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, Readers
from ..graph.attrs import symbol_attributes
from ..graph.decision import WISHES
from ..rules import NEUTRAL, Rule
from .assign_dtypes import follow
from .context import Context
from .known_forward import unknown_forward

OP = "_gluon_amp_hard_swish"
_LEAST = 16384  # values of a map, as of a clip
_PRODUCTS = ("elemwise_mul", "broadcast_mul", "_npi_multiply")
_SUMS = ("_plus_scalar", "_npi_add_scalar")
_FACTORS = ("_mul_scalar", "_npi_multiply_scalar")
_QUOTIENTS = ("_div_scalar", "_npi_true_divide_scalar")
_LIMITS = ("clip", "_npi_clip")
_RULE = Rule(NEUTRAL, note="native bfloat16 kernel")


class _Found(NamedTuple):
    """A product of values and their hard sigmoid."""

    last: Node  # whose result it is
    data: Entry
    within: list[Node]  # what else it is made of
    attrs: dict[str, str]


def is_needed(context: Context) -> bool:
    """Tell whether there are operators in C++ for the device, in a type that they compute in."""
    return context.native is not None and context.target != FLOAT16


def run(graph: Graph, context: Context) -> int:
    """Replace such products of large maps; return how many."""
    readers = Readers(graph)
    unknown = unknown_forward(graph)
    found = [each for each in _find(graph, readers)
             if _fits(each, context) and each.data.node not in unknown]
    if not found or not context.runs_natively(OP):
        return 0
    for each in found:
        node = each.last
        node.inputs = [each.data]
        node.replaced, node.op = node.op, OP
        node.attrs = {**symbol_attributes(node.attrs), **each.attrs}
        if not context.converted:
            node.decision = _RULE.decision
    if context.target == BFLOAT16 and not context.converted:
        follow(graph, context)
    return len(found)


def _find(graph: Graph, readers: Readers) -> Iterator[_Found]:
    for node in graph.operators():
        if node.op in _PRODUCTS:
            for data, gate in (node.inputs, node.inputs[::-1]):
                made = _gate(gate, data, readers)
                if made is not None:
                    yield _Found(node, data, *made)
                    break


def _gate(entry: Entry, data: Entry, readers: Readers) -> tuple[list[Node], dict[str, str]] | None:
    """Return the operators of a hard sigmoid of ``data``, which nothing else reads, and what they compute with."""
    within = []
    for ops in (_QUOTIENTS + _FACTORS, _LIMITS, _SUMS):
        if entry.node.op not in ops or not readers.is_read_once(entry):
            return None
        within.append(entry.node)
        entry = entry.node.inputs[0]
    scaled, limits, moved = (node.attrs for node in within)
    factor = float(scaled["scalar"])
    if entry.key != data.key or factor == 0 or "None" in (limits.get("a_min", "None"), limits.get("a_max", "None")):
        return None
    divisor = factor if within[0].op in _QUOTIENTS else 1 / factor
    return within, {"shift": moved["scalar"], "a_min": limits["a_min"], "a_max": limits["a_max"],
                    "divisor": repr(divisor)}


def _fits(found: _Found, context: Context) -> bool:
    """Tell whether a map is large, all of it in one type, and the user wants none of it in another."""
    nodes = (found.last, *found.within)
    types = {found.data.node.dtypes[found.data.output], *(node.dtypes[0] for node in nodes)}
    is_free = context.converted or not any(node.decided.cause in WISHES for node in nodes)
    return (is_free and len(types) == 1 and types <= {FLOAT32, BFLOAT16} and found.data.shape is not None
            and prod(found.data.shape) >= _LEAST)
