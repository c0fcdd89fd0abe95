"""Run all benchmarks and write bench.json, bench.md and plots into a folder.

    python benchmarks/bench.py                                  # everything, into bench-results
    python benchmarks/bench.py --only training,large_graph
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import _cli
import _machine
import _report
import _suite
import _tables
import inference
import passes
import training
from _errors import ChildFailed, Parser, unknown
from _sizes import COSTS

_SCALED = ("fp32", "amp")
_SCALED_SUITE = _suite.Suite("training", {"resnet50": (4,), "encoder": (4,)})
_HERE = Path(__file__).parent


def _suite_part(suite: _suite.Suite) -> Callable[[argparse.Namespace], dict[str, Any]]:
    return lambda args: _suite.run(suite, args)


def _scaling(args: argparse.Namespace) -> dict[str, Any]:
    """Compare one thread with all of them."""
    threads = _cli.use_threads(args)
    compared = ",".join(f"{name}@{number}" for name in _SCALED for number in sorted({1, threads}))
    given = argparse.Namespace(**{**vars(args), "compare": compared})
    return {**_suite.run(_SCALED_SUITE, given), "threads": threads}


def _scaling_tables(measured: Mapping[str, Any]) -> str:
    threads, texts = measured["threads"], [_tables.suite(measured)]
    for result in measured["results"]:
        ratios = ((name, _tables.ratio(result, f"{name}@{threads}", f"{name}@1")) for name in _SCALED)
        texts += [f"{result['network']}, {name}: {threads} threads are {ratio['median']:.2f}x as fast as one "
                  f"({_tables.span(ratio)})\n" for name, ratio in ratios if ratio is not None]
    return "\n".join(texts)


def _script(name: str, *arguments: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """Return a part that a script measures, in a process of its own."""

    def run(args: argparse.Namespace) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.json"
            command = [sys.executable, str(_HERE / f"{name}.py"), *arguments, "--json", str(path)]
            code = subprocess.run(command).returncode
            if code:
                raise ChildFailed(name, f"ended with exit code {code}")
            measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return measured

    return run


def _by_script(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return what makes a script's tables; the script may need MXNet for nothing else."""
    return lambda measured: importlib.import_module(name).markdown(measured)


# name -> (title, what measures it, what makes its tables)
PARTS: Mapping[str, tuple[str, Callable[[argparse.Namespace], dict[str, Any]], Callable[[Mapping[str, Any]], str]]] = {
    "training": ("Training", _suite_part(training.SUITE), _tables.suite),
    "inference": ("Inference", _suite_part(inference.SUITE), _tables.suite),
    "scaling": ("One thread and all of them", _scaling, _scaling_tables),
    "passes": ("Graph passes", passes.measure, passes.markdown),
    "step_costs": ("A step outside the network", _script("step_costs"), _by_script("step_costs")),
    "large_graph": ("Large graphs", _script("large_graph"), _by_script("large_graph")),
    "eager_overhead": ("Imperative calls", _script("eager_overhead"), _by_script("eager_overhead")),
    "primitives": ("Where the time of a training step goes", _script("primitives", "--network", "ssd512"),
                   _by_script("primitives")),
}
_PLOTTED = ("training", "inference")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PARTS", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--output", metavar="DIR", default="bench-results", help="default: bench-results")
    parser.add_argument("--networks", metavar="NAMES", help="of training, inference and passes (default: all)")
    parser.add_argument("--add", action="store_true", help="keep what bench.json holds and is not measured again")
    parser.add_argument("--small", action="store_true", help="tiny networks, to see whether everything works")
    _cli.add_measuring(parser.add_argument_group("how to measure the networks"), budget=60.0)
    parser.set_defaults(compare=None, batch_sizes=None, markdown=None, passes=None)
    return parser


def _write(folder: Path, measured: Mapping[str, Any]) -> None:
    """Write what there is so far: a failure later on does not lose it."""
    _cli.write_json(str(folder / "bench.json"), measured)
    texts = [f"## {PARTS[name][0]}\n\n{PARTS[name][2](part)}" for name, part in measured["parts"].items()]
    (folder / "bench.md").write_text("\n".join([_report.machine_text(), *texts]), encoding="utf-8")
    for name in _PLOTTED:
        if name in measured["parts"]:
            _tables.plot(measured["parts"][name], str(folder / f"{name}.png"))


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
    return {**part, "results": results}


def _run(argv: Sequence[str] | None) -> None:
    args = _parser().parse_args(argv)
    _cli.check_measuring(args)
    chosen = _cli.names("--only", args.only)
    for name in chosen:
        if name not in PARTS:
            raise unknown("part", name, PARTS)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "bench.json"
    parts = json.loads(known.read_text(encoding="utf-8"))["parts"] if args.add and known.exists() else {}
    for name in chosen:
        print(f"== {PARTS[name][0]}", flush=True)
        parts[name] = merged(parts.get(name, {}), PARTS[name][1](args))
        ordered = {each: parts[each] for each in PARTS if each in parts}
        _write(folder, {"machine": _machine.describe(), "parts": ordered})
    print(f"written: {folder / 'bench.json'}, {folder / 'bench.md'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _cli.run(_run, argv)


if __name__ == "__main__":
    sys.exit(main())
