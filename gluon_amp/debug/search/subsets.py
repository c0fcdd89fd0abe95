"""Find a small subset that satisfies a condition, with few questions."""
from __future__ import annotations

from typing import Callable, Sequence, TypeVar

__all__ = ["pruned", "shortest_prefix"]

Item = TypeVar("Item")
Condition = Callable[[Sequence[Item]], bool]


def shortest_prefix(order: Sequence[Item], holds: Condition) -> list[Item]:
    """Return the prefix of ``order`` for which a condition holds, but not for the prefix that is one shorter.

    The condition must hold for the whole and not for nothing. It is asked about log2 of the length times.

    Examples
    --------
    >>> shortest_prefix('abcdefgh', lambda found: 'e' in found)
    ['a', 'b', 'c', 'd', 'e']
    """
    too_short, enough = 0, len(order)
    while enough - too_short > 1:
        middle = (too_short + enough) // 2
        if holds(order[:middle]):
            enough = middle
        else:
            too_short = middle
    return list(order[:enough])


def pruned(found: Sequence[Item], holds: Condition) -> list[Item]:
    """Remove items, the last first and in ever smaller pieces, as long as the condition holds.

    No single item of the result can be removed, if the condition holds for every superset of a set that it holds for.

    Examples
    --------
    >>> pruned('abcdefgh', lambda found: 'b' in found and 'g' in found)
    ['b', 'g']
    """
    kept, size = list(found), max(len(found) // 2, 1)
    while kept:
        start = len(kept)
        while start > 0:
            start = max(start - size, 0)
            fewer = kept[:start] + kept[start + size:]
            if holds(fewer):
                kept = fewer
        if size == 1:
            break
        size = max(min(size, len(kept)) // 2, 1)
    return kept
