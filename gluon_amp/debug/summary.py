"""The summary of a report, in at most six lines: what runs low, what stays wide and why, and what to do next."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Iterator

from ..dtypes import FLOAT16, FLOAT32, FORMATS, INT8, LOW_PRECISION
from ..graph.decision import WISHES
from .records import OpRecord

if TYPE_CHECKING:
    from .report import Report

LOW = (*LOW_PRECISION, INT8)
_WORTH_SAYING, _MUCH = 0.02, 0.1  # parts of the arithmetic, or of the time
_SMALL_BATCH = 4
_HEADROOM = 16  # how many times larger than the largest gradient later ones may be
_LARGEST_SCALE = 2.0 ** 24


def summarized(report: Report) -> str:
    """Return the lines in which there is something to say."""
    remedy = next(_remedies(report), "")
    lines = (_counts(report), _wide(report), _attention(report), _values(report), _loss_scale(report),
             remedy and f"Next: {remedy}")
    return "\n".join(filter(None, lines))


def _sentences(*texts: object) -> str:
    return ". ".join(str(text) for text in texts if text)


def _counts(report: Report) -> str:
    rows = report.operators
    low, natively = [row for row in rows if row.precision in LOW], sum(row.native for row in rows)
    kinds = " and ".join(sorted({str(row.precision) for row in low})) or "low precision"
    return _sentences(
        f"float32: {report.reason}. All {len(rows)} operators run in FP32, {len(report.inserted)} were added to make "
        "them faster" if report.reason and not low else
        f"{len(low)} of {len(rows)} operators in {kinds}, {report.arithmetic_share():.0%} of the arithmetic, "
        f"{len(report.casts)} casts ({size_of(sum(row.bytes_converted for row in report.casts))})",
        natively and f"{natively} of the operators ran in C++ of this package", report.is_off and "AMP is off",
        report.imitated and "Low precision is imitated, and its casts are not counted",
        report.disabled_passes and f"Passes that are off: {', '.join(report.disabled_passes)}")


def _wide(report: Report) -> str:
    """Say what keeps the most expensive operators in FP32."""
    rows = in_fp32(report)
    told = [f"{row.name} ({report.share([row]):.0%}{f'; {row.reason}' if row.reason else ''})"
            for number, row in enumerate(rows[:2]) if not number or report.share([row]) >= _WORTH_SAYING / 2]
    return (f"In float32: {report.share(rows):.0%} of the {report.measure}, most of it {', '.join(told)}"
            if told and report.target_dtypes else "")


def in_fp32(report: Report) -> list[OpRecord]:
    """Return the operators in FP32, the most expensive first; none where they matter little."""
    rows = sorted((row for row in report.operators if row.precision == FLOAT32), key=lambda row: -report.share([row]))
    return rows if report.share(rows) >= _WORTH_SAYING else []


def _attention(report: Report) -> str:
    casts = report.share(report.casts) if report.timed else 0.0
    eager = sum(not row.in_graph for row in report.operators)
    silent = sum(row.observed is None for row in report.operators)
    return _sentences(
        report.mismatches and f"Not as planned: {', '.join(row.name for row in report.mismatches)}",
        casts >= _MUCH and f"Casts take {casts:.0%} of the time",
        silent and f"The engine reported nothing of {silent} operators",
        eager and f"{eager} operators ran outside of graphs, as the code called them: only these calls are covered, "
                  "not their backward pass, nor array methods that make views")


def _values(report: Report) -> str:
    """Say how near the values that were looked at are to the limits of their types."""
    overflowing = _overflowing(report)
    rows = [row for row in report.operators if row.largest is not None and row.precision in LOW_PRECISION]
    if overflowing or not rows:
        return overflowing and f"Values that overflow {' and '.join(report.target_dtypes)}: {overflowing}"
    row = max(rows, key=lambda row: row.largest or 0.0)
    doublings = FORMATS[str(row.precision)].headroom(row.largest or 0.0)
    return (f"Values: at most {row.largest:.3g} in {row.precision}, of {row.name}, which can double {doublings:.1f} "
            "times before it overflows")


def _overflowing(report: Report) -> str:
    """Name what overflows a type: data and parameters that are cast, and results of operators."""
    cast = [row.reads[0].name for row in report.inserted
            if row.rounds and row.largest == math.inf and row.reads[0].source is None]
    # An operator that reads infinite values, such as those of a mask, is not at fault.
    results = [row.name for row in report.operators if row.precision in LOW_PRECISION and row.largest is not None
               and row.largest >= FORMATS[str(row.precision)].overflow
               and not any(read.source is not None and read.source.largest == math.inf for read in row.reads)]
    return ", ".join(list(dict.fromkeys([*cast, *results]))[:5])


def _loss_scale(report: Report) -> str:
    """Suggest a static loss scale by the gradients that were looked at."""
    found = [row.largest_gradient for row in report.operators if row.largest_gradient]
    largest = max((size for size in found if math.isfinite(size)), default=0.0)
    if FLOAT16 not in report.target_dtypes or not largest:
        return ""
    scale = 2.0 ** math.floor(math.log2(FORMATS[FLOAT16].largest / (_HEADROOM * largest)))
    of = "the loss" if report.has_loss else "the sum of the outputs (loss=... takes those of a loss)"
    return (f"Loss scale: the gradients of {of} reach {largest:.3g}; {min(scale, _LARGEST_SCALE):g} leaves them room "
            f"for {_HEADROOM} times that in float16, and amp.init_trainer(trainer) finds one as it goes")


def _remedies(report: Report) -> Iterator[str]:
    """Say what to do, the most important first."""
    wide = in_fp32(report) if report.target_dtypes else []
    users = report.share([row for row in wide if row.cause in WISHES])
    why = f"amp.explain(net, {wide[0].name!r}, data) says what can be done about it" if wide else ""
    if report.is_off:
        yield "call amp.init() for training, or amp.convert_hybrid_block(net) for inference"
    if _overflowing(report):
        yield ("keep the operators whose values overflow in FP32 with amp.exclude(block), or let "
               "amp.search_exclusions(net, data, max_error=...) choose")
    if report.share([row for row in report.operators if not row.in_graph]) >= _WORTH_SAYING:
        yield ("net.hybridize(static_alloc=True, static_shape=True) rewrites the network once, instead of casting at "
               "every call")
    if users >= _WORTH_SAYING:
        yield f"operator lists, exclusions and regions of the program keep {users:.0%} of the {report.measure} in FP32"
    if report.imitated:
        yield ("float16 is imitated on this CPU, exactly and slowly, to test numerics: for speed call amp.init() "
               "without a type, or take a GPU")
    if report.share(wide) >= _MUCH:
        yield why
    yield from filter(None, [_parameters(report), why])


def _parameters(report: Report) -> str:
    """Look at casts of parameters: their cost does not depend on the batch, and inference does not need them."""
    count = len({read.name for row in report.operators for read in row.inputs if read.is_parameter and read.is_cast})
    batch = next((read.shape[0] for row in report.operators for read in row.reads
                  if read.source is None and not read.is_parameter and read.shape), _SMALL_BATCH)
    if count and not report.train:
        return f"for inference amp.convert_hybrid_block(net) casts {count} parameters once, not at each call"
    return (f"each call casts {count} parameters, whatever the size of the batch: one of {batch} is small"
            if count and batch < _SMALL_BATCH else "")


def size_of(count: int) -> str:
    """Write a number of bytes."""
    from rich.filesize import decimal

    return decimal(count)
