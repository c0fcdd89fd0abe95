"""Recurrent layers in C++: whether a node may become one, and its inputs and outputs then.

::

    RNN(x, _rnn_param_concat(weights, biases), state)   ->   _gluon_amp_rnn(x, weights, biases, state, masks)
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..graph import Consumers, Entry, Graph, Node, operator
from ..graph.attrs import integer, is_set
from ..machine.dtypes import BFLOAT16, FLOAT32
from ..rules import FP32, LOWER, Cause, Decision
from .context import Context
from .precisions import decide, give_low, in_type, plan_outputs

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_UNSUPPORTED = ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max")
_MASKS = Decision(FP32, Cause.TABLE, "masks of dropout are FP32")


def fits(node: Node, consumers: Consumers) -> bool:
    """Tell whether the operator in C++ computes the same as a node."""
    return (not is_set(node.attrs, "use_sequence_length")
            and all(node.attrs.get(name, "None") == "None" for name in _UNSUPPORTED))


def _separate_parameters(node: Node) -> None:
    """Read parameters where they are joined from: joining them takes longer than a layer on few sequences."""
    joined = node.inputs[1].node
    if joined.op != "_rnn_param_concat":
        return
    parts = [entry.node.inputs[0] if entry.node.op == "Reshape" and entry.node.attrs.get("shape") in ("-1", "(-1,)")
             and not is_set(entry.node.attrs, "reverse") else entry for entry in joined.inputs]
    # Gluon has the weights of all layers, then their biases.
    states, layers = integer(node.attrs, "state_size", 0), integer(node.attrs, "num_layers", 1)
    rows = _GATES[node.attrs["mode"]] * states
    directions = 2 if is_set(node.attrs, "bidirectional") else 1
    widths = [(node.inputs[0].shape or ())[2], *[directions * states] * (layers - 1)]
    weights = [(rows, width) for layer in widths for _ in range(directions) for width in (layer, states)]
    if [entry.shape for entry in parts] == [*weights, *[(rows,)] * len(weights)]:
        node.inputs = [node.inputs[0], *parts, *node.inputs[2:]]
        node.attrs = {**node.attrs, "separate": "True"}


def fit(graph: Graph, node: Node, context: Context) -> None:
    """Give a layer its masks, its precision, and all outputs: states, and what backward needs."""
    _separate_parameters(node)
    states = 2 if node.attrs["mode"] == "lstm" else 1
    state_shape = node.inputs[-1].shape
    node.num_outputs = 1 + states + context.facts.recorded
    node.shapes = [node.shapes[0], *[state_shape] * states, *[None] * context.facts.recorded]
    node.dtypes, node.planned = [FLOAT32] * node.num_outputs, []
    # MXNet has no kernel for it in bfloat16.
    decision = decide(replace(node, op=node.kind), context) if context.converted else node.decided
    lowered = (context.target == BFLOAT16 and not (context.converted and context.policy.training)
               and decision.rule == FP32 and decision.cause is Cause.TABLE)
    masks = _masks(graph, node, context)
    node.inputs = [*node.inputs, *masks]
    node.attrs = {**node.attrs, "masks": str(bool(masks)), "training": str(context.facts.recorded)}
    if not lowered:
        return
    node.attrs["dtype"] = BFLOAT16
    if context.converted:
        node.inputs[0] = in_type(graph, node.inputs[0], BFLOAT16, {}, Consumers(graph))
        give_low(graph, node)
    else:
        node.decision = Decision(LOWER, Cause.TABLE, "in C++; weights, states and sums stay FP32",
                                 tuple(range(1, len(node.inputs))))
        node.planned = [BFLOAT16, *node.dtypes[1:]]


def _masks(graph: Graph, node: Node, context: Context) -> list[Entry]:
    """Make a mask for the values between each two layers, by MXNet's Dropout: of its seed, and of ones in inference."""
    p, layers = node.attrs.get("p", "0"), integer(node.attrs, "num_layers", 1)
    if not float(p) or layers == 1 or context.converted:
        return []
    width = (node.shapes[0] or ())[-1]
    steps, batch = (node.inputs[0].shape or ())[:2]

    def made(op: str, entry: Entry, last: int, **attrs: Any) -> Node:
        helper = operator(op, graph.new_name(f"{node.name}_{op.strip('_').lower()}"), [entry], entry,
                          dtypes=[FLOAT32], shapes=[(steps, batch, last)], **attrs)
        helper.decision = _MASKS
        return helper

    # The number of steps and sequences may be another at the next call: it is read off the data.
    data = node.inputs[0]
    first = made("slice_axis", data, 1, axis=2, begin=0, end=1)
    first.decision = context.decide(first.op, first.attrs, data.shape)
    plan_outputs(first, context)
    ones = Entry(made("broadcast_axis", Entry(made("ones_like", Entry(first), 1)), width, axis=2, size=width))
    masks = []
    for _ in range(layers - 1):
        mask = made("Dropout", ones, width, p=p)
        mask.num_outputs, mask.dtypes, mask.shapes = 2, [FLOAT32] * 2, mask.shapes * 2
        masks.append(Entry(made("BlockGrad", Entry(mask), width)))
    return masks
