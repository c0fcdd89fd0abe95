"""Gradients that are wrong, or lost, by how operators are put together.

``branch_gradients``: MXNet writes the gradients of tensors that the branch taken reads, or the body of a
``while_loop``. The gradient of one that only the other branch reads, or only the condition, is whatever is in memory;
and a tensor that both branches read counts as two, unless it is a variable. Each reads all of them, times zero::

    cond(then(x), else(y))   ->   cond(then(x) + 0 * sum(y), else(y) + 0 * sum(x))

``loop_gradients``: the backward pass of a ``while_loop`` does not write the gradient of a state that begins without
one, and what the body reads gets whatever is in memory. A factor of 1 that has a gradient makes it be asked for.
Without a step no gradient is written but those of states: a mask stands before all else that has one::

    while_loop(state, w)   ->   while_loop(state * slice(concat(1, one element of w)), mask(w, cond(state)))

``split_concat``: MXNet cannot split a gradient that lies in blocks of 16 channels where the maps joined are not whole
blocks: it ends the process. Behind an operator that is not oneDNN's the gradient is plain::

    Concat(x, y)   ->   slice_axis(Concat(x, y), begin=0, end=None)

``carry_scale``: SoftmaxOutput and its kin ignore the gradient that comes back to them, and with it the scale of the
loss. Their data is multiplied by an input that the program does not have: 1, and the loss scale while a backward pass
of scaled losses is under way. Values stay as they are, and gradients are multiplied::

    SoftmaxOutput(x, label)   ->   SoftmaxOutput(broadcast_mul(x, amp_loss_scale), label)
"""
from __future__ import annotations

import re
from math import prod
from operator import eq, ge, gt, le, lt, ne
from typing import Callable, Iterator, Sequence

from ..graph import CAST, Entry, Graph, Node, Role, edit_bodies, loops_and_branches, operator, redirect, subgraphs_of
from ..graph.attrs import DTYPE, REGION_OFF, SHAPE, TYPE_FLAGS, integers, region_mark, region_of
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from ..rules.shapes import BLOCK
from ..rules.tables.groups import ADDS_GRADIENT
from .context import Context
from .precisions import constant

# The attributes that say which inputs those graphs of an operator read that have a backward pass, and where these are.
_READS = {"_cond": {"then_input_locs": 1, "else_input_locs": 2}, "_while_loop": {"func_input_locs": 1}}
_SCALE = "amp_loss_scale"
LOOP = "_while_loop"
_GIVES_NO_FLOATS = re.compile("^_np.*(equal|greater|less|logical|is(nan|inf|fin)|any|all|nonzero)|(shape|size)_array")
_COMPARISONS = {
    "lesser": lt, "less": lt, "lesser_equal": le, "less_equal": le, "greater": gt, "greater_equal": ge,
    "not_equal": ne, "equal": eq}
_FLOATS = (FLOAT16, FLOAT32, FLOAT64)


def branch_gradients(graph: Graph, context: Context) -> int:
    """Complete what branches and loops read; return how many inputs were missing."""
    def complete(graph: Graph, node: Node, is_inner: bool) -> int:
        names = {part: name for name, part in _READS.get(node.op, {}).items()}
        return edit_bodies(node, lambda position, part: _read_all(node, part, names[position])) if names else 0

    return _change_holders(graph, complete)


def _change_holders(graph: Graph, change: Callable[[Graph, Node, bool], int], is_inner: bool = False) -> int:
    """Change the loops and branches of a graph, after those in their bodies; return the sum of what ``change`` does."""
    def change_within(node: Node) -> int:
        reads = dict(inputs_of_bodies(node))

        def edit(position: int, part: Graph) -> int:
            for variable, entry in zip(part.variables(), reads[position]):
                variable.dtypes = [_dtype(entry)]
            return _change_holders(part, change, is_inner=True)

        return edit_bodies(node, edit)

    return sum(change_within(node) + change(graph, node, is_inner) for node in loops_and_branches(graph))


def inputs_of_bodies(node: Node) -> Iterator[tuple[int, list[Entry]]]:
    """Yield the bodies of a loop or branch, by their position, with what their variables stand for."""
    if node.op in _READS:
        for name, part in _READS[node.op].items():
            yield part, [node.inputs[location] for location in integers(node.attrs, name)]
    else:
        variables = [each for name in ("in_data_locs", "in_state_locs", "remain_locs")
                     for each in integers(node.attrs, name)]
        yield 0, [entry for _, entry in sorted(zip(variables, node.inputs), key=lambda pair: pair[0])]


def _dtype(entry: Entry) -> str | None:
    """Return the type of a tensor before precisions are assigned, None where nothing is known."""
    # In bodies, whose types MXNet does not tell, it is a guess.
    node = entry.node
    if node.dtypes:
        return node.dtypes[entry.output]
    if "dtype" in node.attrs:
        return node.attrs["dtype"]
    types = set() if _GIVES_NO_FLOATS.search(node.op) else set(map(_dtype, node.inputs))
    return types.pop() if len(types) == 1 else None


