"""Fuse attention into one operator in C++: products, softmax, and the operators that split and join heads.

::

    batch_dot(softmax(scale * batch_dot(heads(q), heads(k))), heads(v))   ->   _gluon_amp_attention(q, k, v)

It reads heads where they lie. The operators that split and join them are recognised by where they put the values of two
arrays of other sizes than the network's, not by how they are written. Masks, lengths and dropout between the products
are part of the operator.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from ..graph import WISHES, Consumers, Entry, Graph, Node, operator
from ..graph.attrs import integer, integers, is_set, symbol_attributes
from ..machine.dtypes import BFLOAT16, FLOAT32
from ..rules import FP32, LOWER, Cause, Decision
from .context import Context
from .precisions import Made, decide, give_low, in_type, is_widened

ATTENTION, _LEAST = "_gluon_amp_attention", 500_000
_FP32_INPUTS = ("bias", "mask", "bits")
_MOVES = ("Reshape", "transpose", "SwapAxis")
_REPEATS = ("repeat", "expand_dims", "broadcast_axis", "Reshape")
_SCALES = ("_mul_scalar", "_div_scalar", "_contrib_div_sqrt_dim")
_PRODUCTS = ("elemwise_mul", "broadcast_mul")
_SIZES = ((2, 3), (5, 2))  # of batches and lengths, to try moves with
_DEFAULT_SOFTMAX = {"axis": ("-1", "2"), "temperature": ("None", "1.0", "1"), "dtype": ("None",)}
_SELF, _MEMORY = "_contrib_interleaved_matmul_selfatt", "_contrib_interleaved_matmul_encdec"
# Products that read heads of one projection, or of one for queries and one for keys and values; by their names in
# converted graphs, too.
_INTERLEAVED = {_SELF: _SELF, "_sg_mkldnn_selfatt": _SELF, _MEMORY: _MEMORY}


class _Attention(NamedTuple):
    """Operators that compute attention."""

    node: Node  # the last one, which gives (batch, length, units)
    products: tuple[Node, Node]  # of queries and keys, and with values
    softmax: Node
    inputs: Mapping[str, Entry]  # by the names that the operator has for them, in the graph's order
    attrs: Mapping[str, object]  # of the operator
    dropout: Node | None  # of the weights


def fuse_attention(graph: Graph, context: Context, unknown: set[Node]) -> int:
    """Fuse the operators of each attention into one; return how many."""
    consumers = Consumers(graph)
    found = [each for each in (_find(node, consumers) for node in graph.operators())
             if each is not None and _gains_as_one(each, context)
             and not any(entry.node in unknown for entry in each.inputs.values())
             and (each.dropout is None or may_draw(context))]
    if not found or not context.runs_natively(ATTENTION):
        return 0
    casts: Made = {}
    for each in found:
        node, inputs = each.node, dict(each.inputs)
        if each.dropout is not None:
            inputs["bits"] = random_bits(graph, each.dropout)
        kept = tuple(position for position, name in enumerate(inputs) if name in _FP32_INPUTS)
        decision = _decision_on(each, context, kept)
        dtype = BFLOAT16 if decision.rule == LOWER else FLOAT32
        if context.converted:
            inputs.update((name, in_type(graph, entry, dtype, casts, consumers)) for name, entry in each.inputs.items()
                          if name not in (*_FP32_INPUTS, "lengths"))
        node.inputs = list(inputs.values())
        node.replaced, node.op = node.op, ATTENTION
        attrs = {**each.attrs, "operands": ",".join(inputs)}
        node.attrs = {**symbol_attributes(node.attrs), **{name: str(value) for name, value in attrs.items()}}
        node.dtypes = [FLOAT32]
        if not context.converted:
            node.decision, node.planned = decision, [dtype]
        elif dtype == BFLOAT16:
            give_low(graph, node)
    return len(found)


def may_draw(context: Context) -> bool:
    """Tell whether dropout may draw other numbers than MXNet's of the same seed: not where it trains in FP32."""
    return context.policy.lowers or not context.facts.recorded


