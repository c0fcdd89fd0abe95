"""Measure what the default of `amp.init()` and of conversions loses against the fastest mode of each network.

    python benchmarks/regret.py                   # or make regret: a handful of networks
    python benchmarks/regret.py --networks all    # all of the zoo; it goes on where the last run ended
    python benchmarks/regret.py --again bert      # measure the rows of a network anew
    python benchmarks/regret.py --quick           # two minutes, bound 1.15, nothing is kept: for busy machines

Modes are MXNet in FP32, MXNet's AMP, and gluon_amp in FP32, in bfloat16 and as chosen, each a process of its own, in
turns. The regret is the time of the default over that of the fastest mode, the median of the rounds. A row above the
bound is measured once more, and that counts; it fails where a row stays above it, with --quick in four of five rounds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from benchmarks import harness
from benchmarks.harness import CONTRIB, OURS, REFERENCE
from benchmarks.zoo import Result, Row, against, collect, parser, rows, step

BOUND, QUICK_BOUND, QUICK_SHARE, QUICK_TOTAL = 1.03, 1.15, 0.8, 90.0
MODES = (OURS, REFERENCE, CONTRIB, "amp-fp32", "amp-bf16")
HANDFUL = "resnet18_v1,mobilenetv2_1.0,squeezenet1.1,shufflenet_v2,cifar_resnet20_v1,bert"
QUICK = "resnet18_v1,mobilenetv2_1.0"


def regret(result: Result) -> tuple[float, str]:
    """Return the regret of a row, and the name of its fastest mode."""
    slowest = {OURS: 1.0, **{name: 1.0 / speed.median for name, speed in against(result).items()}}
    fastest = max(slowest, key=lambda name: slowest[name])
    return slowest[fastest], fastest


def above(results: Sequence[Result], bound: float, share: float = 0.0) -> list[Result]:
    """Return the rows whose regret is above a bound, in a share of the rounds at least, and those not compared."""
    return [each for each in results if not against(each) or (
        round(regret(each)[0], 2) > bound and _share_above(each, bound) >= share)]


def _share_above(result: Result, bound: float) -> float:
    """Return the share of the rounds in which the default took longer than its fastest mode by more than a bound."""
    fastest = regret(result)[1]
    group = next(group for group in result["groups"] if fastest in group)
    rounds = [ours > bound * theirs for ours, theirs in zip(group[OURS], group[fastest])]
    return sum(rounds) / len(rounds)


def markdown(results: Sequence[Result]) -> str:
    """Return the table, the largest regret first, and the geometric mean."""
    compared = sorted((each for each in results if against(each)), key=lambda each: -regret(each)[0])
    lines = []
    for each in compared:
        row, (value, fastest) = Row(**each["row"]), regret(each)
        times = [harness.seconds(step(each, name)) if name == OURS or name in against(each) else "fails"
                 for name in MODES]
        lines.append([row.network, row.what, str(row.batch_size), each["dtype"][OURS], *times, f"**{value:.2f}x**",
                      "" if fastest == OURS else harness.implementation(fastest).label])
    heading = ["network", "", "batch", "type chosen", *(harness.implementation(name).label for name in MODES),
               "regret", "faster"]
    if not compared:
        return ""
    mean = statistics.geometric_mean(regret(each)[0] for each in compared)
    return harness.table(heading, lines) + f"\nGeometric mean of {len(compared)} rows: {mean:.3f}x.\n"


def wrong(result: Result, bound: float) -> str:
    """Say what was chosen, and what would have been faster."""
    row = Row(**result["row"])
    if not against(result):
        return f"not compared: {row}: {'; '.join(result['failures'].values())}"
    (value, fastest), notes = regret(result), "; ".join(result["notes"][OURS])
    return (f"wrong choice: {row}: {result['dtype'][OURS]} takes {value:.2f} times as long as "
            f"{harness.implementation(fastest).label}, the bound is {bound:.2f}. {notes}")


def run(argv: Sequence[str] | None) -> int:
    made = parser(__doc__, "regret.json", HANDFUL)
    made.add_argument("--bound", type=harness.above_zero, default=BOUND, help=f"the largest regret (default: {BOUND})")
    made.add_argument("--quick", action="store_true", help="for continuous integration")
    if made.parse_args(argv).quick:
        made.set_defaults(networks=QUICK, only="training", bound=QUICK_BOUND, rounds=5, steps=3, total=QUICK_TOTAL)
    args = made.parse_args(argv)
    share = QUICK_SHARE if args.quick else 0.0
    with tempfile.TemporaryDirectory() as folder:
        args.output = str(Path(folder) / "regret.json") if args.quick else args.output
        results = collect(args, dict.fromkeys(rows(args), MODES), keep=not args.quick, again=args.again,
                          repeat=lambda found: bool(above([found], args.bound, share)))
    found = above(results, args.bound, share)
    print(harness.machine_line(), "", markdown(results), *(wrong(each, args.bound) for each in found), sep="\n")
    harness.write_json(args.json, {"results": results, "bound": args.bound})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(harness.main(run))
