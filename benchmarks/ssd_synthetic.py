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

from benchmarks import harness
from benchmarks.harness import CONTRIB, FEWEST_ROUNDS, OURS, REFERENCE, Comparison, Plan, Track, UsageError
from benchmarks.networks import TUTORIAL, side_of

STEPS = 20
BATCH_SIZES = (8, 4, 2)  # or else 1
BUDGET = 315.0
_OVERTIME = 15.0  # seconds after the budget in which a step may end; with start-up and table that is below 6 minutes
_PROBE_SHARE = 0.45  # of the budget: a process that has not run two steps of one image by then is too slow
# Memory of an FP32 process: without any image, and for each of 512 pixels; low precision takes a share of it.
_BASE_BYTES, _IMAGE_BYTES, _LOW_SHARE = 1.0e9, 0.68e9, 0.75
_SAFE_MEMORY, _SAFE_TIME = 0.85, 0.9


def _parser() -> argparse.ArgumentParser:
    parser = harness.Parser(__doc__)
    what = parser.add_argument_group("what to run")
    what.add_argument("--amp", action="store_true", help="mixed precision through gluon_amp")
    what.add_argument("--compare", metavar="NAMES", help=f"measure in turns, some of {', '.join(_known())}")
    what.add_argument("--network", help=f"an SSD of GluonCV (default: {TUTORIAL})")
    what.add_argument("--pretrained-base", action="store_true", help="download the pretrained backbone")
    what.add_argument("--data", metavar="DIR", help="train on a Pascal VOC directory and report its mAP")
    what.add_argument("--batch-size", type=harness.integer(1), help="default: 8, or less where 8 does not fit")
    what.add_argument("--data-shape", type=harness.integer(1), help="side of the images in pixels")
    parser.add_measuring(BUDGET)
    return parser


def _known() -> list[str]:
    return [name for name in harness.IMPLEMENTATIONS if harness.runs(name, "training")]


def _names(args: argparse.Namespace) -> list[str]:
    """Return the implementations to run; refuse options that do not go together."""
    if args.compare and args.amp:
        raise UsageError("--amp goes without --compare: name amp in --compare instead")
    if args.data is not None and (args.compare or args.pretrained_base):
        raise UsageError(f"--data goes without --{'compare' if args.compare else 'pretrained-base'}")
    if args.compare is None:
        return [OURS if args.amp else REFERENCE]
    names = harness.names("--compare", args.compare)
    for name in names:
        if not harness.runs(name, "training"):
            raise UsageError(f"{name} is not for training; known: {', '.join(_known())}")
    return names


def _memory(names: Sequence[str], batch_size: int, side: int) -> float:
    """Return the bytes that all processes need together, roughly."""
    shares = sum(_LOW_SHARE if name.startswith((OURS, CONTRIB)) else 1.0 for name in names)
    return shares * (_BASE_BYTES + batch_size * _IMAGE_BYTES * (side / 512) ** 2)


def fitting_batch(probes: Sequence[Track], names: Sequence[str], side: int, memory: float, seconds: float,
                  warmup: int) -> tuple[int, str]:
    """Return the largest batch that fits the memory, at which the fewest rounds fit the time, and why no larger one.

    Parameters
    ----------
    probes : sequence of Track
        Steps of one image that were measured, one a process; none where the time does not matter.
    names : sequence of str
        The processes that are alive at the same time.
    side : int
        Of the images, in pixels.
    memory, seconds : float
        The available bytes (0 when not known) and time.
    warmup : int
        Steps before the rounds.
    """
    reason = "batch 8 fits"
    for batch_size in BATCH_SIZES:
        taken = _memory(names, batch_size, side)
        # the first step of a batch takes longer, to touch new memory; larger batches take less an image
        needed = sum(probe.startup + max(0.0, probe.warmup[0] - probe.warmup[-1])
                     + (warmup + FEWEST_ROUNDS + 0.5) * batch_size * probe.warmup[-1] for probe in probes)
        if memory and taken > _SAFE_MEMORY * memory:
            reason = f"batch {batch_size} would need about {taken / 1e9:.0f} GB of {memory / 1e9:.0f} GB"
        elif needed > _SAFE_TIME * seconds:
            reason = (f"batch {batch_size} would take about {needed:.0f} s of {seconds:.0f} s for {FEWEST_ROUNDS} "
                      "rounds")
        else:
            return batch_size, reason
    return 1, reason


