"""Find attention of several heads: products, softmax, and all that splits projections into heads and joins them again.

One operator in C++ does all of that, and reads heads where they lie. What splits and joins is recognised by where it
puts the values of two arrays of other sizes than the network's, not by how it is written.
"""
from __future__ import annotations

from math import prod
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from ..graph import Entry, Graph, Node, Readers
from ..graph.attrs import integer, is_set

__all__ = ["Attention", "find"]

_MOVES = ("Reshape", "transpose", "SwapAxis")
_SCALES = ("_mul_scalar", "_div_scalar")
_SIZES = ((2, 3), (5, 2))  # of batches and lengths, to try moves with
_DEFAULT_SOFTMAX = {"axis": ("-1", "2"), "temperature": ("None", "1.0", "1"), "dtype": ("None",),
                    "use_length": ("False", "0")}


class Attention(NamedTuple):
    """What one operator can take the place of."""

    node: Node  # the last one, which gives (batch, length, units)
    products: tuple[Node, Node]  # of queries and keys, and with values
    softmax: Node
    inputs: tuple[Entry, ...]  # projections, (batch, length, units), or one of three times the units; then the bias
    attrs: Mapping[str, object]  # of the operator


def find(graph: Graph, readers: Readers) -> Iterator[Attention]:
    """Find attention whose inner results nothing else reads."""
    for node in graph.operators():
        if node.op == "batch_dot" and not is_set(node.attrs, "transpose_a") and not is_set(node.attrs, "transpose_b"):
            found = _around(node, readers)
            if found is not None:
                yield found


