"""Whether gluon_amp is slower than MXNet FP32 anywhere: the least ratio of all rows, measured again where it is low."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from time import monotonic
from typing import Any, Callable, Iterator, Mapping, Sequence

from . import tables
from .registry import OURS, REFERENCE

ROUNDS_AGAIN = 15

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """How many times as fast as MXNet FP32 gluon_amp is, round by round."""

    workload: str
    network: str
    batch_size: int
    dtype: str
    ratios: Sequence[float]
    again: bool

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return statistics.median(self.ratios)

    @property
    def is_slower(self) -> bool:
        """Whether the median, with the two decimals of the tables, is below 1."""
        return round(self.median, 2) < 1.0

    def __str__(self) -> str:
        below = sum(ratio < 1.0 for ratio in self.ratios)
        text = (f"{tables.NAMES[self.network]}, {self.workload}, batch {self.batch_size}, {self.dtype}: "
                f"{self.median:.2f}x ({min(self.ratios):.2f}-{max(self.ratios):.2f}), below 1.0 in {below} of "
                f"{len(self.ratios)} rounds")
        return f"{text}, measured again" if self.again else text


def rows(suites: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield a row for each result that has both; a measurement that was repeated counts by its repetition."""
    for suite in suites:
        for result in suite["results"]:
            again = result.get("again")
            for comparison in [again] if again else result["comparisons"]:
                tracks = {track["name"]: track for track in comparison["implementations"]}
                if OURS in tracks and REFERENCE in tracks:
                    ours, theirs = (map(statistics.median, tracks[name]["turns"]) for name in (OURS, REFERENCE))
                    ratios = [slow / fast for fast, slow in zip(ours, theirs)]
                    yield Row(suite["workload"], result["network"], result["batch_size"],
                              tracks[OURS]["about"]["dtype"], ratios, again is not None)
                    break


def missing(suites: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the rows in which the two were not compared, and why, where it is known."""
    found = []
    for suite in suites:
        compared = {(row.network, row.batch_size) for row in rows([suite])}
        for result in suite["results"]:
            if (result["network"], result["batch_size"]) not in compared:
                reasons = [result["failures"].get(name, "") for name in (OURS, REFERENCE)]
                found.append(f"{tables.NAMES[result['network']]}, {suite['workload']}, batch {result['batch_size']}: "
                             f"{'; '.join(filter(None, reasons)) or 'not measured'}")
    return found


def measure_low_rows_again(suite: dict[str, Any], measure: Callable[[Result, float], Mapping[str, Any] | None],
                           end: float = math.inf) -> None:
    """Let what is below 1.0 be measured once more, with more rounds; it is kept beside the first measurement.

    Parameters
    ----------
    suite : dict
        As `suites.run` returns it; changed in place.
    measure : callable
        Takes a result and the seconds that there are; returns a comparison of the two, None when it failed.
    end : float
        When it is to be over, on the clock of `time.monotonic`.
    """
    slower = {(row.network, row.batch_size) for row in rows([suite]) if row.is_slower}
    results = [result for result in suite["results"] if (result["network"], result["batch_size"]) in slower]
    for number, result in enumerate(results):
        again = measure(result, (end - monotonic()) / (len(results) - number))
        if again is not None:
            result["again"] = again


def verdict(suites: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Return the least ratio of all rows in words, and the failures: rows slower than FP32, or without a ratio."""
    found = sorted(rows(suites), key=lambda row: row.median)
    lines = [f"Least ratio of gluon_amp to MXNet FP32 of {len(found)} rows: {found[0]}"] if found else []
    for suite in suites:
        lines += [f"Not measured, the time was over: {tables.NAMES[network]}, {suite['workload']}, batch {batch_size}"
                  for network, batch_size in suite.get("skipped", ())]
    failures = [f"slower than FP32: {row}" for row in found if row.is_slower]
    failures += [f"not compared with FP32: {text}" for text in missing(suites)]
    return "\n".join([*lines, *failures]), failures
