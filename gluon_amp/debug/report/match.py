"""Match the engine's reports of a run with the graphs that ran, and find the precision of each operator."""
from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any, Iterator, Mapping, Sequence

from mxnet.gluon import Block

from ...dtypes import FLOAT32
from ...graph import Entry, Graph, Node, Role, named_by
from ...rules import KEEP, Policy, precision
from ..recording.engine import Output
from ..recording.events import FLOATS
from .flops import flops
from .ran import Captured, Ran, Recording

__all__ = ["judge_call", "mark_imitation", "matched", "planned"]

_BACKWARD = re.compile(r"(.+)_backward_\d+$")


def matched(recording: Recording, captured: Captured) -> list[Ran]:
    """Give each operator of a graph the reports about it."""
    operators = recording.graph.operators()
    ran = [Ran(node, recording.block, True, recording.policy, shape=node.shapes[0] if node.shapes else None)
           for node in operators]
    by_name: dict[tuple[str, str], list[Ran]] = defaultdict(list)
    for record in ran:
        by_name[record.node.op, record.node.name].append(record)
    for node, record in _pairs(recording.traced, ran):
        record.flops, record.shape = flops(node), node.shapes[0]
    reported: dict[int, list[Output]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for output in recording.heard[:recording.forward]:
        candidates = by_name.get((output.op, _node_name(output, by_name)), [])
        if seen[output.name] < len(candidates):
            record = candidates[seen[output.name]]
            record.milliseconds += output.milliseconds
            reported[id(record)].append(output)
        else:
            captured.other_milliseconds += output.milliseconds
        seen[output.name] += 1
    _add_backward(recording.heard[recording.forward:], by_name, captured)
    rounded = _rounded(ran)
    for record in ran:
        _judge(record, reported, rounded.get(id(record.node)))
    return ran


def planned(block: Block, graph: Graph, policy: Policy | None) -> list[Ran]:
    """Return the operators of a graph that did not run, with what was planned for them."""
    ran = [Ran(node, block, True, policy, flops(node), node.shapes[0]) for node in graph.operators()]
    rounded = _rounded(ran)
    for record in ran:
        _judge(record, {}, rounded.get(id(record.node)))
    mark_imitation(ran)
    return ran


def _pairs(traced: Graph, ran: Sequence[Ran]) -> Iterator[tuple[Node, Ran]]:
    """Yield the operators of a graph as traced with what ran for them; several may have one name."""
    by_name: dict[tuple[str, str], list[Ran]] = defaultdict(list)
    for record in ran:
        by_name[record.node.kind, record.node.name].append(record)
    seen: Counter[tuple[str, str]] = Counter()
    for node in traced.operators():
        records = by_name.get((node.op, node.name), [])
        if seen[node.op, node.name] < len(records):
            yield node, records[seen[node.op, node.name]]
        seen[node.op, node.name] += 1


def _node_name(output: Output, known: Mapping[tuple[str, str], Any]) -> str:
    """Return the longest prefix of an output's name that is the name of a node."""
    return next((name for name in named_by(output.name) if (output.op, name) in known), "")


def _add_backward(outputs: Sequence[Output], by_name: Mapping[tuple[str, str], list[Ran]], captured: Captured) -> None:
    """Add the time of backward operators; nodes of the same name share it."""
    named: dict[str, list[Ran]] = defaultdict(list)
    for (_, name), records in by_name.items():
        named[name] += records
    for output in outputs:
        match = _BACKWARD.match(output.name)
        records = named.get(match[1], []) if match else []
        for record in records:
            record.milliseconds += output.milliseconds / len(records)
        if not records:
            captured.other_milliseconds += output.milliseconds


def _rounded(ran: Sequence[Ran]) -> dict[int, Ran]:
    """Find the casts by which an imitated type rounds the outputs of operators (see ``passes/imitate.py``)."""
    return {id(record.node.inputs[0].node): record for record in ran
            if record.node.role is Role.ROUNDING and record.node.dtypes[0] != FLOAT32}


def _judge(record: Ran, reported: Mapping[int, list[Output]], rounding: Ran | None) -> None:
    """Say what was planned and observed for an operator of a graph."""
    node = record.node
    if rounding is not None:
        record.planned = rounding.node.dtypes[0]
        record.observed = _first_dtype(reported.get(id(rounding), []))
        return
    record.planned = _of_data(node, Entry(node).dtype)
    observed = _first_dtype(reported.get(id(record), []))
    record.observed = None if observed is None else _of_data(node, observed)


def mark_imitation(ran: Sequence[Ran]) -> None:
    """Mark the casts that imitate a type: they surround an operator that computes in FP32 in its place."""
    by_node = {id(record.node): record for record in ran}
    for record in ran:
        if record.in_graph:
            record.imitation = record.node.role is Role.ROUNDING
            continue
        if record.policy is None or not record.policy.imitated or record.planned != record.policy.target_dtype:
            continue
        if record.node.role is Role.CAST:
            source = by_node.get(id(record.node.inputs[0].node))
            record.imitation = (source is not None and not source.inserted
                                and source.planned == record.policy.target_dtype)
        elif not record.inserted:
            for entry in record.node.inputs:
                raised = by_node.get(id(entry.node))
                if raised is not None and raised.node.role is Role.CAST:
                    raised.imitation = True


def _first_dtype(outputs: Sequence[Output]) -> str | None:
    return outputs[0].dtype if outputs else None


def _of_data(node: Node, dtype: str | None) -> str | None:
    """Return the type of a node's floating-point data: of its output, or of an input where the output is an integer."""
    if dtype in FLOATS:
        return dtype
    return next((entry.dtype for entry in node.inputs if entry.dtype in FLOATS), dtype)


def judge_call(ran: Ran, before: Sequence[Recording | Ran]) -> None:
    """Say what was planned and observed for an operator that was called by itself."""
    node, policy = ran.node, ran.policy
    ran.observed = ran.planned = _of_data(node, node.dtypes[0] if node.dtypes else None)
    if policy is None:
        return
    together = _of_call(ran.call, before) if policy.imitated else []
    if ran.inserted:
        last = together[-1] if together else None
        if last is not None and not last.inserted and ran.observed == last.planned == policy.target_dtype:
            last.observed = policy.target_dtype  # this cast rounds its result
        return
    if node.decision is None or node.decision.rule == KEEP:
        return
    # What was cast up for this call only stands for the imitated type.
    raised = {id(record.node) for record in together if record.observed == FLOAT32}
    types = [entry.node.inputs[0].dtype if id(entry.node) in raised else entry.dtype for entry in node.inputs]
    ran.planned = precision(node.decision, types, FLOAT32, policy.target_dtype) or ran.planned


def _of_call(call: int, before: Sequence[Recording | Ran]) -> list[Ran]:
    """Return what ran for the same call of the program."""
    same: list[Ran] = []
    for record in reversed(before):
        if not (isinstance(record, Ran) and call and record.call == call):
            break
        same.insert(0, record)
    return same
