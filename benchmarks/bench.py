"""Run all benchmarks and write bench.json, bench.md and plots into a folder.

    python benchmarks/bench.py                                  # everything, into bench-results
    python benchmarks/bench.py --only training,primitives
    python benchmarks/bench.py --small                          # tiny networks, to see whether everything works

It ends with the least ratio of gluon_amp to MXNet FP32 of all rows. A row below 1.0 is measured once more, with 15
rounds; when it stays below 1.0 the exit code is 1, after everything is written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Dict, Mapping, NamedTuple, Sequence

from benchmarks.harness import cli, least, machine, report, suites, tables
from benchmarks.harness.compare import Plan
from benchmarks.harness.errors import ChildFailed
from benchmarks.harness.registry import OURS, REFERENCE
from benchmarks.harness.sizes import COSTS

BUDGET = 2400.0
_AGAIN_SHARE = 0.12  # of the time of a suite, for rows that are measured again
_LEAST_AGAIN = 15.0  # seconds for one of them
_FIXED_SHARE = 0.25  # of all time, at most, for the parts whose time is fixed
_SCALED = (REFERENCE, OURS)
_SUITES = {"training": suites.TRAINING, "inference": suites.INFERENCE}
_SMALL_NETWORKS = ("mobilenet_v2", "lstm", "encoder")
_HERE = Path(__file__).parent

Measure = Callable[[argparse.Namespace, float], Dict[str, Any]]


class Part(NamedTuple):
    """What measures something until a time, what makes its tables, and its time: seconds or a share of the rest."""

    title: str
    measure: Measure
    tables: Callable[[Mapping[str, Any]], str]
    seconds: float = 0.0
    share: float = 0.0


def _suite_part(name: str) -> Measure:
    def measure(args: argparse.Namespace, end: float) -> dict[str, Any]:
        suite = _SUITES[name]
        rows_end = end - _AGAIN_SHARE * (end - monotonic())
        measured = suites.run(_smaller(suite) if args.small else suite, args, rows_end)
        if not args.small:
            least.measure_low_rows_again(measured, lambda result, left: _again(suite, result, args, left), end)
        return measured

    return measure


def _smaller(suite: suites.Suite) -> suites.Suite:
    """Return a suite of few networks, each at one batch size."""
    return replace(suite, batch_sizes={name: batches[:1] for name, batches in suite.batch_sizes.items()
                                       if name in _SMALL_NETWORKS})


def _again(suite: suites.Suite, result: Mapping[str, Any], args: argparse.Namespace, seconds: float
           ) -> Mapping[str, Any] | None:
    """Compare gluon_amp and MXNet FP32 once more, in more rounds."""
    network, batch_size = result["network"], result["batch_size"]
    plan = Plan(least.ROUNDS_AGAIN, args.steps, args.warmup, seconds, seconds, (REFERENCE, OURS))
    with report.TqdmProgress() as progress:
        progress.say(f"{network}, batch {batch_size}: below 1.0, so it is measured again, in {seconds:.0f} s")
        if seconds < _LEAST_AGAIN:
            return None
        measured = suites.measure(replace(suite, inspects=False), network, batch_size, [REFERENCE, OURS],
                                  suites.common_settings(args), plan, progress)
    comparisons = measured.as_dict()["comparisons"]
    return comparisons[0] if comparisons else None


def _scaling(args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Compare one thread with all of them."""
    threads = cli.use_threads(args)
    compared = ",".join(f"{name}@{number}" for name in _SCALED for number in sorted({1, threads}))
    given = argparse.Namespace(**{**vars(args), "compare": compared, "networks": None})
    suite = _smaller(suites.SCALING) if args.small else suites.SCALING
    return {**suites.run(suite, given, end), "threads": threads}


def _scaling_tables(measured: Mapping[str, Any]) -> str:
    threads, texts = measured["threads"], [tables.suite(measured)]
    for result in measured["results"]:
        ratios = ((name, tables.ratio(result, f"{name}@{threads}", f"{name}@1")) for name in _SCALED)
        texts += [f"{result['network']}, {name}: {threads} threads are {ratio['median']:.2f}x as fast as one "
                  f"({tables.span(ratio)})\n" for name, ratio in ratios if ratio is not None]
    return "\n".join(texts)


