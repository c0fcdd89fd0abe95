"""Run rectifiers by oneDNN's kernels, and train in FP32 what MXNet has slow bfloat16 kernels for only.

In bfloat16 MXNet's own ``relu`` takes one element at a time, fifty times as long as ``Activation``, which oneDNN runs;
values and gradients are the same. ``clip`` has no kernel of oneDNN: where no operator in C++ took its place it trains
in FP32, between casts, as all of ``SLOW_IN_TRAINING`` in :mod:`~gluon_amp.rules.tables.bfloat16`. What costs it most
are branches that cannot be predicted for data of either sign; behind BatchNorm one with the lower bound 0 gets a
rectifier before it, which takes them away: a quarter of the time. At exactly 0 the gradient is then 0, as that of ReLU,
where clip's is 1.

In FP32 training ``sigmoid`` and ``tanh`` run as ``Activation``, two to ten times as fast and equal up to rounding.
``relu`` is as fast as ``Activation`` there, and lets a NaN through, which that takes for 0; ``clip`` is faster than a
maximum and a minimum.
"""
from __future__ import annotations

from ..dtypes import BFLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, operator
from ..rules import Cause
from ..rules.tables import SLOW_IN_TRAINING
from ..rules.tables.groups import BATCH_NORMS, RELU
from .assign_dtypes import follow, plan_outputs
from .context import Context

_FP32_ACTIVATIONS = {"sigmoid": "sigmoid", "_npx_sigmoid": "sigmoid", "tanh": "tanh", "_npi_tanh": "tanh"}
_MOST_DIMENSIONS = 5  # of oneDNN's kernel; MXNet's own one does not take bfloat16


def is_needed(context: Context) -> bool:
    """Tell whether activations run in bfloat16, on oneDNN's kernels, or train in FP32."""
    if context.target == FLOAT32:
        return context.policy.training
    return context.target == BFLOAT16 and not context.device.imitated


def run(graph: Graph, context: Context) -> int:
    """Replace or help the activations that run in the target type; return how many."""
    return _in_fp32(graph) if context.target == FLOAT32 else _in_bfloat16(graph, context)


def _in_fp32(graph: Graph) -> int:
    activations = [node for node in graph.operators() if node.op in _FP32_ACTIVATIONS
                   and Entry(node).dtype == FLOAT32 and _fits(Entry(node)) and node.decided.cause is not Cause.STORAGE]
    for node in activations:
        node.op, node.attrs = "Activation", {**node.attrs, "act_type": _FP32_ACTIVATIONS[node.op]}
    return len(activations)


def _in_bfloat16(graph: Graph, context: Context) -> int:
    lowered = [node for node in graph.operators() if Entry(node).dtype == BFLOAT16]
    relus = [node for node in lowered if node.op in RELU and _fits(Entry(node))]
    for node in relus:
        node.op, node.attrs = "Activation", {**node.attrs, "act_type": "relu"}
    clips = [node for node in lowered if node.op == "clip" and float(node.attrs["a_min"]) == 0
             and node.inputs[0].node.op in BATCH_NORMS and _fits(Entry(node))]
    for node in clips:
        _rectify_input(graph, node, context)
    slow = [node for node in lowered if context.policy.training and node.op in SLOW_IN_TRAINING
            and node.decided.cause is Cause.TABLE]
    for node in slow:
        node.decision = SLOW_IN_TRAINING[node.op][0].decision
        plan_outputs(node, context)
    follow(graph, context)
    return len(relus) + len(slow)


def _fits(entry: Entry) -> bool:
    return entry.shape is not None and 0 < len(entry.shape) <= _MOST_DIMENSIONS and all(entry.shape)


def _rectify_input(graph: Graph, clip: Node, context: Context) -> None:
    (source,) = clip.inputs
    relu = operator("Activation", graph.new_name(f"{clip.name}_relu"), [source], source, act_type="relu")
    relu.dtypes, relu.planned = [FLOAT32], [BFLOAT16]
    relu.decision = context.decide(relu.op, relu.attrs, source.shape)
    clip.inputs = [Entry(relu)]
