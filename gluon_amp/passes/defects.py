"""Cure what MXNet does wrong with single operators.

A row of :data:`.defect_table.DEFECTS` is heeded where gradients of its operand are asked for: in graphs, in the bodies
of loops and branches, and in calls outside of graphs. What an operator in C++ has taken the place of needs no cure, and
gets none.
"""
from __future__ import annotations

from typing import Callable, Iterable, Iterator, Mapping

from ..graph import BODIES, Entry, Graph, Node, set_subgraphs, subgraphs_of
from ..graph.decision import WISHES
from ..rules import KEEP
from .assign_dtypes import decide, follow, plan_outputs
from .context import Context
from .defect_table import DEFECTS, Cure, Defect
from .facts import Concern

_ROWS: Mapping[str, tuple[Defect, ...]] = {
    op: tuple(each for each in DEFECTS if op in each.ops) for op in {op for each in DEFECTS for op in each.ops}}
CONCERNED = frozenset(_ROWS)  # the operators that some row is about
IN_CALLS = frozenset(op for each in DEFECTS if each.in_calls for op in each.ops)  # those also in calls
# those of which some row is about gradients of inference
DEPEND_ON_MODE = frozenset(op for each in DEFECTS if each.evaluating for op in each.ops)


def concerns_of(graph: Graph, is_asked: Callable[[str], bool], evaluates: bool) -> frozenset[Concern]:
    """Name the gradients in a graph that are wrong.

    Parameters
    ----------
    graph : Graph
        As the program made it.
    is_asked : callable
        Takes the name of a variable and says whether its gradient is asked for.
    evaluates : bool
        Whether gradients are those of inference.
    """
    def reaches(entry: Entry) -> bool:
        return any(is_asked(name) for name in _variables_before(entry))

    return frozenset(Concern(node.name, each.of) for node in graph.operators() for each in _ROWS.get(node.op, ())
                     if each.concerns(node, evaluates)
                     and (each.without is None or not reaches(node.inputs[each.without]))
                     and reaches(node.inputs[each.of]))


def _variables_before(entry: Entry) -> Iterator[str]:
    """Yield the variables that a tensor's gradient goes back to, near ones first."""
    seen, waiting = {id(entry.node)}, [entry.node]
    while waiting:
        node = waiting.pop(0)
        if node.is_variable:
            yield node.name
        elif node.op != "BlockGrad":
            for each in node.inputs:
                if id(each.node) not in seen:
                    seen.add(id(each.node))
                    waiting.append(each.node)


def is_needed(context: Context) -> bool:
    """Tell whether gradients may be asked for."""
    return context.facts.recorded


def run(graph: Graph, context: Context) -> int:
    """Follow the table; return how many gradients were cured."""
    count, made = _cured(graph, lambda node, each: Concern(node.name, each.of) in context.facts.concerned,
                          context.facts.evaluates)
    for node, served in made:
        _settle(node, served, context)
    if made:
        follow(graph, context)
    return count + sum(_cure_bodies(node, context) for node in graph.operators() if node.op in BODIES)


def _cured(graph: Graph, applies: Callable[[Node, Defect], bool], evaluates: bool
           ) -> tuple[int, list[tuple[Node, Node]]]:
    """Cure the nodes of a graph; return how many times, and what was put in, with the node that each serves."""
    moved: dict[tuple[int, int], Entry] = {}
    count, made = 0, []
    for node in graph.operators():
        node.inputs = [moved.get(entry.key, entry) for entry in node.inputs]
        for each in _ROWS.get(node.op, ()):
            if each.concerns(node, evaluates) and applies(node, each):
                cure = Cure(graph, node, each.of)
                _follow_row(each, cure, moved)
                count += 1
                made += [(one, node) for one in cure.made]
    graph.heads = [moved.get(head.key, head) for head in graph.heads]
    return count, made


def _follow_row(row: Defect, cure: Cure, moved: dict[tuple[int, int], Entry]) -> None:
    result = row.cure(cure)
    if result is not None:
        result.node.stands_for = cure.node.name
        moved[Entry(cure.node).key] = result


def _settle(node: Node, served: Node, context: Context) -> None:
    """Give a node that was put in a precision: that of the node that it serves where the user asked for that one's."""
    if node.decision is None:
        wished = served.decision is not None and served.decision.cause in WISHES
        node.decision = served.decision if wished else decide(node, context)
    if node.decided.rule != KEEP:
        plan_outputs(node, context)


def _cure_bodies(node: Node, context: Context) -> int:
    """Cure the bodies of a loop or branch: of what is read there gradients are asked for, as far as is known."""
    parts = subgraphs_of(node)
    count = 0
    for position in BODIES[node.op]:
        count += _cured(parts[position], lambda inner, each: each.without is None, context.facts.evaluates)[0]
        count += sum(_cure_bodies(inner, context) for inner in parts[position].operators() if inner.op in BODIES)
    if count:
        set_subgraphs(node, parts)
    return count


def may_concern(op: str, operands: int, is_asked: Callable[[int], bool], evaluates: bool) -> bool:
    """Tell whether a call outside of graphs may be concerned: the arguments are those of :func:`cured_call`."""
    return any(operands > each.of and _is_asked_for(each, is_asked, evaluates) for each in _ROWS[op])


def _is_asked_for(row: Defect, is_asked: Callable[[int], bool], evaluates: bool) -> bool:
    return (row.in_calls and (evaluates or not row.evaluating) and is_asked(row.of)
            and (row.without is None or not is_asked(row.without)))


def cured_call(op: str, attrs: Mapping[str, str], inputs: Iterable[Node], is_asked: Callable[[int], bool],
               evaluates: bool) -> Graph | None:
    """Return a graph of what a call outside of graphs is to run; None where that is the operator alone.

    Parameters
    ----------
    op, attrs
        The operator.
    inputs : iterable of Node
        What stands for each operand: a variable where the user made the array, something else where it was computed.
    is_asked : callable
        Takes the position of an operand and says whether its gradient is asked for.
    evaluates : bool
        Whether gradients are those of inference.
    """
    node = Node(op, op, dict(attrs), [Entry(each) for each in inputs])
    graph = Graph([Entry(node)])
    return graph if _cured(graph, lambda _, each: _is_asked_for(each, is_asked, evaluates), evaluates)[0] else None
