"""``amp.advise``: what keeps a network from running faster."""
from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet.gluon import Block

from .. import _machine
from ..dtypes import FLOAT32, LOW_PRECISION, Support
from ..errors import expected
from ..rules import FP32, Cause
from ..state.devices import support
from .notebook import Shown
from .report import Report, report
from .report.flops import MATRIX_OPERATORS
from .report.rows import OperatorRow

# Parts of arithmetic or time below which there is nothing worth saying.
_WORTH_SAYING = 0.02
_MUCH = 0.1
_SMALL_BATCH = 4


def advise(net: Block | mx.sym.Symbol | Report, data: Any = None, *, train: bool = False, time: bool = True) -> Advices:
    """List what keeps the network from running faster: the machine, the settings, or the network itself.

    Parameters
    ----------
    net : Block, Symbol or Report
        The network, or what :func:`gluon_amp.report` returned for it.
    data : NDArray or sequence of them
        As :func:`gluon_amp.report` takes it. Not needed for a report.
    train, time : bool
        As in :func:`gluon_amp.report`. Without times the advice does not say where the time goes.

    Returns
    -------
    Advices
        Print it. Empty when nothing is known to hold the network back.

    Raises
    ------
    TypeError, StateError, GraphError
        As in :func:`gluon_amp.report`.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(4, in_units=8)
    >>> net.initialize()
    >>> print(amp.advise(net, mx.nd.ones((2, 8)), time=False))
    1. AMP is off: everything runs as the program says. ...
    """
    if isinstance(net, Report):
        if data is not None:
            raise TypeError(expected("no data beside a report", "data", data))
        reported = net
    else:
        reported = report(net, data, train=train, time=time)
    situation = Situation(reported, support(reported.device_type, reported.device_id),
                          "amx_bf16" in _machine.cpu_flags() and not _machine.amx_granted(),
                          os.environ.get("OMP_NUM_THREADS"), os.cpu_count() or 1, _machine.threads_misfit())
    return advices(situation)


def advices(situation: Situation) -> Advices:
    """Run all checks; sort advice by the share of the network that it concerns, general advice first."""
    given = [advice for check in CHECKS for advice in check(situation)]
    return Advices(tuple(sorted(given, key=lambda advice: -2.0 if advice.share is None else -advice.share)))


@dataclass(frozen=True, repr=False)
class Advices(Shown):
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
    misfit: str = ""  # what is wrong where threads and CPUs do not fit

    def share(self, rows: Iterable[OperatorRow]) -> float:
        """Return the part of the arithmetic that is in some operators."""
        return sum(row.flops for row in rows) / self.report.flops if self.report.flops else 0.0

    def in_fp32(self, *causes: Cause) -> list[OperatorRow]:
        """Return the operators that AMP keeps in FP32 for one of the given causes."""
        return [row for row in self.report.operators
                if row.rule == FP32 and row.precision == FLOAT32 and row.cause in causes]


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
           least: float = _WORTH_SAYING) -> Iterator[Advice]:
    """Advise on operators in FP32, unless they matter little."""
    share = situation.share(rows)
    if share >= least:
        yield Advice(topic, text.format(share=f"{share:.0%}", kinds=_kinds(rows), count=_count(rows)), share,
                     tuple(row.name for row in rows))


def _is_off(situation: Situation) -> Iterator[Advice]:
    if situation.report.is_off:
        yield Advice("off", "AMP is off: everything runs as the program says. Call amp.init() for training, or "
                            "amp.convert_hybrid_block(net) for inference")


def _no_hardware(situation: Situation) -> Iterator[Advice]:
    support = situation.support
    if situation.report.imitated:
        yield Advice("hardware", "float16 is imitated on this CPU, exactly and slowly, to test numerics. For speed "
                                 "use amp.init('bfloat16'), or a GPU")
    elif support.dtype == FLOAT32 and situation.report.target_dtypes:
        yield Advice("hardware", f"Low precision is slower than FP32 here: {support.reason}. Call amp.init() without "
                                 "a type")
    elif support.dtype == FLOAT32:
        yield Advice("hardware", f"FP32 is fastest on this device: {support.reason}")


def _unused_amx(situation: Situation) -> Iterator[Advice]:
    if situation.unused_amx:
        yield Advice("AMX", "This process does not use the CPU's AMX tiles, which make bfloat16 several times as fast: "
                            "import gluon_amp before MXNet runs its first operator, and leave DNNL_MAX_CPU_ISA unset")


