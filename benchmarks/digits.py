"""Show that mixed precision trains to the same result: SSD on handwritten digits, FP32 beside gluon_amp.

Both runs start from the same weights and see the same images in the same order, each in a process of its
own, and take turns. Steps and image size follow from steps that are measured first, so that all of it ends within the
budget. The exit code is 0 when both reach the mAP that is asked for and differ by little, 1 when they do not.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness import cli, machine, report
from benchmarks.harness.children import Child, ChildCommand
from benchmarks.harness.commands import worker_command
from benchmarks.harness.errors import UsageError
from benchmarks.harness.stats import Spread
from benchmarks.voc import turns
from benchmarks.voc.digits import make

PROJECT = Path(__file__).resolve().parents[1]
DEFAULT_PLOT = PROJECT / "build" / "digits.png"

IMAGES, VAL, SIZE, DATA_SEED = 3000, 600, 128, 0
STEPS = turns.STEPS
BUDGET = 320.0
LEAST_MAP = 0.6
LARGEST_DIFFERENCE = 1.5  # points: hundredths of mAP, after all steps; a network that has learned half varies more
LARGEST_CONVERSION_CHANGE = 0.5
JUDGED_STEPS = 300  # fewer do not teach enough to expect this mAP: the losses are compared
LARGEST_LOSS_CHANGE = 0.1
_AVERAGED = 50  # steps: one batch's loss says little

Run = Mapping[str, Any]


def _parser() -> cli.Parser:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--data", metavar="DIR", help="a Pascal VOC directory (default: digits, made in build/ once)")
    add("--steps", type=cli.positive, help=f"updates of each run (default: {STEPS}, or what the budget allows)")
    add("--data-shape", type=cli.positive,
        help="side of the network's input in pixels (default: 128, or less on slow machines)")
    add("--budget", type=cli.seconds, default=BUDGET, help=f"seconds in all without --steps (default: {BUDGET:.0f})")
    add("--batch-size", type=cli.positive, default=16, help="default: 16")
    add("--seed", type=cli.integer(0), default=0, help="of weights and order, the same for both runs (default: 0)")
    add("--dtype", help="bfloat16 or float16 (default: what the machine is good at)")
    add("--plot", metavar="PATH", type=cli.writable, help="where the losses are drawn (default: build/digits.png)")
    return parser


def digits_directory(images: int = IMAGES, val: int = VAL, progress: bool = True) -> Path:
    """Return the digits in Pascal VOC's format, made below ``build/`` the first time."""
    name = f"digits-voc-{images}-{val}-{SIZE}-{DATA_SEED}"
    return make(PROJECT / "build" / name, images, val, SIZE, DATA_SEED, progress)


def command(name: str, arguments: Mapping[str, Any], threads: int) -> ChildCommand:
    """Return how to start one half, see `voc.worker`."""
    return worker_command(name, sys.executable, "voc.worker:Half", arguments, {"OMP_NUM_THREADS": str(threads)})


def failures(fp32: Run, amp: Run) -> list[str]:
    """Return what is wrong with a pair of runs, nothing when they agree.

    Parameters
    ----------
    fp32, amp : mapping
        What the two runs gave, see `training.TrainingResult`.
    """
    found = []
    if fp32["initial_weights"] != amp["initial_weights"]:
        found.append("the runs did not start from the same weights, so they cannot be compared")
    for label, run in (("FP32", fp32), ("AMP", amp)):
        if not all(math.isfinite(loss) for loss in run["losses"]["total"]):
            found.append(f"{label}: a loss is not finite")
    return found + (_failures_of_map(fp32, amp) if is_judged(fp32) else _failures_of_loss(fp32, amp))


def is_judged(fp32: Run) -> bool:
    """Return whether there were enough steps to expect a mAP."""
    return bool(fp32["settings"]["steps"] >= JUDGED_STEPS)


