"""A benchmark of several networks and batch sizes: one interleaved comparison after the other."""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from . import cli, machine, report, sizes, tables
from .commands import command, runs_here
from .compare import FEWEST_ROUNDS, Comparison, Plan, Progress, compare
from .errors import NoTime, UsageError, reason
from .registry import OURS, REFERENCE, check, implementation, names

_STARTUP = 3.0  # seconds that a process takes to start, roughly
_STARTUP_RATE = 0.3e9  # bytes a second, of the memory that it takes without any sample
_STEPS = 5  # steps that it runs
_OVERTIME = 1.3  # of a row's share
_COMPILE_SHARE = 0.2  # of the time for a suite
_LEAST_COMPILE = 10.0  # seconds that a network needs at least
_COMPILE_LIMIT = 900.0  # seconds for a network, where there is no other limit
_NOT_COMPILED = "not compiled: {}"
_PAIR = {OURS, REFERENCE}
_SSD_TRAINING = {"network": "ssd_512_resnet50_v1_coco", "data_shape": None, "pretrained_base": False}


@dataclass(frozen=True)
class Suite:
    """What a benchmark program measures when nothing else is asked for.

    Parameters
    ----------
    workload : str
        A key of `registry.WORKLOADS`.
    batch_sizes : mapping of str to tuple of int
        By network, a key of `sizes.COSTS`.
    inspects : bool
        Whether outputs, memory and parameter files are compared at the end.
    memory_share, time_share : float
        Memory that a process needs, and time that a step takes, as shares of those of FP32 training.
    """

    workload: str
    batch_sizes: Mapping[str, tuple[int, ...]]
    inspects: bool = False
    memory_share: float = 1.0
    time_share: float = 1.0


TRAINING = Suite("training", {
    "ssd512": (2, 8), "resnet50": (1, 4, 16), "mobilenet_v2": (1, 4, 16), "lstm": (1, 4, 16), "encoder": (1, 4, 16),
    "encoder_masked": (4,),
})
INFERENCE = Suite(
    "inference",
    dict.fromkeys(("resnet50", "mobilenet_v2", "vgg16", "ssd512", "lstm", "encoder", "encoder_masked"), (1, 8)),
    inspects=True, memory_share=0.5, time_share=0.3)
SCALING = Suite("training", {"resnet50": (4,), "encoder": (4,)})


class Row(NamedTuple):
    """A network at a batch size, and the implementations to compare in it."""

    network: str
    batch_size: int
    names: Sequence[str]

    @property
    def place(self) -> tuple[str, int]:
        """What is measured, whatever it is compared in."""
        return self.network, self.batch_size

    @property
    def is_pair(self) -> bool:
        """Whether it is gluon_amp beside FP32 and nothing else."""
        return set(self.names) == _PAIR


@dataclass
class Result:
    """What was measured of a network at a batch size.

    ``failures`` holds the reasons of the implementations that did not run, ``no_time`` those that only lacked the time.
    Comparisons are several where the memory does not hold all processes at once; `OURS` is in each.
    """

    network: str
    batch_size: int
    settings: dict[str, Any]
    comparisons: list[Comparison] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    no_time: set[str] = field(default_factory=set)

    def add(self, later: Result) -> None:
        """Add what was measured of the same network later."""
        self.comparisons += later.comparisons
        self.failures.update(later.failures)
        self.no_time |= later.no_time

    def note(self, name: str, failure: Exception, text: str = "{}") -> None:
        """Keep why an implementation did not run."""
        self.failures[name] = text.format(reason(failure))
        if isinstance(failure, NoTime):
            self.no_time.add(name)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        comparisons = [report.as_dict(self.settings, each) for each in self.comparisons]
        return {"network": self.network, "batch_size": self.batch_size, "comparisons": comparisons,
                "failures": self.failures, "no_time": sorted(self.no_time)}


