"""Run all benchmarks and write bench.json, bench.md and plots into a folder.

    python benchmarks/bench.py                                  # everything, into bench-results
    python benchmarks/bench.py --only training,large_graph
    python benchmarks/bench.py --small                          # tiny networks, to see whether everything works

It ends with the least ratio of gluon_amp to MXNet FP32 of all rows. A row below 1.0 is measured once more, with 15
rounds; when it stays below 1.0, in more rounds than chance explains, the exit code is 1, after everything is written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Dict, Mapping, Sequence

import _cli
import _least
import _machine
import _report
import _suite
import _tables
import inference
import passes
import training
from _compare import Plan
from _errors import ChildFailed, Parser, UsageError, unknown
from _sizes import COSTS

BUDGET = 2400.0
_AGAIN_LIMIT = 300.0  # seconds for one row that is measured again
_SCALED = ("fp32", "amp")
_SCALED_SUITE = _suite.Suite("training", {"resnet50": (4,), "encoder": (4,)})
_SUITES = {"training": training.SUITE, "inference": inference.SUITE}
_SMALL_NETWORKS = ("mobilenet_v2", "lstm", "encoder")
_HERE = Path(__file__).parent

Measure = Callable[[argparse.Namespace, float], Dict[str, Any]]


def _suite_part(name: str) -> Measure:
    def run(args: argparse.Namespace, end: float) -> dict[str, Any]:
        suite = _SUITES[name]
        measured = _suite.run(_smaller(suite) if args.small else suite, args, end)
        if not args.small:
            _least.measure_low_rows_again(measured, lambda result: _again(suite, result, args))
        return measured

    return run


def _smaller(suite: _suite.Suite) -> _suite.Suite:
    """Return a suite of few networks, each at one batch size."""
    return replace(suite, batch_sizes={name: sizes[:1] for name, sizes in suite.batch_sizes.items()
                                       if name in _SMALL_NETWORKS})


def _again(suite: _suite.Suite, result: Mapping[str, Any], args: argparse.Namespace) -> Mapping[str, Any] | None:
    """Compare gluon_amp and MXNet FP32 once more, in more rounds."""
    network, batch_size = result["network"], result["batch_size"]
    plan = Plan(_least.ROUNDS_AGAIN, args.steps, args.warmup, args.budget, _AGAIN_LIMIT)
    with _report.TqdmProgress() as progress:
        progress.say(f"{network}, batch {batch_size}: below 1.0, so it is measured again, {_least.ROUNDS_AGAIN} rounds")
        measured = _suite.measure(replace(suite, inspects=False), network, batch_size,
                                  [_least.REFERENCE, _least.OURS], _suite.common_settings(args), plan, progress)
    comparisons = measured.as_dict()["comparisons"]
    return comparisons[0] if comparisons else None


def _scaling(args: argparse.Namespace, end: float) -> dict[str, Any]:
    """Compare one thread with all of them."""
    threads = _cli.use_threads(args)
    compared = ",".join(f"{name}@{number}" for name in _SCALED for number in sorted({1, threads}))
    given = argparse.Namespace(**{**vars(args), "compare": compared, "networks": None})
    return {**_suite.run(_smaller(_SCALED_SUITE) if args.small else _SCALED_SUITE, given, end), "threads": threads}


def _scaling_tables(measured: Mapping[str, Any]) -> str:
    threads, texts = measured["threads"], [_tables.suite(measured)]
    for result in measured["results"]:
        ratios = ((name, _tables.ratio(result, f"{name}@{threads}", f"{name}@1")) for name in _SCALED)
        texts += [f"{result['network']}, {name}: {threads} threads are {ratio['median']:.2f}x as fast as one "
                  f"({_tables.span(ratio)})\n" for name, ratio in ratios if ratio is not None]
    return "\n".join(texts)


def _script(name: str, *arguments: str, small: Sequence[str] = ()) -> Measure:
    """Return a part that a script measures, in a process of its own."""

    def run(args: argparse.Namespace, end: float) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            given = [*arguments, *(small if args.small else ())]
            command = [sys.executable, str(_HERE / f"{name}.py"), *given, "--json", str(path)]
            timeout = None if math.isinf(end) else max(_LEAST_PART, end - monotonic())
            try:
                code = subprocess.run(command, timeout=timeout).returncode
            except subprocess.TimeoutExpired as expired:
                raise ChildFailed(name, f"did not end within {expired.timeout:.0f} s") from expired
            if code:
                raise ChildFailed(name, f"ended with exit code {code}")
            measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return measured

    return run


def _by_script(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what makes a script's tables; the script may need MXNet for nothing else."""
    return lambda measured: importlib.import_module(name).markdown(measured)