def _failures_of_map(fp32: Run, amp: Run) -> list[str]:
    # written so that a mAP that is not a number fails
    found = [f"{label}: mAP {run['mean_ap']:.3f}, expected {LEAST_MAP} at least"
             for label, run in (("FP32", fp32), ("AMP", amp)) if not run["mean_ap"] >= LEAST_MAP]
    difference, largest = points(fp32, amp), LARGEST_DIFFERENCE * max(1.0, STEPS / fp32["settings"]["steps"])
    if not abs(difference) <= largest:
        found.append(f"AMP's mAP is {difference:+.2f} points from FP32's, expected {largest:.1f} at most")
    for label, run in (("FP32", fp32), ("AMP", amp)):
        change = conversion_points(run)
        if not abs(change) <= LARGEST_CONVERSION_CHANGE:
            found.append(f"{label}: conversion changes the mAP by {change:+.2f} points, expected "
                         f"{LARGEST_CONVERSION_CHANGE} at most")
    return found


def _failures_of_loss(fp32: Run, amp: Run) -> list[str]:
    theirs, ours = final_loss(fp32, "total"), final_loss(amp, "total")
    if abs(ours - theirs) <= LARGEST_LOSS_CHANGE * theirs:
        return []
    return [f"AMP's loss is {ours:.3f}, FP32's {theirs:.3f}: expected at most {LARGEST_LOSS_CHANGE:.0%} between them"]


def points(fp32: Run, amp: Run) -> float:
    """Return how far AMP's mAP lies above FP32's, in hundredths."""
    return 100.0 * (float(amp["mean_ap"]) - float(fp32["mean_ap"]))


def conversion_points(run: Run) -> float:
    """Return how far a trained network's mAP rises by conversion to mixed precision, in hundredths."""
    return 100.0 * (float(run["converted_mean_ap"]) - float(run["mean_ap"]))


def final_loss(run: Run, part: str) -> float:
    """Return a loss (``cls``, ``box`` or ``total``) as the mean of the last steps."""
    tail = run["losses"][part][-_AVERAGED:]
    return float(sum(tail) / len(tail))


def stays_in_fp32(amp: Run) -> bool:
    """Return whether gluon_amp chose FP32 on this machine."""
    return bool(amp["dtype"] == "float32")


def verdict(amp: Run, outcome: turns.Outcome, other_load: float) -> str:
    """Return what the two runs show on this machine, in words."""
    judged = "" if is_judged(amp) else (f"{outcome.steps} steps are too few to expect a mAP (it takes {JUDGED_STEPS}): "
                                        "only the losses were compared\n")
    speed = _speed_in_words(amp, outcome) if not report.is_disturbed(other_load) else "the speeds are no finding"
    return f"{judged}{speed}; {report.other_load_text(other_load)}"


def _speed_in_words(amp: Run, outcome: turns.Outcome) -> str:
    ratio = outcome.ratio
    text = f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f} over {ratio.count} turns)"
    if stays_in_fp32(amp):
        return (f"gluon_amp keeps FP32 on this machine, so both runs trained in FP32; what it gains without "
                f"lower precision: {text}")
    return f"gluon_amp trained in {amp['dtype']}, {text} as fast as FP32"


