"""Run the tests that depend on the CPU as on lesser ones: once under each limit of oneDNN's, once without.

    python tools/run_machines.py              # AVX2, AVX512_CORE, this CPU's own
    python tools/run_machines.py -x -k docs   # more arguments for pytest
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Sequence

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from gluon_amp.dtypes import cpu_isa  # noqa: E402

LIMITS = ("AVX2", "AVX512_CORE")
VARIABLE = "DNNL_MAX_CPU_ISA"


def run(name: str, limit: str | None, arguments: Sequence[str]) -> bool:
    """Run the tests in a process of their own; return whether they pass."""
    print(f"{name}: testing", flush=True)
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE}
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "machine and not slow", *arguments], cwd=PROJECT,
                          env={**environ, **({VARIABLE: limit} if limit else {})}, check=False)
    print(f"{name}: {'passed' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - begin:.0f} s", flush=True)
    return done.returncode == 0


def main(arguments: Sequence[str]) -> int:
    """Run the tests on every machine that this one can pass for; return the exit code."""
    own, passed = cpu_isa(environ={}), []
    for limit in LIMITS:
        if limit == own:
            continue
        if cpu_isa(environ={VARIABLE: limit}) == limit:
            passed.append(run(limit, limit, arguments))
        else:
            print(f"{limit}: left out, this CPU has {own} and nothing above", flush=True)
    passed.append(run(f"{own}, this CPU's own", None, arguments))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
