"""How far results are from others, and how few changes are enough for them."""
from __future__ import annotations

from typing import Callable, Sequence, TypeVar

import numpy as np

Item = TypeVar("Item")
Condition = Callable[[Sequence[Item]], bool]


def relative_error(pairs: Sequence[tuple[np.ndarray, np.ndarray]], floor: float = 0.0) -> float:
    """Return the 2-norm of all differences over that of the first arrays, or over ``floor`` where that is larger."""
    # Values that are not finite in the first arrays do not count; where only the second are not finite, the error is
    # infinite.
    square_error = square_norm = 0.0
    for expected_, actual in pairs:
        known = np.isfinite(expected_)
        if not np.isfinite(actual[known]).all():
            return float("inf")
        square_error += float(((expected_[known] - actual[known]) ** 2).sum())
        square_norm += float((expected_[known] ** 2).sum())
    if not square_error:
        return 0.0
    norm = max(float(np.sqrt(square_norm)), floor)
    return float(np.sqrt(square_error) / norm) if norm else float("inf")


def fewest(order: Sequence[Item], holds: Condition, prune: bool = False) -> list[Item] | None:
    """Return few items for which a condition holds, from the front of an order; None where it does not for all.

    The condition is asked for none, for all, and then for about log2 of the number of items. With ``prune`` the items
    that are not needed are taken out again, which asks once or twice for each: no single one of the result can go
    then, where a condition that holds for some items also holds for more.
    """
    if holds(order[:0]):
        return []
    if not holds(order):
        return None
    too_few, enough = 0, len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if holds(order[:middle]):
            enough = middle
        else:
            too_few = middle
    return _pruned(list(order[:enough]), holds) if prune else list(order[:enough])


def _pruned(kept: list[Item], holds: Condition) -> list[Item]:
    """Take items out, the last first and in ever smaller pieces, as long as the condition holds."""
    size = max(len(kept) // 2, 1)
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
