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
import resource
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from typing import Any, Iterator, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from fuzz_apart import ENDED, apart
from fuzz_checks import CHECKS, full_source
from fuzz_generate import generate
from fuzz_programs import EXACT, FLOAT, Program
from fuzz_stock import StockFails, Wrong, check_stock, thoroughly

import gluon_amp as amp  # isort: skip
import mxnet as mx

from gluon_amp.state.devices import support

DTYPES = {"ways": ("bfloat16", "float16", "float32"), "conversion": ("float32", "bfloat16"),
          "training": ("bfloat16", "float32"), "first_call": ("bfloat16",),
          "executor": ("bfloat16", "float32"), "symbols": ("bfloat16", "float32"), "imported": ("bfloat16",),
          "empty": ("bfloat16",)}
RUNS_BFLOAT16 = support("cpu").requested("bfloat16") is not None  # native or emulated
_NEAR = 4.0  # times the bound


def dtypes_of(check: str) -> list[str]:
    """Name the types that suit a check on this CPU; where it has no bfloat16 it imitates float16 in training."""
    if RUNS_BFLOAT16:
        return list(DTYPES[check])
    other = ["float16"] if check in ("ways", "first_call", "executor", "imported", "empty") else []
    named = [[each] if each != "bfloat16" else other for each in DTYPES[check]]
    return list(dict.fromkeys(dtype for some in named for dtype in some))


def failure(program: Program, check: str, dtype: str) -> str | None:
    """Return what is wrong with a program, None when all is well."""
    try:
        _check(program, check, dtype)
    except StockFails:
        return None
    except Wrong as error:
        return str(error)
    except Exception as error:  # whatever a network that runs in FP32 raises is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {os.path.basename(last.filename)}: {str(error).splitlines()[0][:200]}"
    finally:
        amp.deinit()
    return None


def _check(program: Program, check: str, dtype: str) -> None:
    """Run a check; a difference just above its bound is measured against a bound that is known better."""
    try:
        CHECKS[check](program, dtype)
    except Wrong as error:
        if error.excess > _NEAR:  # what is not initialised may be right the next time
            raise
        amp.deinit()
        with thoroughly():
            CHECKS[check](program, dtype)


def failure_apart(program: Program, check: str, dtype: str) -> str | None:
    """Return what is wrong with a program, which runs in a process of its own: that it ended the process, perhaps."""
    return apart(lambda: failure(program, check, dtype))


def shrink(program: Program, check: str, dtype: str, seconds: float = 120) -> Program:
    """Return a smaller program that fails as well, as small as can be found in the time."""
    until = time.monotonic() + seconds
    going, kind = True, _kind(failure_apart(program, check, dtype))
    while going and time.monotonic() < until:
        going = False
        for smaller in program.smaller():
            if time.monotonic() > until:
                break
            if _kind(failure_apart(smaller, check, dtype)) == kind:
                program, going = smaller, True
                break
    return program


def _kind(message: str | None) -> str | None:
    """Return the part of a message that tells failures apart."""
    return message and message.split(",")[0].split(":")[0]


def program_of(seed: int, arguments: argparse.Namespace) -> Program:
    """Return the program of a seed."""
    return generate(seed, arguments.steps, EXACT if seed % 4 == 3 else FLOAT)


