"""The cheapest of two precisions for each of many operators, as a minimum cut.

Operators and casts cost time. A graph whose edges cost what it takes to have their ends on different sides has a cut of
the same cost for every choice of precisions, so that the smallest cut is the cheapest choice
(https://doi.org/10.1109/TPAMI.2004.1262177). No graphs of MXNet here: operators are numbers.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple, Sequence

import numpy as np

from ..graph import connected_parts

# Stand for everything whose precision is settled, where the number of an operator is expected.
FIXED_LOW, FIXED_FP32 = -1, -2

# SciPy counts flows in 32-bit integers: an edge that must not be cut, and the most that all others may add up to.
_INFINITE = 2**29
_LARGEST_SUM = 2**28


class Tensor(NamedTuple):
    """A tensor that is cast once where its producer and any of its readers differ."""

    producer: int  # the number of an operator, or one of the fixed ends
    readers: tuple[int, ...]  # likewise, without repetitions
    cost: int  # of the cast

    @property
    def ends(self) -> tuple[int, ...]:
        """Producer and readers."""
        return self.producer, *self.readers


class Gain(NamedTuple):
    """Operators to change together, and what that saves."""

    operators: list[int]
    saved: int


@dataclass
class Placement:
    """Operators that may run in either of two precisions.

    Examples
    --------
    Two operators between low-precision ones; that the first runs in FP32 needs two casts:

    >>> tensors = [Tensor(FIXED_LOW, (0,), 5), Tensor(0, (1,), 5), Tensor(1, (FIXED_LOW,), 5)]
    >>> placement = Placement([False, True], [(0, 0), (0, 0)], tensors)
    >>> placement.cost(placement.low), placement.gains()
    (10, [Gain(operators=[0], saved=10)])
    """

    low: list[bool] = field(default_factory=list)  # which of them run in low precision now
    # what each costs in FP32 and in low precision. Costs are whole numbers, in any unit.
    kernels: list[tuple[int, int]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)  # what they read and give
    # the second of two operators has to run in low precision when the first does
    implied: list[tuple[int, int]] = field(default_factory=list)
    least_share: float = 0.0  # what changing a connected part has to save at least, as a share of what it costs

    def cost(self, low: Sequence[bool]) -> int:
        """Return what a choice of precisions costs."""
        return _Part(list(range(len(self.low))), self.tensors).cost(self.kernels, low)

    def gains(self) -> list[Gain]:
        """Return the changes that make the cheapest choice, and of those the fewest, for each connected part."""
        # Only operators that are connected with a cast, or with an operator that is slower as it is, are looked at.
        parts = self._parts()
        members = [number for part in parts for number in part.operators]
        if not members:
            return []
        cut = self._cut(members, [tensor for part in parts for tensor in part.tensors])
        gains = [Gain([number for number in part.operators if cut[number] != self.low[number]],
                      part.cost(self.kernels, self.low) - part.cost(self.kernels, cut)) for part in parts]
        # Costs are rounded to fit 32 bits: what is a gain only through that is none.
        return [gain for gain, part in zip(gains, parts)
                if gain.saved > self.least_share * part.cost(self.kernels, self.low)]

    def _parts(self) -> list[_Part]:
        """Return the connected parts with casts, or with operators that are slower than they would be elsewhere."""
        if not (any(_is_cast(tensor, self.low) for tensor in self.tensors)
                or any(costs[low] > costs[not low] for low, costs in zip(self.low, self.kernels))):
            return []
        component = self._components()
        parts: dict[int, _Part] = defaultdict(_Part)
        for tensor in self.tensors:
            part = parts[component[max(tensor.ends)]]
            part.tensors.append(tensor)
            part.may_gain |= _is_cast(tensor, self.low)
        for number, (low, costs) in enumerate(zip(self.low, self.kernels)):
            part = parts[component[number]]
            part.operators.append(number)
            part.may_gain |= costs[low] > costs[not low]
        return [part for part in parts.values() if part.may_gain]

    def _components(self) -> Sequence[int]:
        """Return the number of each operator's connected part."""
        pairs = [(max(tensor.ends), end) for tensor in self.tensors for end in tensor.ends if end >= 0]
        return connected_parts(pairs, len(self.low))

    def _cut(self, members: Sequence[int], tensors: Sequence[Tensor]) -> list[bool]:
        """Return ``low`` with the operators of some parts as the smallest cut has them."""
        node = {FIXED_LOW: 0, FIXED_FP32: 1, **{member: number for number, member in enumerate(members, 2)}}
        total = (sum(abs(fp32 - low) for fp32, low in (self.kernels[member] for member in members))
                 + sum(tensor.cost for tensor in tensors))
        # All changes together cost less than one unit: they decide between choices of equal cost.
        weight = len(members) + 1
        scale = total * weight // _LARGEST_SUM + 1
        edges = _Edges(len(node))
        for member in members:
            fp32, low = self.kernels[member]
            edges.add(node[member], 1, max(0, low - fp32) // scale * weight + (not self.low[member]))
            edges.add(0, node[member], max(0, fp32 - low) // scale * weight + self.low[member])
        for tensor in tensors:
            edges.add_tensor(node[tensor.producer], [node[reader] for reader in tensor.readers],
                             tensor.cost // scale * weight)
        for first, second in self.implied:
            if first in node and second in node:
                edges.add(node[first], node[second], _INFINITE)
        reached = edges.source_side()
        return [node[number] in reached if number in node else before for number, before in enumerate(self.low)]


@dataclass
class _Part:
    """A connected component."""

    operators: list[int] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    may_gain: bool = False

    def cost(self, kernels: Sequence[tuple[int, int]], low: Sequence[bool]) -> int:
        """Return what a choice costs in this part."""
        return (sum(kernels[number][low[number]] for number in self.operators)
                + sum(tensor.cost for tensor in self.tensors if _is_cast(tensor, low)))


def _is_cast(tensor: Tensor, low: Sequence[bool]) -> bool:
    """Tell whether a reader differs from the producer."""
    first = _side(tensor.producer, low)
    return any(_side(reader, low) != first for reader in tensor.readers)


def _side(end: int, low: Sequence[bool]) -> bool:
    return low[end] if end >= 0 else end == FIXED_LOW


class _Edges:
    """A network of flows from node 0, which stands for low precision, to node 1."""

    def __init__(self, nodes: int):
        self._nodes = nodes
        self._capacities: dict[tuple[int, int], int] = defaultdict(int)

    def add(self, start: int, end: int, capacity: int) -> None:
        """Add capacity between two nodes."""
        if start != end and capacity:
            self._capacities[start, end] = min(self._capacities[start, end] + capacity, _INFINITE)

    def add_tensor(self, producer: int, readers: Sequence[int], cost: int) -> None:
        """Add a cost that is due once as soon as one reader is on the other side."""
        if len(readers) == 1:
            self.add(producer, readers[0], cost)
            self.add(readers[0], producer, cost)
            return
        raised, lowered = self._nodes, self._nodes + 1
        self._nodes += 2
        self.add(producer, raised, cost)
        self.add(lowered, producer, cost)
        for reader in readers:
            self.add(raised, reader, _INFINITE)
            self.add(reader, lowered, _INFINITE)

    def source_side(self) -> set[int]:
        """Return the nodes on the source's side of the smallest cut with fewest of them."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        starts, ends = (np.array(part, dtype=np.int32) for part in zip(*self._capacities))
        capacities = np.array(list(self._capacities.values()), dtype=np.int32)
        matrix = csr_matrix((capacities, (starts, ends)), shape=(self._nodes, self._nodes), dtype=np.int32)
        left = csr_matrix(matrix - maximum_flow(matrix, 0, 1).flow)
        left.eliminate_zeros()
        return set(map(int, breadth_first_order(left, 0, return_predecessors=False)))
