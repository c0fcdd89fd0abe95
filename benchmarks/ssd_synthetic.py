"""Train SSD on synthetic data, as MXNet's AMP tutorial does, and measure how fast that goes.

    python benchmarks/ssd_synthetic.py                              # FP32, the tutorial's lines
    python benchmarks/ssd_synthetic.py --amp                        # mixed precision
    python benchmarks/ssd_synthetic.py --compare fp32,amp,mxnet-amp # side by side, with a table
    python benchmarks/ssd_synthetic.py --amp --data DIR             # real images in Pascal VOC's format
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any, Sequence

import _cli
import _machine
import _report
import _sizes
from _commands import command
from _compare import Comparison, Track, compare
from _errors import Parser, UsageError
from _registry import build, check, implementation, names
from _worker import timed_step
from tqdm import tqdm

DEFAULT_NETWORK = "ssd_512_resnet50_v1_coco"
DEFAULT_STEPS = 20
_SIZE_OF_COST = 512  # the side length in pixels that the cost below belongs to

# in FP32; other networks differ, which a measured warm-up step then shows
COST = _sizes.COSTS["ssd512"]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what to run")
    what.add_argument("--amp", action="store_true", help="mixed precision through gluon_amp")
    what.add_argument("--compare", metavar="NAMES", help=f"measure in turns, some of {', '.join(names('ssd'))}")
    what.add_argument("--network", help=f"an SSD of GluonCV (default: {DEFAULT_NETWORK})")
    what.add_argument("--pretrained-base", action="store_true", help="download the pretrained backbone")
    what.add_argument("--data", metavar="DIR", help="train on a Pascal VOC directory and report its mAP")
    what.add_argument("--batch-size", type=int, help="default: 8, or less when that does not fit the machine")
    what.add_argument("--data-shape", type=int, help="side of the images in pixels (default: the network's)")
    _cli.add_measuring(parser.add_argument_group("how to measure"))
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong without MXNet."""
    _cli.check_measuring(args, "batch_size", "data_shape")
    for name in _names(args):
        check("ssd", name)
    if args.compare and args.amp:
        raise UsageError("--amp goes without --compare: name amp in --compare instead")
    for flag in ("compare", "plot", "pretrained_base"):
        if args.data is not None and getattr(args, flag):
            raise UsageError(f"--data goes without --{flag.replace('_', '-')}")


def _names(args: argparse.Namespace) -> list[str]:
    """Return the implementations to run."""
    if args.compare is None:
        return ["amp" if args.amp else "fp32"]
    return _cli.names("--compare", args.compare)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the workload's settings, the batch size still as it was given."""
    return {
        "network": args.network or DEFAULT_NETWORK,
        "batch_size": args.batch_size,
        "data_shape": args.data_shape,
        "device": args.device,
        "dtype": args.dtype,
        "seed": args.seed,
        "pretrained_base": args.pretrained_base,
        "threads": _cli.use_threads(args),
    }


def _side(settings: dict[str, Any]) -> int:
    found = re.match(r"ssd_(\d+)_", settings["network"])
    return int(settings["data_shape"] or (found.group(1) if found else _SIZE_OF_COST))


def _fill_batch_size(settings: dict[str, Any], names: Sequence[str], budget: float | None) -> None:
    """Choose a batch size when none was given, and say which and why."""
    if settings["batch_size"] is not None:
        return
    settings["batch_size"] = 8
    if settings["device"].startswith("cpu"):
        area = (_side(settings) / _SIZE_OF_COST) ** 2
        cost = _sizes.Cost(COST.base_bytes, COST.sample_bytes * area, COST.sample_gflop * area)
        machine = _sizes.Machine(_machine.available_memory(), _machine.matmul_gflops())
        shares = [implementation(name).memory_share for name in names]
        settings["batch_size"], reason = _sizes.choose_batch_size(cost, machine, shares, budget)
        memory, gflops = machine.available_bytes / 1e9, machine.gflops
        print(f"{reason} ({memory:.0f} GB available, about {gflops:.0f} GFLOP/s in FP32)", flush=True)


def _compared(args: argparse.Namespace, settings: dict[str, Any]) -> Comparison:
    """Measure several implementations in turns."""
    _fill_batch_size(settings, _names(args), None if args.rounds else args.budget)
    with _report.TqdmProgress() as progress:
        return compare([command("ssd", name, settings) for name in _names(args)], _cli.plan(args), progress)


def _trained(args: argparse.Namespace, settings: dict[str, Any]) -> Comparison:
    """Train with one implementation in this process, with lines like the tutorial's."""
    logging.basicConfig(level=logging.INFO)
    name = _names(args)[0]
    _fill_batch_size(settings, [name], None)
    begin, load = time.monotonic(), _machine.OtherLoad()
    session = build("ssd", name, settings)
    about = dict(session.about, samples_per_step=session.samples_per_step, versions=_machine.versions())
    track = Track(name, about, _machine.library_settings(), time.monotonic() - begin)
    for text in about["notes"]:
        print(f"{name}: {text}", flush=True)
    steps = args.steps or DEFAULT_STEPS
    shown_every = max(1, steps // 4)
    for number in tqdm(range(args.warmup + steps), unit="step", dynamic_ncols=True, disable=None):
        seconds, losses = timed_step(session)
        track.losses.append(losses)
        if number < args.warmup:
            track.warmup.append(seconds)
            continue
        track.turns.append([seconds])
        if len(track.turns) % shown_every == 0:
            tqdm.write(_tutorial_line(track, number, shown_every))
    track.peak_memory = _machine.peak_memory()
    return Comparison([track], time.monotonic() - begin, load.share())


def _tutorial_line(track: Track, batch: int, shown: int) -> str:
    """Return the tutorial's line: the speed since the last line, the losses as means of the epoch so far."""
    speed = shown * track.about["samples_per_step"] / sum(track.round_seconds[-shown:])
    means = {name: sum(each[name] for each in track.losses) / len(track.losses) for name in track.losses[-1]}
    losses = ", ".join(f"{name}={value:.3f}" for name, value in means.items())
    return f"[Epoch 0][Batch {batch}], Speed: {speed:.3f} samples/sec, {losses}"


def _train_on_voc(args: argparse.Namespace) -> None:
    """Train on a Pascal VOC directory and print the mean average precision."""
    import voc  # MXNet with it, which reads the number of threads when it is imported
    from _backends import context

    optional = ("network", "steps", "batch_size", "data_shape")
    given = {name: getattr(args, name) for name in optional if getattr(args, name) is not None}
    device = context(args.device)
    try:
        result = voc.train(args.data, args.amp, args.dtype, seed=args.seed, device=device, **given)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    print(f"{result.dtype}: {result.settings.steps} steps, {result.samples_per_second:.2f} samples/sec")
    for name, precision in result.average_precision.items():
        print(f"  {name}: {precision:.4f}")
    print(f"VOC mAP (IoU 0.5) = {result.mean_ap:.4f}")
    if args.json:
        Path(args.json).write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")


def _run(argv: Sequence[str] | None) -> None:
    args = _parser().parse_args(argv)
    _check(args)
    settings = _settings(args)
    if args.data is not None:
        _train_on_voc(args)
        return
    comparison = _compared(args, settings) if args.compare else _trained(args, settings)
    _report.show(settings, comparison)
    if args.json:
        _report.write_json(args.json, settings, comparison)
    if args.plot:
        title = f"{settings['network']}, batch {settings['batch_size']}, {settings['threads']} threads"
        _report.write_plot(args.plot, title, comparison)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _cli.run(_run, argv)


if __name__ == "__main__":
    sys.exit(main())
