"""``amp.report``: every operator of a network, the precision planned for it and the one it really runs in."""
from __future__ import annotations

import math
import os
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Callable, Collection, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray
from rich.filesize import decimal

from .._mxnet.arrays import is_recorded
from .._mxnet.engine import Stopwatch, interleaved
from ..base import checks
from ..errors import expected
from ..graph import WISHES
from ..machine import host
from ..machine.dtypes import FLOAT16, FLOAT32, FORMATS, INT8, LOW_PRECISION
from ..passes.kernels import predicted
from ..state.devices import cpu_rates
from ..state.in_force import in_force
from .recorder import record
from .recording import Recording, float_arrays, ready, unchanged
from .records import OpRecord

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH, _UNLIMITED = 170, 100_000  # of files and pipes, unless COLUMNS says otherwise; and where all is wanted


class Shown:
    """A result: one line where Python prints it, a table in notebooks, its summary as text."""

    summary: str
    table: Callable[..., Table]

    def _repr_mimebundle_(self, include: Any = (), exclude: Any = (), **_: Any) -> dict[str, str]:
        return self.__rich__()._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def __str__(self) -> str:
        return self.summary

    @property
    def headline(self) -> str:
        """The first line of the summary."""
        return self.summary.partition("\n")[0]

    def print(self, *by: str, wide: bool = False, **others: Any) -> None:
        """Print the ``table`` of the same arguments as wide as the terminal; a wide one as wide as it is."""
        from rich.console import Console

        console, table = Console(), self.table(*by, wide=wide, **others)
        width = console.width if console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ else _WIDTH
        # Names of operators are never broken.
        names = [len(str(cell)) for column in table.columns[:1] for cell in column.cells]
        least = max(names, default=0) + 4 * len(table.columns)
        Console(width=_UNLIMITED if wide else max(width, least)).print(table)

    def __rich__(self) -> Table:
        return self.table()


def text_table(lines: Sequence[Mapping[str, str]], numbers: Collection[str], summary: str,
               red: Collection[int] = ()) -> Table:
    """Return a table of lines with the same columns, some of numbers, and a summary that begins above it."""
    from rich.table import Table
    from rich.text import Text

    # Names are the user's: as Text nothing in them is markup.
    title, _, caption = summary.partition("\n")
    table = Table(title=Text(title), caption=Text(caption), title_justify="left", caption_justify="left")
    for number, name in enumerate(lines[0] if lines else ()):
        table.add_column(name, no_wrap=not number, overflow="fold", justify="right" if name in numbers else "left")
    for number, line in enumerate(lines):
        table.add_row(*map(Text, line.values()), style="red" if number in red else None)
    return table


LOW = (*LOW_PRECISION, INT8)
_TIMED_RUNS = 3  # after one that makes kernels
_WORTH_SAYING, _MUCH = 0.02, 0.1  # parts of the arithmetic, or of the time
_HEADROOM = 16  # how many times larger than the largest gradient later ones may be
_LARGEST_SCALE = 2.0 ** 24


