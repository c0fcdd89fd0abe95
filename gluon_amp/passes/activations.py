"""Activations on faster kernels: oneDNN's, or one in C++.

``hard_swish`` fuses x * hard_sigmoid(x), as in MobileNet v3, and x * sigmoid(x), as in EfficientNet, into one operator
in C++: each of MXNet's four operators, and of the five of the gradient, reads and writes a whole map. It takes maps in
any order of axes, so that it may stand in chains with the channels last::

    x * (clip(x + 3, 0, 6) / 6)   ->   _gluon_amp_hard_swish(x)        x * sigmoid(x)   ->   _gluon_amp_swish(x)

``native_activations`` runs rectifiers in bfloat16, where MXNet's own takes fifty times as long, and in FP32 training
``sigmoid`` and ``tanh`` by oneDNN's kernels, and squares not by the C library's power::

    relu(x)   ->   Activation(x, act_type=relu)        tanh(x)   ->   Activation(x, act_type=tanh)
    x ** 2    ->   square(x)

``clip`` has no kernel of oneDNN: where no operator in C++ took its place it trains in FP32, between casts, as all of
``SLOW_IN_TRAINING`` in :mod:`~gluon_amp.rules.tables`. Behind BatchNorm one with the lower bound 0 gets a rectifier
before it, which takes away branches that cannot be predicted. At exactly 0 the gradient is then 0, as that of ReLU,
where clip's is 1::

    clip(BatchNorm(x), 0, 6)   ->   clip(Activation(BatchNorm(x), act_type=relu), 0, 6)

In FP32 ``relu`` is as fast as ``Activation``, and lets a NaN through, which that takes for 0.
"""
from __future__ import annotations

from math import prod
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ..graph import WISHES, Consumers, Entry, Graph, Node, operator
from ..graph.attrs import symbol_attributes
from ..machine.dtypes import BFLOAT16, FLOAT32
from ..rules import NEUTRAL, Cause, Rule
from ..rules.tables import SLOW_IN_TRAINING
from ..rules.tables.groups import BATCH_NORMS, RELU
from .context import Context
from .precisions import plan_outputs, propagate_dtypes, unknown_forward

HARD_SWISH, SWISH = "_gluon_amp_hard_swish", "_gluon_amp_swish"
SQUARES: Mapping[str, str] = {"_power_scalar": "square", "_npi_power_scalar": "_npi_square"}  # by the power
_LEAST = 16384  # values of a map, as of a clip
_PRODUCTS = ("elemwise_mul", "broadcast_mul", "_npi_multiply")
_FACTORS = ("_mul_scalar", "_npi_multiply_scalar")
_QUOTIENTS = ("_div_scalar", "_npi_true_divide_scalar")


# What takes the place of a product with a sigmoid, hard or not: the operator in C++, the sigmoid's, and attributes.
_Swish = Tuple[str, List[Node], Dict[str, str]]


def hard_swish(graph: Graph, context: Context) -> int:
    """Fuse the products of large maps and their sigmoid, hard or not; return how many."""
    unknown, consumers, count = unknown_forward(graph), Consumers(graph), 0
    for node in graph.operators():
        for data, gate in (node.inputs, node.inputs[::-1]) if node.op in _PRODUCTS else ():
            op, within, attrs = _hard_sigmoid(gate, data, consumers) or _sigmoid(gate, data, consumers) or ("", [], {})
            if (op and _is_worth_it(data, [node, *within], context) and data.node not in unknown
                    and context.runs_natively(op)):
                node.inputs, node.replaced, node.op = [data], node.op, op
                node.attrs = {**symbol_attributes(node.attrs), **attrs}
                if not context.converted:
                    node.decision = Rule(NEUTRAL, note="native bfloat16 kernel").decision
                count += 1
                break
    if count and context.target == BFLOAT16 and not context.converted:
        propagate_dtypes(graph, context)
    return count


def _sigmoid(entry: Entry, data: Entry, consumers: Consumers) -> _Swish | None:
    """Recognise a sigmoid of ``data``, maybe times a constant."""
    node = entry.node
    if node.op not in ("sigmoid", "_npx_sigmoid") and (
            node.op != "Activation" or node.attrs.get("act_type") != "sigmoid"):
        return None
    within, (inner,) = [node], node.inputs
    if inner.key != data.key and inner.node.op in _FACTORS and consumers.is_read_once(inner):
        within.append(inner.node)
        (inner,) = inner.node.inputs
    if inner.key != data.key or not consumers.is_read_once(entry):
        return None
    return SWISH, within, {"beta": within[1].attrs["scalar"]} if len(within) > 1 else {}