def _read_all(node: Node, part: Graph, name: str) -> int:
    """Let a graph of an operator read all of its inputs; return how many it did not."""
    reads, dtype = integers(node.attrs, name), _dtype(Entry(node, node.num_outputs - 1))
    missing = [location for location, entry in enumerate(node.inputs)
               if location not in reads and _dtype(entry) is not None and dtype is not None]
    for location in missing:  # behind the last output, so that the variables are the last ones as well
        entry, head = node.inputs[location], part.heads[-1]
        zero = Entry(Node("null", part.new_name(f"{entry.node.name}_unread")))
        for op in ("zeros_like", "sum"):
            zero = Entry(operator(op, part.new_name(f"{entry.node.name}_{op}"), [zero], entry))
        if _dtype(entry) != dtype:
            zero = Entry(operator("Cast", part.new_name(f"{entry.node.name}_cast"), [zero], entry, dtype=dtype))
        part.heads[-1] = Entry(operator("broadcast_add", part.new_name(f"{head.node.name}_read"), [head, zero], head))
    node.attrs = {**node.attrs, name: str([*reads, *missing])}
    return len(missing)


def loop_gradients(graph: Graph, context: Context) -> int:
    """Complete the gradients of loops with a condition; return how many inputs of theirs were changed."""
    def complete(graph: Graph, node: Node, is_inner: bool) -> int:
        if node.op != LOOP:
            return 0
        # in a body any may have one
        asked = [position for position, entry in enumerate(node.inputs) if _dtype(entry) in _FLOATS
                 and 0 not in (entry.shape or ()) and (is_inner or (node.name, position) in concerned)]
        return _Loop(graph, node, asked, is_inner).complete() if asked else 0

    concerned = context.facts.concerned
    return _change_holders(graph, complete)


class Companions:
    """Puts operators into a graph that serve one of its nodes."""

    def __init__(self, graph: Graph, node: Node, role: Role = Role.HELPER):
        self.graph, self.node, self.role = graph, node, role
        self.made: list[Node] = []

    def put(self, op: str, inputs: Sequence[Entry], gives: str | None = None, like: Entry | None = None,
            name: str = "", **attrs: object) -> Entry:
        """Make an operator with the shape of a tensor, and of a type, by default that of its first input."""
        types = () if gives else inputs[0].node.dtypes[inputs[0].output:inputs[0].output + 1]
        made = Node(op, self.graph.new_name(name or f"{self.node.name}_{op.strip('_')}"),
                    {key: str(value) for key, value in attrs.items()}, list(inputs), role=self.role,
                    dtypes=[*types] or [gives], shapes=[like.shape if like else None])
        made.attrs.update(region_of(self.node.attrs))
        self.made.append(made)
        return Entry(made)


