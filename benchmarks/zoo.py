"""Measure the networks of the model zoos, an SSD, an LSTM and an encoder, training and converted.

    python benchmarks/zoo.py                                    # or make zoo: against MXNet FP32
    python benchmarks/zoo.py --networks xception,fcn_resnet50_voc --only training --add
    python benchmarks/zoo.py --torch --only training            # beside the same architectures in PyTorch
    python benchmarks/zoo.py --compare amp,amp~fuse,fp32        # what the graph pass `fuse` is worth
    python benchmarks/zoo.py --mode eager --networks resnet50_v1,mobilenetv2_1.0,bert

Every row has a process for each side, in turns. A row is written as soon as it is measured; ``--add`` keeps the rows of
an earlier run and measures what is missing. It fails where gluon_amp is slower than FP32, or takes more memory at batch
4 and more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from benchmarks import harness
from benchmarks.harness import OURS, REFERENCE, ChildFailed, Plan, Spread, UsageError
from benchmarks.networks import NETWORKS

WORKLOADS = ("training", "inference")
MODES = ("static", "plain", "eager")
FROM_BATCH = 4  # on memory counts: below, weights outweigh activations
FORMAT = 2  # of the file
_LEAST, _KERNELS = 3, 3  # rows, and kernels in each, that are named
_OUTSIDE = "outside of oneDNN"


class Row(NamedTuple):
    """A network to measure, and how."""

    what: str  # one of `WORKLOADS`
    network: str
    batch_size: int
    mode: str

    def __str__(self) -> str:
        return f"{self.what} {self.network}, batch {self.batch_size}, {self.mode}"


Result = Mapping[str, Any]  # what `measure` returns


def parser(description: str | None, output: str, networks: str) -> harness.Parser:
    """Return the options of a script that measures rows.

    Parameters
    ----------
    description : str
        Of the script.
    output : str
        The file that the rows are kept in by default.
    networks : str
        The networks by default, with commas, or ``"all"``.
    """
    made = harness.Parser(description)
    add = made.add_argument
    add("--only", choices=WORKLOADS, help="training or inference (default: both)")
    add("--networks", metavar="NAMES", default=networks,
        help=f"all, or some of {', '.join(NETWORKS)} (default: {networks})")
    add("--batch-sizes", metavar="SIZES", type=harness.integers, default=(4,), help="with commas (default: 4)")
    add("--mode", choices=MODES, default="static", help="hybridized with static memory or without, or not at all")
    add("--output", metavar="FILE", type=harness.writable, default=output, help=f"default: {output}")
    add("--again", metavar="NAMES", default="", help="networks whose rows in the file are measured anew")
    add("--total", type=harness.above_zero, default=5400.0, metavar="SECONDS", help="for everything (default: 5400)")
    made.add_measuring(budget=30.0)
    return made


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows that the arguments ask for."""
    names = list(NETWORKS) if args.networks == "all" else harness.names("--networks", args.networks, "network",
                                                                        NETWORKS)
    for what in [args.only] if args.only else WORKLOADS:
        for name in names:
            if what == "inference" or NETWORKS[name].trains:
                yield from (Row(what, name, size, args.mode) for size in args.batch_sizes)