def report(net: Block, data: Any, *, train: bool = False, time: bool = False, ranges: bool = False,
           loss: Callable[[Any], NDArray] | None = None) -> Report:
    """Run a network once and say what mixed precision did to it, operator by operator, and what to do about it.

    Hybridized blocks are reported as the graphs that they run, other code as it is called. The network is left as it
    was.

    Parameters
    ----------
    net : Block
        Initialized; a symbol runs in a ``gluon.SymbolBlock``.
    data : NDArray, or sequence of them
        The argument of the network's call, or all its arguments in a tuple.
    train : bool
        Run as in training; running statistics and gradients are put back afterwards.
    time : bool
        Take the time of every operator with MXNet's profiler, which nothing else may use meanwhile: the median of three
        runs. With ``train`` the backward pass is part of it, and the summary says how long a step takes, and how long
        it should by the rates of this kind of CPU.
    ranges : bool
        Look at the largest value of every operator, and with ``train`` at the largest gradient: the summary says how
        near they are to the limits of the type, and which loss scale fits.
    loss : callable, optional
        Takes what the network returns and gives the loss; the backward pass begins with the sum of the outputs without.

    Returns
    -------
    Report
        Print it.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> amp.init('bfloat16')
    >>> net = mx.gluon.nn.Dense(4, in_units=8, prefix='fc_')
    >>> net.initialize()
    >>> net.hybridize()
    >>> found = amp.report(net, mx.nd.ones((2, 8)))
    >>> found.operators[0].name, found.operators[0].observed
    ('fc_fwd', 'bfloat16')
    >>> print(found.summary)
    1 of 1 operators in bfloat16, 100% of the arithmetic, 4 casts (360 bytes)
    Next: for inference amp.convert_hybrid_block(net) casts 2 parameters once, not at each call
    >>> amp.deinit()
    """
    for name, value in (("train", train), ("time", time), ("ranges", ranges)):
        checks.true_or_false(name, value)
    arguments = ready(net, data)

    def run(**options: Any) -> Recording:
        made = record(lambda: net(*arguments), net, records=train, train_mode=train, loss=loss,
                      differentiates=train and bool(options), **options)
        if train and options:
            made.backward([(array, made.call("ones_like", [array], {})[0]) for array in made.losses or made.outputs])
        return made

    def step() -> None:  # without its update
        with autograd.record():
            result = net(*arguments)
            heads = float_arrays(result if loss is None else loss(result))
        autograd.backward(list(filter(is_recorded, heads)))
        mx.nd.waitall()

    step_milliseconds = 0.0
    with unchanged(net) if train else nullcontext():
        made = run()
        if ranges:
            found = {each.key: each for each in run(ranges=True).records}
            for each in made.records:
                if each.key in found:
                    each.largest, each.largest_gradient = found[each.key].largest, found[each.key].largest_gradient
        if time:
            host.keep_freed_memory()  # as after a step of training: without it operators take twice as long
            with Stopwatch() as stopwatch:
                runs = [run(stopwatch=stopwatch) for _ in range(1 + _TIMED_RUNS)][1:]
            _add_times(made, runs)
            if runs[0].parameter_gradients:
                step_milliseconds = interleaved([step], _TIMED_RUNS, warm_up=2)[0]
    device, policies = made.device or mx.cpu(), made.policies if in_force.is_on() else []
    of_net = made.records[:made.count]
    return Report(tuple(each for each in of_net if not each.inserted),
                  tuple(each for each in of_net if each.inserted), train, time, loss is not None,
                  made.other_milliseconds, step_milliseconds,
                  tuple(sorted({policy.target_dtype for policy in policies if policy.lowers})),
                  device.device_type != "gpu" and any(policy.target_dtype == FLOAT16 for policy in policies),
                  tuple(sorted({name for policy in policies for name in policy.disabled_passes})),
                  in_force.device(device).reason if in_force.policy(device) is not None else "", device)