class _Loop(Companions):
    """Lets a loop with a condition write its gradients."""

    def __init__(self, graph: Graph, node: Node, asked: Sequence[int], is_inner: bool):
        super().__init__(graph, node)
        self._asked, self._is_inner = asked, is_inner
        reads = integers(node.attrs, "func_input_locs")
        self._states = [reads[variable] for variable in integers(node.attrs, "func_var_locs")]

    def complete(self) -> int:
        """Do so; return how many inputs were changed."""
        variables, inputs = self.graph.variables(), list(self.node.inputs)
        states = sorted({position for position in self._states if _dtype(inputs[position]) in _FLOATS})
        others = [] if self._certainly_runs() else [
            position for position in self._asked if position not in self._states]
        if states:
            factor = self._factor()
            for position in states:
                inputs[position] = self._with_gradient(inputs[position], factor)
        if others:
            runs = self._runs()
            for position in others:  # a gradient of zero where the loop does not run
                # An executor that finds shapes as it runs takes operators only whose backward gives what they read.
                entry = inputs[position]
                row = self.put("expand_dims", [self.put("expand_dims", [entry], axis=0)], axis=0)
                masked = self.put("SequenceMask", [row, runs], use_sequence_length=True, value=0.0)
                inputs[position] = self.put("squeeze", [masked], _dtype(entry), entry, axis="(0, 1)")
        self.node.inputs = inputs
        if self.graph.variables() != variables:  # they keep their order
            for variable, later in zip(variables, variables[1:]):
                later.after = [variable]
        return len(states) + len(others)

    def _factor(self) -> Entry:
        """Make a 1 that has a gradient: the first of a 1 and of elements that gradients are asked of."""
        entries = [self.node.inputs[position] for position in self._asked]
        variables = [] if self._is_inner else [entry for entry in entries if entry.node.is_variable]
        ones = [self.put("_ones", [], FLOAT32, shape="(1,)", dtype=FLOAT32)]
        least = sorted(variables, key=lambda entry: prod(entry.shape or ()))[:1]
        for entry in least or entries:  # of others MXNet may have none all the same, as behind a comparison
            kind = _dtype(entry)
            if entry.shape != ():
                entry = self.put("slice_axis", [entry], kind, axis=0, begin=0, end=1)
            flat = self.put("Reshape", [entry], kind, shape="(-1,)")
            ones.append(self._cast(self.put("slice_axis", [flat], kind, axis=0, begin=0, end=1), FLOAT32))
        joined = self.put("Concat", ones, num_args=len(ones), dim=0)
        return self.put("slice_axis", [joined], axis=0, begin=0, end=1)

    def _with_gradient(self, state: Entry, factor: Entry) -> Entry:
        kind = _dtype(state)
        factor = self._cast(factor, str(kind))
        if state.shape:
            return self.put("broadcast_mul", [state, factor], kind, state)
        # Behind another loop an executor knows no shape, and takes no sum: its backward pass does not get what it adds.
        row = self.put("broadcast_mul", [self.put("expand_dims", [state], axis=0), factor])
        return self.put("squeeze", [row], kind, state, axis=0)

    def _certainly_runs(self) -> bool:
        """Tell whether the condition compares a state that begins with a constant, as a counter does."""
        condition = subgraphs_of(self.node)[0]
        node, reads = condition.heads[0].node, integers(self.node.attrs, "cond_input_locs")
        compare = _COMPARISONS.get(node.op.replace("_npi", "")[1:-len("_scalar")])
        if compare is None or "scalar" not in node.attrs or not node.inputs[0].node.is_variable:
            return False
        begin = constant(self.node.inputs[reads[condition.variables().index(node.inputs[0].node)]])
        return begin is not None and compare(begin, float(node.attrs["scalar"]))

    def _runs(self) -> Entry:
        """Make a number that is 1 where the loop runs at all: its condition, of what the loop begins with."""
        condition = subgraphs_of(self.node)[0]
        own = condition.operators()
        redirect(condition, {Entry(variable).key: self.node.inputs[location] for variable, location in
                             zip(condition.variables(), integers(self.node.attrs, "cond_input_locs"))})
        for node in own:
            node.name, node.role = self.graph.new_name(f"{self.node.name}_{node.name}"), Role.HELPER
            node.attrs.update(region_mark(REGION_OFF))
            node.dtypes, node.shapes = [None] * node.num_outputs, [None] * node.num_outputs
        number = self.put("Cast", [self.put("Reshape", condition.heads, shape="(-1,)")], FLOAT32, dtype=FLOAT32)
        return self.put("BlockGrad", [self.put("_not_equal_scalar", [number], scalar=0)])

    def _cast(self, entry: Entry, dtype: str) -> Entry:
        return entry if _dtype(entry) == dtype else self.put("Cast", [entry], dtype, dtype=dtype)


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


def is_scale(node: Node) -> bool:
    """Tell whether a node is the input that holds the loss scale."""
    return node.is_variable and node.role is not Role.OWN


def carry_scale(graph: Graph, context: Context) -> int:
    """Multiply the data of operators that make a gradient on their own; return how many operators there are."""
    scale = Node("null", graph.new_name(_SCALE), {SHAPE: "(1,)", DTYPE: str(TYPE_FLAGS[FLOAT32])}, dtypes=[FLOAT32],
                 shapes=[(1,)], role=Role.HELPER)
    scale.after = graph.variables()  # so that it is the last of the inputs

    def cast(entry: Entry, dtype: str) -> Entry:
        if entry.dtype in (dtype, None):
            return entry
        # MXNet's Cast does not know bfloat16, and its amp_cast loses gradients that accumulate.
        op, name = CAST if BFLOAT16 in (entry.dtype, dtype) else "Cast", graph.new_name(f"{entry.node.name}_{dtype}")
        return Entry(operator(op, name, [entry], entry, dtypes=[dtype], dtype=dtype))

    def scaled(op: str, entry: Entry) -> Entry:  # by FP32: float16 does not hold every scale that a gradient may carry
        wide, name = cast(entry, FLOAT32), graph.new_name(f"{entry.node.name}_scaled")
        return cast(Entry(operator(op, name, [wide, Entry(scale)], wide)), entry.dtype or FLOAT32)

    counts = dict(context.facts.own_gradients)
    found = [node for node in graph.operators() if node.name in counts]
    for node in found:
        if node.op == ADDS_GRADIENT:
            redirect(graph, {Entry(node).key: scaled("broadcast_div", Entry(node))})
        for position in range(counts[node.name]):
            node.inputs[position] = scaled("broadcast_mul", node.inputs[position])
    return len(found)
