"""One check per cause, in the order in which to think of them."""
from __future__ import annotations

from collections import Counter
from typing import Callable, Optional, Sequence

from ...dtypes import FLOAT32, LOW_PRECISION
from ...rules import Cause
from ..report import Report
from ..report.flops import MATRIX_OPERATORS
from ..report.rows import OperatorRow
from .situation import Advice, Situation

Check = Callable[[Situation], Optional[Advice]]

# Parts of arithmetic or time below which there is nothing worth saying.
_WORTH_SAYING = 0.02
_MUCH = 0.1
_SMALL_BATCH = 4


def _kinds(rows: Sequence[OperatorRow]) -> str:
    """Name the kinds of some operators, the ones with most arithmetic first."""
    weights: Counter[str] = Counter()
    for row in rows:
        weights[row.op] += row.flops + 1
    names = [name for name, _ in weights.most_common(4)]
    return ", ".join(names) + (" and others" if len(weights) > len(names) else "")


def _count(rows: Sequence[OperatorRow]) -> str:
    return "1 operator" if len(rows) == 1 else f"{len(rows)} operators"


def _about(topic: str, situation: Situation, rows: Sequence[OperatorRow], text: str,
           least: float = _WORTH_SAYING) -> Advice | None:
    """Write an advice about operators in FP32; None where they matter little."""
    share = situation.share(rows)
    if share < least:
        return None
    return Advice(topic, text.format(share=f"{share:.0%}", kinds=_kinds(rows), count=_count(rows)), share,
                  tuple(row.name for row in rows))


def _is_off(situation: Situation) -> Advice | None:
    report = situation.report
    if report.target_dtypes or report.reason or any(row.precision in LOW_PRECISION for row in report.operators):
        return None
    return Advice("off", "AMP is off: everything runs as the program says. Call amp.init() for training, or "
                         "amp.convert_hybrid_block(net) for inference")


def _no_hardware(situation: Situation) -> Advice | None:
    support = situation.support
    if situation.report.imitated:
        return Advice("hardware", "float16 is imitated on this CPU, exactly and slowly, to test numerics. For speed "
                                  "use amp.init('bfloat16'), or a GPU")
    if support.dtype == FLOAT32 and situation.report.target_dtypes:
        return Advice("hardware", f"Low precision is slower than FP32 here: {support.reason}. Call amp.init() without "
                                  "a type")
    if support.dtype == FLOAT32:
        return Advice("hardware", f"FP32 is fastest on this device: {support.reason}")
    return None


def _unused_amx(situation: Situation) -> Advice | None:
    if not situation.unused_amx:
        return None
    return Advice("AMX", "This process does not use the CPU's AMX tiles, which make bfloat16 several times as fast: "
                         "import gluon_amp before MXNet runs its first operator, and leave DNNL_MAX_CPU_ISA unset")


def _few_threads(situation: Situation) -> Advice | None:
    if situation.threads or situation.processors < 2 or situation.report.device_type != "cpu":
        return None
    return Advice("threads", f"OMP_NUM_THREADS is not set: MXNet then uses half of the {situation.processors} logical "
                             "processors. Set it to the number of cores before Python starts")


def _not_hybridized(situation: Situation) -> Advice | None:
    rows = [row for row in situation.report.operators if not row.in_graph and row.flops]
    return _about("hybridize", situation, rows,
                  "{share} of the arithmetic ran outside of graphs. net.hybridize(static_alloc=True, "
                  "static_shape=True) rewrites the network once, instead of casting at every call, and pads channels")


# What is said of operators that are in FP32 for some causes.
_BY_CAUSE: tuple[tuple[str, tuple[Cause, ...], str], ...] = (
    ("lists", (Cause.USER_LIST, Cause.NOT_LISTED),
     "{share} of the arithmetic stays in FP32 because of the operator lists given to amp.init: {kinds}"),
    ("exclusions", (Cause.REGION, Cause.EXCLUSION),
     "{share} of the arithmetic is in excluded blocks and regions without AMP: {kinds}"),
    ("regions", (Cause.OUTSIDE,),
     "{share} of the arithmetic is outside of every autocast region: {kinds}. amp.init() covers all of it"),
    ("layout", (Cause.LAYOUT,),
     "{share} of the arithmetic is in channels-last layouts, for which MXNet has no fast bfloat16 kernel: use NCHW"),
    ("shapes", (Cause.SHAPE,),
     "{share} of the arithmetic stays in FP32 because oneDNN's low-precision kernels are wrong for the shapes of "
     "{count} ({kinds}): other sizes of the input, or of the batch, may avoid that"),
    ("few channels", (Cause.CHANNELS,),
     "{share} of the arithmetic is in {count} with few input channels, where low precision gains nothing. That is "
     "normal for the first layer of a network"),
)
_OTHER_CAUSES = set(Cause).difference(*(causes for _, causes, _ in _BY_CAUSE))


