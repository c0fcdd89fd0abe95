"""What is noted of a run: one record per operator, and per graph what the engine reported."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mxnet.gluon import Block

from ...graph import Graph, Node, Role
from ...rules import Policy
from ..recording.engine import Output

__all__ = ["Captured", "Ran", "Recording"]


@dataclass(eq=False)
class Ran:
    """An operator that ran.

    Attributes
    ----------
    node : Node
        With types and shapes; its inputs lead to the nodes that it read from.
    block : Block or None
        The innermost block whose call it belongs to, as far as MXNet tells: for graphs the hybridized block.
    in_graph : bool
        Whether it ran as part of a hybridized block's graph.
    policy : Policy or None
        What decided on it.
    flops : int
        Its arithmetic, and that of the program: without the channels that AMP appends.
    shape : tuple of int or None
        Of its first output, likewise.
    planned, observed : str or None
        The precision of its floating-point data: decided, and reported by the engine. None where there is none, or no
        report.
    milliseconds : float
        Forward and backward, when times were taken.
    call : int
        Number of the program's call that it ran for, outside of graphs.
    imitation : bool
        Whether it is a cast by which a type is imitated, rather than one between operators of different precision.
    """

    node: Node
    block: Block | None
    in_graph: bool
    policy: Policy | None
    flops: int = 0
    shape: tuple[int, ...] | None = None
    planned: str | None = None
    observed: str | None = None
    milliseconds: float = 0.0
    call: int = 0
    imitation: bool = False

    @property
    def inserted(self) -> bool:
        """Whether AMP put it there."""
        return self.node.role is not Role.OWN


@dataclass
class Captured:
    """One run of a network.

    Attributes
    ----------
    ran : list of Ran
        In the order in which they ran.
    train : bool
        Whether it ran as in training.
    timed : bool
        Whether times were taken.
    device_type : str
        ``'cpu'`` or ``'gpu'``.
    other_milliseconds : float
        Time of what belongs to no operator, such as sums of gradients.
    """

    ran: list[Ran]
    train: bool
    timed: bool
    device_type: str = "cpu"
    other_milliseconds: float = 0.0


@dataclass
class Recording:
    """A graph that ran, and what was heard of it.

    Attributes
    ----------
    block : Block or None
        The hybridized block.
    graph, traced : Graph
        What ran, and what the program made.
    policy : Policy or None
        What it decided by.
    heard : list of Output
        What the engine reported; the first ``forward`` in the forward pass.
    operation : CachedOp
        Kept until the backward pass is over.
    """

    block: Block | None
    graph: Graph
    traced: Graph
    policy: Policy | None
    heard: list[Output] = field(default_factory=list)
    forward: int = 0
    operation: Any = None
