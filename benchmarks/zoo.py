"""Measure the networks of the model zoos, training and converted, with gluon_amp against MXNet FP32.

    python benchmarks/zoo.py                                    # or make zoo
    python benchmarks/zoo.py --networks xception,fcn_resnet50_voc --only training --add
    python benchmarks/zoo.py --mode eager --networks resnet50_v1,mobilenetv2_1.0,bert

Every row has a process for each side, in turns. What is measured is written after each row; ``--add`` keeps it and
measures what is missing. It fails where gluon_amp is slower than FP32, or takes more memory at batch 4 and more.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from benchmarks.harness import cli, machine, report, tables
from benchmarks.harness.children import Child, ChildCommand
from benchmarks.harness.commands import command, peer_python, runs_here
from benchmarks.harness.compare import Plan, compare
from benchmarks.harness.errors import ChildFailed, Refused, UsageError, reason
from benchmarks.harness.onednn import executions
from benchmarks.harness.registry import OURS, REFERENCE, TORCH
from benchmarks.networks.zoo_table import MEMBERS

WORKLOADS = {"training": "zoo-training", "inference": "zoo-inference"}
MODES = ("static", "plain", "eager")
FROM_BATCH = 4  # on memory counts: below, weights outweigh activations
_PEERS = ("torch", "torch-amp")
_LEAST = 3  # rows whose kernels are named
_KERNELS = 3
_OTHERS = "outside of oneDNN"


class Row(NamedTuple):
    """What one line of the table is about."""

    what: str  # a key of `WORKLOADS`
    network: str
    batch_size: int
    mode: str

    @property
    def key(self) -> str:
        """Return the row's name in the file."""
        return f"{self.what} {self.network} {self.batch_size} {self.mode}"


def _parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--only", choices=WORKLOADS, help="training or inference (default: both)")
    add("--networks", metavar="NAMES", help=f"some of {', '.join(MEMBERS)} (default: all)")
    add("--batch-sizes", metavar="SIZES", type=cli.integers, default=(4,), help="with commas (default: 4)")
    add("--mode", choices=MODES, default="static", help="hybridized with static memory or without, or not at all")
    add("--torch", action="store_true", help="measure the same architectures of torchvision and timm, too")
    add("--output", metavar="FILE", type=cli.writable, default="zoo.json", help="default: zoo.json")
    add("--add", action="store_true", help="keep what the file holds, and measure what is missing")
    add("--total", type=cli.seconds, default=5400.0, metavar="SECONDS", help="for everything (default: 5400)")
    cli.add_measuring(parser, budget=30.0, plots=False)
    return parser


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield what the arguments ask for."""
    names = list(MEMBERS) if args.networks is None else cli.names("--networks", args.networks, "network", MEMBERS)
    for what in [args.only] if args.only else WORKLOADS:
        for name in names:
            if what == "inference" or MEMBERS[name].trains:
                yield from (Row(what, name, batch_size, args.mode) for batch_size in args.batch_sizes)


def _sides(row: Row, with_torch: bool) -> list[str]:
    peers = [name for name in _PEERS if with_torch and row.what == "training" and MEMBERS[row.network].peer
             and runs_here(name)]
    return [REFERENCE, OURS, *peers]


def measure(row: Row, sides: Sequence[str], settings: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return what was measured of a row: seconds by rounds, peak memory, types and failures."""
    given = {**settings, "network": row.network, "batch_size": row.batch_size, "mode": row.mode}
    commands = [command(WORKLOADS[row.what], name, given) for name in sides]
    with report.TqdmProgress() as progress:
        progress.say(row.key)
        found = compare(commands, plan, progress)
    return {"row": row._asdict(), "failures": {name: reason(each) for name, each in found.failures.items()},
            "seconds": {track.name: track.round_seconds for track in found.tracks},
            "memory": {track.name: track.peak_memory for track in found.tracks},
            "dtype": {track.name: track.about["dtype"] for track in found.tracks},
            "other_load": found.other_load}


def kernels(row: Row, settings: Mapping[str, Any]) -> list[str]:
    """Name what takes most of gluon_amp's time in a step, with its share."""
    given = {**settings, "network": row.network, "batch_size": row.batch_size, "mode": row.mode}
    plain = command(WORKLOADS[row.what], OURS, given)
    with Child(ChildCommand(OURS, plain.argv, {**plain.environment, "DNNL_VERBOSE": "1"})) as child:
        child.ready()
        child.ask("run", steps=2)
        before = len(child.log())
        step = child.ask("run", steps=1)["seconds"][0]
        log = child.log()[before:]
    taken: dict[str, float] = {}
    for each in executions(log):
        name = f"{each.primitive} {each.kernel}"
        taken[name] = taken.get(name, 0.0) + each.seconds
    taken[_OTHERS] = max(0.0, step - sum(taken.values()))
    most = sorted(taken.items(), key=lambda item: -item[1])[:_KERNELS]
    return [f"{name} {seconds / step:.0%}" for name, seconds in most]


