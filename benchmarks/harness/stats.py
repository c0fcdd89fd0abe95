"""Statistics of interleaved rounds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Sequence


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of a set of measurements."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Return the median, minimum and maximum of measurements.

    Parameters
    ----------
    values : sequence of float
        At least one measurement.

    Raises
    ------
    ValueError
        If there are no measurements.

    Examples
    --------
    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3)
    """
    if not values:
        raise ValueError("expected at least one measurement, received none")
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Return percentiles of measurements, each the value of a measurement that was made.

    Parameters
    ----------
    values : sequence of float
        At least one measurement.
    wanted : sequence of int
        From 1 to 100.

    Examples
    --------
    >>> percentiles([5.0, 1.0, 2.0, 4.0, 3.0])
    {'p50': 3.0, 'p90': 5.0, 'p99': 5.0}
    """
    ordered = sorted(values)
    return {f"p{share}": ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] for share in wanted}


def round_ratios(reference: Sequence[float], measured: Sequence[float]) -> Spread:
    """Return how many times as fast as the reference something ran.

    The ratio is taken within each round before the median, because the two times of one round were measured
    next to each other, under the same disturbances.

    Parameters
    ----------
    reference, measured : sequence of float
        Seconds per step, one value a round, in the same order.

    Raises
    ------
    ValueError
        If the numbers of rounds differ.

    Examples
    --------
    >>> round_ratios([2.0, 4.0, 9.0], [1.0, 4.0, 3.0])
    Spread(median=2.0, low=1.0, high=3.0, count=3)
    """
    if len(reference) != len(measured):
        raise ValueError(f"expected the same number of rounds, received {len(reference)} and {len(measured)}")
    return spread([slow / fast for slow, fast in zip(reference, measured)])
