"""Show that mixed precision trains to the same result: SSD on handwritten digits, FP32 beside gluon_amp.

Both runs start from the same weights and see the same images in the same order, each in a process of its
own. The exit code is 0 when both reach the mAP that is asked for and differ by little, 1 when they do not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence

import _machine
import _report
import make_digits_voc
from _errors import ChildFailed, Parser, UsageError
from rich.console import Console
from rich.table import Table

PROJECT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("_voc_worker.py")
DEFAULT_PLOT = PROJECT / "build" / "digits.png"

IMAGES, VAL, SIZE, DATA_SEED = 3000, 600, 128, 0
LEAST_MAP = 0.6
LARGEST_DIFFERENCE = 1.5  # points: hundredths of mAP
LARGEST_CONVERSION_CHANGE = 0.5
_AVERAGED = 50  # steps: one batch's loss says little

Run = Mapping[str, Any]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="DIR", help="a Pascal VOC directory (default: digits, made in build/ once)")
    add("--steps", type=int, default=600, help="updates of each run (default: 600)")
    add("--batch-size", type=int, default=16, help="default: 16")
    add("--seed", type=int, default=0, help="of weights and order, the same for both runs (default: 0)")
    add("--dtype", help="bfloat16 or float16 (default: what the machine is good at)")
    add("--threads", type=int, help="OpenMP threads (default: all physical cores)")
    add("--json", metavar="PATH", help="write everything that was measured")
    add("--plot", metavar="PATH", help="where the plot of the losses goes (default: build/digits.png)")
    return parser


def _check(args: argparse.Namespace) -> None:
    for name in ("steps", "batch_size", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, received {value}")
    if args.seed < 0:
        raise UsageError(f"--seed: expected at least 0, received {args.seed}")
    for path in (args.json, args.plot):
        _report.check_writable(path)


def digits_directory(images: int = IMAGES, val: int = VAL, progress: bool = True) -> Path:
    """Return the digits in Pascal VOC's format, made below ``build/`` the first time."""
    name = f"digits-voc-{images}-{val}-{SIZE}-{DATA_SEED}"
    return make_digits_voc.make(PROJECT / "build" / name, images, val, SIZE, DATA_SEED, progress)


