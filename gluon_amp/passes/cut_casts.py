"""Choose the precision of operators that may run in either by cost: that of casts, and that of their own kernels.

:mod:`~gluon_amp.passes.assign_dtypes` decides in one sweep, by inputs only. A join of one FP32 tensor with many in low
precision then runs in FP32, and so does what follows. Here operators with the rules NEUTRAL and WIDEST are decided
again, all at once, by a minimum cut (:mod:`~gluon_amp.passes.placement`) with measured costs.

What an FP32 operator or an output of the graph reads is never rounded more than by the sweep: an operator goes from
FP32 to low precision only together with all its readers in FP32, which have to be such operators as well.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod
from typing import Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node
from ..rules import FP32, KEEP, LOWER, NEUTRAL, WIDEST, Cause
from ..rules.costs import COSTS, Costs
from .assign_dtypes import data_precision, plan_outputs
from .context import Context
from .placement import FIXED_FP32, FIXED_LOW, Placement, Tensor

# Its author said which precision it follows; nothing is known of its cost.
_CUSTOM = "Custom"
# Rates differ by a fifth from run to run, and do not know layouts: smaller gains may well be losses.
_LEAST_SHARE = 0.1


def is_needed(context: Context) -> bool:
    """Tell whether the costs of casts and kernels are known: they are for bfloat16 on the CPU."""
    return context.target in COSTS and not context.policy.imitated


def run(graph: Graph, context: Context) -> int:
    """Decide again where that saves time; return how many operators were moved."""
    return Choice(graph, context, COSTS[context.target]).apply()


class Choice:
    """The operators of a graph that may run in either precision, after ``assign_dtypes``."""

    def __init__(self, graph: Graph, context: Context, costs: Costs):
        self.graph, self.context = graph, context
        self.placement = Placement(least_share=_LEAST_SHARE)  # the operators as numbers, and what they cost
        nodes = graph.operators()
        uses = _uses(graph, nodes, context)
        movable = _movable(graph, nodes, uses, context)
        numbers = {key: number for number, key in enumerate(movable)}
        self.operators = list(movable.values())
        for node in self.operators:
            size = sum(map(_size, (*_data(node, context), *_outputs(node))))
            is_low = data_precision(node, context) == context.target
            self.placement.low.append(is_low)
            self.placement.kernels.append(costs.kernel(node.op, size, context.policy.training, is_low))
        for reads in uses.values():
            self._add(reads[0].entry, [read.end(numbers) for read in reads], numbers, costs)

    def _add(self, entry: Entry, ends: Sequence[int], numbers: Mapping[int, int], costs: Costs) -> None:
        """Add a tensor, if a movable operator gives or reads it."""
        readers = tuple(dict.fromkeys(ends))
        fixed = FIXED_LOW if entry.dtype == self.context.target else FIXED_FP32
        producer = numbers.get(id(entry.node), fixed)
        if producer >= 0 and entry.output not in {output.output for output in _outputs(entry.node)}:
            producer = fixed
        if max(producer, *readers) < 0:
            return
        backward = self.context.policy.training and not entry.node.is_variable
        low = self.placement.low
        self.placement.tensors.append(Tensor(producer, readers, costs.cast(_size(entry), backward)))
        if producer >= 0 and not low[producer]:
            self.placement.implied += [(producer, end) for end in readers if end >= 0 and not low[end]]

    def apply(self) -> int:
        """Give the operators the precisions that cost least; return how many moved."""
        gains = self.placement.gains()
        if not gains:
            return 0
        target, followers = self.context.target, [node for node in self.graph.operators() if _is_follower(node)]
        before = {id(node): data_precision(node, self.context) for node in followers}
        reasons: dict[int, str] = {}
        for gain in gains:
            text = f"saves about {gain.saved / 1e6:.1g} ms of casts and kernels"
            if len(gain.operators) > 1:
                text += f", together with {len(gain.operators) - 1} more"
            reasons.update((id(self.operators[number]), text) for number in gain.operators)
        for node in followers:
            was, reason = before[id(node)], reasons.get(id(node))
            if was is not None:
                wanted = was if reason is None else FLOAT32 if was == target else target
                _settle(node, wanted, f"in {wanted} rather than {was}: {reason}" if reason else "", self.context)
        return len(reasons)


def _is_follower(node: Node) -> bool:
    return node.decided.rule in (NEUTRAL, WIDEST)


def _settle(node: Node, wanted: str, reason: str, context: Context) -> None:
    """Make a node run in a precision; by its own rule where that gives it."""
    decision = node.decided
    if data_precision(node, context) != wanted:
        reason = reason or f"{decision.note}; stays in {wanted}, which costs least"
        decision = replace(decision, rule=LOWER if wanted == context.target else FP32)
    node.decision = replace(decision, cause=Cause.COST, note=reason) if reason else decision
    plan_outputs(node, context)


def _is_free(node: Node, context: Context) -> bool:
    """Tell whether a node can be moved: its inputs and outputs are FP32 in the program, and of known size."""
    if not _is_follower(node) or not node.decided.safe or node.op == _CUSTOM:
        return False
    tensors = [*_data(node, context), *_outputs(node)]
    return (data_precision(node, context) is not None
            and all(entry.node.dtypes[entry.output] == FLOAT32 and all(entry.shape or (0,)) for entry in tensors))


def _data(node: Node, context: Context) -> list[Entry]:
    """Return the inputs that a node takes in its precision."""
    return [entry for position, entry in enumerate(node.inputs)
            if context.is_float(entry) and position not in node.decided.fp32_inputs]


def _outputs(node: Node) -> list[Entry]:
    """Return the outputs that a node gives in its precision."""
    count = 1 if node.decided.fp32_inputs else len(node.dtypes)
    return [Entry(node, output) for output in range(count) if node.dtypes[output] == FLOAT32]


def _size(entry: Entry) -> int:
    """Return the bytes of a tensor in FP32."""
    return 4 * prod(entry.shape or (0,))


class _Read(NamedTuple):
    """A use of a tensor that may be cast."""

    entry: Entry
    reader: Node | None  # None for one whose precision is settled
    is_low: bool

    def end(self, numbers: Mapping[int, int]) -> int:
        """Return the reader's number, or the fixed end that it is on."""
        return numbers.get(id(self.reader), FIXED_LOW if self.is_low else FIXED_FP32)


