"""Show that mixed precision trains to the same result: SSD on handwritten digits, FP32 beside gluon_amp.

    python benchmarks/digits.py      # or make digits: at most 6 minutes

Both runs start from the same weights and see the same images in the same order, each in a process of its own, and take
turns. The learning rate follows the share of the steps or of the time that is over, whichever is larger: a slow machine
takes fewer steps and still comes to the end of the schedule. The exit code is 1 where the runs differ by more than
rounding does, or do not reach the mAP that is asked for.
"""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Mapping, Sequence

from benchmarks import harness, make_digits_voc
from benchmarks.harness import Spread

STEPS, TURN, FIRST_TURN = 600, 20, 4  # steps of each run; a turn takes a thirtieth of the time at most
BUDGET, _TRAINING_SHARE = 320.0, 0.75  # the rest is for the evaluation
FEW_IMAGES = 200  # that are evaluated where the time did not allow all steps
LEAST_MAP = 0.6
LARGEST_DIFFERENCE = 1.5  # points: hundredths of mAP, after all steps; a network that has learned half varies more
LARGEST_CONVERSION_CHANGE = 0.5
JUDGED_STEPS = 300  # fewer do not teach enough to expect this mAP: the losses are compared
LARGEST_LOSS_CHANGE = 0.1
_AVERAGED = 50  # steps: one batch's loss says little

Run = Mapping[str, Any]  # what `voc.Half.finish` returns


def points(fp32: Run, amp: Run) -> float:
    """Return how far AMP's mAP lies above FP32's, in hundredths."""
    return 100.0 * (float(amp["mean_ap"]) - float(fp32["mean_ap"]))


def conversion_points(run: Run) -> float:
    """Return how far a trained network's mAP rises by conversion, in hundredths."""
    return 100.0 * (float(run["converted_mean_ap"]) - float(run["mean_ap"]))


def final_loss(run: Run, part: str) -> float:
    """Return a loss (``cls``, ``box`` or ``total``) as the mean of the last steps."""
    tail = run["losses"][part][-_AVERAGED:]
    return float(sum(tail) / len(tail))


def failures(fp32: Run, amp: Run) -> list[str]:
    """Return what is wrong with a pair of runs, nothing when they agree; a figure that is not a number fails."""
    found, runs = [], (("FP32", fp32), ("AMP", amp))
    if fp32["initial_weights"] != amp["initial_weights"]:
        found.append("the runs did not start from the same weights, so they cannot be compared")
    found += [f"{label}: a loss is not finite" for label, run in runs
              if not all(map(math.isfinite, run["losses"]["total"]))]
    if fp32["steps"] < JUDGED_STEPS:
        theirs, ours = final_loss(fp32, "total"), final_loss(amp, "total")
        if not abs(ours - theirs) <= LARGEST_LOSS_CHANGE * theirs:
            found.append(f"AMP's loss is {ours:.3f}, FP32's {theirs:.3f}: expected at most {LARGEST_LOSS_CHANGE:.0%} "
                         "between them")
        return found
    found += [f"{label}: mAP {run['mean_ap']:.3f}, expected {LEAST_MAP} at least" for label, run in runs
              if not run["mean_ap"] >= LEAST_MAP]
    largest = LARGEST_DIFFERENCE * max(1.0, STEPS / fp32["steps"])
    if not abs(points(fp32, amp)) <= largest:
        found.append(f"AMP's mAP is {points(fp32, amp):+.2f} points from FP32's, expected {largest:.1f} at most")
    found += [f"{label}: conversion changes the mAP by {conversion_points(run):+.2f} points, expected "
              f"{LARGEST_CONVERSION_CHANGE} at most" for label, run in runs
              if not abs(conversion_points(run)) <= LARGEST_CONVERSION_CHANGE]
    return found


def train(commands: Sequence[harness.Command], steps: int, limit: float) -> tuple[list[Run], Spread]:
    """Train both halves in turns until the steps or the time are over; return the runs, and AMP's speed by turns."""
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(harness.Child(each)) for each in commands]
        begin, done, progress, step = monotonic(), 0, 0.0, 0.0  # and seconds of a step of both
        times: list[list[float]] = [[] for _ in halves]
        while progress < 1.0:
            count = FIRST_TURN if not done else max(1, int(min(TURN, limit / 30 / step)))
            count, started = min(count, steps - done), monotonic()
            until = min(1.0, max((done + count) / steps, (started - begin + count * step) / limit))
            for place in ((0, 1), (1, 0))[len(times[0]) % 2]:
                times[place].append(halves[place].ask("run", steps=count, begin=progress, end=until))
            step, done, progress = (monotonic() - started) / count, done + count, until
        if done < steps:
            harness.say(f"the time allowed {done} of {steps} steps")
        images = FEW_IMAGES if done < steps else None
        return [half.ask("finish", images=images) for half in halves], harness.ratios(*times)