def _compared(args: argparse.Namespace, names: Sequence[str], settings: dict[str, Any], begin: float) -> Comparison:
    """Measure several implementations in turns; without --rounds all of it ends soon after the budget."""
    plan, end, failures = harness.plan(args), math.inf if args.rounds else begin + args.budget, {}

    def run(batch_size: int, how: Plan) -> Comparison:
        return harness.compare([harness.command("training", name, {**settings, "batch_size": batch_size})
                                for name in names], how)

    if args.batch_size is None:
        probes: Sequence[Track] = ()
        if not args.rounds:
            harness.say("measuring a step of one image, to choose the batch size")
            probed = run(1, Plan(rounds=0, warmup=2, limit=_PROBE_SHARE * args.budget))
            probed.require((REFERENCE, OURS))
            failures, probes = dict(probed.failures), probed.tracks
            names = [track.name for track in probes]
        settings["batch_size"], why = fitting_batch(probes, names, _side(settings), harness.available_memory(),
                                                    end - monotonic(), args.warmup)
        harness.say(f"batch size {settings['batch_size']} chosen: {why}")
    if not args.rounds:
        plan = replace(plan, budget=end - monotonic(), limit=end - monotonic() + _OVERTIME)
    found = run(settings["batch_size"], plan)
    return replace(found, seconds=monotonic() - begin, failures={**failures, **found.failures})


def _side(settings: dict[str, Any]) -> int:
    return settings["data_shape"] or side_of(settings["network"])


