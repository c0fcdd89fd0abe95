"""Train SSD on synthetic data, as MXNet's AMP tutorial does, and measure how fast that goes.

    python benchmarks/ssd_synthetic.py                              # FP32, the tutorial's lines
    python benchmarks/ssd_synthetic.py --amp                        # mixed precision
    python benchmarks/ssd_synthetic.py --compare fp32,amp,mxnet-amp # side by side, with a table
    python benchmarks/ssd_synthetic.py --amp --data DIR             # real images in Pascal VOC's format
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from dataclasses import replace
from time import monotonic
from typing import Any, Sequence

from tqdm import tqdm

from benchmarks.harness import cli, machine, report, sizes
from benchmarks.harness.commands import command
from benchmarks.harness.compare import FEWEST_ROUNDS, Comparison, Plan, Progress, Track, compare
from benchmarks.harness.errors import UsageError
from benchmarks.harness.registry import CONTRIB, OURS, REFERENCE, build, check, implementation, names
from benchmarks.harness.worker import about, timed_step
from benchmarks.networks import tasks

DEFAULT_NETWORK = "ssd_512_resnet50_v1_coco"
DEFAULT_STEPS = 20
DEFAULT_BATCH_SIZE = 8
BUDGET = 315.0
_OVERTIME = 15.0  # seconds after the budget in which a step may end; with start-up and table that is below 6 minutes
_PROBE_SHARE = 0.45  # of the budget: what has not run two steps of one sample by then is too slow
_SIZE_OF_COST = 512  # the side length in pixels that the cost belongs to


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(__doc__)
    what = parser.add_argument_group("what to run")
    what.add_argument("--amp", action="store_true", help="mixed precision through gluon_amp")
    what.add_argument("--compare", metavar="NAMES", help=f"measure in turns, some of {', '.join(names('ssd'))}")
    what.add_argument("--network", help=f"an SSD of GluonCV (default: {DEFAULT_NETWORK})")
    what.add_argument("--pretrained-base", action="store_true", help="download the pretrained backbone")
    what.add_argument("--data", metavar="DIR", help="train on a Pascal VOC directory and report its mAP")
    what.add_argument("--batch-size", type=cli.positive, help="default: 8, or less when that does not fit the machine")
    what.add_argument("--data-shape", type=cli.positive, help="side of the images in pixels (default: the network's)")
    cli.add_measuring(parser, budget=BUDGET)
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
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
    return cli.names("--compare", args.compare)


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
        "threads": cli.use_threads(args),
    }


def _largest_batch(settings: dict[str, Any], names: Sequence[str]) -> tuple[int, str]:
    """Return the batch size that the memory allows, and why it is no larger."""
    if not settings["device"].startswith("cpu"):
        return DEFAULT_BATCH_SIZE, "the usual size"
    side = settings["data_shape"] or tasks.side_of(settings["network"], _SIZE_OF_COST)
    area = (side / _SIZE_OF_COST) ** 2
    per_image = sizes.COSTS["ssd512"]
    cost = sizes.Cost(per_image.base_bytes, per_image.sample_bytes * area)
    shares = [implementation(name).memory_share for name in names]
    return sizes.largest_batch(cost, machine.available_memory(), shares, DEFAULT_BATCH_SIZE)


def _probe(settings: dict[str, Any], names: Sequence[str], plan: Plan, progress: Progress) -> Comparison:
    """Measure a step of one image of each implementation."""
    progress.say("measuring a step of one image, to choose the batch size")
    once = replace(plan, rounds=0, warmup=2, limit=_PROBE_SHARE * plan.budget)
    return compare([command("ssd", name, {**settings, "batch_size": 1}) for name in names], once, progress)


def _compared(args: argparse.Namespace, settings: dict[str, Any], begin: float) -> Comparison:
    """Measure several implementations in turns; with a budget, all of it ends soon after."""
    names, plan, failures = _names(args), replace(cli.plan(args), keep=(REFERENCE, OURS)), {}
    end = math.inf if args.rounds else begin + args.budget
    with report.TqdmProgress() as progress:
        if settings["batch_size"] is None:
            settings["batch_size"], why = _largest_batch(settings, names)
            if not args.rounds:
                probed = _probe(settings, names, plan, progress)
                failures = dict(probed.failures)
                names = [track.name for track in probed.tracks]
                probed.require((REFERENCE, OURS))
                choice = _choice(settings["batch_size"], why, probed, end - monotonic(), args)
                settings["batch_size"], why = choice.batch_size, choice.reason
                plan = replace(plan, warmup=choice.warmup)
            progress.say(f"batch size {settings['batch_size']} chosen: {why}; {plan.warmup} warm-up "
                         f"step{'s' * (plan.warmup != 1)}")
        if not args.rounds:
            left = end - monotonic()
            plan = replace(plan, budget=left, limit=left + _OVERTIME)
        comparison = compare([command("ssd", name, settings) for name in names], plan, progress)
    return replace(comparison, seconds=monotonic() - begin, failures={**failures, **comparison.failures})


def _choice(largest: int, why: str, probed: Comparison, left: float, args: argparse.Namespace) -> sizes.Choice:
    probes = [sizes.Probe(track.startup, track.warmup[0], track.warmup[-1]) for track in probed.tracks]
    # a turn of quick steps is longer than one
    rounds = FEWEST_ROUNDS * (args.steps or 1)
    return sizes.choose(largest, why, probes, left, rounds, args.warmup)


def _trained(args: argparse.Namespace, settings: dict[str, Any]) -> Comparison:
    """Train with one implementation in this process, with lines like the tutorial's."""
    logging.basicConfig(level=logging.INFO)
    name = _names(args)[0]
    if settings["batch_size"] is None:
        settings["batch_size"], why = _largest_batch(settings, [name])
        print(f"batch size {settings['batch_size']} chosen: {why}", flush=True)
    begin, load = monotonic(), machine.OtherLoad()
    session = build("ssd", name, settings)
    track = Track(name, about(session), machine.library_settings(), monotonic() - begin)
    for text in track.about["notes"]:
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
    track.peak_memory = machine.peak_memory()
    return Comparison([track], monotonic() - begin, load.share())