def run(seed: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Try one seed; tell of every check before it begins, as it may end the process, and of what it finds."""
    program = program_of(seed, arguments)
    try:
        check_stock(program)
    except (Wrong, mx.MXNetError) as error:
        yield {"seed": seed, "stock_is_wrong": str(error)}
        return
    for check in arguments.checks:
        for dtype in arguments.dtypes or dtypes_of(check):
            yield {"trying": (check, dtype)}
            message = failure(program, check, dtype)
            if message is not None:
                yield {"seed": seed, "check": check, "dtype": dtype, "message": message}


def work(arguments: argparse.Namespace) -> int:
    """Try seeds one after the other; a line of JSON tells of each."""
    until = time.monotonic() + 60 * arguments.minutes
    for seed in range(arguments.first, arguments.first + arguments.count):
        if time.monotonic() > until:
            break
        print(json.dumps({"begun": seed}), flush=True)
        for found in run(seed, arguments):
            print(json.dumps(found), flush=True)
        print(json.dumps({"done": seed}), flush=True)
    return 0


def work_on_failure(arguments: argparse.Namespace) -> int:
    """Print the smallest program that fails as one seed does; nothing runs in this process itself."""
    (check,), (dtype,) = arguments.checks, arguments.dtypes
    small = shrink(program_of(arguments.first, arguments), check, dtype, arguments.shrink)
    print(f"   smaller: {failure_apart(small, check, dtype)}; excluded: {small.excluded}\n{small.source()}\n--\n"
          f"{full_source(small, check, dtype)}", flush=True)
    return 0


def supervise(arguments: argparse.Namespace) -> int:
    """Run :func:`work` in a process of its own, again behind a seed that ended it."""
    counts: Counter[str] = Counter()
    first, last = arguments.first, arguments.first + arguments.count
    until = time.monotonic() + 60 * arguments.minutes
    while first < last and time.monotonic() < until:
        begun, trying = None, None
        process = subprocess.Popen(command(arguments, "work", first, last - first, (until - time.monotonic()) / 60),
                                   stdout=subprocess.PIPE, text=True)
        for line in process.stdout or ():
            found = json.loads(line) if line.startswith("{") else {}
            begun = found.get("begun", begun)
            trying = None if "begun" in found else found.get("trying", trying)
            counts["programs"] += "done" in found
            counts["wrong in MXNet alone"] += "stock_is_wrong" in found
            if "message" in found:
                counts["findings"] += 1
                report(found["seed"], found["check"], found["dtype"], found["message"], arguments)
        if process.wait() == 0:
            break
        if trying is None:
            counts["crashes of MXNet alone"] += 1
            print(f"== seed {begun}: {ENDED} with {process.returncode}, of MXNet alone", flush=True)
        else:
            counts["crashes"] += 1
            report(begun, *trying, f"{ENDED} with {process.returncode}", arguments)
        first = (first if begun is None else begun) + 1
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{counts['programs']} programs in {(used.ru_utime + used.ru_stime) / 60:.1f} minutes of CPU: "
          f"{counts['findings']} findings, {counts['crashes']} crashes, "
          f"{counts['crashes of MXNet alone']} of MXNet alone, which is wrong in {counts['wrong in MXNet alone']}")
    return 1 if counts["findings"] or counts["crashes"] else 0


def command(arguments: argparse.Namespace, role: str, first: int, count: int, minutes: float) -> list[str]:
    """Return the command line of a process that does part of the work."""
    made = [sys.executable, os.path.abspath(__file__), "--role", role, "--first", str(first), "--count", str(count),
            "--minutes", str(minutes), "--steps", str(arguments.steps), "--shrink", str(arguments.shrink), "--checks",
            *arguments.checks]
    return made + (["--dtypes", *arguments.dtypes] if arguments.dtypes else [])


def report(seed: int, check: str, dtype: str, message: str, arguments: argparse.Namespace) -> None:
    """Print one finding, with the smallest program that shows it."""
    print(f"== seed {seed}, {check}, {dtype}: {message}", flush=True)
    narrowed = argparse.Namespace(**{**vars(arguments), "checks": [check], "dtypes": [dtype]})
    subprocess.run(command(narrowed, "shrink", seed, 1, arguments.minutes), check=False)


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
    parser.add_argument("--role", choices=sorted(ROLES), default="supervise", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


ROLES = {"supervise": supervise, "work": work, "shrink": work_on_failure}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    options = parse(None)
    sys.exit(ROLES[options.role](options))