def _trained(args: argparse.Namespace, name: str, settings: dict[str, Any]) -> Comparison:
    """Train with one implementation in this process, with lines like the tutorial's."""
    logging.basicConfig(level=logging.INFO)
    if args.batch_size is None:
        memory = harness.available_memory()
        settings["batch_size"], why = fitting_batch((), [name], _side(settings), memory, math.inf, 0)
        print(f"batch size {settings['batch_size']} chosen: {why}", flush=True)
    begin, load = monotonic(), harness.OtherLoad()
    session = harness.build("training", name, settings)
    track, steps = Track(name, dict(session.about), monotonic() - begin), args.steps or STEPS
    for text in track.about["notes"]:
        print(f"{name}: {text}", flush=True)
    shown_every = max(1, steps // 4)
    for number in tqdm(range(args.warmup + steps), unit="step", dynamic_ncols=True, disable=None):
        seconds, losses = harness.timed_step(session)
        track.losses.append(losses)
        if number < args.warmup:
            track.warmup.append(seconds)
            continue
        track.turns.append([seconds])
        if len(track.turns) % shown_every == 0:
            tqdm.write(_tutorial_line(track, number, shown_every))
    track.peak_memory = harness.peak_memory()
    return Comparison([track], monotonic() - begin, load.share())


def _tutorial_line(track: Track, batch: int, shown: int) -> str:
    """Return the tutorial's line: the speed since the last line, the losses as means of the epoch so far."""
    speed = shown * track.about["samples"] / sum(track.round_seconds[-shown:])
    means = {name: sum(each[name] for each in track.losses) / len(track.losses) for name in track.losses[-1]}
    losses = ", ".join(f"{name}={value:.3f}" for name, value in means.items())
    return f"[Epoch 0][Batch {batch}], Speed: {speed:.3f} samples/sec, {losses}"


def _train_on_voc(args: argparse.Namespace) -> None:
    """Train on a Pascal VOC directory and print the mean average precision."""
    from benchmarks import voc  # MXNet with it, which reads the number of threads when it is imported

    given = {"batch_size": args.batch_size or voc.BATCH_SIZE, "steps": args.steps or voc.STEPS,
             "network": args.network or voc.DIGITS}
    found = voc.train(args.data, args.amp, args.dtype, args.device, seed=args.seed, data_shape=args.data_shape, **given)
    print(f"{found['dtype']}: {found['steps']} steps, {found['samples_per_second']:.2f} samples/sec")
    for name, precision in found["average_precision"].items():
        print(f"  {name}: {precision:.4f}")
    print(f"VOC mAP (IoU 0.5) = {found['mean_ap']:.4f}")
    harness.write_json(args.json, found)


def table(found: Comparison) -> str:
    """Return the comparison: a row an implementation, ratios above 1 where it is faster than the others."""
    measured = [track.name for track in found.tracks]
    references = [name for name in (REFERENCE, CONTRIB, "torch-amp") if name in measured and len(measured) > 1]
    base = found.track(references[0]) if references else found.tracks[0]
    lines = []
    for track in found.tracks:
        step, first, last = harness.spread(track.round_seconds), track.losses[0], track.losses[-1]
        memory = f"{track.peak_memory / 1e9:.2f} GB" + (
            "" if track is base else f", {track.peak_memory / base.peak_memory:.2f}x")
        lines.append([f"{harness.implementation(track.name).label}, {track.about['dtype']}", f"{step.median:.3f}",
                      f"{step.low:.3f}-{step.high:.3f}", f"{track.about['samples'] / step.median:.2f}",
                      *("" if name == track.name else str(found.ratio(track.name, name)) for name in references),
                      memory, *(f"{first[name]:.4g} to {last[name]:.4g}" for name in first)])
    heading = ["", "s/step", "min-max", "samples/s",
               *(f"against {harness.implementation(name).label}" for name in references), "peak memory",
               *found.tracks[0].losses[0]]
    failed = [f"{harness.implementation(name).label} fails: {failure}" for name, failure in found.failures.items()]
    turns = found.tracks[0].turns
    return "\n".join([harness.table(heading, lines), *failed, harness.machine_line(),
                      f"{len(turns)} rounds of {len(turns[0])} steps, {found.seconds:.0f} s in all; "
                      f"{harness.load_line(found.other_load)}"])


def broken_promise(found: Comparison) -> int:
    """Say where gluon_amp is slower than FP32 and MXNet's AMP; return 1 then."""
    slower = found.slower(OURS, (REFERENCE, CONTRIB))
    if not slower:
        return 0
    own = found.track(OURS).about
    other = "bfloat16" if own["dtype"] == "float32" else "float32"
    print(f"gluon_amp is slower than {' and '.join(harness.implementation(name).label for name in slower)} here. It "
          f"ran {own['dtype']}: {'; '.join(own['notes'])}. --dtype {other} (amp.init('{other}') in a script) takes the "
          "other type", file=sys.stderr)
    return 1


def run(argv: Sequence[str] | None) -> int:
    begin, args = monotonic(), _parser().parse_args(argv)
    names = _names(args)
    settings = {"network": args.network or TUTORIAL, "batch_size": args.batch_size, "data_shape": args.data_shape,
                "device": args.device, "dtype": args.dtype, "seed": args.seed, "mode": "static",
                "pretrained_base": args.pretrained_base, "threads": harness.use_threads(args)}
    if args.data is not None:
        _train_on_voc(args)
        return 0
    found = _compared(args, names, settings, begin) if args.compare else _trained(args, names[0], settings)
    found.require()
    print(table(found), ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None), sep="\n")
    harness.write_json(args.json, {"settings": settings, "seconds": found.seconds, "other_load": found.other_load,
                                   "failures": {name: str(each) for name, each in found.failures.items()},
                                   "implementations": [vars(track) for track in found.tracks]})
    found.require((REFERENCE, OURS))
    return broken_promise(found)


if __name__ == "__main__":
    sys.exit(harness.main(run))
