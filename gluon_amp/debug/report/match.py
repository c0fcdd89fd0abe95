"""What is noted of a run: the engine's reports, matched with the graphs that ran, and the precision of each operator.

The engine knows operators by names alone, and reports those of one name in the order of the graph.
"""
from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block

from ..._mxnet.engine import Output
from ...dtypes import FLOAT32, INT8
from ...graph import Entry, Graph, Node, Role, named_by
from ...graph.attrs import is_in_int8
from ...rules import KEEP, Policy, precision
from ..recording.events import FLOATS
from .flops import flops

_BACKWARD = re.compile(r"(.+)_backward_\d+$")
_Key = tuple  # what tells operators apart: kind and name


@dataclass(eq=False)
class Ran:
    """An operator that ran; its node has types and shapes, and leads to the nodes that it read from."""

    node: Node
    block: Block | None  # the innermost whose call it belongs to; for graphs the hybridized block
    in_graph: bool
    policy: Policy | None
    flops: int = 0  # of the program: without the channels that AMP appends
    shape: tuple[int, ...] | None = None  # of its first output, likewise
    planned: str | None = None  # the precision of its floating-point data, as decided
    observed: str | None = None  # and as the engine reports it; None where there is none, or no report
    milliseconds: float = 0.0  # forward and backward

    @property
    def inserted(self) -> bool:
        """Whether AMP put it there."""
        return self.node.role is not Role.OWN

    @property
    def imitation(self) -> bool:
        """Whether it is a cast by which a type is imitated, not one between different precisions."""
        return self.node.role is Role.ROUNDING


@dataclass
class Captured:
    """One run of a network: its operators, in the order in which they ran."""

    ran: list[Ran] = field(default_factory=list)
    device: mx.Context | None = None  # where its arrays are
    other_milliseconds: float = 0.0  # of what belongs to no operator, such as sums of gradients


@dataclass
class GraphRan:
    """A graph that ran, and what was heard of it."""

    block: Block | None
    graph: Graph  # what ran
    traced: Graph  # what the program made
    policy: Policy | None
    heard: list[Output] = field(default_factory=list)
    forward: int = 0  # how many of them are of the forward pass
    operation: Any = None  # kept until the backward pass is over


def matched(graph_ran: GraphRan, captured: Captured) -> list[Ran]:
    """Give each operator of a graph the reports about it."""
    ran = [Ran(node, graph_ran.block, True, graph_ran.policy, shape=node.shapes[0] if node.shapes else None)
           for node in graph_ran.graph.operators()]
    by_program = {key: iter(records) for key, records in _grouped(ran, lambda node: (node.kind, node.name)).items()}
    for node in graph_ran.traced.operators():
        record = next(by_program.get((node.op, node.name), iter(())), None)
        if record is not None:
            record.flops, record.shape = flops(node), node.shapes[0]
    by_name = _grouped(ran, lambda node: (node.op, node.name))
    reported = _reported(graph_ran.heard[:graph_ran.forward], by_name, captured)
    _add_backward(graph_ran.heard[graph_ran.forward:], by_name, captured)
    _judge(ran, reported)
    return ran


def planned(block: Block, graph: Graph, policy: Policy | None) -> list[Ran]:
    """Return the operators of a graph that did not run, with what was planned for them."""
    ran = [Ran(node, block, True, policy, flops(node), node.shapes[0]) for node in graph.operators()]
    _judge(ran, {})
    return ran


def _grouped(ran: Iterable[Ran], key: Callable[[Node], _Key]) -> dict[_Key, list[Ran]]:
    groups: dict[_Key, list[Ran]] = defaultdict(list)
    for record in ran:
        groups[key(record.node)].append(record)
    return groups


def _reported(outputs: Sequence[Output], by_name: Mapping[_Key, list[Ran]], captured: Captured
              ) -> dict[int, str | None]:
    """Add the times of forward operators; return the type of each record's first output, by the record's id."""
    types: dict[int, str | None] = {}
    waiting: dict[_Key, Iterator[Ran]] = {}
    for output in outputs:
        tensor = output.op, output.name
        if tensor not in waiting:
            keys = ((output.op, name) for name in named_by(output.name))
            waiting[tensor] = iter(next((by_name[key] for key in keys if key in by_name), []))
        record = next(waiting[tensor], None)
        if record is None:
            captured.other_milliseconds += output.milliseconds
        else:
            record.milliseconds += output.milliseconds
            types.setdefault(id(record), output.dtype)
    return types


def _add_backward(outputs: Sequence[Output], by_name: Mapping[_Key, list[Ran]], captured: Captured) -> None:
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


def _judge(ran: Sequence[Ran], reported: Mapping[int, str | None]) -> None:
    """Say what was planned and observed for the operators of a graph."""
    # An operator whose type is imitated computes in FP32; a cast behind it rounds (see ``passes/float16.py``).
    rounding = {id(record.node.inputs[0].node): record for record in ran
                if record.imitation and record.node.dtypes[0] != FLOAT32}
    for record in ran:
        rounded = rounding.get(id(record.node))
        if rounded is not None:
            record.planned, record.observed = rounded.node.dtypes[0], reported.get(id(rounded))
        else:
            observed = reported.get(id(record))
            record.planned = _of_data(record.node, Entry(record.node).dtype)
            record.observed = None if observed is None else _of_data(record.node, observed)


def _of_data(node: Node, dtype: str | None) -> str | None:
    """Return the type of a node's data: of its output, or of an input where the output is an integer."""
    if is_in_int8(node.op, node.attrs):
        return INT8
    if dtype in FLOATS:
        return dtype
    return next((entry.dtype for entry in node.inputs if entry.dtype in FLOATS), dtype)


def judge_call(ran: Ran, known: Mapping[int, Ran]) -> None:
    """Say what was planned and observed for an operator called by itself; ``known`` is what ran before, by node."""
    node, policy = ran.node, ran.policy
    ran.observed = ran.planned = _of_data(node, node.dtypes[0] if node.dtypes else None)
    if policy is None:
        return
    if ran.imitation:
        rounded = known.get(id(node.inputs[0].node))
        if rounded is not None and ran.observed == rounded.planned == policy.target_dtype:
            rounded.observed = policy.target_dtype
    elif not ran.inserted and node.decision is not None and node.decision.rule != KEEP:
        # What was cast up for this call only stands for the imitated type.
        types = [(entry.node.inputs[0] if entry.node.role is Role.ROUNDING else entry).dtype for entry in node.inputs]
        ran.planned = precision(node.decision, types, FLOAT32, policy.target_dtype) or ran.planned
