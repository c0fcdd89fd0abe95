#!/usr/bin/env python
"""Try random networks against stock FP32, and print the smallest program that shows what is found.

Every program runs in a process that a crash may end; the next one goes on behind it.

    python tools/fuzz.py --minutes 60
    python tools/fuzz.py --first 17 --count 1 --checks conversion --dtypes float32
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from fuzz_checks import CHECKS, Wrong, check_stock, full_source
from fuzz_programs import EXACT, FLOAT, Program, generate

import gluon_amp as amp

DTYPES = {"ways": ("bfloat16", "float16"), "conversion": ("float32", "bfloat16"), "first_call": ("bfloat16",)}


def failure(program: Program, check: str, dtype: str) -> str | None:
    """Return what is wrong with a program, None when all is well."""
    try:
        CHECKS[check](program, dtype)
    except Wrong as error:
        return str(error)
    except Exception as error:  # whatever a network that runs in FP32 raises is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {os.path.basename(last.filename)}: {str(error).splitlines()[0][:200]}"
    finally:
        amp.deinit()
    return None


def shrink(program: Program, check: str, dtype: str, seconds: float = 120) -> Program:
    """Return a smaller program that fails as well, as small as can be found in the time."""
    until = time.monotonic() + seconds
    going, kind = True, _kind(failure(program, check, dtype))
    while going and time.monotonic() < until:
        going = False
        for smaller in program.smaller():
            if time.monotonic() > until:
                break
            if _kind(failure(smaller, check, dtype)) == kind:
                program, going = smaller, True
                break
    return program


def _kind(message: str | None) -> str | None:
    """Return the part of a message that tells failures apart."""
    return message and message.split(",")[0].split(":")[0]


def run(seed: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Try one seed."""
    found = []
    program = generate(seed, arguments.steps, EXACT if seed % 4 == 3 else FLOAT)
    try:
        check_stock(program)
    except Wrong as error:
        return [{"seed": seed, "stock_is_wrong": str(error)}]
    print(json.dumps({"stock": seed}), flush=True)
    for check in arguments.checks:
        for dtype in arguments.dtypes or DTYPES[check]:
            message = failure(program, check, dtype)
            if message is not None:
                small = shrink(program, check, dtype, arguments.shrink)
                found.append({"seed": seed, "check": check, "dtype": dtype, "message": message,
                              "small": failure(small, check, dtype) or message, "source": small.source(),
                              "script": full_source(small, check, dtype), "excluded": small.excluded})
    return found


def work(arguments: argparse.Namespace) -> int:
    """Try seeds one after the other; a line of JSON tells of each."""
    warnings.simplefilter("ignore")
    until = time.monotonic() + 60 * arguments.minutes
    for seed in range(arguments.first, arguments.first + arguments.count):
        if time.monotonic() > until:
            break
        print(json.dumps({"begun": seed}), flush=True)
        for found in run(seed, arguments):
            print(json.dumps(found), flush=True)
        print(json.dumps({"done": seed}), flush=True)
    return 0


def supervise(arguments: argparse.Namespace) -> int:
    """Run :func:`work` in a process of its own, again behind a seed that ended it."""
    counts: Counter[str] = Counter()
    first, last = arguments.first, arguments.first + arguments.count
    until = time.monotonic() + 60 * arguments.minutes
    while first < last and time.monotonic() < until:
        left = (until - time.monotonic()) / 60
        command = [sys.executable, os.path.abspath(__file__), "--worker", "--first", str(first), "--count",
                   str(last - first), "--minutes", str(left), "--steps", str(arguments.steps), "--shrink",
                   str(arguments.shrink), "--checks", *arguments.checks]
        command += ["--dtypes", *arguments.dtypes] if arguments.dtypes else []
        begun = survived = None
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for line in process.stdout or ():
            found = json.loads(line) if line.startswith("{") else {}
            begun, survived = found.get("begun", begun), found.get("stock", survived)
            counts["programs"] += "done" in found
            counts["wrong in MXNet alone"] += "stock_is_wrong" in found
            if "message" in found:
                counts["findings"] += 1
                report(found)
        if process.wait() == 0:
            break
        whose = "crashes" if survived == begun else "crashes of MXNet alone"
        counts[whose] += 1
        print(f"== seed {begun}: the process ended with {process.returncode} ({whose})", flush=True)
        first = (first if begun is None else begun) + 1
    print(f"{counts['programs']} programs, {counts['findings']} findings, {counts['crashes']} crashes, "
          f"{counts['crashes of MXNet alone']} of MXNet alone, which is wrong in {counts['wrong in MXNet alone']}")
    return 1 if counts["findings"] or counts["crashes"] else 0


def report(found: dict[str, Any]) -> None:
    """Print one finding."""
    print(f"== seed {found['seed']}, {found['check']}, {found['dtype']}: {found['message']}\n"
          f"   smaller: {found['small']}; excluded: {found['excluded']}\n{found['source']}\n--\n{found['script']}",
          flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=10 ** 6, help="how many seeds")
    parser.add_argument("--minutes", type=float, default=10, help="for how long")
    parser.add_argument("--steps", type=int, default=30, help="operators in a program")
    parser.add_argument("--shrink", type=float, default=90, help="seconds to look for a smaller program")
    parser.add_argument("--checks", nargs="+", choices=sorted(CHECKS), default=list(CHECKS))
    parser.add_argument("--dtypes", nargs="+", help="instead of those that suit each check")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    options = parse(None)
    sys.exit(work(options) if options.worker else supervise(options))
