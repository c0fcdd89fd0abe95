"""Gradients that are wrong, or lost, by how operators are put together.

``branch_gradients``: MXNet writes the gradients of tensors that the branch taken reads, or the body of a
``while_loop``. The gradient of one that only the other branch reads, or only the condition, is whatever is in memory;
and a tensor that both branches read counts as two, unless it is a variable. Each reads all of them, times zero::

    cond(then(x), else(y))   ->   cond(then(x) + 0 * sum(y), else(y) + 0 * sum(x))

``split_concat``: MXNet cannot split a gradient that lies in blocks of 16 channels where the maps joined are not whole
blocks: it raises "could not construct a sub-memory", or ends the process. Behind an operator that is not oneDNN's the
gradient is plain::

    Concat(x, y)   ->   slice_axis(Concat(x, y), begin=0, end=None)

``carry_scale``: SoftmaxOutput and its kin ignore the gradient that comes back to them, and with it the scale of the
loss. Their data is multiplied by an input that the program does not have: it holds 1, and the loss scale while a
backward pass of scaled losses is under way. Values stay as they are, and gradients are multiplied::

    SoftmaxOutput(x, label)   ->   SoftmaxOutput(broadcast_mul(x, amp_loss_scale), label)
"""
from __future__ import annotations

from ..dtypes import BFLOAT16, FLOAT32
from ..graph import CAST, Entry, Graph, Node, Role, operator, redirect, set_subgraphs, subgraphs_of
from ..graph.attrs import DTYPE, SHAPE, TYPE_FLAGS, integers, region_of
from ..rules.shapes import BLOCK
from ..rules.tables.groups import ADDS_GRADIENT
from .context import Context

# The attributes that say which inputs those graphs of an operator read that have a backward pass, and where these are.
_READS = {"_cond": {"then_input_locs": 1, "else_input_locs": 2}, "_while_loop": {"func_input_locs": 1}}
_SCALE = "amp_loss_scale"


def branch_gradients(graph: Graph, context: Context) -> int:
    """Complete what branches and loops read; return how many inputs were missing."""
    return sum(_complete(node) for node in graph.operators() if node.op in _READS)


def _complete(node: Node) -> int:
    parts = subgraphs_of(node)
    added = sum(_read_all(node, parts[part], name) for name, part in _READS[node.op].items())
    if added:
        set_subgraphs(node, parts)
    return added


def _read_all(node: Node, part: Graph, name: str) -> int:
    """Let a graph of an operator read all of its inputs; return how many it did not."""
    reads, dtype = integers(node.attrs, name), node.dtypes[-1] if node.dtypes else None
    missing = [location for location, entry in enumerate(node.inputs)
               if location not in reads and entry.dtype is not None and dtype is not None]
    for location in missing:  # behind the last output, so that the variables are the last ones as well
        head, zero = part.heads[-1], _zero(part, node.inputs[location], str(dtype))
        part.heads[-1] = Entry(operator("broadcast_add", part.new_name(f"{head.node.name}_read"), [head, zero], head))
    node.attrs = {**node.attrs, name: str([*reads, *missing])}
    return len(missing)


def _zero(part: Graph, entry: Entry, dtype: str) -> Entry:
    """Make a variable that stands for a tensor, and a zero that depends on it."""
    made = Entry(Node("null", part.new_name(f"{entry.node.name}_unread")))
    for op in ("zeros_like", "sum"):
        made = Entry(operator(op, part.new_name(f"{entry.node.name}_{op}"), [made], entry))
    if entry.dtype == dtype:
        return made
    return Entry(operator("Cast", part.new_name(f"{entry.node.name}_cast"), [made], entry, dtype=dtype))


def split_concat(graph: Graph, context: Context) -> int:
    """Put an operator that changes nothing behind joins of channels some of which are no whole blocks of oneDNN's."""
    moved = {}
    for node in graph.operators():
        shapes = [entry.shape or () for entry in node.inputs]
        if (node.op == "Concat" and node.attrs.get("dim", "1") == "1" and all(len(shape) == 4 for shape in shapes)
                and any(shape[1] % BLOCK for shape in shapes)):
            whole = with_plain_gradient(graph, Entry(node), node.name)
            whole.attrs.update(region_of(node.attrs))
            whole.stands_for = node.name
            moved[Entry(node).key] = Entry(whole)
    redirect(graph, moved)
    return len(moved)


def with_plain_gradient(graph: Graph, joined: Entry, name: str) -> Node:
    """Make an operator behind joined maps that passes all of them on, and their gradient in plain layout."""
    return operator("slice_axis", graph.new_name(f"{name}_plain"), [joined], joined, axis=1, begin=0, end=None)


def has_own_gradients(context: Context) -> bool:
    """Tell whether there are operators that make a gradient on their own, and gradients may carry a scale."""
    return bool(context.facts.own_gradients)


def is_scale(node: Node) -> bool:
    """Tell whether a node is the input that holds the loss scale."""
    return node.is_variable and node.role is not Role.OWN


def carry_scale(graph: Graph, context: Context) -> int:
    """Multiply the data of operators that make a gradient on their own; return how many operators there are."""
    scaling = _Scaling(graph)
    counts = dict(context.facts.own_gradients)
    found = [node for node in graph.operators() if node.name in counts]
    for node in found:
        if node.op == ADDS_GRADIENT:
            redirect(graph, {Entry(node).key: scaling.of("broadcast_div", Entry(node))})
        for position in range(counts[node.name]):
            node.inputs[position] = scaling.of("broadcast_mul", node.inputs[position])
    return len(found)


class _Scaling:
    """Multiplies tensors of a graph by its loss scale, or divides them."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._scale = Node("null", graph.new_name(_SCALE), {SHAPE: "(1,)", DTYPE: str(TYPE_FLAGS[FLOAT32])},
                           dtypes=[FLOAT32], shapes=[(1,)], role=Role.HELPER)
        self._scale.after = graph.variables()  # so that it is the last of the inputs

    def of(self, op: str, entry: Entry) -> Entry:
        """Return a tensor whose gradient is multiplied or divided by the scale."""
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
