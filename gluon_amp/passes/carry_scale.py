"""Let the gradients of operators that make their own carry the loss scale.

SoftmaxOutput and its kin ignore the gradient that comes back to them, and with it the scale of the loss. Here their
data is multiplied by an input that the program does not have. It holds 1, and the loss scale while a backward pass of
scaled losses is under way: values stay as they are, and gradients are multiplied.
"""
from __future__ import annotations

from ..dtypes import BFLOAT16, FLOAT32
from ..graph import CAST, Entry, Graph, Node, Role, operator, redirect
from ..graph.attrs import DTYPE, SHAPE, TYPE_FLAGS
from ..rules.tables.groups import ADDS_GRADIENT
from .context import Context

_SCALE = "amp_loss_scale"


def is_needed(context: Context) -> bool:
    """Tell whether there are such operators, and gradients that may carry a scale."""
    return bool(context.facts.own_gradients)


def is_scale(node: Node) -> bool:
    """Tell whether a node is the input that holds the loss scale."""
    return node.is_variable and node.role is not Role.OWN


def run(graph: Graph, context: Context) -> int:
    """Multiply what such operators read; return how many operators there are."""
    scaling = _Scaling(graph)
    counts = dict(context.facts.own_gradients)
    found = [node for node in graph.operators() if node.name in counts]
    for node in found:
        if node.op == ADDS_GRADIENT:
            redirect(graph, {Entry(node).key: scaling.inverse(Entry(node))})
        for position in range(counts[node.name]):
            node.inputs[position] = scaling.times(node.inputs[position])
    return len(found)


class _Scaling:
    """Multiplies tensors of a graph by its loss scale."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._scale = Node("null", graph.new_name(_SCALE), {SHAPE: "(1,)", DTYPE: str(TYPE_FLAGS[FLOAT32])},
                           dtypes=[FLOAT32], shapes=[(1,)], role=Role.HELPER)
        self._scale.after = graph.variables()  # so that it is the last of the inputs

    def times(self, entry: Entry) -> Entry:
        """Return a tensor whose gradient is multiplied by the scale."""
        return self._made("broadcast_mul", entry)

    def inverse(self, entry: Entry) -> Entry:
        """Return a tensor whose gradient is divided by the scale."""
        return self._made("broadcast_div", entry)

    def _made(self, op: str, entry: Entry) -> Entry:
        # float16 does not hold every scale that a gradient in float16 may carry.
        wide = self._cast(entry, FLOAT32)
        made = Entry(operator(op, self._name(entry, "scaled"), [wide, Entry(self._scale)], wide))
        return self._cast(made, entry.dtype or FLOAT32)

    def _cast(self, entry: Entry, dtype: str) -> Entry:
        if entry.dtype in (dtype, None):
            return entry
        # MXNet's Cast does not know bfloat16, and its amp_cast loses gradients that accumulate.
        op = CAST if BFLOAT16 in (entry.dtype, dtype) else "Cast"
        made = operator(op, self._name(entry, dtype), [entry], entry, dtype=dtype)
        made.dtypes = [dtype]
        return Entry(made)

    def _name(self, entry: Entry, suffix: str) -> str:
        return self._graph.new_name(f"{entry.node.name}_{suffix}")