def _tutorial_line(track: Track, batch: int, shown: int) -> str:
    """Return the tutorial's line: the speed since the last line, the losses as means of the epoch so far."""
    speed = shown * track.about["samples_per_step"] / sum(track.round_seconds[-shown:])
    means = {name: sum(each[name] for each in track.losses) / len(track.losses) for name in track.losses[-1]}
    losses = ", ".join(f"{name}={value:.3f}" for name, value in means.items())
    return f"[Epoch 0][Batch {batch}], Speed: {speed:.3f} samples/sec, {losses}"


def _train_on_voc(args: argparse.Namespace) -> None:
    """Train on a Pascal VOC directory and print the mean average precision."""
    from benchmarks.harness.backends import context
    from benchmarks.voc import training as voc  # MXNet with it, which reads the number of threads when it is imported

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
    cli.write_json(args.json, result.as_dict())


def run(argv: Sequence[str] | None) -> int:
    begin = monotonic()
    args = _parser().parse_args(argv)
    _check(args)
    settings = _settings(args)
    if args.data is not None:
        _train_on_voc(args)
        return 0
    comparison = _compared(args, settings, begin) if args.compare else _trained(args, settings)
    if not comparison.tracks:
        comparison.require()
    report.show(settings, comparison)
    cli.write_json(args.json, report.as_dict(settings, comparison))
    if args.plot:
        title = f"{settings['network']}, batch {settings['batch_size']}, {settings['threads']} threads"
        report.write_plot(args.plot, title, comparison)
    comparison.require((REFERENCE, OURS))
    return _broken_promise(comparison)


def _broken_promise(comparison: Comparison) -> int:
    """Say where gluon_amp is slower than what it is to be faster than; return 1 then."""
    slower = comparison.slower(OURS, (REFERENCE, CONTRIB))
    if not slower:
        return 0
    own = comparison.track(OURS).about
    other = "bfloat16" if own["dtype"] == "float32" else "float32"
    print(f"gluon_amp is slower than {' and '.join(implementation(name).label for name in slower)} here. It ran "
          f"{own['dtype']}: {'; '.join(own['notes'])}. --dtype {other} (amp.init('{other}') in a script) takes the "
          "other type", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(cli.main(run))