def table(fp32: Run, amp: Run, ratio: Spread | None) -> Table:
    """Return the two runs side by side, with their difference or ratio in the last column; no ratio: no finding."""
    result = Table(title="SSD on handwritten digits: the same seed, images and steps")
    result.add_column("", no_wrap=True)
    for heading in ("MXNet\nfloat32", f"gluon_amp\n{amp['dtype']}", "gluon_amp vs MXNet"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_row("mAP", *(f"{run['mean_ap']:.4f}" for run in (fp32, amp)), f"{points(fp32, amp):+.2f} points")
    for name in fp32["average_precision"]:
        ours, theirs = (run["average_precision"][name] for run in (amp, fp32))
        result.add_row(f"  {name}", f"{theirs:.3f}", f"{ours:.3f}", f"{100 * (ours - theirs):+.1f}", style="dim")
    converted = [f"{run['converted_mean_ap']:.4f}" for run in (fp32, amp)]
    change = f"{conversion_points(fp32):+.2f} points for FP32's"
    result.add_row(f"mAP, converted ({amp['converted_dtype']})", *converted, change)
    for part, text in (("cls", "class loss"), ("box", "box loss"), ("total", "loss")):
        ours, theirs = final_loss(amp, part), final_loss(fp32, part)
        result.add_row(f"{text}, last {_AVERAGED} steps", f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}")
    for key, text, places, unit in (
        ("samples_per_second", "samples/s, without loading", 1, 1.0),
        ("seconds", "seconds, with loading", 1, 1.0),
        ("peak_memory", "peak memory, GB", 2, 1e9),
    ):
        ours, theirs = amp[key] / unit, fp32[key] / unit
        found = "" if ratio is None and key != "peak_memory" else f"{ours / theirs:.2f}x"
        result.add_row(text, f"{theirs:.{places}f}", f"{ours:.{places}f}", found)
    result.add_row("speed, turn by turn", "", "", "the machine was busy" if ratio is None else f"{ratio.median:.2f}x")
    return result


def conditions(amp: Run, threads: int) -> str:
    """Return the lines that say what ran, and on what."""
    about, settings = machine.describe(), amp["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in amp["versions"].items())
    side = settings["data_shape"]
    return (
        f"{report.machine_text()}{about['system']}, Python {about['python']}, {versions}\n"
        f"network {settings['network']}, {side}x{side}, batch {settings['batch_size']}, "
        f"{settings['steps']} steps, seed {settings['seed']}, {threads} threads"
    )


def write_plot(path: Path, fp32: Run, amp: Run) -> None:
    """Write both runs' losses, smoothed over the raw ones, to an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, label, color in ((fp32, "MXNet, float32", "C0"), (amp, f"gluon_amp, {amp['dtype']}", "C1")):
        losses = run["losses"]["total"]
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.7)
        axes.plot(steps, smoothed(losses), color=color, label=f"{label}: mAP {run['mean_ap']:.3f}")
    axes.set(xlabel="step", ylabel="loss per matched anchor", yscale="log", title="SSD on handwritten digits")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def smoothed(values: Sequence[float], reach: int = 10) -> list[float]:
    """Return the mean of each value and up to ``reach`` values on either side.

    Examples
    --------
    >>> smoothed([0.0, 3.0, 0.0], reach=1)
    [1.5, 1.0, 1.5]
    """
    windows = (values[max(0, middle - reach) : middle + reach + 1] for middle in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def run(argv: Sequence[str] | None) -> int:
    begin, load = monotonic(), machine.OtherLoad()
    args = _parser().parse_args(argv)
    threads = cli.use_threads(args)
    try:
        data = Path(args.data) if args.data else digits_directory()
    except OSError as error:
        raise UsageError(str(error)) from error
    common = {"data_dir": str(data), "batch_size": args.batch_size, "seed": args.seed}
    commands = [command("FP32", {**common, "amp": False, "dtype": None}, threads),
                command("AMP", {**common, "amp": True, "dtype": args.dtype}, threads)]
    end = math.inf if args.steps else begin + args.budget
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(Child(each)) for each in commands]
        outcome = turns.train(halves, args.steps, args.data_shape, end, lambda text: print(text, flush=True))
    return _show(args, outcome, threads, load.share())


def _show(args: argparse.Namespace, outcome: turns.Outcome, threads: int, other_load: float) -> int:
    """Print and write everything; return the exit code."""
    fp32, amp = outcome.runs
    plot = Path(args.plot) if args.plot else DEFAULT_PLOT
    write_plot(plot, fp32, amp)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(fp32, amp, None if report.is_disturbed(other_load) else outcome.ratio))
    for text in (verdict(amp, outcome, other_load), conditions(amp, threads), f"plot of the losses: {plot}"):
        console.print(text, highlight=False, soft_wrap=True)
    found = failures(fp32, amp)
    cli.write_json(args.json, {"machine": machine.describe(), "threads": threads, "fp32": fp32, "amp": amp,
                               "points": points(fp32, amp), "failures": found, "speed_ratio": vars(outcome.ratio),
                               "chosen": vars(outcome.choice), "other_load": other_load})
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(cli.main(run))
