"""Identities before operators in C++, which MXNet does not tell that a gradient is to be added to what is there.

More than a few operators do not share an identity (:mod:`~gluon_amp.passes.summed_gradients`), and those of one tensor
differ in an attribute: MXNet would make one of them.
"""
from __future__ import annotations

from collections import Counter
from typing import Collection

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Readers, Role, operator
from .assign_dtypes import plan_outputs
from .context import Context
from .summed_gradients import APART, SharedGuards, numbers


class Guards:
    """Puts identities before the operators in C++ of a graph, where gradients may be sums."""

    def __init__(self, graph: Graph, readers: Readers, context: Context):
        self._readers, self._context = readers, context
        self._shared = SharedGuards(lambda entry: behind_identity(graph, entry, context))
        self._numbers = numbers(graph)
        self._read = Counter((self._numbers[id(entry.node)], entry.output)
                             for node in graph.nodes() for entry in node.inputs)

    def before(self, entry: Entry, within: Collection[int] = (), uses: int = 0) -> Entry:
        """Return what one more operator in C++ is to read: a tensor, or an identity that it shares with others.

        Of an operator in the place of several, ``within`` has those that nothing reads any more, and ``uses`` is how
        often it reads the tensor itself.
        """
        return self._shared.before(entry) if self._is_needed(entry, within, uses) else entry

    def _is_needed(self, entry: Entry, within: Collection[int], uses: int) -> bool:
        if not self._context.facts.recorded:
            return False
        if entry.node.is_variable and entry.node.name in self._context.facts.accumulated:
            return True
        inner = sum(id(reader) in within for reader in self._readers.of(entry))
        # A cast that was put in a moment ago has no number, and no other readers.
        count = self._read[self._numbers.get(id(entry.node), -1), entry.output] - inner + uses
        return count != 1 or self._readers.is_head(entry)


def behind_identity(graph: Graph, entry: Entry, context: Context) -> Entry:
    """Return a tensor behind an identity of its own, in the precision that it has."""
    made = operator("_copy", graph.new_name(f"{entry.node.name}_native"), [entry], entry, Role.GUARD)
    made.attrs[APART] = made.name
    made.dtypes, made.decision = [FLOAT32], context.policy.decide("_copy", made.attrs, entry.shape)
    plan_outputs(made, context)
    return Entry(made)
