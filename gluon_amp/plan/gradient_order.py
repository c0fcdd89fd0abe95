"""Let the gradients of weights be cast as soon as they are computed.

MXNet runs the operators of a backward graph in the order in which it comes upon them from the gradients of the inputs,
beginning with the first input. The gradient of the first layer's weight needs all other layers', so that the casts of
those come last: until then all gradients are kept in low precision, too. Where the inputs begin with the weights of the
last layers each gradient is cast before the next one is computed, and its memory is free for others.
"""
from __future__ import annotations

from typing import Any, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import NDArray

from .._mxnet.invoke import UpstreamCachedOp
from .._mxnet.symbols import from_graph
from ..dtypes import FLOAT32
from ..graph import Graph, Node, Role, cast_nodes
from ..passes.gradients import is_scale
from .planner import Plan

_POSITIONS = ("data_indices", "param_indices")  # flags of cached ops that are positions of inputs
Flags = Sequence[Tuple[str, Any]]


class OrderedCachedOp(UpstreamCachedOp):
    """A cached op whose symbol has its inputs in another order than its plan."""

    def __init__(self, symbol: mx.sym.Symbol, flags: Flags, order: tuple[int, ...]):
        super().__init__(symbol, flags)
        self.order = order  # which of the plan's arguments each of the inputs is

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        """Run it; arguments and result are those of MXNet's cached op."""
        return super().__call__(*(args[position] for position in self.order), **kwargs)


def cached_op(plan: Plan, flags: Flags) -> UpstreamCachedOp:
    """Make what runs a plan; it takes the plan's arguments."""
    if plan.carries_scale:
        last = len(plan.traced.names)
        flags = [(name, [*value, last] if name == "data_indices" else value) for name, value in flags]
    # On GPUs, where MXNet fuses operators by their order, this was never tried.
    if plan.symbol is None or not plan.facts.recorded or plan.facts.device != "cpu":
        return UpstreamCachedOp(plan.runs, flags)
    graph = plan.graph.copy()
    old = {id(node): position for position, node in enumerate(graph.variables())}
    if not put_last_weights_first(graph):
        return UpstreamCachedOp(plan.runs, flags)
    order = tuple(old[id(node)] for node in graph.variables())
    new = {position: place for place, position in enumerate(order)}
    turned = [(name, [new[position] for position in value] if name in _POSITIONS else value) for name, value in flags]
    return OrderedCachedOp(from_graph(graph, plan.traced.symbol), turned, order)


def put_last_weights_first(graph: Graph) -> bool:
    """Let the first input come after the weights that are cast, the last one first; return whether there are any."""
    first, *others = graph.variables()
    for node in others:  # which a pass may have put in the program's order
        node.after = [] if not is_scale(node) else node.after
    weights = [source for source in map(_cast_variable, cast_nodes(graph)) if source not in (None, first)]
    first.after = list(dict.fromkeys(reversed(weights)))
    return bool(first.after)


def _cast_variable(node: Node) -> Node | None:
    """Return the variable in FP32 that a cast to low precision reads, perhaps behind an identity."""
    source = node.inputs[0].node
    if source.role is Role.IDENTITY:
        source = source.inputs[0].node
    return source if source.is_variable and source.dtypes == [FLOAT32] and node.dtypes != [FLOAT32] else None