def _add_times(made: Recording, runs: Sequence[Recording]) -> None:
    """Add the median of each time that runs of the same network took; a loss and sums of gradients count as others."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        for each in run.records:
            times[each.key].append(each.milliseconds)
    network = {each.key: each for each in made.records[:made.count]}
    for key, each in network.items():
        each.milliseconds = median(times[key] or [0.0])
    made.other_milliseconds = median([run.other_milliseconds + sum(
        each.milliseconds for each in run.records if each.key not in network) for run in runs])


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """What one run of a network showed; made by :func:`gluon_amp.report`."""

    operators: tuple[OpRecord, ...]  # the network's own, in the order in which they ran
    inserted: tuple[OpRecord, ...]  # what AMP added: casts, and helpers such as the padding of channels
    train: bool  # whether it ran as in training
    timed: bool
    has_loss: bool  # whether gradients are those of a loss, not of the sum of the outputs
    other_milliseconds: float  # time of what belongs to no operator of the network, such as sums of gradients
    step_milliseconds: float  # time of a training step as the program runs it; 0.0 where none was taken
    target_dtypes: tuple[str, ...]  # the low-precision types in force; empty when AMP was off
    imitated: bool  # whether low precision was imitated
    disabled_passes: tuple[str, ...]  # the graph passes that are switched off
    reason: str  # why AMP keeps everything in FP32 on this device; empty where it does not
    device: mx.Context  # GPUs of one machine may differ

    @property
    def casts(self) -> tuple[OpRecord, ...]:
        """The casts between operators of different precision."""
        return tuple(row for row in self.inserted if row.is_cast)

    @property
    def flops(self) -> int:
        """The arithmetic of the forward pass."""
        return sum(row.flops for row in self.operators)

    @property
    def milliseconds(self) -> float:
        """All time taken."""
        return sum(row.milliseconds for row in (*self.operators, *self.inserted)) + self.other_milliseconds

    @property
    def predicted_milliseconds(self) -> float:
        """The time of a training step by the rates of the CPU; operators outside of graphs do not count."""
        return sum(predicted(*row.costed, cpu_rates()) for row in (*self.operators, *self.inserted) if row.costed)

    @property
    def mismatches(self) -> tuple[OpRecord, ...]:
        """The operators that ran in another precision than planned."""
        return tuple(row for row in self.operators if row.observed != row.planned)

    @property
    def is_off(self) -> bool:
        """Whether AMP was off, and nothing ran in low precision by itself."""
        return not (self.target_dtypes or self.reason or any(row.precision in LOW for row in self.operators))

    def arithmetic_share(self) -> float:
        """Return the share of the arithmetic, 0 to 1, that runs in low precision."""
        return sum(row.flops for row in self.operators if row.precision in LOW) / (self.flops or 1)

    @property
    def measure(self) -> str:
        """What :meth:`share` is a part of: ``'time'`` where it was taken, else ``'arithmetic'``."""
        return "time" if self.timed else "arithmetic"

    def share(self, rows: Sequence[OpRecord]) -> float:
        """Return the part of the network, 0 to 1, that some operators are."""
        if self.timed:
            return sum(row.milliseconds for row in rows) / (self.milliseconds or 1.0)
        return sum(row.flops for row in rows) / (self.flops or 1)

    @property
    def summary(self) -> str:  # type: ignore[override]
        """At most six lines: what runs low, what stays wide and why, whether values fit, and what to do next."""
        remedy = next(_remedies(self), "")
        lines = (_counts(self), _wide(self), _attention(self), _values(self), _loss_scale(self),
                 remedy and f"Next: {remedy}")
        return "\n".join(filter(None, lines))

    def table(self, by: str = "operator", *, wide: bool = False) -> Table:
        """Return a table for rich, with the summary around it: a line per ``'operator'``, ``'block'`` or ``'op'``.

        ``wide``: a line per operator has blocks, what was planned, bytes converted, rules and reasons, too.
        """
        if by not in ("operator", "block", "op"):
            raise ValueError(expected("'operator', 'block' or 'op'", "by", by))
        if by == "operator":
            lines = [{by: row.name, "kind": f"{row.op} (C++)" if row.native else row.op,
                      **({"block": row.path or row.block, "planned": str(row.planned)} if wide else {}),
                      "observed": str(row.observed), **self._shares([row], wide),
                      **({"rule": row.rule, "reason": row.reason} if wide else {})} for row in self.operators]
            red = [number for number, row in enumerate(self.operators) if row in self.mismatches]
            return text_table(lines, _NUMBERS, self.summary, red)
        groups: dict[str, list[OpRecord]] = defaultdict(list)
        for row in self.operators:
            groups[row.op if by == "op" else row.path or row.block].append(row)
        lines = [{by: name, "operators": str(len(rows)),
                  "in low precision": str(sum(row.precision in LOW for row in rows)), **self._shares(rows, True)}
                 for name, rows in sorted(groups.items(), key=lambda item: -sum(row.flops for row in item[1]))]
        return text_table(lines, _NUMBERS, self.summary)

    def _shares(self, rows: Sequence[OpRecord], wide: bool) -> dict[str, str]:
        casts = sum(row.casts for row in rows)
        converted = sum(row.bytes_converted for row in rows)
        return {"arithmetic": f"{sum(row.flops for row in rows) / (self.flops or 1):.1%}",
                "casts": str(casts or ""), **({"converted": decimal(converted) if casts else ""} if wide else {}),
                **({"time": f"{self.share(rows):.1%}"} if self.timed else {})}

    def __rich__(self) -> Table:
        return self.table("op")


_NUMBERS = ("arithmetic", "casts", "converted", "time", "operators", "in low precision")


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
        f"{len(report.casts)} casts ({decimal(sum(row.bytes_converted for row in report.casts))})",
        report.step_milliseconds and f"A step takes {report.step_milliseconds:.3g} ms" + (
            f", by the rates of {cpu_rates()} {report.predicted_milliseconds:.3g}"
            if report.device.device_type != "gpu" and all(row.in_graph for row in report.operators) else ""),
        natively and f"{natively} of the operators ran in C++ of this package", report.is_off and "AMP is off",
        report.imitated and "Low precision is imitated, and its casts are not counted",
        report.disabled_passes and f"Passes that are off: {', '.join(report.disabled_passes)}")


def _wide(report: Report) -> str:
    """Say what keeps the most expensive operators in FP32."""
    rows = _in_fp32(report)
    told = [f"{row.name} ({report.share([row]):.0%}{f'; {row.reason}' if row.reason else ''})"
            for number, row in enumerate(rows[:2]) if not number or report.share([row]) >= _WORTH_SAYING / 2]
    return (f"In float32: {report.share(rows):.0%} of the {report.measure}, most of it {', '.join(told)}"
            if told and report.target_dtypes else "")


def _in_fp32(report: Report) -> list[OpRecord]:
    """Return the operators in FP32, the most expensive first; none where they matter little."""
    rows = sorted((row for row in report.operators if row.precision == FLOAT32), key=lambda row: -report.share([row]))
    return rows if report.share(rows) >= _WORTH_SAYING else []


def _attention(report: Report) -> str:
    casts = report.share(report.casts) if report.timed else 0.0
    eager = sum(not row.in_graph for row in report.operators)
    return _sentences(
        report.mismatches and f"Not as planned: {', '.join(row.name for row in report.mismatches)}",
        casts >= _MUCH and f"Casts take {casts:.0%} of the time",
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
    wide = _in_fp32(report) if report.target_dtypes else []
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
    cast = {read.name for row in report.operators for read in row.inputs if read.is_parameter and read.is_cast}
    if cast and not report.train:
        yield f"for inference amp.convert_hybrid_block(net) casts {len(cast)} parameters once, not at each call"
    if wide:
        yield why