def _script(title: str, name: str, seconds: float, *arguments: str, small: Sequence[str] = ()) -> Part:
    """Return a part that a script measures, in a process of its own."""

    def measure(args: argparse.Namespace, end: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            given = [*arguments, *(small if args.small else ())]
            command = [sys.executable, str(_HERE / f"{name}.py"), *given, "--json", str(path)]
            try:
                code = subprocess.run(command, timeout=end - monotonic()).returncode
            except subprocess.TimeoutExpired as expired:
                raise ChildFailed(name, f"did not end within {expired.timeout:.0f} s") from expired
            if code:
                raise ChildFailed(name, f"ended with exit code {code}")
            measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return measured

    # the script may need MXNet for nothing but its measurements
    return Part(title, measure, lambda measured: importlib.import_module(f"benchmarks.{name}").markdown(measured),
                seconds)


PARTS: Mapping[str, Part] = {
    "training": Part("Training", _suite_part("training"), tables.suite, share=0.62),
    "inference": Part("Inference", _suite_part("inference"), tables.suite, share=0.28),
    "eager_overhead": _script("Imperative calls", "eager_overhead", 40.0),
    "primitives": _script("Where the time of a training step goes", "primitives", 100.0, "--network", "ssd512",
                          small=["--small", "--batch-size", "1"]),
    "scaling": Part("One thread and all of them", _scaling, _scaling_tables, share=0.04),
}
_PLOTTED = ("training", "inference")


def _parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--output", metavar="DIR", default="bench-results", help="default: bench-results")
    parser.add_argument("--networks", metavar="NAMES", help="of training and inference (default: all)")
    parser.add_argument("--add", action="store_true", help="keep what bench.json holds and is not measured again")
    parser.add_argument("--small", action="store_true", help="few tiny networks, to see whether everything works")
    parser.add_argument("--total", type=cli.seconds, default=BUDGET, metavar="SECONDS",
                        help=f"time for everything (default: {BUDGET:.0f}); what does not begin in time is left out")
    cli.add_measuring(parser, "how to measure the networks", budget=120.0, plots=False)
    parser.set_defaults(compare=None, batch_sizes=None)
    return parser


def _write(folder: Path, measured: Mapping[str, Any]) -> None:
    """Write what there is so far: a failure later on does not lose it."""
    cli.write_json(folder / "bench.json", measured)
    found = _suites(measured["parts"])
    texts = [tables.machine_section(measured["machine"], measured["versions"], found, measured["seconds"])]
    if not measured["small"]:
        texts.append(least.verdict(found)[0] + "\n")
    texts += [f"## {PARTS[name].title}\n\n{PARTS[name].tables(part)}" for name, part in measured["parts"].items()]
    (folder / "bench.md").write_text("\n".join(texts), encoding="utf-8")
    for name in _PLOTTED:
        if name in measured["parts"]:
            tables.plot(measured["parts"][name], str(folder / f"{name}.png"))


def _suites(parts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [parts[name] for name in _SUITES if name in parts]


def merged(before: Mapping[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return a part with the earlier results of the networks and batch sizes that were not measured again.

    Examples
    --------
    >>> earlier, later = {"network": "lstm", "batch_size": 1}, {"network": "lstm", "batch_size": 8}
    >>> len(merged({"results": [earlier, later]}, {"results": [later]})["results"])
    2
    """
    if "results" not in part:
        return part
    again = {(each["network"], each["batch_size"]) for each in part["results"]}
    kept = [each for each in before.get("results", ()) if (each["network"], each["batch_size"]) not in again]
    order = list(COSTS)
    results = sorted([*kept, *part["results"]], key=lambda each: (order.index(each["network"]), each["batch_size"]))
    there = {(each["network"], each["batch_size"]) for each in kept}
    skipped = [row for row in part.get("skipped", ()) if tuple(row) not in there]
    return {**part, "results": results, "skipped": skipped}


def slots(chosen: Sequence[str], total: float) -> dict[str, float]:
    """Return the seconds of each part: fixed ones as far as the time is long enough for them, shares of the rest.

    Examples
    --------
    >>> slots(["training", "inference"], 90.0), slots(["primitives", "training"], 1060.0)
    ({'training': 62.0, 'inference': 28.0}, {'primitives': 100.0, 'training': 960.0})
    """
    fixed = sum(PARTS[name].seconds for name in chosen)
    shares = sum(PARTS[name].share for name in chosen)
    scale = min(1.0, _FIXED_SHARE * total / fixed) if fixed and shares else 1.0
    rest = total - scale * fixed
    return {name: scale * PARTS[name].seconds + (rest * PARTS[name].share / shares if shares else 0.0)
            for name in chosen}


def _measure(chosen: Sequence[str], args: argparse.Namespace, folder: Path, parts: dict[str, Any], earlier: float,
             begin: float) -> list[str]:
    """Measure the parts, write what there is after each, and return what failed."""
    failed, due, end = [], begin, begin + args.total
    for name, seconds in slots(chosen, args.total).items():
        part, due = PARTS[name], due + seconds
        # a script ends by itself, and may use what is left of all time
        until = end if part.seconds else due
        print(f"== {part.title}", flush=True)
        try:
            if until - monotonic() < part.seconds / 2:
                raise ChildFailed(name, "not measured, the time was over")
            parts[name] = merged(parts.get(name, {}), part.measure(args, until))
        except ChildFailed as failure:
            failed.append(str(failure))
            print(f"error: {failure}", file=sys.stderr, flush=True)
        ordered = {each: parts[each] for each in PARTS if each in parts}
        _write(folder, {"machine": machine.describe(), "versions": machine.versions(), "small": args.small,
                        "seconds": earlier + monotonic() - begin, "parts": ordered})
    return failed


def run(argv: Sequence[str] | None) -> None:
    begin = monotonic()
    args = _parser().parse_args(argv)
    if args.small:
        args.rounds, args.steps, args.warmup = args.rounds or 1, args.steps or 1, min(args.warmup, 1)
        args.networks = args.networks or ",".join(_SMALL_NETWORKS)
    chosen = cli.names("--only", args.only, "part", PARTS)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "bench.json"
    before = json.loads(known.read_text(encoding="utf-8")) if args.add and known.exists() else {}
    parts = before.get("parts", {})
    failed = _measure(chosen, args, folder, parts, before.get("seconds", 0.0), begin)
    print(f"written: {known}, {folder / 'bench.md'}")
    if args.small:
        print("tiny networks: their ratios say nothing")
    else:
        text, failures = least.verdict(_suites(parts))
        print(text)
        failed += failures
    if failed:
        raise ChildFailed("bench", "; ".join(failed))


if __name__ == "__main__":
    sys.exit(cli.main(run))