def settings_of(suite: Suite, network: str, batch_size: int, common: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workload of a network in a suite, and its settings.

    Parameters
    ----------
    suite : Suite
        The suite.
    network : str
        A key of `sizes.COSTS`.
    batch_size : int
        Samples in a batch.
    common : mapping
        ``device``, ``dtype``, ``seed``, ``threads`` and ``small``.
    """
    if network == "ssd512" and suite.workload == "training":
        given = {**_SSD_TRAINING, "batch_size": batch_size, **common}
        return "ssd", {**given, "data_shape": 64 if common["small"] else None}
    return suite.workload, {"network": network, "batch_size": batch_size, **common}


def measure(suite: Suite, network: str, batch_size: int, wanted: Sequence[str], common: Mapping[str, Any], plan: Plan,
            progress: Progress, known: Sequence[Result] = ()) -> Result:
    """Measure implementations of a network at a batch size; those that cannot run it are left out and noted.

    Whatever has not run in the ``known`` results is left out.
    """
    workload, settings = settings_of(suite, network, batch_size, common)
    result = Result(network, batch_size, settings)
    for each in known:
        result.failures.update((name, each.failures[name]) for name in wanted if name in each.failures)
        result.no_time |= each.no_time.intersection(wanted)
    shares = {name: implementation(name).memory_share * suite.memory_share for name in wanted}
    cost = replace(sizes.COSTS[network], base_bytes=0.0, sample_bytes=0.0) if common["small"] else sizes.COSTS[network]
    groups = sizes.groups(cost, machine.available_memory(), shares, batch_size, OURS)
    fitting = {name for group in groups for name in group}
    result.failures.update({name: "does not fit the memory" for name in wanted if name not in fitting})
    for group in groups:
        group.sort(key=wanted.index)
        comparison = _attempt(suite, workload, group, result, plan, progress)
        if comparison is not None:
            result.comparisons.append(comparison)
    return result


def _attempt(suite: Suite, workload: str, group: Sequence[str], result: Result, plan: Plan,
             progress: Progress) -> Comparison | None:
    """Compare a group, without those that have turned out not to run."""
    commands = []
    for name in group:
        if name not in result.failures:
            try:
                commands.append(command(workload, name, result.settings))
            except UsageError as error:
                result.failures[name] = str(error)
    comparison = _compared(suite, commands, plan, progress)
    for name, failure in comparison.failures.items():
        result.note(name, failure)
    return comparison if comparison.tracks else None


def _compared(suite: Suite, commands: Sequence[Any], plan: Plan, progress: Progress) -> Comparison:
    if not suite.inspects:
        return compare(commands, plan, progress)
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(commands, plan, progress, save_to=Path(folder))
        if comparison.tracks:
            _add_errors(comparison, Path(folder))
    return comparison


def _add_errors(comparison: Comparison, folder: Path) -> None:
    """Add to each track how far its outputs are from the first one's, which is FP32's unless it was left out."""
    from . import outputs  # NumPy with it

    expected = outputs.load(folder / comparison.tracks[0].name)
    for track in comparison.tracks:
        track.saved.update(outputs.difference(expected, outputs.load(folder / track.name)))


def parser(suite: Suite, description: str | None) -> cli.Parser:
    """Return the parser of a suite's command line."""
    result = cli.Parser(description)
    what = result.add_argument_group("what to run")
    what.add_argument("--networks", metavar="NAMES",
                      help=f"some of {', '.join(suite.batch_sizes)} (default: all)")
    what.add_argument("--batch-sizes", metavar="SIZES", type=cli.integers,
                      help="with commas (default: some that are usual for each)")
    what.add_argument("--compare", metavar="NAMES", help=f"some of {', '.join(names(suite.workload))} (default: all)")
    what.add_argument("--small", action="store_true", help="tiny networks, to see whether everything works")
    cli.add_measuring(result, budget=60.0)
    result.add_argument("--markdown", metavar="PATH", type=cli.writable, help="write the tables")
    return result


def _networks(suite: Suite, args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the batch sizes to measure, by network."""
    known = suite.batch_sizes
    chosen = list(known) if args.networks is None else cli.names("--networks", args.networks, "network", known)
    return {name: args.batch_sizes or known[name] for name in chosen}


def _implementations(suite: Suite, args: argparse.Namespace) -> list[str]:
    if args.compare is None:
        return [name for name in names(suite.workload) if runs_here(name)]
    chosen = cli.names("--compare", args.compare)
    for name in chosen:
        check(suite.workload, name)
    return chosen


def run(suite: Suite, args: argparse.Namespace, end: float = math.inf) -> dict[str, Any]:
    """Measure what the arguments ask for, show each table, and return everything, ready for JSON.

    Parameters
    ----------
    suite : Suite
        What there is to measure.
    args : Namespace
        Of `parser`.
    end : float
        When it is to be over, on the clock of `time.monotonic`: what has not begun by then is skipped.
    """
    networks, wanted = _networks(suite, args), _implementations(suite, args)
    common = common_settings(args)
    rows = [Row(network, batch_size, _of_row(wanted, args, batch_size == max(batches)))
            for network, batches in networks.items() for batch_size in batches]
    turns = list(_by_importance(suite, rows, args.small)) if math.isfinite(end) else rows
    weights = [_weight(suite, row, args.small) for row in turns]
    results: dict[tuple[str, int], Result] = {}
    compiled: dict[str, Result] | None = None
    for number, row in enumerate(turns):
        if compiled is None and not row.is_pair:
            compiled = _compile(suite, rows, common, end)
        pairs = [weight for weight, each in zip(weights[number:], turns[number:]) if each.is_pair]
        plan = share_of(cli.plan(args), end - monotonic(), weights[number:], pairs if row.is_pair else None)
        if plan is None:
            break
        earlier = results.get(row.place)
        known = [each for each in ((compiled or {}).get(row.network), earlier) if each is not None]
        with report.TqdmProgress() as progress:
            progress.say(f"{row.network}, batch {row.batch_size}")
            result = measure(suite, *row, common, plan, progress, known)
        for comparison in result.comparisons:
            report.show(result.settings, comparison)
        if earlier is None:
            results[row.place] = result
        else:
            earlier.add(result)
    return {"workload": suite.workload, "settings": common, "plan": asdict(cli.plan(args)),
            "machine": machine.describe(), "results": [each.as_dict() for each in results.values()],
            "skipped": [list(row.place) for row in rows if row.place not in results]}


def _by_importance(suite: Suite, rows: Sequence[Row], small: bool) -> Iterator[Row]:
    """Yield gluon_amp beside FP32 of all rows first, then their peers beside gluon_amp, what is quick first."""
    pairs = [row for row in rows if set(row.names) > _PAIR]
    yield from (row._replace(names=[REFERENCE, OURS]) if row in pairs else row for row in rows)
    # where outputs are compared, it is with FP32's
    known = () if suite.inspects else (REFERENCE,)
    peers = [row._replace(names=[name for name in row.names if name not in known]) for row in pairs]
    yield from sorted(peers, key=lambda row: _weight(suite, row, small))


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all networks share; sets the number of threads."""
    return {"device": args.device, "dtype": args.dtype, "seed": args.seed, "threads": cli.use_threads(args),
            "small": args.small}


def _of_row(wanted: Sequence[str], args: argparse.Namespace, is_largest: bool) -> list[str]:
    """Return what a row measures, what compiles last: by default only the largest batch is compiled."""
    chosen = sorted(wanted, key=lambda name: implementation(name).compiles)
    if args.compare is not None or is_largest:
        return chosen
    return [name for name in chosen if not implementation(name).compiles]


def _compile(suite: Suite, rows: Sequence[Row], common: Mapping[str, Any], end: float) -> dict[str, Result]:
    """Let implementations compile before they are measured, what is quick first: their cache keeps it, on disk.

    Returns
    -------
    dict
        By network, which implementations are left out, and why.
    """
    jobs = [(network, batch_size, name) for network, batch_size, chosen in rows for name in chosen
            if implementation(name).compiles]
    if not jobs:
        return {}
    jobs.sort(key=lambda job: sizes.COSTS[job[0]].compiled)
    until = monotonic() + _COMPILE_SHARE * (end - monotonic())
    results: dict[str, Result] = {}
    for network, batch_size, name in jobs:
        workload, settings = settings_of(suite, network, batch_size, common)
        result = results.setdefault(network, Result(network, batch_size, settings))
        limit = min(_COMPILE_LIMIT, until - monotonic())
        if limit < _LEAST_COMPILE:
            result.note(name, NoTime(name, "the time for compilation was over"), _NOT_COMPILED)
            continue
        try:
            commands = [command(workload, name, settings)]
        except UsageError:  # the row will say so
            continue
        with report.TqdmProgress() as progress:
            progress.say(f"{network}, batch {batch_size}: {name} compiles, within {limit:.0f} s")
            comparison = compare(commands, Plan(rounds=0, warmup=1, limit=limit, keep=[name]), progress)
        for failure in comparison.failures.values():
            result.note(name, failure, _NOT_COMPILED)
    return results


def _weight(suite: Suite, row: Row, small: bool) -> float:
    """Return roughly the seconds that a row takes, to divide the time that there is."""
    cost = sizes.COSTS[row.network]
    startup = _STARTUP + cost.base_bytes / _STARTUP_RATE
    steps = _STEPS * suite.time_share * row.batch_size * cost.sample_seconds
    return 1.0 if small else len(row.names) * (startup + steps)


def share_of(plan: Plan, left: float, weights: Sequence[float], waiting: Sequence[float] | None = None) -> Plan | None:
    """Return the plan of the first of several rows in the time that is left; None when nothing is left.

    Rounds follow from its share by weight. A row ends after 1.3 times its share, or when only the rows that are
    ``waiting``, itself among them, would have their shares of what is left: the others' time may be taken.

    Examples
    --------
    >>> share_of(Plan(budget=60.0), 300.0, [1.0] * 10)
    Plan(rounds=None, steps=None, warmup=2, budget=30.0, limit=39.0, keep=('amp', 'fp32'), fewest=3)
    """
    if math.isinf(left):
        return plan
    if left <= 0:
        return None
    share = left * weights[0] / sum(weights)
    limit = left * weights[0] / sum(waiting or weights)
    return replace(plan, budget=min(plan.budget, share), limit=max(_OVERTIME * share, limit), keep=(OURS, REFERENCE),
                   fewest=FEWEST_ROUNDS)


def program(suite: Suite, description: str | None) -> Callable[[Sequence[str] | None], None]:
    """Return what the script of a suite runs."""

    def run_suite(argv: Sequence[str] | None) -> None:
        args = parser(suite, description).parse_args(argv)
        measured = run(suite, args)
        text = tables.suite(measured)
        print(text)
        cli.write_json(args.json, measured)
        if args.markdown:
            Path(args.markdown).write_text(text, encoding="utf-8")
        if args.plot:
            tables.plot(measured, args.plot)

    return run_suite
