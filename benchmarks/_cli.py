"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import _machine
import _report
from _compare import Plan
from _errors import ChildFailed, UsageError

DEFAULT_WARMUP = 2
DEFAULT_BUDGET = 300.0


def add_measuring(parser: argparse.ArgumentParser, budget: float = DEFAULT_BUDGET, plots: bool = True) -> None:
    """Add the options that say how to measure and where to write.

    Parameters
    ----------
    parser : ArgumentParser
        Gets ``--device``, ``--dtype``, ``--threads``, ``--seed``, ``--steps``, ``--warmup``, ``--rounds``,
        ``--budget``, ``--json`` and ``--plot``.
    budget : float
        The default of ``--budget``, in seconds.
    plots : bool
        Whether there is ``--plot``; it is not given otherwise.
    """
    add = parser.add_argument
    add("--dtype", help="bfloat16 or float16 (default: what the device is good at)")
    add("--device", default="cpu", help="cpu, gpu or gpu:1 (default: cpu)")
    add("--threads", type=int, help="OpenMP threads (default: all physical cores)")
    add("--seed", type=int, default=0, help="of the weights and of the data (default: 0)")
    add("--steps", type=int, help="timed steps of one turn (default: about a second's)")
    add("--warmup", type=int, default=DEFAULT_WARMUP, help=f"steps before timing (default: {DEFAULT_WARMUP})")
    add("--rounds", type=int, help="turns of each implementation (default: chosen from the budget)")
    add("--budget", type=float, default=budget, help=f"seconds for a comparison (default: {budget:.0f})")
    add("--json", metavar="PATH", help="write everything that was measured")
    if plots:
        add("--plot", metavar="PATH", help="write a bar chart")
    else:
        parser.set_defaults(plot=None)


def check_measuring(args: argparse.Namespace, *counts: str) -> None:
    """Refuse what can be seen to be wrong without any framework.

    Parameters
    ----------
    args : Namespace
        With the options of `add_measuring`.
    counts : str
        More options that must be at least 1 when they are given.

    Raises
    ------
    UsageError
        For the first that is wrong.
    """
    for name in (*counts, "threads", "steps", "rounds"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected an integer of at least 1, received {value}")
    if args.warmup < 0 or args.budget <= 0:
        raise UsageError(f"expected --warmup >= 0 and --budget > 0, received {args.warmup} and {args.budget}")
    if not re.fullmatch(r"(cpu|gpu)(:\d+)?", args.device):
        raise UsageError(f"--device: expected cpu, gpu or gpu:1, received {args.device!r}")
    for path in (args.json, args.plot):
        _report.check_writable(path)


def names(flag: str, text: str) -> list[str]:
    """Return different names that were given with commas.

    Raises
    ------
    UsageError
        If there are none, or some twice.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) < len(found):
        raise UsageError(f"{flag}: expected different names with commas, received {text!r}")
    return found


def plan(args: argparse.Namespace) -> Plan:
    """Return how long to measure."""
    return Plan(rounds=args.rounds, steps=args.steps, warmup=args.warmup, budget=args.budget)


def use_threads(args: argparse.Namespace) -> int:
    """Set the number of threads for this process and its children and return it; before anything loads OpenMP."""
    threads = args.threads or _machine.physical_cores()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads


def write_json(path: str | None, measured: Mapping[str, Any]) -> None:
    """Write everything that was measured, where a path is given."""
    if path:
        Path(path).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


def run(program: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None) -> int:
    """Run a benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    try:
        program(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ChildFailed as failure:
        print(f"error: {failure}\n{failure.stderr_tail}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
