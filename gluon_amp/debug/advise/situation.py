"""What advice is made from, and what it says."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Iterable, Iterator, NamedTuple

from ...dtypes import FLOAT32, Support
from ...rules import FP32, Cause
from ..report import Report
from ..report.rows import OperatorRow


@dataclass(frozen=True)
class Advices:
    """What :func:`gluon_amp.advise` found; print it.

    Attributes
    ----------
    items : tuple of Advice
        The most important first.
    """

    items: tuple[Advice, ...]

    def __iter__(self) -> Iterator[Advice]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, in the same order."""
        return tuple(item.topic for item in self.items)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return everything as dicts, lists, strings and numbers."""
        return [asdict(item) for item in self.items]

    def __str__(self) -> str:
        if not self.items:
            return "Nothing is known to hold this network back"
        return "\n".join(f"{number}. {item.text}" for number, item in enumerate(self.items, 1))


@dataclass(frozen=True)
class Advice:
    """One thing that holds speed back.

    Attributes
    ----------
    topic : str
        A word or two, to select by.
    text : str
        What it is, and what to do.
    share : float or None
        The part of the arithmetic or of the time that it is about, 0 to 1; None where it is about everything.
    operators : tuple of str
        The operators meant.
    """

    topic: str
    text: str
    share: float | None = None
    operators: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text


class Situation(NamedTuple):
    """What checks look at."""

    report: Report
    support: Support  # what the device runs
    unused_amx: bool  # whether the CPU has AMX tiles that this process may not use
    threads: str | None  # OMP_NUM_THREADS
    processors: int  # logical ones

    def share(self, rows: Iterable[OperatorRow]) -> float:
        """Return the part of the arithmetic that is in some operators."""
        return sum(row.flops for row in rows) / self.report.flops if self.report.flops else 0.0

    def in_fp32(self, *causes: Cause) -> list[OperatorRow]:
        """Return the operators that AMP keeps in FP32 for one of the given causes."""
        return [row for row in self.report.operators
                if row.rule == FP32 and row.precision == FLOAT32 and row.cause in causes]
