"""Show where the time of a step goes: oneDNN's primitives, against what the machine can compute and move.

    python benchmarks/primitives.py --network ssd512 --batch-size 8
    python benchmarks/primitives.py --network resnet50 --workload inference --implementation mxnet-amp-amx

Time outside oneDNN is MXNet's own operators, the optimizer and Python. A primitive's arithmetic and traffic follow
from its shapes; the ceilings are the fastest convolution of each type and the fastest copy that were measured here.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any, Mapping, Sequence

from benchmarks.harness import cli
from benchmarks.harness.children import Child, ChildCommand
from benchmarks.harness.commands import command
from benchmarks.harness.onednn import Execution, executions, table_of
from benchmarks.harness.registry import check
from benchmarks.harness.sizes import COSTS
from benchmarks.harness.suites import Suite, settings_of

_ATTRIBUTES = ("primitive", "kernel", "direction", "tensors", "shape")


def profile(workload: str, name: str, settings: Mapping[str, Any], steps: int = 3
            ) -> tuple[dict[str, Any], list[Execution], float]:
    """Run an implementation; return what it says of itself, the primitives of its median step, and its seconds."""
    plain = command(workload, name, settings)
    logged = ChildCommand(name, plain.argv, {**plain.environment, "DNNL_VERBOSE": "1"})
    with Child(logged) as child:
        about = child.ready()["about"]
        for _ in range(2):
            child.ask("run", steps=1)
        found = []
        for _ in range(steps):
            before = len(child.log())
            seconds = child.ask("run", steps=1)["seconds"][0]
            found.append((seconds, child.log()[before:]))
    median = statistics.median_low(seconds for seconds, _ in found)
    log = next(log for seconds, log in found if seconds == median)
    return about, list(executions(log)), median


def measure_ceilings() -> dict[str, float]:
    """Return the machine's limits: ``f32`` and ``bf16`` in 1e9 operations a second, ``memory`` in 1e9 bytes a second.

    They are those of the fastest convolutions and of a copy, measured in a process of gluon_amp.
    """
    about, runs, _ = profile("ceilings", "amp", {"device": "cpu", "dtype": None})
    found = {"f32": 0.0, "bf16": 0.0, "memory": about["memory"]}
    for run in runs:
        if run.gflop:
            found[run.precision] = max(found[run.precision], run.gflop / run.seconds)
    return found


def run(argv: Sequence[str] | None) -> None:
    parser = cli.Parser(__doc__, json_help="write every primitive of the step")
    parser.add_argument("--network", default="ssd512", choices=COSTS, help="default: ssd512")
    parser.add_argument("--workload", default="training", choices=("training", "inference"))
    parser.add_argument("--implementation", default="amp", help="default: amp")
    parser.add_argument("--batch-size", type=cli.positive, default=8, help="default: 8")
    parser.add_argument("--by", default="primitive,kernel,direction",
                        help=f"what makes a row, some of {','.join(_ATTRIBUTES)}")
    parser.add_argument("--small", action="store_true", help="a tiny network, to see whether everything works")
    args = parser.parse_args(argv)
    by = cli.names("--by", args.by, "attribute", _ATTRIBUTES)
    common = {"device": "cpu", "dtype": None, "seed": 0, "threads": cli.use_threads(args), "small": args.small}
    workload, settings = settings_of(Suite(args.workload, {}), args.network, args.batch_size, common)
    check(workload, args.implementation)
    ceilings = measure_ceilings()
    _, runs, step = profile(workload, args.implementation, settings)
    what = f"{args.network}, {args.workload}, batch {args.batch_size}, {args.implementation}"
    cli.show(args, {"title": what, "seconds": step, "ceilings": ceilings, "table": table_of(runs, step, by, ceilings),
                    "primitives": [vars(run) for run in runs]}, markdown)


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table of a step and what it is compared to."""
    ceilings = ", ".join(f"{name} {value:.0f} {'GB/s' if name == 'memory' else 'GFLOP/s'}"
                         for name, value in measured["ceilings"].items() if value)
    milliseconds = f"{measured['seconds'] * 1e3:.1f} ms"
    return f"{measured['title']}: {milliseconds} a step; ceilings: {ceilings}\n\n{measured['table']}"



if __name__ == "__main__":
    sys.exit(cli.main(run))