# name -> (title, what measures it, what makes its tables, its share of the time)
PARTS: Mapping[str, tuple[str, Measure, Callable[[Mapping[str, Any]], str], float]] = {
    "training": ("Training", _suite_part("training"), _tables.suite, 0.6),
    "inference": ("Inference", _suite_part("inference"), _tables.suite, 0.17),
    "scaling": ("One thread and all of them", _scaling, _scaling_tables, 0.03),
    "passes": ("Graph passes", passes.measure, passes.markdown, 0.1),
    "step_costs": ("A step outside the network", _script("step_costs", small=["--small", "--rounds", "1"]),
                   _by_script("step_costs"), 0.02),
    "large_graph": ("Large graphs", _script("large_graph", small=["--layers", "2,4", "--rounds", "1"]),
                    _by_script("large_graph"), 0.03),
    "eager_overhead": ("Imperative calls", _script("eager_overhead"), _by_script("eager_overhead"), 0.02),
    "primitives": ("Where the time of a training step goes",
                   _script("primitives", "--network", "ssd512", small=["--small", "--batch-size", "1"]),
                   _by_script("primitives"), 0.03),
}
_LEAST_PART = 300.0  # seconds that a script may always take
_PLOTTED = ("training", "inference")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--output", metavar="DIR", default="bench-results", help="default: bench-results")
    parser.add_argument("--networks", metavar="NAMES", help="of training, inference and passes (default: all)")
    parser.add_argument("--add", action="store_true", help="keep what bench.json holds and is not measured again")
    parser.add_argument("--small", action="store_true", help="few tiny networks, to see whether everything works")
    parser.add_argument("--total", type=float, default=BUDGET, metavar="SECONDS",
                        help=f"time for everything (default: {BUDGET:.0f}); rows that do not begin in time are skipped")
    _cli.add_measuring(parser.add_argument_group("how to measure the networks"), budget=40.0)
    parser.set_defaults(compare=None, batch_sizes=None, markdown=None, passes=None)
    return parser


def _write(folder: Path, measured: Mapping[str, Any]) -> None:
    """Write what there is so far: a failure later on does not lose it."""
    _cli.write_json(str(folder / "bench.json"), measured)
    suites = _suites(measured["parts"])
    texts = [_tables.machine_section(measured["machine"], measured["versions"], suites, measured["seconds"])]
    if not measured["small"]:
        texts.append(_least.verdict(suites)[0] + "\n")
    texts += [f"## {PARTS[name][0]}\n\n{PARTS[name][2](part)}" for name, part in measured["parts"].items()]
    (folder / "bench.md").write_text("\n".join(texts), encoding="utf-8")
    for name in _PLOTTED:
        if name in measured["parts"]:
            _tables.plot(measured["parts"][name], str(folder / f"{name}.png"))


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


def _ends(chosen: Sequence[str], begin: float, total: float) -> dict[str, float]:
    """Return when each part is to be over, by its share of the time."""
    shares = [PARTS[name][3] for name in chosen]
    return {name: begin + total * sum(shares[: place + 1]) / sum(shares) for place, name in enumerate(chosen)}


def _run(argv: Sequence[str] | None) -> None:
    begin = monotonic()
    args = _parser().parse_args(argv)
    _cli.check_measuring(args)
    if not args.total > 0:
        raise UsageError(f"--total: expected more than 0, received {args.total}")
    if args.small:
        args.rounds, args.steps, args.warmup = args.rounds or 1, args.steps or 1, min(args.warmup, 1)
        args.networks = args.networks or ",".join(_SMALL_NETWORKS)
    chosen = _cli.names("--only", args.only)
    for name in chosen:
        if name not in PARTS:
            raise unknown("part", name, PARTS)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "bench.json"
    parts = json.loads(known.read_text(encoding="utf-8"))["parts"] if args.add and known.exists() else {}
    failed = []
    for name, end in _ends(chosen, begin, args.total).items():
        print(f"== {PARTS[name][0]}", flush=True)
        try:
            parts[name] = merged(parts.get(name, {}), PARTS[name][1](args, end))
        except ChildFailed as failure:
            failed.append(str(failure))
            print(f"error: {failure}", file=sys.stderr, flush=True)
        ordered = {each: parts[each] for each in PARTS if each in parts}
        _write(folder, {"machine": _machine.describe(), "versions": _machine.versions(), "small": args.small,
                        "seconds": monotonic() - begin, "parts": ordered})
    print(f"written: {folder / 'bench.json'}, {folder / 'bench.md'}")
    if args.small:
        print("tiny networks: their ratios say nothing")
    else:
        text, failures = _least.verdict(_suites(parts))
        print(text)
        failed += failures
    if failed:
        raise ChildFailed("bench", "; ".join(failed))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _cli.run(_run, argv)


if __name__ == "__main__":
    sys.exit(main())