def measure(row: Row, sides: Sequence[str], settings: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Compare implementations of a network; in groups around gluon_amp where the memory does not hold all at once."""
    harness.say(str(row))
    commands = {name: harness.command(row.what, name, {**settings, **_settings(row)}) for name in sides}
    found: dict[str, Any] = {"row": row._asdict(), "groups": [], "memory": {}, "dtype": {}, "notes": {},
                             "failures": {}, "other_load": 0.0}
    waiting = [name for name in sides if name != OURS]
    while waiting:
        group = harness.compare([commands[name] for name in (OURS, *waiting)], plan)
        for track in group.tracks:
            found["memory"].setdefault(track.name, track.peak_memory)
            found["dtype"].setdefault(track.name, track.about["dtype"])
            found["notes"].setdefault(track.name, track.about["notes"])
        found["groups"].append({track.name: track.round_seconds for track in group.tracks})
        found["failures"].update({name: str(failure) for name, failure in group.failures.items()})
        found["other_load"] = max(found["other_load"], group.other_load)
        waiting = list(group.waiting)
    return found


def _settings(row: Row) -> dict[str, Any]:
    return {"network": row.network, "batch_size": row.batch_size, "mode": row.mode}


def against(result: Result) -> dict[str, Spread]:
    """Return how many times as fast as each other side gluon_amp is."""
    return {name: harness.ratios(times, group[OURS]) for group in result["groups"] if group.get(OURS)
            for name, times in group.items() if name != OURS}


def step(result: Result, name: str = OURS) -> float:
    """Return the median seconds of a step."""
    return statistics.median(next(group[name] for group in result["groups"] if group.get(name)))


def collect(args: argparse.Namespace, sides: Mapping[Row, Sequence[str]], keep: bool, again: str = "",
            repeat: Callable[[Result], bool] = lambda found: False) -> list[dict[str, Any]]:
    """Measure rows, write the file after each, and return all results in it.

    Parameters
    ----------
    args : Namespace
        Of `parser`.
    sides : mapping of Row to sequence of str
        The implementations of each row.
    keep : bool
        Whether rows that the file has are kept, and not measured.
    again : str
        Networks whose rows are measured all the same.
    repeat : callable
        Says whether a new result is measured once more, because it would be a failure.
    """
    end, path, settings = monotonic() + args.total, Path(args.output), _common(args)
    anew = harness.names("--again", again, "network", NETWORKS) if again else ()
    results = [each for each in _kept(path, settings) if each["row"]["network"] not in anew] if keep else []
    done = {Row(**each["row"]) for each in results}
    waiting = [row for row in sides if row not in done]
    if done:
        harness.say(f"{len(done)} rows were measured before, and are kept from {path}")
    for number, row in enumerate(waiting):
        if monotonic() > end:
            harness.say("Not measured, the time was over: " + "; ".join(map(str, waiting[number:])))
            break
        found = measure(row, sides[row], settings, harness.plan(args))
        if repeat(found):
            harness.say("measured once more, because it would be a failure")
            found = measure(row, sides[row], settings, harness.plan(args))
        results.append(found)
        write(args, results)
    return results


def _common(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all rows share; sets the number of threads."""
    return {"device": args.device, "dtype": args.dtype, "seed": args.seed, "threads": harness.use_threads(args)}


def write(args: argparse.Namespace, results: Sequence[Result]) -> None:
    """Write all results."""
    harness.write_json(args.output, {"format": FORMAT, "settings": _common(args), "results": results})


def _kept(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a file that was measured alike."""
    if not path.exists():
        return []
    found, here = json.loads(path.read_text(encoding="utf-8")), harness.describe()
    kinds = [(each.get("kind"), each.get("cpu_family_model"), each.get("isa_limit")) for each in
             (found.get("machine", {}), here)]
    if found.get("format") != FORMAT or kinds[0] != kinds[1] or found["settings"] != settings:
        raise UsageError(f"{path} was measured with other settings, on another machine, or by another version of this "
                         "script: name another file by --output, or remove it")
    return list(found["results"])


def kernels(row: Row, settings: Mapping[str, Any]) -> list[str]:
    """Name the kernels that take most of gluon_amp's time in a step, with their shares."""
    plain = harness.command(row.what, OURS, {**settings, **_settings(row)})
    with harness.Child(plain._replace(environment={**plain.environment, "DNNL_VERBOSE": "1"})) as child:
        child.ask("run", steps=2)
        before = len(child.log())
        took = child.ask("run", steps=1)["seconds"][0]
        log = child.log()[before:]
    times: dict[str, float] = {}
    for each in harness.executions(log):
        name = f"{each.primitive} {each.direction} {each.kernel}"
        times[name] = times.get(name, 0.0) + each.seconds
    times[_OUTSIDE] = max(0.0, took - sum(times.values()))
    most = sorted(times, key=lambda name: -times[name])[:_KERNELS]
    return [f"{name} {times[name] / took:.0%}" for name in most]


def _name_kernels(results: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Note the kernels of the rows that gain least."""
    for each in sorted((each for each in results if REFERENCE in against(each)), key=_speed)[:_LEAST]:
        if "kernels" not in each:
            try:
                each["kernels"] = kernels(Row(**each["row"]), _common(args))
            except (ChildFailed, UsageError) as failure:
                each["kernels"] = [str(failure)]


def _speed(result: Result) -> float:
    return against(result)[REFERENCE].median


def _share_of_memory(result: Result) -> float:
    return float(result["memory"][OURS] / result["memory"][REFERENCE])


def failures(results: Sequence[Result]) -> list[str]:
    """Name the rows that are slower than FP32, take more memory, or were not compared."""
    found = []
    for each in results:
        row = Row(**each["row"])
        if REFERENCE not in against(each):
            found.append(f"not compared: {row}: {'; '.join(each['failures'].values())}")
            continue
        if round(_speed(each), 2) < 1.0:
            found.append(f"slower than FP32: {row}: {_speed(each):.2f}x")
        if row.batch_size >= FROM_BATCH and round(_share_of_memory(each), 2) > 1.0:
            found.append(f"more memory than FP32: {row}: {_share_of_memory(each):.2f}x")
    return found


def markdown(results: Sequence[Result]) -> str:
    """Return the table, with the rows that gain least first."""
    compared = sorted((each for each in results if REFERENCE in against(each)), key=_speed)
    others = list(dict.fromkeys(name for each in compared for name in against(each) if name != REFERENCE))
    lines = []
    for each in compared:
        row, speeds = Row(**each["row"]), against(each)
        lines.append([row.network, row.what, str(row.batch_size), each["dtype"][OURS], harness.seconds(step(each)),
                      f"**{speeds[REFERENCE].median:.2f}x** ({speeds[REFERENCE].low:.2f}-{speeds[REFERENCE].high:.2f})",
                      f"{_share_of_memory(each):.2f}x",
                      *(str(speeds[name]) if name in speeds else "fails" if name in each["failures"] else ""
                        for name in others), "; ".join(each.get("kernels", ()))])
    heading = ["network", "", "batch", "type chosen", "gluon_amp", "against MXNet FP32", "peak memory",
               *(f"against {harness.implementation(name).label}" for name in others), "most of a step"]
    if not compared:
        return ""
    mean = statistics.geometric_mean(map(_speed, compared))
    return harness.table(heading, lines) + f"\nGeometric mean of {len(compared)} rows: {mean:.2f}x.\n"


def _sides(args: argparse.Namespace, row: Row) -> list[str]:
    wanted = harness.names("--compare", args.compare)
    if args.torch and getattr(NETWORKS[row.network], "peer", ""):
        wanted += ["torch"] if harness.kind() in ("AVX2", "AVX512 without BF16") else ["torch", "torch-amp"]
    return [name for name in dict.fromkeys([OURS, REFERENCE, *wanted]) if harness.runs(name, row.what)]


def run(argv: Sequence[str] | None) -> int:
    made = parser(__doc__, "zoo.json", "all")
    made.add_argument("--add", action="store_true", help="keep the rows of the file, and measure what is missing")
    made.add_argument("--compare", metavar="NAMES", default=f"{REFERENCE},{OURS}",
                      help=f"more sides, of {', '.join(harness.IMPLEMENTATIONS)}, and amp~ with the name of a pass")
    made.add_argument("--torch", action="store_true", help="the same architectures in PyTorch, torchvision and timm")
    args = made.parse_args(argv)
    if args.torch and harness.torch_python() is None:
        raise UsageError("--torch needs an interpreter with torch, torchvision and timm: name it in TORCH_PYTHON")
    results = collect(args, {row: _sides(args, row) for row in rows(args)}, args.add, args.again)
    _name_kernels(results, args)
    write(args, results)
    print(harness.machine_line(), "", markdown(results), *failures(results), sep="\n")
    harness.write_json(args.json, {"results": results})
    return 1 if failures(results) else 0


if __name__ == "__main__":
    sys.exit(harness.main(run))