_ReadsOf = Mapping[Tuple[int, int], List[_Read]]  # by the key of the tensor


def _uses(graph: Graph, nodes: Sequence[Node], context: Context) -> _ReadsOf:
    """Return the uses of each tensor, and their precision."""
    uses: dict[tuple[int, int], list[_Read]] = defaultdict(list)
    heads = [_Read(head, None, False) for head, dtype in zip(graph.heads, context.outputs) if dtype == FLOAT32]
    for read in (*(read for node in nodes for read in _reads(node, context)), *heads):
        uses[read.entry.key].append(read)
    return uses


def _reads(node: Node, context: Context) -> Iterator[_Read]:
    if node.decided.rule == KEEP:
        yield from (_Read(entry, None, False) for entry in node.inputs if entry.node.dtypes[entry.output] == FLOAT32)
        return
    is_low = data_precision(node, context) == context.target
    for position, entry in enumerate(node.inputs):
        if context.is_float(entry):
            settled = position in node.decided.fp32_inputs
            yield _Read(entry, None, False) if settled else _Read(entry, node, is_low)


def _movable(graph: Graph, nodes: Sequence[Node], uses: _ReadsOf, context: Context) -> dict[int, Node]:
    """Return the nodes that may be moved, in order."""
    kept = {id(head.node) for head, dtype in zip(graph.heads, context.outputs) if dtype is None}
    free = {id(node): node for node in nodes if id(node) not in kept and _is_free(node, context)}
    # From the end on: what is read in FP32 by something that stays there has to stay as well.
    for node in reversed(list(free.values())):
        if data_precision(node, context) != context.target and _is_needed(node, uses, free):
            del free[id(node)]
    return free


def _is_needed(node: Node, uses: _ReadsOf, free: Mapping[int, Node]) -> bool:
    """Tell whether the FP32 readers of a node need FP32 values."""
    following = {entry.output for entry in _outputs(node)}
    return any(output not in following or not (read.is_low or id(read.reader) in free)
               for output in range(len(node.dtypes)) for read in uses.get((id(node), output), ()))
