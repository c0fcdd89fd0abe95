"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, Callable, Collection, Mapping, Sequence

from . import machine
from .compare import Plan
from .errors import ChildFailed, UsageError, unknown

DEFAULT_WARMUP = 2
DEFAULT_BUDGET = 300.0


def integer(least: int) -> Callable[[str], int]:
    """Return the type of an option that takes an integer of at least so much."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, received {text}")
        return int(text)

    return parse


positive = integer(1)


def integers(text: str) -> tuple[int, ...]:
    """Return the value of an option that takes integers of at least 1 with commas."""
    if not all(part.isdigit() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected integers of at least 1, received {text!r}")
    return tuple(int(part) for part in text.split(","))


def seconds(text: str) -> float:
    """Return the value of an option that takes a time."""
    if not re.fullmatch(r"\d*\.?\d+", text) or not float(text):
        raise argparse.ArgumentTypeError(f"expected a number above 0, received {text}")
    return float(text)


def writable(text: str) -> str:
    """Return a path to write to; refuse early, before a long measurement, one whose folder does not exist."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: its folder does not exist")
    return text


def device(text: str) -> str:
    """Return the name of a device."""
    if not re.fullmatch(r"(cpu|gpu)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, gpu or gpu:1, received {text!r}")
    return text


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the benchmarks, with the options ``--json`` and ``--threads`` of all."""

    def __init__(self, description: str | None, json_help: str = "write everything that was measured"):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--threads", type=positive, help="OpenMP threads (default: all physical cores)")
        self.add_argument("--json", metavar="PATH", type=writable, help=json_help)

    def error(self, message: str) -> Any:
        """Refuse the arguments."""
        raise UsageError(message)


def add_measuring(parser: argparse.ArgumentParser, title: str = "how to measure", budget: float = DEFAULT_BUDGET,
                  plots: bool = True) -> None:
    """Add the options that say how to measure.

    Parameters
    ----------
    parser : ArgumentParser
        Gets ``--device``, ``--dtype``, ``--seed``, ``--steps``, ``--warmup``, ``--rounds``, ``--budget``, ``--plot``.
    title : str
        Of their group.
    budget : float
        The default of ``--budget``, in seconds.
    plots : bool
        Whether there is ``--plot``; it is not given otherwise.
    """
    add = parser.add_argument_group(title).add_argument
    add("--dtype", help="bfloat16 or float16 (default: what the device is good at)")
    add("--device", type=device, default="cpu", help="cpu, gpu or gpu:1 (default: cpu)")
    add("--seed", type=integer(0), default=0, help="of the weights and of the data (default: 0)")
    add("--steps", type=positive, help="timed steps of one turn (default: about a second's)")
    add("--warmup", type=integer(0), default=DEFAULT_WARMUP, help=f"steps before timing (default: {DEFAULT_WARMUP})")
    add("--rounds", type=positive, help="turns of each implementation (default: chosen from the budget)")
    add("--budget", type=seconds, default=budget, help=f"seconds for a comparison (default: {budget:.0f})")
    if plots:
        add("--plot", metavar="PATH", type=writable, help="write a bar chart")
    else:
        parser.set_defaults(plot=None)


def names(flag: str, text: str, kind: str = "", known: Collection[str] | None = None) -> list[str]:
    """Return different names that were given with commas.

    Parameters
    ----------
    flag, text : str
        The option and its value.
    kind : str
        What the names stand for.
    known : collection of str, optional
        The accepted ones.

    Raises
    ------
    UsageError
        If there are none, some twice, or one is not known.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) < len(found):
        raise UsageError(f"{flag}: expected different names with commas, received {text!r}")
    for name in found:
        if known is not None and name not in known:
            raise unknown(kind, name, known)
    return found


def plan(args: argparse.Namespace) -> Plan:
    """Return how long to measure."""
    return Plan(rounds=args.rounds, steps=args.steps, warmup=args.warmup, budget=args.budget)


def use_threads(args: argparse.Namespace) -> int:
    """Set the number of threads for this process and its children and return it; before anything loads OpenMP."""
    args.threads = args.threads or machine.physical_cores()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    return int(args.threads)


def write_json(path: str | Path | None, measured: Mapping[str, Any]) -> None:
    """Write everything that was measured, where a path is given."""
    if path:
        Path(path).write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


def show(args: argparse.Namespace, measured: Mapping[str, Any], markdown: Callable[[Mapping[str, Any]], str]) -> None:
    """Print the tables of what was measured, and write it with the machine that it was measured on."""
    measured = {"machine": machine.describe(), "versions": machine.versions(), "threads": args.threads, **measured}
    print(markdown(measured))
    write_json(args.json, measured)


def main(program: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    try:
        return program(argv) or 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ChildFailed as failure:
        print(f"error: {failure}\n{failure.stderr_tail}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