def _gains_as_one(found: _Attention, context: Context) -> bool:
    types = {"lengths": ("int32",), **dict.fromkeys(_FP32_INPUTS, (FLOAT32,))}  # before casts are placed
    others = (FLOAT32, BFLOAT16) if context.converted else (FLOAT32,)
    known = all(entry.shape and entry.node.dtypes[entry.output] in types.get(name, others)
                for name, entry in found.inputs.items())
    shape, weights = found.node.shapes[0], found.softmax.shapes[0]
    return (known and shape is not None and weights is not None
            and 2 * prod(weights) * shape[-1] // int(str(found.attrs["heads"])) >= _LEAST)


def _decision_on(found: _Attention, context: Context, fp32_inputs: tuple[int, ...]) -> Decision:
    """Return low precision, unless nothing has it or the user wants FP32 of one of the operators."""
    nodes = (*found.products, found.softmax)
    # A converted graph has no decisions any more, and other names for products.
    decisions = [decide(replace(node, op=node.op.replace("_sg_mkldnn_selfatt", _SELF)), context) if context.converted
                 else node.decided for node in nodes]
    if not context.policy.lowers:
        return decisions[-1]
    for decision in decisions:
        if decision.cause in WISHES and decision.rule == FP32:
            return replace(decision, fp32_inputs=())
    if context.converted and (context.policy.training or context.target != BFLOAT16):
        return decisions[-1]
    return Decision(LOWER, Cause.TABLE, "attention in C++ keeps its scores in FP32", fp32_inputs)


def _find(node: Node, consumers: Consumers) -> _Attention | None:
    """Find attention that ends with a product, and whose inner results nothing else reads."""
    if node.op == "batch_dot" and not is_set(node.attrs, "transpose_a") and not is_set(node.attrs, "transpose_b"):
        return _around(node, consumers)
    return _interleaved(node, consumers) if node.op in [f"{kind}_valatt" for kind in _INTERLEAVED] else None


@dataclass
class _Weights:
    """How weights are made of scores."""

    softmax: Node
    scores: Entry
    moves: list[Node] = field(default_factory=list)  # between softmax and product, which have to leave values in place
    dropout: Node | None = None
    extras: dict[str, Entry] = field(default_factory=dict)  # for all heads; by the operator's names
    masked: float | None = None  # the score of values that a mask takes away


def _around(product: Node, consumers: Consumers) -> _Attention | None:
    weights = _weights(product.inputs[0])
    if weights is None:
        return None
    scores, scalings = _behind(weights.scores, lambda each: each.node.op in _SCALES)
    may_be_shared = scores.node.op == "broadcast_add"  # of one image and one head: other calls may have several images
    if scores.node.op in ("broadcast_add", "elemwise_add") and _factor(scalings) == 1 and weights.masked is None:
        scores, weights.extras["bias"] = scores.node.inputs
        scores, scalings = _behind(scores, lambda each: each.node.op in _SCALES)
    first = scores.node
    if first.op != "batch_dot" or is_set(first.attrs, "transpose_a") or not is_set(first.attrs, "transpose_b"):
        return None
    bases, ways = zip(*(
        _behind(entry, lambda each: consumers.is_read_once(each) and each.node.op in (*_MOVES, *_SCALES))
        for entry in (*first.inputs, product.inputs[1])))  # each projection, and the operators on its way to heads
    shapes: list[tuple[int, ...]] = [base.shape or () for base in bases]
    width = (first.inputs[0].shape or (0,))[-1]
    if not width or not all(len(shape) == 3 for shape in shapes):
        return None
    units, count = shapes[0][-1], shapes[0][-1] // width
    if count < 1 or not all(_are_heads(each, shape[-1], count) for each, shape in zip(ways, shapes)):
        return None
    last = _joined(product, count, units, consumers)
    if _factor(ways[2]) != 1 or last is None or (may_be_shared and (weights.scores.shape or ())[:1] == (1,)):
        return None
    layout, projections = _projections(bases, consumers)
    sizes = shapes[0][0], shapes[0][1], shapes[1][1], count
    scale = _factor(scalings) * (_factor(ways[0]) * _factor(ways[1]))
    return _attention(last, (first, product), weights, {"layout": layout, "scale": repr(scale)}, projections, sizes,
                      consumers)


def _interleaved(product: Node, consumers: Consumers) -> _Attention | None:
    weights = _weights(product.inputs[1])
    if weights is None:
        return None
    first, heads = weights.scores.node, integer(product.attrs, "heads", 0)
    kind = product.op.replace("_valatt", "")
    if (first.op != f"{kind}_qk" or integer(first.attrs, "heads", 0) != heads
            or first.inputs[-1].key != product.inputs[0].key
            or any(is_set(node.attrs, "quantized") for node in (first, product))):
        return None
    is_self = _INTERLEAVED[kind] == _SELF
    names = ["projections"] if is_self else ["queries", "keys_values"]
    shapes = [entry.shape or () for entry in first.inputs]
    if not all(shape and all(shape) for shape in shapes):
        return None
    (queries, batch, row), keys = shapes[0], shapes[-1][0]
    width = row // (3 * heads if is_self else heads)
    return _attention(product, (first, product), weights, {"layout": "interleaved", "scale": repr(width ** -0.5)},
                      dict(zip(names, first.inputs)), (batch, queries, keys, heads), consumers)


def _attention(last: Node, products: tuple[Node, Node], weights: _Weights, attrs: Mapping[str, object],
               projections: Mapping[str, Entry], sizes: tuple[int, int, int, int], consumers: Consumers
               ) -> _Attention | None:
    """Return attention, if extras are for its heads and nothing else reads its inner results."""
    batch, queries, keys, heads = sizes
    rows = batch, queries, keys
    shapes: Mapping[str, Sequence[tuple[int, ...]]] = {
        "lengths": [(batch, queries)], "mask": [rows], "bias": [rows, (batch, 1, keys)]}
    if not _does(weights.moves, lambda batch, length: (batch * heads, length, length + 1), lambda x: x):
        return None
    inputs = dict(projections)
    for name, entry in weights.extras.items():
        base = _before_repeat(entry, heads, shapes[name])
        if base is None:
            return None
        inputs[name] = base
    inputs = _in_order(last, inputs)
    within = _within(last, inputs.values(), consumers)
    if not {id(products[0]), id(weights.softmax)} <= within:
        return None
    attrs = {**attrs, "heads": heads, **({} if weights.masked is None else {"masked": repr(weights.masked)}),
             **({} if weights.dropout is None else {"p": weights.dropout.attrs.get("p", "0.5")})}
    return _Attention(last, products, weights.softmax, inputs, attrs, weights.dropout)


def _weights(entry: Entry) -> _Weights | None:
    """Return how weights are made, if the operator can make them."""
    entry, nodes = _behind(entry, lambda each: each.node.op in (*_MOVES, "_copy") or is_plain_dropout(each))
    dropouts = [node for node in nodes if node.op == "Dropout"]
    mask = None
    if entry.node.op in _PRODUCTS:
        entry, mask = entry.node.inputs
    softmax = entry.node
    if len(dropouts) > 1 or softmax.op != "softmax" or any(
            softmax.attrs.get(name, values[0]) not in values for name, values in _DEFAULT_SOFTMAX.items()):
        return None
    found = _Weights(softmax, softmax.inputs[0], [node for node in nodes if node.op in _MOVES],
                     dropouts[0] if dropouts else None)
    if is_set(softmax.attrs, "use_length"):
        found.extras["lengths"] = softmax.inputs[1]
    if mask is None:
        return found
    choice = found.scores.node  # by the mask that the weights are times
    if choice.op != "where" or choice.inputs[0].key != mask.key:
        return None
    scores, fill = choice.inputs[1], choice.inputs[2].node
    ones = fill.inputs[0].node if fill.op == "_mul_scalar" else fill
    if ones.op != "ones_like" or ones.inputs[0].key != scores.key:
        return None
    found.masked = 1.0 if ones is fill else float(fill.attrs.get("scalar", 1))
    found.extras["mask"], found.scores = mask, scores
    return found


def _behind(entry: Entry, passes: Callable[[Entry], bool]) -> tuple[Entry, list[Node]]:
    """Look through operators; return the tensor behind them, and them in the order in which they run."""
    nodes: list[Node] = []
    while passes(entry):
        nodes.insert(0, entry.node)
        entry = entry.node.inputs[0]
    return entry, nodes


def _before_repeat(entry: Entry, heads: int, shapes: Sequence[tuple[int, ...]]) -> Entry | None:
    """Return a tensor of one of some shapes that is repeated for all heads."""
    moves: list[Node] = []
    while entry.shape not in shapes or not _does(
            moves, lambda batch, length: (batch, length, length + 1)[:len(shapes[0])],
            lambda x: np.repeat(x, heads, axis=0)):
        if entry.node.op not in _REPEATS:
            return None
        moves.insert(0, entry.node)
        entry = entry.node.inputs[0]
    return entry


def _in_order(last: Node, inputs: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return inputs in the order in which a graph comes to them: its variables keep their order then."""
    found: dict[str, Entry] = {}
    seen, waiting = set(), list(last.inputs)
    while waiting:
        entry = waiting.pop(0)
        if entry.key not in seen:
            seen.add(entry.key)
            names = [name for name, each in inputs.items() if each.key == entry.key]
            found.update((name, inputs[name]) for name in names)
            waiting[:0] = [] if names else entry.node.inputs
    return found


def _within(last: Node, inputs: Iterable[Entry], consumers: Consumers) -> frozenset[int]:
    """Return the nodes between inputs and a last one that nothing else reads."""
    ends, within = {entry.node for entry in inputs}, {id(last)}
    waiting = [entry.node for entry in last.inputs]
    while waiting:
        node = waiting.pop()
        outputs = [Entry(node, output) for output in range(node.num_outputs)]
        if node in ends or node.is_variable or id(node) in within or any(map(consumers.is_head, outputs)):
            continue
        if all(id(consumer) in within for output in outputs for consumer in consumers.of(output)):
            within.add(id(node))
            waiting += [entry.node for entry in node.inputs]
    return frozenset(within)


def _factor(nodes: Sequence[Node]) -> float:
    """Return the product of the factors of operators; others have none."""
    factor = 1.0
    for node in nodes:
        if node.op == "_contrib_div_sqrt_dim":
            factor *= float((node.inputs[0].shape or (1,))[-1]) ** -0.5
        elif node.op in _SCALES:
            scalar = float(node.attrs.get("scalar", 1))
            factor *= scalar if node.op == "_mul_scalar" else 1 / scalar
    return factor


def _are_heads(moves: Sequence[Node], units: int, heads: int) -> bool:
    """Tell whether (batch, length, units) becomes (batch * heads, length, width)."""
    return units % heads == 0 and _does(
        [node for node in moves if node.op in _MOVES], lambda batch, length: (batch, length, units),
        lambda x: x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3).reshape(-1, x.shape[1], units // heads))


def _joined(product: Node, heads: int, units: int, consumers: Consumers) -> Node | None:
    """Return the node behind a product that gives (batch, length, units) from heads."""
    node = product
    moves: list[Node] = []
    while consumers.is_read_once(Entry(node)) and len(moves) <= len(_MOVES):
        (node,) = consumers.of(Entry(node))
        if node.op not in _MOVES:
            return None
        moves.append(node)
        if _does(moves, lambda batch, length: (batch * heads, length, units // heads),
                 lambda x: x.reshape(-1, heads, *x.shape[1:]).transpose(0, 2, 1, 3).reshape(-1, x.shape[1], units)):
            return node
    return None


def _projections(bases: Sequence[Entry], consumers: Consumers) -> tuple[str, dict[str, Entry]]:
    """Return the layout of queries, keys and values, and the inputs of the operator."""
    parts = [base.node.inputs[0] if is_widened(base) else base for base in bases]
    split = parts[0].node
    if (split.op == "SliceChannel" and all(part.node is split for part in parts)
            and all(map(consumers.is_read_once, (*bases, *parts)))
            and [part.output for part in parts] == [0, 1, 2] and integer(split.attrs, "num_outputs", 0) == 3
            and split.attrs.get("axis") in ("2", "-1") and not is_set(split.attrs, "squeeze_axis")):
        return "joined", {"projections": split.inputs[0]}
    return "separate", dict(zip(("queries", "keys", "values"), bases))


def _does(moves: Sequence[Node], shape: Callable[..., tuple[int, ...]], wanted: Callable[[Any], Any]) -> bool:
    """Tell whether operators put values where a function does, at several sizes."""
    for sizes in _SIZES:
        x = np.arange(prod(shape(*sizes))).reshape(shape(*sizes))
        try:
            received = x
            for node in moves:
                received = _moved(node, received)
        except (ValueError, IndexError):
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
        return np.transpose(x, integers(node.attrs, "axes") or None)
    if node.op == "repeat":
        return np.repeat(x, integer(node.attrs, "repeats", 0), axis=int(node.attrs.get("axis", "None")))
    if node.op == "expand_dims":
        return np.expand_dims(x, integer(node.attrs, "axis", 0))
    if node.op == "broadcast_axis":
        wider = dict(zip(integers(node.attrs, "axis"), integers(node.attrs, "size")))
        return np.broadcast_to(x, [wider.get(axis, size) for axis, size in enumerate(x.shape)])
    step = -1 if is_set(node.attrs, "reverse") else 1
    wanted, sizes = integers(node.attrs, "shape")[::step], x.shape[::step]
    kept = [sizes[i] if size == 0 and i < len(sizes) else size for i, size in enumerate(wanted)]
    if not wanted or min(wanted) < -1 or 0 in kept:
        raise ValueError("not known here")
    return x.reshape(kept[::step])


_COUNT = 64  # of bits
_BITS = Decision(FP32, Cause.TABLE, "random bits of dropout are FP32")


def is_plain_dropout(entry: Entry) -> bool:
    """Tell whether a tensor is the result of dropout of single values."""
    node = entry.node
    return (node.op == "Dropout" and entry.output == 0 and 0 < float(node.attrs.get("p", "0.5")) < 1
            and node.attrs.get("axes", "()") in ("()", "[]", "None"))


def random_bits(graph: Graph, dropout: Node) -> Entry:
    """Make random bits by MXNet's Dropout, for its seed and in its mode; they are all ones where it drops nothing."""
    def made(op: str, inputs: list[Entry], **attrs: Any) -> Node:
        node = operator(op, graph.new_name(f"{dropout.name}_{op.strip('_').lower()}"), inputs, Entry(dropout),
                        dtypes=[FLOAT32], shapes=[(_COUNT,)], **attrs)
        node.decision = _BITS
        return node

    mode: dict[str, Any] = {name: value for name, value in dropout.attrs.items() if name == "mode"}
    ones = made("_ones", [], shape=f"({_COUNT},)", dtype=FLOAT32)
    drawn = made("Dropout", [Entry(ones)], p=0.5, **mode)
    drawn.num_outputs, drawn.dtypes, drawn.shapes = 2, drawn.dtypes * 2, drawn.shapes * 2
    return Entry(made("BlockGrad", [Entry(drawn)]))