class _Heads(NamedTuple):
    """A tensor's way from a projection to heads."""

    base: Entry
    moves: list[Node]  # in the order in which they run
    scale: float

    def are_of(self, heads: int) -> bool:
        """Whether (batch, length, units) becomes (batch * heads, length, width)."""
        units = (self.base.shape or (0,))[-1]
        return units % heads == 0 and _does(
            self.moves, lambda batch, length: (batch, length, units),
            lambda x: x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3).reshape(-1, x.shape[1], units // heads))


def _around(product: Node, readers: Readers) -> Attention | None:
    softmax = product.inputs[0].node
    if not _is_plain_softmax(softmax) or not _is_inner(product.inputs[0], readers):
        return None
    scores, scale = _scaled(softmax.inputs[0], readers)
    bias = None
    if scores is not None and scores.node.op in ("broadcast_add", "elemwise_add") and _is_inner(scores, readers):
        if scale != 1:
            return None
        bias, scores = _bias_of(scores.node)
        scores, scale = _scaled(scores, readers) if scores is not None else (None, 1.0)
    if scores is None or scores.node.op != "batch_dot" or not _is_inner(scores, readers):
        return None
    first = scores.node
    if is_set(first.attrs, "transpose_a") or not is_set(first.attrs, "transpose_b"):
        return None
    heads = [_heads(entry, readers) for entry in (*first.inputs, product.inputs[1])]
    shape, units = first.inputs[0].shape or (0,), (heads[0].base.shape or (0,))[-1]
    count = units // shape[-1] if shape[-1] else 0
    if count < 1 or not all(len(each.base.shape or ()) == 3 and each.are_of(count) for each in heads):
        return None
    if heads[2].scale != 1 or (bias is not None and not _is_for(bias.node, count)):
        return None
    last = _joined(product, count, units, readers)
    if last is None:
        return None
    attrs = {"heads": count, "scale": repr(scale * heads[0].scale * heads[1].scale), "bias": bias is not None}
    layout, projections = _projections([each.base for each in heads], readers)
    if bias is not None and layout != "joined":  # inputs of the graph would come in another order
        return None
    added = () if bias is None else (bias.node.inputs[0],)
    return Attention(last, (first, product), softmax, (*projections, *added), {**attrs, "layout": layout})


def _is_inner(entry: Entry, readers: Readers) -> bool:
    return len(readers.of(entry)) == 1 and not readers.is_head(entry)


def _is_plain_softmax(node: Node) -> bool:
    return (node.op == "softmax" and len(node.inputs) == 1
            and all(node.attrs.get(name, values[0]) in values for name, values in _DEFAULT_SOFTMAX.items()))


def _scaled(entry: Entry, readers: Readers) -> tuple[Entry | None, float]:
    """Return what is behind factors, and their product."""
    scale = 1.0
    while entry.node.op in _SCALES and _is_inner(entry, readers):
        scale *= _factor(entry.node)
        entry = entry.node.inputs[0]
    return entry, scale


def _factor(node: Node) -> float:
    scalar = float(node.attrs.get("scalar", 1))
    return scalar if node.op == "_mul_scalar" else 1 / scalar


def _bias_of(addition: Node) -> tuple[Entry | None, Entry | None]:
    """Return the repeated bias and the scores of a sum; in another order the graph's inputs would have another one."""
    scores, bias = addition.inputs
    is_bias = bias.node.op == "repeat" and len(bias.node.inputs[0].shape or ()) == 3
    return (bias, scores) if is_bias else (None, None)


def _is_for(repeat: Node, heads: int) -> bool:
    return integer(repeat.attrs, "repeats", 0) == heads and repeat.attrs.get("axis") == "0"


def _heads(entry: Entry, readers: Readers) -> _Heads:
    moves: list[Node] = []
    scale = 1.0
    while _is_inner(entry, readers) and entry.node.op in (*_MOVES, *_SCALES):
        if entry.node.op in _SCALES:
            scale *= _factor(entry.node)
        else:
            moves.insert(0, entry.node)
        entry = entry.node.inputs[0]
    return _Heads(entry, moves, scale)


def _joined(product: Node, heads: int, units: int, readers: Readers) -> Node | None:
    """Return the node that gives (batch, length, units) from heads, if that is what follows a product."""
    node = product
    moves: list[Node] = []
    while _is_inner(Entry(node), readers) and readers.of(Entry(node))[0].op in _MOVES and len(moves) < len(_MOVES) + 1:
        node = readers.of(Entry(node))[0]
        moves.append(node)
        if _does(moves, lambda batch, length: (batch * heads, length, units // heads),
                 lambda x: x.reshape(-1, heads, *x.shape[1:]).transpose(0, 2, 1, 3).reshape(-1, x.shape[1], units)):
            return node
    return None


def _projections(bases: Sequence[Entry], readers: Readers) -> tuple[str, list[Entry]]:
    """Return the layout of queries, keys and values, and what the operator is to read."""
    split = bases[0].node
    if (split.op == "SliceChannel" and all(base.node is split and _is_inner(base, readers) for base in bases)
            and [base.output for base in bases] == [0, 1, 2] and integer(split.attrs, "num_outputs", 0) == 3
            and split.attrs.get("axis") in ("2", "-1") and not is_set(split.attrs, "squeeze_axis")):
        return "joined", [split.inputs[0]]
    return "separate", list(bases)


def _does(moves: Sequence[Node], shape: Callable[..., tuple[int, ...]], wanted: Callable[[Any], Any]) -> bool:
    """Whether operators put values where a function does, at several sizes."""
    for sizes in _SIZES:
        x = np.arange(prod(shape(*sizes))).reshape(shape(*sizes))
        try:
            received = x
            for node in moves:
                received = _moved(node, received)
        except ValueError:
            return False
        expected = wanted(x)
        if received.shape != expected.shape or (received != expected).any():
            return False
    return True


def _moved(node: Node, x: np.ndarray) -> np.ndarray:
    """Run an operator that moves data; raise ValueError where that is not possible."""
    if node.op == "SwapAxis":
        return np.swapaxes(x, integer(node.attrs, "dim1", 0), integer(node.attrs, "dim2", 0))
    if node.op == "transpose":
        return np.transpose(x, _signed(node.attrs.get("axes", "")) or None)
    wanted = _signed(node.attrs.get("shape", ""))
    sizes = list(x.shape)
    if is_set(node.attrs, "reverse"):
        wanted, sizes = wanted[::-1], sizes[::-1]
    if not wanted or min(wanted) < -1:
        raise ValueError("not known here")
    kept = [sizes[i] if size == 0 and i < len(sizes) else size for i, size in enumerate(wanted)]
    if 0 in kept:
        raise ValueError("not known here")
    return x.reshape(kept[::-1] if is_set(node.attrs, "reverse") else kept)


def _signed(text: str) -> list[int]:
    return [int(number) for number in text.strip("()[] ").split(",") if number.strip()]
