"""A benchmark of several networks and batch sizes: one interleaved comparison after the other."""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Mapping, Sequence

import _cli
import _machine
import _report
import _sizes
import _tables
from _commands import command, runs_here
from _compare import Comparison, Plan, Progress, compare
from _errors import Parser, UsageError, reason, unknown
from _registry import check, implementation, names

OURS = "amp"
_LEAST_LIMIT = 120.0
_COMPILED_WEIGHT = 3.0
_SSD_TRAINING = {"network": "ssd_512_resnet50_v1_coco", "data_shape": None, "pretrained_base": False}


@dataclass(frozen=True)
class Suite:
    """What a benchmark program measures when nothing else is asked for.

    Parameters
    ----------
    workload : str
        A key of `_registry.WORKLOADS`.
    batch_sizes : mapping of str to tuple of int
        By network, a key of `_sizes.COSTS`.
    inspects : bool
        Whether outputs, memory and parameter files are compared at the end.
    memory_share : float
        Memory that a process needs as a share of what it needs for FP32 training.
    """

    workload: str
    batch_sizes: Mapping[str, tuple[int, ...]]
    inspects: bool = False
    memory_share: float = 1.0


@dataclass
class Result:
    """What was measured of a network at a batch size.

    ``failures`` holds the reasons of the implementations that could not run. Comparisons are several where the memory
    does not hold all processes at once; `OURS` is in each.
    """

    network: str
    batch_size: int
    settings: dict[str, Any]
    comparisons: list[Comparison] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        comparisons = [_report.as_dict(self.settings, each) for each in self.comparisons]
        return {"network": self.network, "batch_size": self.batch_size, "comparisons": comparisons,
                "failures": self.failures}


def settings_of(suite: Suite, network: str, batch_size: int, common: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workload of a network in a suite, and its settings.

    Parameters
    ----------
    suite : Suite
        The suite.
    network : str
        A key of `_sizes.COSTS`.
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
            progress: Progress) -> Result:
    """Measure implementations of a network at a batch size; those that cannot run it are left out and noted."""
    workload, settings = settings_of(suite, network, batch_size, common)
    result = Result(network, batch_size, settings)
    shares = {name: implementation(name).memory_share * suite.memory_share for name in wanted}
    cost = _sizes.Cost(0.0, 0.0) if common["small"] else _sizes.COSTS[network]
    groups = _sizes.groups(cost, _machine.available_memory(), shares, batch_size, OURS)
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
    left = [name for name in group if name not in result.failures]
    commands = []
    for name in left:
        try:
            commands.append(command(workload, name, result.settings))
        except UsageError as error:
            result.failures[name] = str(error)
    comparison = _compared(suite, commands, plan, progress)
    result.failures.update({name: reason(failure) for name, failure in comparison.failures.items()})
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
    import _outputs  # NumPy with it

    expected = _outputs.load(folder / comparison.tracks[0].name)
    for track in comparison.tracks:
        track.saved.update(_outputs.difference(expected, _outputs.load(folder / track.name)))


