"""What processes of test_audit.py run instead of operators: each ends in another way.

    python tests/helpers/audit_runners.py transpose "axes=(0, 2, 3, 1)"

runs a condition of an operator in prediction and prints the verdicts, for tests that need another environment.
"""
from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))  # where it is a program

from audit.runner import Options, run_modes
from audit.verdicts import OK, Result


def _modes(only, behaviour):
    for _, mode in only:
        if "write" in mode:
            behaviour()
    return {key: Result(OK) for key in only}


def well(op, dtype, rounding, device, only):
    return _modes(only, lambda: None)


def segfault(op, dtype, rounding, device, only):
    return _modes(only, lambda: ctypes.string_at(0))


def abort(op, dtype, rounding, device, only):
    def complain():
        os.write(2, b"malloc(): invalid size (unsorted)\n")
        os.abort()
    return _modes(only, complain)


def leave(op, dtype, rounding, device, only):
    return _modes(only, lambda: os._exit(255))


def sleep(op, dtype, rounding, device, only):
    return _modes(only, lambda: time.sleep(1000))


def spin(op, dtype, rounding, device, only):
    def forever():
        while True:
            pass
    return _modes(only, forever)


def fail(op, dtype, rounding, device, only):
    def complain():
        raise ValueError("no good")
    return _modes(only, complain)


if __name__ == "__main__":
    keys = [(sys.argv[2], f"{run}/plain/infer") for run in ("eager", "cached", "static")]
    for result in run_modes(sys.argv[1], Options(timeout=20.0), "bfloat16", keys).values():
        print(result.verdict)
