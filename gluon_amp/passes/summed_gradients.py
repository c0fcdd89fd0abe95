"""Tell how MXNet adds the gradients of a tensor's readers.

Up to seven it adds by an operator of its own. Of more, it asks those that give them to add to what is there, one after
the other. Operators of libraries are not told, and casts do not do it: either would leave its own gradient alone.

Before it makes gradients, MXNet puts one operator in the place of equal ones, so that those have the readers of all.
"""
from __future__ import annotations

import os
from typing import Any, Callable

from ..graph import Entry, Graph

_VARIABLE = "MXNET_EXEC_INPLACE_GRAD_SUM_CAP"  # MXNet's: from how many gradients on it asks for additions
_DEFAULT = 8
APART = "__gluon_amp_guard__"  # the attribute in which operators differ that MXNet is not to make one of


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


class SharedGuards:
    """Makes operators that change nothing, each of which as many readers share as MXNet adds gradients of itself."""

    def __init__(self, make: Callable[[Entry], Entry]):
        self._make, self._most = make, most_summed()
        self._latest: dict[tuple[int, int], tuple[Entry, int]] = {}  # the last of a tensor, and who reads it
        self.count = 0

    def before(self, entry: Entry) -> Entry:
        """Return what one more operator is to read."""
        made, readers = self._latest.get(entry.key, (entry, self._most))
        if readers == self._most:
            made, readers = self._make(entry), 0
            made.node.attrs[APART] = made.node.name  # beside others of this tensor, or of one that MXNet takes for it
            self.count += 1
        self._latest[entry.key] = made, readers + 1
        return made
