"""The summary of a report, in at most six lines: what runs low, what stays wide and why, and what to do next."""
from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Sequence

from ...dtypes import FLOAT32, INT8, LOW_PRECISION
from ...rules import Cause
from .rows import OperatorRow

if TYPE_CHECKING:
    from .reporting import Report

LOW = (*LOW_PRECISION, INT8)
_WORTH_SAYING = 0.02  # the part of the arithmetic, or of the time, below which nothing is said
_MANY_CASTS = 0.1  # the part of the time that casts take
_SMALL_BATCH = 4
_USERS = (Cause.USER_LIST, Cause.NOT_LISTED, Cause.EXCLUSION, Cause.REGION, Cause.OUTSIDE, Cause.REGISTERED)


def summarized(report: Report) -> str:
    """Return the lines that there is something to say in."""
    return "\n".join(filter(None, (make(report) for make in (_counts, _wide, _attention, _next))))


def _counts(report: Report) -> str:
    low = [row for row in report.operators if row.precision in LOW]
    if report.reason and not low:
        text = (f"float32: {report.reason}. All {len(report.operators)} operators run in FP32, {len(report.inserted)} "
                "were added to make them faster")
    else:
        kinds = " and ".join(sorted({str(row.precision) for row in low})) or "low precision"
        text = (f"{len(low)} of {len(report.operators)} operators in {kinds}, {report.arithmetic_share():.0%} of the "
                f"arithmetic, {len(report.casts)} casts ({size_of(sum(row.bytes_converted for row in report.casts))})")
    natively = sum(row.native for row in report.operators)
    return _sentences(
        text, natively and f"{natively} of the operators ran in C++ of this package", report.is_off and "AMP is off",
        report.imitated and "Low precision is imitated, and its casts are not counted",
        report.disabled_passes and f"Passes that are off: {', '.join(report.disabled_passes)}")


def _sentences(*texts: object) -> str:
    return ". ".join(str(text) for text in texts if text)


def _wide(report: Report) -> str:
    """Say what keeps the most expensive operators in FP32."""
    rows = _expensive_in_fp32(report)
    if not (report.target_dtypes and rows):
        return ""
    told = [f"{row.name} ({report.share([row]):.0%}{f'; {row.reason}' if row.reason else ''})"
            for position, row in enumerate(rows[:2]) if not position or report.share([row]) >= _WORTH_SAYING / 2]
    return f"In float32: {report.share(rows):.0%} of the {report.measure}, most of it {', '.join(told)}"


def _expensive_in_fp32(report: Report) -> list[OperatorRow]:
    rows = sorted((row for row in report.operators if row.precision == FLOAT32), key=lambda row: -report.share([row]))
    return rows if report.share(rows) >= _WORTH_SAYING else []


def _attention(report: Report) -> str:
    casts = sum(row.milliseconds for row in report.casts) / report.milliseconds if report.milliseconds else 0.0
    eager = sum(not row.in_graph for row in report.operators)
    return _sentences(
        report.mismatches and f"Not as planned: {', '.join(row.name for row in report.mismatches)}",
        casts >= _MANY_CASTS and f"Casts take {casts:.0%} of the time",
        eager and f"{eager} operators ran outside of graphs, as the code called them: only these calls are covered, "
                  "not their backward pass, nor array methods that make views")


def _next(report: Report) -> str:
    """Say what to do: the first remedy that fits."""
    return next((f"Next: {text}" for text in (find(report) for find in _REMEDIES) if text), "")


def _off(report: Report) -> str:
    return ("call amp.init() for training, or amp.convert_hybrid_block(net) for inference" if report.is_off else "")


def _eager(report: Report) -> str:
    share = report.share([row for row in report.operators if not row.in_graph])
    return ("net.hybridize(static_alloc=True, static_shape=True) rewrites the network once, instead of casting at "
            "every call" if share >= _WORTH_SAYING else "")


def _settings(report: Report) -> str:
    rows = [row for row in _expensive_in_fp32(report) if row.cause in _USERS]
    return (f"operator lists, exclusions and regions of the program keep {report.share(rows):.0%} of the "
            f"{report.measure} in float32" if report.share(rows) >= _WORTH_SAYING else "")


def _imitation(report: Report) -> str:
    return ("float16 is imitated on this CPU, exactly and slowly, to test numerics: for speed call amp.init() without "
            "a type, or take a GPU" if report.imitated else "")


def _parameters(report: Report) -> str:
    """Look at casts of parameters: their cost does not depend on the batch, and inference does not need them."""
    reads = [read for row in report.operators for read in row.inputs]
    count = len({read.name for read in reads if read.is_parameter and read.dtype != read.source_dtype})
    batch = next((read.shape[0] for read in reads if read.operator is None and not read.is_parameter and read.shape),
                 _SMALL_BATCH)
    if count and not report.train:
        return f"for inference amp.convert_hybrid_block(net) casts {count} parameters once, not at each call"
    return (f"each call casts {count} parameters, whatever the size of the batch: one of {batch} is small"
            if count and batch < _SMALL_BATCH else "")


def _why(report: Report) -> str:
    rows = _expensive_in_fp32(report) if report.target_dtypes else []
    return f"amp.explain(net, {rows[0].name!r}, data) says what can be done about it" if rows else ""


_REMEDIES: Sequence[Callable[[Report], str]] = (_off, _eager, _settings, _imitation, _parameters, _why)


def size_of(count: int) -> str:
    """Write a number of bytes."""
    from rich.filesize import decimal

    return decimal(count)
