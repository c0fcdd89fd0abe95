"""Tell how MXNet adds the gradients of a tensor's readers, and keep those of sums apart.

Up to seven it adds by an operator of its own. Of more, it asks those that give them to add to what is there, one after
the other. Operators of libraries are not told, and casts do not do it: either would leave its own gradient alone.

Before it makes gradients, MXNet puts one operator in the place of equal ones, so that those have the readers of all.
"""
from __future__ import annotations

import os
from typing import Any, Callable, Collection, Iterable

from ..graph import Entry, Graph, Node

_VARIABLE = "MXNET_EXEC_INPLACE_GRAD_SUM_CAP"  # MXNet's: from how many gradients on it asks for additions
_DEFAULT = 8
_SUM = "elemwise_add"  # whose gradient MXNet takes for those of what it adds


def numbers(graph: Graph) -> dict[int, int]:
    """Give nodes of equal operators and inputs equal numbers: MXNet makes one of them."""
    made: dict[int, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes():
        inputs = tuple((made[id(entry.node)], entry.output) for entry in node.inputs)
        key = id(node) if not inputs else (node.op, frozenset(node.attrs.items()), inputs)
        made[id(node)] = known.setdefault(key, len(known))
    return made


def most_summed() -> int:
    """Return how many gradients MXNet adds by an operator of its own."""
    try:
        return max(1, min(int(os.environ.get(_VARIABLE, _DEFAULT)), _DEFAULT) - 1)
    except ValueError:
        return 1


def guard_sums(nodes: Iterable[Node], names: Collection[str], guarded: Callable[[Entry], Entry]) -> None:
    """Let sums read variables of some names behind an operator that changes nothing.

    MXNet lets operators behind a sum write their gradient where that of the variable is, though more is to be added
    there; in a graph with loops or branches it writes nothing there.
    """
    for node in nodes:
        if node.op == _SUM:
            node.inputs = [guarded(entry) if entry.node.is_variable and entry.node.name in names else entry
                           for entry in node.inputs]
