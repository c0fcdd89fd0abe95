"""How far results are from others, and how few changes are enough for them."""
from __future__ import annotations

import math
from numbers import Real
from typing import Any, Callable, Sequence, TypeVar

import numpy as np

from ..errors import PolicyError, expected
from . import checks

Item = TypeVar("Item")


def relative_error(pairs: Sequence[tuple[np.ndarray, np.ndarray]], floor: float = 0.0) -> float:
    """Return the 2-norm of all differences over that of the first arrays, or over ``floor`` where that is larger."""
    # Values not finite in the first arrays do not count; where only the second are not finite, the error is infinite.
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


def fewest(order: Sequence[Item], holds: Callable[[Sequence[Item]], bool], prune: bool = False) -> list[Item] | None:
    """Return few items for which a condition holds, from the front of an order; None where it does not for all."""
    # It is asked for about log2 of the number of items; to ``prune`` those that are not needed asks once or twice each.
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
    kept = list(order[:enough])
    size = len(kept) if prune else 0
    while size > 1:  # items are taken out in ever smaller pieces, the last first
        size = max(min(size, len(kept)) // 2, 1)
        for start in reversed(range(0, len(kept), size)):
            fewer = kept[:start] + kept[start + size:]
            if holds(fewer):
                kept = fewer
    return kept


def allowed(max_error: Any, metric: Any, budget: Any) -> float | None:
    """Return how much worse than in FP32 results may be: an error, or the budget of a metric; None for neither."""
    if metric is not None and max_error is not None:
        raise PolicyError("expected either max_error, or metric and budget, received both")
    if (metric is None) != (budget is None):
        raise PolicyError("metric and budget belong together: expected what measures a network, and how much worse "
                          "than in FP32 it may be")
    if metric is not None and not callable(metric):
        raise PolicyError(expected("a function of the network", "metric", metric))
    name, value = ("budget", budget) if max_error is None else ("max_error", max_error)
    if value is not None and not (checks.is_number(value) and 0 <= value < math.inf):
        raise PolicyError(expected("a number, 0 or above", name, value))
    return value


def measured(metric: Any, net: Any) -> float:
    """Return the number that a metric, a function, gives for a network."""
    value = given = metric(net)
    if hasattr(value, "asnumpy"):
        value = value.asnumpy()
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, (Real, np.bool_)):
        raise PolicyError(expected("a number, or an array of one", "the result of metric", given))
    return float(value)
