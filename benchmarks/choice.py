"""Compare the type that `amp.init()` chooses on this CPU with the others, on training steps of two small networks.

    python benchmarks/choice.py     # or make choice: at most two minutes

The type that was chosen, FP32 and bfloat16, where it runs, take turns. It fails where the choice takes 15% longer than
the fastest of them in every one of three repeats.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Sequence

from benchmarks.harness import cli, machine, report
from benchmarks.harness.commands import command
from benchmarks.harness.compare import Comparison, Plan, compare
from benchmarks.harness.registry import OURS

NETWORKS = {"resnet18_v1": 4, "mobilenetv2_1.0": 4}  # and their batches
CHOSEN = "as chosen"
TYPES = {CHOSEN: None, "FP32": "float32", "bfloat16": "bfloat16"}
REPEATS, WORST = 3, 1.15


def measure(network: str, batch_size: int, threads: int) -> Comparison:
    """Run training steps of a network in each type, in turns."""
    settings = {"device": "cpu", "seed": 0, "threads": threads, "network": network, "batch_size": batch_size,
                "mode": "static"}
    commands = [replace(command("zoo-training", OURS, {**settings, "dtype": dtype}), name=name)
                for name, dtype in TYPES.items()]
    with report.TqdmProgress() as progress:
        found = compare(commands, Plan(rounds=REPEATS, steps=3), progress)
    found.require([CHOSEN])
    return found


def lag(found: Comparison) -> tuple[float, str]:
    """Return how many times as long as the fastest type the choice takes, its least of the rounds, and that type."""
    own = found.track(CHOSEN)
    ratios = [(min(mine / theirs for mine, theirs in zip(own.round_seconds, each.round_seconds)), each.name)
              for each in found.tracks if each is not own]
    return max(ratios)


def run(argv: Sequence[str] | None) -> int:
    args = cli.Parser(__doc__).parse_args(argv)
    threads, worse = cli.use_threads(args), []
    print(report.machine_text(), end="")
    for network, batch_size in NETWORKS.items():
        found = measure(network, batch_size, threads)
        times = ", ".join(f"{track.name} {track.step.median * 1e3:.0f} ms" for track in found.tracks)
        print(f"{network}, batch {batch_size}: {times}; {'; '.join(found.track(CHOSEN).about['notes'])}")
        times_as_long, fastest = lag(found)
        if times_as_long > WORST:
            worse.append(f"{network}: the choice takes {times_as_long:.2f} times as long as {fastest} at least")
    for text in worse:
        print(text, file=sys.stderr)
    cli.write_json(args.json, {"machine": machine.describe(), "worse": worse})
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(cli.main(run))
