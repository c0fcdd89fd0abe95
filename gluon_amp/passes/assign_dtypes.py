"""Give every operator a precision, by propagation from the inputs to the outputs.

A join of FP32 with low precision, as of a network's stem with its first dense block, runs in FP32 by its rule, and so
does what follows. In bfloat16 it is lowered where all that reads it is lowered too: nothing is rounded but what would
be rounded there.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from ..dtypes import BFLOAT16, FLOAT32, FORMATS
from ..graph import Graph, Node
from ..graph.attrs import REGION_ON, integer, region
from ..rules import KEEP, LOWER, NEUTRAL, WIDEST, Cause, Decision, precision
from ..rules.decision import BEHIND_LOOP, EXCLUDED, IN_INT8, OUTSIDE, READS_SPARSE, SWITCHED_OFF, in_fp32, may_lower
from . import sparse_tensors
from .constants import constant
from .context import Context
from .known_forward import behind_loops


def run(graph: Graph, context: Context) -> int:
    """Write each operator's decision and the data types of its outputs; return how many give low precision."""
    nodes, lowered = graph.operators(), 0
    kept = sparse_tensors.readers(graph, context.facts.sparse)
    shapeless = behind_loops(graph) if context.facts.bound else ()
    for node in nodes:
        node.decision = READS_SPARSE if id(node) in kept else decide(node, context)
        if id(node) in shapeless and may_lower(node.decided):
            node.decision = BEHIND_LOOP
    joins = _joins(graph, nodes) if context.target == BFLOAT16 and not context.device.imitated else ()
    for node in nodes:
        if id(node) in joins and {FLOAT32, context.target} <= {entry.dtype for entry in node.inputs}:
            node.decision = replace(node.decided, rule=LOWER, cause=Cause.READERS, note="all that reads it is lowered")
        lowered += plan_outputs(node, context)
    return lowered


def _joins(graph: Graph, nodes: Sequence[Node]) -> set[int]:
    """Return the ids of joins that only operators in low precision read, also through operators that follow them."""
    kept = {id(head.node) for head in graph.heads}  # what is read as it is
    joins = set()
    for node in reversed(nodes):  # its readers first
        decision, follows = node.decided, id(node) not in kept
        if follows and decision.rule == WIDEST and decision.cause is Cause.TABLE:
            joins.add(id(node))
        lowers = decision.rule == LOWER or id(node) in joins
        kept.update(id(entry.node) for position, entry in enumerate(node.inputs) if position in decision.fp32_inputs
                    or not (lowers or (follows and decision.rule == NEUTRAL and position == 0)))
    return joins


def follow(graph: Graph, context: Context) -> None:
    """Let operators take the precision of their data again, after others have changed theirs."""
    for node in graph.operators():
        if node.decision is not None and node.decision.rule in (NEUTRAL, WIDEST):
            plan_outputs(node, context)


def decide(node: Node, context: Context) -> Decision:
    """Return the precision of a node: what its region and the user's exclusions say, else the policy."""
    setting = region(node.attrs)
    if setting is None and not context.everywhere:
        return OUTSIDE
    if setting not in (None, REGION_ON, context.target):
        return SWITCHED_OFF
    if node.name in context.policy.excluded:
        return EXCLUDED
    if context.int8 is not None and node.name in context.int8.layers:
        return IN_INT8
    decision = context.decide(node.op, node.attrs, _data_shape(node))
    return decision if not may_lower(decision) else _within_range(decision, node, context)


def _within_range(decision: Decision, node: Node, context: Context) -> Decision:
    """Return a decision on a node, or FP32 where the type cannot hold a constant among its inputs."""
    for position, entry in enumerate(node.inputs):
        value = constant(entry) if position not in decision.fp32_inputs and context.is_float(entry) else None
        if value is not None and not FORMATS[context.target].holds(value):
            return in_fp32(decision, f"{context.target} cannot hold the constant {value:g} that it reads")
    return decision


def _data_shape(node: Node) -> tuple[int, ...] | None:
    """Return the shape of a node's data; of a convolution at least the channels, which its weight tells."""
    shape = node.inputs[0].shape if node.inputs else None
    weight = node.inputs[1].shape if node.op == "Convolution" and len(node.inputs) > 1 else None
    if shape is None and weight is not None and len(weight) > 1:  # a variable may state any shape, a wrong one too
        return 0, weight[1] * integer(node.attrs, "num_group", 1)
    return shape


def data_precision(node: Node, context: Context) -> str | None:
    """Return the precision that a node's floating-point data takes; None when it has no such data."""
    if node.decided.rule == KEEP:
        return None
    return precision(node.decided, [entry.dtype for entry in node.inputs], FLOAT32, context.target)


def plan_outputs(node: Node, context: Context) -> bool:
    """Give the outputs of a node the types that follow from its decision; return whether that lowers one of them."""
    node.planned = []
    if data_precision(node, context) != context.target:
        return False
    # The hidden outputs of operators with FP32 inputs (BatchNorm's mean and variance) are FP32 as well.
    count = 1 if node.decided.fp32_inputs else len(node.dtypes)
    node.planned = [context.target if dtype == FLOAT32 and index < count else dtype
                    for index, dtype in enumerate(node.dtypes)]
    return node.planned != node.dtypes


def input_dtypes(node: Node, context: Context) -> list[str | None]:
    """Return the type that each input must have; None where the input is left as it is."""
    if node.decided.rule == KEEP:
        return [FLOAT32 if entry.is_lowered else None for entry in node.inputs]
    wanted = data_precision(node, context)
    return [None if not context.is_float(entry)
            else FLOAT32 if position in node.decided.fp32_inputs
            else wanted
            for position, entry in enumerate(node.inputs)]