def _threads(situation: Situation) -> Iterator[Advice]:
    if situation.report.device_type != "cpu":
        return
    if situation.misfit:
        yield Advice("threads", situation.misfit)
    elif not situation.threads and situation.processors > 1:
        yield Advice("threads", f"OMP_NUM_THREADS is not set: MXNet then uses half of the {situation.processors} "
                                "logical processors. Set it to the number of cores before Python starts")


def _not_hybridized(situation: Situation) -> Iterator[Advice]:
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


def _by_cause(situation: Situation) -> Iterator[Advice]:
    for topic, causes, text in _BY_CAUSE:
        yield from _about(topic, situation, situation.in_fp32(*causes), text)


def _no_kernel(situation: Situation) -> Iterator[Advice]:
    rows = [row for row in situation.in_fp32(*_OTHER_CAUSES) if not row.safe]
    return _about("no kernel", situation, rows,
                  "{share} of the arithmetic is in operators that have no correct low-precision kernel: {kinds}. "
                  "Only other operators would help", least=_MUCH / 2)


def _odd_channels(situation: Situation) -> Iterator[Advice]:
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


def _parameter_casts(situation: Situation) -> Iterator[Advice]:
    """Advise on casts of parameters: their cost does not depend on the batch, and inference does not need them."""
    report = situation.report
    parameters = {read.name: read.shape for row in report.operators for read in row.inputs
                  if read.is_parameter and read.dtype != read.source_dtype}
    shapes = (read.shape for row in report.operators for read in row.inputs
              if read.operator is None and not read.is_parameter and read.shape)
    batch = next((shape[0] for shape in shapes), None)
    text = f"Each call casts {len(parameters)} parameters, whatever the size of the batch. "
    if parameters and not report.train:
        yield Advice("parameter casts", text + "For inference convert the network, which casts them once and folds "
                                               "BatchNorm: amp.convert_hybrid_block(net)")
    elif parameters and batch is not None and batch < _SMALL_BATCH:
        yield Advice("batch", text + f"A batch of {batch} is too small to make up for that: take a larger one")


def _casts(situation: Situation) -> Iterator[Advice]:
    report = situation.report
    share = sum(row.milliseconds for row in report.casts) / report.milliseconds if report.milliseconds else 0.0
    islands = [row for row in report.operators if row.precision == FLOAT32
               and any(read.source_dtype in LOW_PRECISION for read in row.inputs)]
    where = f" They surround operators that stay in FP32: {_kinds(islands)}" if islands else ""
    if share >= _MUCH:
        yield Advice("casts", f"Casts take {share:.0%} of the time ({len(report.casts)} of them).{where}", share,
                     tuple(row.name for row in islands))


def _other_time(situation: Situation) -> Iterator[Advice]:
    report = situation.report
    spent: dict[str, float] = {}
    for row in report.operators:
        spent[row.op] = spent.get(row.op, 0.0) + row.milliseconds
    total = report.milliseconds
    matrix = sum(time for op, time in spent.items() if op in MATRIX_OPERATORS) / total if total else 1.0
    if matrix > 0.5:
        return
    rest = {op: time for op, time in spent.items() if op not in MATRIX_OPERATORS}
    rest["casts"] = sum(row.milliseconds for row in report.casts)
    largest = sorted(rest, key=lambda name: -rest[name])[:4]
    named = {name: round(100 * rest[name] / total) for name in largest if 100 * rest[name] >= total}
    left = 100 - round(100 * matrix) - sum(named.values())
    shares = [f"{name} {percent}%" for name, percent in named.items()] + [f"all else {left}%"] * (left > 0)
    yield Advice("time", f"Convolutions and matrix products, which low precision speeds up, take {matrix:.0%} of the "
                         f"time only. The rest: {', '.join(shares)}", 1 - matrix)


def _not_as_planned(situation: Situation) -> Iterator[Advice]:
    rows = situation.report.mismatches
    if rows:
        yield Advice("mismatch", f"{_count(rows)} did not run in the precision planned: "
                                 f"{', '.join(row.name for row in rows[:5])}", None, tuple(row.name for row in rows))


CHECKS: tuple[Callable[[Situation], Iterator[Advice]], ...] = (
    _is_off, _no_hardware, _unused_amx, _threads, _not_as_planned, _not_hybridized, _by_cause, _odd_channels,
    _no_kernel, _parameter_casts, _casts, _other_time)