def parser(suite: Suite, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a suite's command line."""
    result = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = result.add_argument_group("what to run")
    what.add_argument("--networks", metavar="NAMES",
                      help=f"some of {', '.join(suite.batch_sizes)} (default: all)")
    what.add_argument("--batch-sizes", metavar="SIZES", help="with commas (default: some that are usual for each)")
    what.add_argument("--compare", metavar="NAMES", help=f"some of {', '.join(names(suite.workload))} (default: all)")
    what.add_argument("--small", action="store_true", help="tiny networks, to see whether everything works")
    _cli.add_measuring(result.add_argument_group("how to measure"), budget=60.0)
    result.add_argument("--markdown", metavar="PATH", help="write the tables")
    return result


def _networks(suite: Suite, args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the batch sizes to measure, by network."""
    chosen = list(suite.batch_sizes) if args.networks is None else _cli.names("--networks", args.networks)
    for name in chosen:
        if name not in suite.batch_sizes:
            raise unknown("network", name, suite.batch_sizes)
    if args.batch_sizes is None:
        return {name: suite.batch_sizes[name] for name in chosen}
    sizes = _cli.names("--batch-sizes", args.batch_sizes)
    if not all(size.isdigit() and int(size) for size in sizes):
        raise UsageError(f"--batch-sizes: expected integers of at least 1, received {args.batch_sizes!r}")
    return {name: tuple(int(size) for size in sizes) for name in chosen}


def _implementations(suite: Suite, args: argparse.Namespace) -> list[str]:
    if args.compare is not None:
        chosen = _cli.names("--compare", args.compare)
        for name in chosen:
            check(suite.workload, name)
        return chosen
    return [name for name in names(suite.workload) if runs_here(name)]


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
    _cli.check_measuring(args)
    _report.check_writable(args.markdown)
    networks, wanted = _networks(suite, args), _implementations(suite, args)
    common = common_settings(args)
    results, skipped = [], []
    rows = [(network, batch_size, _of_row(wanted, args, batch_size == max(sizes)))
            for network, sizes in networks.items() for batch_size in sizes]
    weights = [_weight(chosen) for _, _, chosen in rows]
    for number, (network, batch_size, chosen) in enumerate(rows):
        plan = share_of(_cli.plan(args), end - monotonic(), weights[number:])
        if plan is None:
            skipped.append([network, batch_size])
            continue
        with _report.TqdmProgress() as progress:
            progress.say(f"{network}, batch {batch_size}")
            result = measure(suite, network, batch_size, chosen, common, plan, progress)
        for comparison in result.comparisons:
            _report.show(result.settings, comparison)
        results.append(result.as_dict())
    return {"workload": suite.workload, "settings": common, "plan": asdict(_cli.plan(args)),
            "machine": _machine.describe(), "results": results, "skipped": skipped}


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all networks share; sets the number of threads."""
    return {"device": args.device, "dtype": args.dtype, "seed": args.seed, "threads": _cli.use_threads(args),
            "small": args.small}


def _of_row(wanted: Sequence[str], args: argparse.Namespace, is_largest: bool) -> list[str]:
    """Return what a row measures: compilation takes minutes, so by default it is for the largest batch alone."""
    if args.compare is not None or (is_largest and not args.small):
        return list(wanted)
    return [name for name in wanted if not implementation(name).compiles]


def _weight(names: Sequence[str]) -> float:
    return _COMPILED_WEIGHT if any(implementation(name).compiles for name in names) else 1.0


def share_of(plan: Plan, left: float, weights: Sequence[float]) -> Plan | None:
    """Return the plan of the first of several rows in the time that is left; None when nothing is left.

    Rounds follow from its share by weight, and a row ends after twice its share, or after two minutes.

    Examples
    --------
    >>> share_of(Plan(budget=60.0), 300.0, [1.0] * 10)
    Plan(rounds=None, steps=None, warmup=2, budget=30.0, limit=120.0, keep=('amp', 'fp32'))
    """
    if math.isinf(left):
        return plan
    if left <= 0:
        return None
    share = left * weights[0] / sum(weights)
    limit = max(_LEAST_LIMIT, 2 * share)
    return replace(plan, budget=min(plan.budget * weights[0], share), limit=limit, keep=(OURS, "fp32"))


def main(suite: Suite, description: str | None, argv: Sequence[str] | None) -> int:
    """Run a suite from its command line and return the exit code."""

    def program(given: Sequence[str] | None) -> None:
        args = parser(suite, description).parse_args(given)
        measured = run(suite, args)
        text = _tables.suite(measured)
        print(text)
        _cli.write_json(args.json, measured)
        if args.markdown:
            Path(args.markdown).write_text(text, encoding="utf-8")
        if args.plot:
            _tables.plot(measured, args.plot)

    return _cli.run(program, argv)