def _hard_sigmoid(entry: Entry, data: Entry, consumers: Consumers) -> _Swish | None:
    """Recognise a hard sigmoid of ``data``."""
    within = []
    for ops in (_QUOTIENTS + _FACTORS, ("clip", "_npi_clip"), ("_plus_scalar", "_npi_add_scalar")):
        if entry.node.op not in ops or not consumers.is_read_once(entry):
            return None
        within.append(entry.node)
        entry = entry.node.inputs[0]
    scaled, limits, moved = (node.attrs for node in within)
    factor = float(scaled["scalar"])
    if entry.key != data.key or factor == 0 or "None" in (limits.get("a_min", "None"), limits.get("a_max", "None")):
        return None
    divisor = factor if within[0].op in _QUOTIENTS else 1 / factor
    return HARD_SWISH, within, {"shift": moved["scalar"], "a_min": limits["a_min"], "a_max": limits["a_max"],
                                "divisor": repr(divisor)}


def _is_worth_it(data: Entry, nodes: Sequence[Node], context: Context) -> bool:
    """Tell whether a map is large, all of it in one type, and the user wants none of it in another."""
    types = {data.node.dtypes[data.output], *(node.dtypes[0] for node in nodes)}
    is_free = context.converted or not any(node.decided.cause in WISHES for node in nodes)
    return is_free and types in ({FLOAT32}, {BFLOAT16}) and prod(data.shape or (0,)) >= _LEAST


FP32_ACTIVATIONS = {"sigmoid": "sigmoid", "_npx_sigmoid": "sigmoid", "tanh": "tanh", "_npi_tanh": "tanh"}
_MOST_DIMENSIONS = 5  # of oneDNN's kernel; MXNet's own one does not take bfloat16
_LITTLE = 2048  # values of a sigmoid or tanh in FP32, below which a call of oneDNN's kernel takes longer


def is_square(attrs: Mapping[str, Any]) -> bool:
    """Tell whether the exponent of a power is 2."""
    return float(attrs["scalar"]) == 2


def native_activations(graph: Graph, context: Context) -> int:
    """Replace or help the activations that run in the target type, and squares in FP32; return how many."""
    free = [node for node in graph.operators() if Entry(node).dtype == FLOAT32
            and node.decided.cause not in (*WISHES, Cause.STORAGE)]
    squares = [node for node in free if node.op in SQUARES and is_square(node.attrs)]
    for node in squares:
        node.op, node.attrs = SQUARES[node.op], symbol_attributes(node.attrs)
    lowered = [node for node in graph.operators() if Entry(node).dtype == context.target]
    replaced = [node for node in lowered if context.target == BFLOAT16 and node.op in RELU and _has_kernel(Entry(node))]
    replaced += [node for node in free if context.policy.training and node.op in FP32_ACTIVATIONS
                 and _has_kernel(Entry(node)) and prod(node.shapes[0] or ()) >= _LITTLE]
    for node in replaced:
        node.op, node.attrs = "Activation", {**node.attrs, "act_type": FP32_ACTIVATIONS.get(node.op, "relu")}
    if context.target == FLOAT32:
        return len(replaced) + len(squares)
    for node in lowered:
        if (node.op == "clip" and float(node.attrs["a_min"]) == 0 and node.inputs[0].node.op in BATCH_NORMS
                and _has_kernel(Entry(node))):
            (source,) = node.inputs
            relu = operator("Activation", graph.new_name(f"{node.name}_relu"), [source], source, dtypes=[FLOAT32],
                            act_type="relu")
            relu.planned, relu.decision = [BFLOAT16], context.decide(relu.op, relu.attrs, source.shape)
            node.inputs = [Entry(relu)]
    slow = [node for node in lowered if context.policy.training and node.op in SLOW_IN_TRAINING
            and node.decided.cause is Cause.TABLE]
    for node in slow:
        node.decision = SLOW_IN_TRAINING[node.op][0].decision
        plan_outputs(node, context)
    propagate_dtypes(graph, context)
    return len(replaced) + len(slow) + len(squares)


def _has_kernel(entry: Entry) -> bool:
    return entry.shape is not None and 0 < len(entry.shape) <= _MOST_DIMENSIONS and all(entry.shape)