def ratios(result: Mapping[str, Any], of: str = REFERENCE) -> list[float]:
    """Return how many times as fast as another side gluon_amp is, round by round; empty where one did not run."""
    seconds = result["seconds"]
    if OURS not in seconds or of not in seconds:
        return []
    return [theirs / ours for ours, theirs in zip(seconds[OURS], seconds[of])]


def share_of_memory(result: Mapping[str, Any]) -> float:
    """Return gluon_amp's peak memory as a share of FP32's."""
    return float(result["memory"][OURS] / result["memory"][REFERENCE])


def failures(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the rows that are slower than FP32, take more memory, or were not compared."""
    found = []
    for each in results:
        row, speed = Row(**each["row"]), ratios(each)
        if not speed:
            found.append(f"not compared: {row.key}: {'; '.join(each['failures'].values())}")
        elif round(statistics.median(speed), 2) < 1.0:
            found.append(f"slower than FP32: {row.key}: {statistics.median(speed):.2f}x")
        if speed and row.batch_size >= FROM_BATCH and round(share_of_memory(each), 2) > 1.0:
            found.append(f"more memory than FP32: {row.key}: {share_of_memory(each):.2f}x")
    return found


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table, what gains least first, and the failures."""
    compared = sorted((each for each in measured["results"] if ratios(each)),
                      key=lambda each: statistics.median(ratios(each)))
    peers = [name for name in _PEERS if any(name in each["seconds"] for each in compared)]
    lines = []
    for each in compared:
        row, speed = Row(**each["row"]), ratios(each)
        against = [f"{statistics.median(one):.2f}x" if one else "" for one in (ratios(each, name) for name in peers)]
        lines.append([row.network, row.what, str(row.batch_size), each["dtype"][OURS],
                      tables.seconds(statistics.median(each["seconds"][OURS])),
                      f"**{statistics.median(speed):.2f}x** ({min(speed):.2f}-{max(speed):.2f})",
                      f"{share_of_memory(each):.2f}x", *against,
                      "; ".join(each.get("kernels", ()))])
    heading = ["network", "", "batch", "type chosen", "gluon_amp", "against MXNet FP32", "peak memory",
               *(f"against {name}" for name in peers), "what takes most of a step"]
    middle = statistics.median(statistics.median(ratios(each)) for each in compared) if compared else math.nan
    text = tables.table(heading, lines) + f"\nMedian of {len(compared)} rows: {middle:.2f}x.\n"
    return "\n".join([text, *failures(measured["results"])])


def _known(path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    if not args.add or not path.exists():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["results"])


def _refuse_torch_without_zoos(args: argparse.Namespace) -> None:
    if args.torch and peer_python(TORCH) is None:
        raise UsageError("--torch needs an interpreter with torch, torchvision and timm: name it in TORCH_PYTHON")


def run(argv: Sequence[str] | None) -> int:
    args = _parser().parse_args(argv)
    _refuse_torch_without_zoos(args)
    end, path = monotonic() + args.total, Path(args.output)
    settings = {"device": args.device, "dtype": args.dtype, "seed": args.seed, "threads": cli.use_threads(args)}
    results = _known(path, args)
    done = {Row(**each["row"]) for each in results}
    waiting = [row for row in rows(args) if row not in done]
    measured = {"machine": machine.describe(), "versions": machine.versions(), "threads": args.threads,
                "results": results}
    for number, row in enumerate(waiting):
        if monotonic() > end:
            print(f"Not measured, the time was over: {', '.join(row.key for row in waiting[number:])}", file=sys.stderr)
            break
        print(f"{number + 1} of {len(waiting)}: {row.key}", file=sys.stderr, flush=True)
        results.append(measure(row, _sides(row, args.torch), settings, cli.plan(args)))
        cli.write_json(path, measured)
    _name_kernels(results, settings)
    cli.write_json(path, measured)
    print(markdown(measured))
    return 1 if failures(results) else 0


def _name_kernels(results: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> None:
    """Note what takes most of a step in the rows that gain least."""
    compared = sorted((each for each in results if ratios(each)), key=lambda each: statistics.median(ratios(each)))
    for each in compared[:_LEAST]:
        if "kernels" not in each:
            try:
                each["kernels"] = kernels(Row(**each["row"]), settings)
            except (ChildFailed, Refused) as failure:
                each["kernels"] = [reason(failure)]


if __name__ == "__main__":
    sys.exit(cli.main(run))