def table(fp32: Run, amp: Run, speed: Spread) -> str:
    """Return the two runs side by side, with their difference or ratio in the last column."""
    lines = [["mAP", *(f"{run['mean_ap']:.4f}" for run in (fp32, amp)), f"{points(fp32, amp):+.2f} points"]]
    for name, theirs in fp32["average_precision"].items():
        ours = amp["average_precision"].get(name, math.nan)
        lines.append([name, f"{theirs:.3f}", f"{ours:.3f}", f"{100 * (ours - theirs):+.1f}"])
    lines.append([f"mAP, converted ({amp['converted_dtype']})",
                  *(f"{run['converted_mean_ap']:.4f}" for run in (fp32, amp)),
                  f"{conversion_points(fp32):+.2f} points for FP32's"])
    for part, text in (("cls", "class loss"), ("box", "box loss")):
        theirs, ours = final_loss(fp32, part), final_loss(amp, part)
        lines.append([f"{text}, last {_AVERAGED} steps", f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}"])
    lines.append(["samples/s, without loading", *(f"{run['samples_per_second']:.1f}" for run in (fp32, amp)),
                  str(speed)])
    lines.append(["peak memory", *(f"{run['peak_memory'] / 1e9:.2f} GB" for run in (fp32, amp)),
                  f"{amp['peak_memory'] / fp32['peak_memory']:.2f}x"])
    return harness.table(["", "MXNet, float32", f"gluon_amp, {amp['dtype']}", "gluon_amp vs MXNet"], lines)


def run(argv: Sequence[str] | None) -> int:
    begin, load, parser = monotonic(), harness.OtherLoad(), harness.Parser(__doc__)
    add = parser.add_argument
    add("--data", metavar="DIR", help="a Pascal VOC directory (default: digits, made in build/ once)")
    add("--steps", type=harness.integer(1), help=f"of each run (default: {STEPS}, or what the budget allows)")
    add("--data-shape", type=harness.integer(32), help="side of the network's input in pixels (default: 128)")
    add("--budget", type=harness.above_zero, default=BUDGET, help="seconds in all without --steps (default: 320)")
    add("--batch-size", type=harness.integer(1), default=16, help="default: 16")
    add("--seed", type=harness.integer(0), default=0, help="of weights and order, the same for both (default: 0)")
    add("--dtype", help="bfloat16 or float16 (default: chosen by the machine)")
    args = parser.parse_args(argv)
    build = Path(__file__).resolve().parents[1] / "build"
    data = args.data or str(make_digits_voc.make(build / "digits-voc"))
    common = {"data_dir": data, "batch_size": args.batch_size, "seed": args.seed, "steps": args.steps or STEPS,
              "side": args.data_shape, "environment": {"OMP_NUM_THREADS": str(harness.use_threads(args))}}
    commands = [harness.serving("FP32", "voc:Half", amp=False, dtype=None, **common),
                harness.serving("AMP", "voc:Half", amp=True, dtype=args.dtype, **common)]
    limit = math.inf if args.steps else begin + _TRAINING_SHARE * args.budget - monotonic()
    (fp32, amp), speed = train(commands, args.steps or STEPS, limit)
    found = failures(fp32, amp)
    print(table(fp32, amp, speed), harness.machine_line(),
          f"{amp['side']}x{amp['side']} pixels, batch {args.batch_size}, {amp['steps']} steps, seed {args.seed}, "
          f"{args.threads} threads; {harness.load_line(load.share())}", sep="\n")
    if amp["dtype"] == "float32":
        print("gluon_amp keeps FP32 on this machine: both runs trained in FP32")
    if fp32["steps"] < JUDGED_STEPS:
        print(f"{fp32['steps']} steps are too few to expect a mAP ({JUDGED_STEPS} do): the losses were compared")
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    harness.write_json(args.json, {"fp32": fp32, "amp": amp, "points": points(fp32, amp), "failures": found,
                                   "speed_ratio": speed})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(harness.main(run))