def _by_cause(topic: str, causes: Sequence[Cause], text: str) -> Check:
    return lambda situation: _about(topic, situation, situation.in_fp32(*causes), text)


def _no_kernel(situation: Situation) -> Advice | None:
    rows = [row for row in situation.in_fp32(*_OTHER_CAUSES) if not row.safe]
    return _about("no kernel", situation, rows,
                  "{share} of the arithmetic is in operators that have no correct low-precision kernel: {kinds}. "
                  "Only other operators would help", least=_MUCH / 2)


def _odd_channels(situation: Situation) -> Advice | None:
    multiple = situation.support.channel_multiple
    rows = [row for row in situation.report.operators
            if row.op == "Convolution" and row.precision in LOW_PRECISION and _has_odd_channels(row, multiple)]
    return _about("channels", situation, rows,
                  "{share} of the arithmetic is in {count} (convolutions) whose channels are not a "
                  f"multiple of {multiple}: output channels are padded, which adds arithmetic, and input channels take "
                  f"slower kernels. Choose multiples of {multiple} when you design the network")


def _has_odd_channels(row: OperatorRow, multiple: int) -> bool:
    data, weight = (read.shape or (0, 0) for read in row.inputs[:2])
    grouped = weight[1] != data[1]
    return not grouped and any(channels % multiple for channels in weight[:2])


def _parameter_casts(situation: Situation) -> Advice | None:
    """Advise on casts of parameters: their cost does not depend on the batch, and inference does not need them."""
    report = situation.report
    parameters = {read.name: read.shape for row in report.operators for read in row.inputs
                  if read.is_parameter and read.dtype != read.source_dtype}
    batch = _batch(report)
    if not parameters or (report.train and (batch is None or batch >= _SMALL_BATCH)):
        return None
    text = f"Each call casts {len(parameters)} parameters, whatever the size of the batch. "
    if not report.train:
        return Advice("parameter casts", text + "For inference convert the network, which casts them once and folds "
                                                "BatchNorm: amp.convert_hybrid_block(net)")
    return Advice("batch", text + f"A batch of {batch} is too small to make up for that: take a larger one")


def _batch(report: Report) -> int | None:
    shapes = (read.shape for row in report.operators for read in row.inputs
              if read.operator is None and not read.is_parameter and read.shape)
    return next((shape[0] for shape in shapes), None)


def _casts(situation: Situation) -> Advice | None:
    report = situation.report
    share = sum(row.milliseconds for row in report.casts) / report.milliseconds if report.milliseconds else 0.0
    if share < _MUCH:
        return None
    islands = [row for row in report.operators if row.precision == FLOAT32
               and any(read.source_dtype in LOW_PRECISION for read in row.inputs)]
    where = f" They surround operators that stay in FP32: {_kinds(islands)}" if islands else ""
    return Advice("casts", f"Casts take {share:.0%} of the time ({len(report.casts)} of them).{where}", share,
                  tuple(row.name for row in islands))


def _other_time(situation: Situation) -> Advice | None:
    report = situation.report
    spent: dict[str, float] = {}
    for row in report.operators:
        spent[row.op] = spent.get(row.op, 0.0) + row.milliseconds
    total = report.milliseconds
    matrix = sum(time for op, time in spent.items() if op in MATRIX_OPERATORS) / total if total else 1.0
    if matrix > 0.5:
        return None
    rest = {op: time for op, time in spent.items() if op not in MATRIX_OPERATORS}
    rest["casts"] = sum(row.milliseconds for row in report.casts)
    largest = sorted(rest, key=lambda name: -rest[name])[:4]
    named = {name: round(100 * rest[name] / total) for name in largest if 100 * rest[name] >= total}
    left = 100 - round(100 * matrix) - sum(named.values())
    shares = [f"{name} {percent}%" for name, percent in named.items()] + [f"all else {left}%"] * (left > 0)
    return Advice("time", f"Convolutions and matrix products, which low precision speeds up, take {matrix:.0%} of the "
                          f"time only. The rest: {', '.join(shares)}", 1 - matrix)


def _not_as_planned(situation: Situation) -> Advice | None:
    rows = situation.report.mismatches
    if not rows:
        return None
    return Advice("mismatch", f"{_count(rows)} did not run in the precision planned: "
                              f"{', '.join(row.name for row in rows[:5])}", None, tuple(row.name for row in rows))


CHECKS: tuple[Check, ...] = (_is_off, _no_hardware, _unused_amx, _few_threads, _not_as_planned, _not_hybridized,
                             *(_by_cause(*each) for each in _BY_CAUSE), _odd_channels, _no_kernel, _parameter_casts,
                             _casts, _other_time)