def train(label: str, arguments: Mapping[str, Any], threads: int) -> Run:
    """Run `voc.train` in a process of its own.

    Parameters
    ----------
    label : str
        What to call the run.
    arguments : mapping
        The arguments of `voc.train`.
    threads : int
        OpenMP threads.

    Raises
    ------
    UsageError
        The request cannot be carried out; the process has said why.
    ChildFailed
        The process died.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    search = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(search)
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, str(WORKER), str(result), json.dumps(dict(arguments))]
        code = subprocess.run(command, env=environment, check=False).returncode
        if code == 2:
            raise UsageError(f"the {label} run did not start: see above")
        if code != 0 or not result.is_file():
            raise ChildFailed(label, f"its process ended with exit code {code}")
        run: Run = json.loads(result.read_text(encoding="utf-8"))
    return run


def failures(fp32: Run, amp: Run) -> list[str]:
    """Return what is wrong with a pair of runs, nothing when they agree.

    Parameters
    ----------
    fp32, amp : mapping
        What the two runs gave, see `voc.TrainingResult`.
    """
    found = []
    if fp32["initial_weights"] != amp["initial_weights"]:
        found.append("the runs did not start from the same weights, so they cannot be compared")
    for label, run in (("FP32", fp32), ("AMP", amp)):
        if not all(math.isfinite(loss) for loss in run["losses"]["total"]):
            found.append(f"{label}: a loss is not finite")
        # written so that a mAP that is not a number fails
        if not run["mean_ap"] >= LEAST_MAP:
            found.append(f"{label}: mAP {run['mean_ap']:.3f}, expected {LEAST_MAP} at least")
    difference = points(fp32, amp)
    if not abs(difference) <= LARGEST_DIFFERENCE:
        found.append(f"AMP's mAP is {difference:+.2f} points from FP32's, expected {LARGEST_DIFFERENCE} at most")
    for label, run in (("FP32", fp32), ("AMP", amp)):
        change = conversion_points(run)
        if not abs(change) <= LARGEST_CONVERSION_CHANGE:
            found.append(f"{label}: conversion changes the mAP by {change:+.2f} points, expected "
                         f"{LARGEST_CONVERSION_CHANGE} at most")
    return found


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


def table(fp32: Run, amp: Run) -> Table:
    """Return the two runs side by side, with their difference or ratio in the last column."""
    result = Table(title="SSD on handwritten digits: the same seed, images and steps")
    result.add_column("", no_wrap=True)
    for heading in ("FP32", f"gluon_amp\n{amp['dtype']}", "AMP vs FP32"):
        result.add_column(heading, justify="right", no_wrap=True)
    result.add_row("mAP", *(f"{run['mean_ap']:.4f}" for run in (fp32, amp)), f"{points(fp32, amp):+.2f} points")
    for name in fp32["average_precision"]:
        ours, theirs = (run["average_precision"][name] for run in (amp, fp32))
        result.add_row(f"  {name}", f"{theirs:.3f}", f"{ours:.3f}", f"{100 * (ours - theirs):+.1f}", style="dim")
    converted = [f"{run['converted_mean_ap']:.4f}" for run in (fp32, amp)]
    result.add_row("mAP, converted", *converted, f"{conversion_points(fp32):+.2f} points for FP32's")
    for part, text in (("cls", "class loss"), ("box", "box loss"), ("total", "loss")):
        ours, theirs = final_loss(amp, part), final_loss(fp32, part)
        result.add_row(f"{text}, last {_AVERAGED} steps", f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}")
    for key, text, digits, unit in (
        ("samples_per_second", "samples/s, without loading", 1, 1.0),
        ("seconds", "seconds, with loading", 1, 1.0),
        ("peak_memory", "peak memory, GB", 2, 1e9),
    ):
        ours, theirs = amp[key] / unit, fp32[key] / unit
        result.add_row(text, f"{theirs:.{digits}f}", f"{ours:.{digits}f}", f"{ours / theirs:.2f}x")
    return result


def conditions(amp: Run, threads: int) -> str:
    """Return the lines that say what ran, and on what."""
    machine, settings = _machine.describe(), amp["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in amp["versions"].items())
    sets = " ".join(machine["instruction_sets"]) or "none of AVX2 and above"
    side = settings["data_shape"]
    return (
        f"{machine['cpu']} (family/model {machine['cpu_family_model']}), {machine['physical_cores']} cores, "
        f"{sets}, {machine['memory'] / 1e9:.0f} GB\n"
        f"{machine['system']}, Python {machine['python']}, {versions}\n"
        f"network {settings['network']}, {side}x{side}, batch {settings['batch_size']}, "
        f"{settings['steps']} steps, seed {settings['seed']}, {threads} threads"
    )


def write_plot(path: Path, fp32: Run, amp: Run) -> None:
    """Write both runs' losses, smoothed over the raw ones, to an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for run, label, color in ((fp32, "FP32", "C0"), (amp, f"gluon_amp, {amp['dtype']}", "C1")):
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


def _run(args: argparse.Namespace) -> int:
    _check(args)
    console = Console(width=None if sys.stdout.isatty() else 110)
    threads = args.threads or _machine.physical_cores()
    data = Path(args.data) if args.data else digits_directory()
    common = {"data_dir": str(data), "steps": args.steps, "batch_size": args.batch_size, "seed": args.seed}
    runs = []
    for label, extra in (("FP32", {}), ("AMP", {"amp": True, "dtype": args.dtype})):
        print(f"{label}: {args.steps} steps of {args.batch_size} images from {data}", flush=True)
        runs.append(train(label, {**common, **extra}, threads))
        print(f"{label}: mAP {runs[-1]['mean_ap']:.4f} in {runs[-1]['seconds']:.0f} s", flush=True)
    return _show(args, console, runs[0], runs[1], threads)


def _show(args: argparse.Namespace, console: Console, fp32: Run, amp: Run, threads: int) -> int:
    """Print and write everything; return the exit code."""
    console.print(table(fp32, amp))
    console.print(conditions(amp, threads), highlight=False, soft_wrap=True)
    plot = Path(args.plot) if args.plot else DEFAULT_PLOT
    write_plot(plot, fp32, amp)
    console.print(f"plot of the losses: {plot}", highlight=False, soft_wrap=True)
    found = failures(fp32, amp)
    if args.json:
        content = {"machine": _machine.describe(), "threads": threads, "fp32": fp32, "amp": amp}
        content.update(points=points(fp32, amp), failures=found)
        Path(args.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for text in found:
        print(f"error: {text}", file=sys.stderr)
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run both and return the exit code: 1 when they fail or disagree, 2 for an impossible request."""
    try:
        return _run(_parser().parse_args(argv))
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ChildFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
