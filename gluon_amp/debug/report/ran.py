"""What is noted of a run: one record per operator, and per graph what the engine reported."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
from mxnet.gluon import Block

from ...graph import Graph, Node, Role
from ...rules import Policy
from ..recording.engine import Output


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
