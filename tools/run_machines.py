"""Run the tests that depend on the CPU as on lesser ones: once under each limit of oneDNN's, once without.

    python tools/run_machines.py              # AVX2, AVX512_CORE, this CPU's own
    python tools/run_machines.py -x -k docs   # more arguments for pytest
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Sequence

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from gluon_amp.dtypes import cpu_isa  # noqa: E402

LIMITS = ("AVX2", "AVX512_CORE")
VARIABLE = "DNNL_MAX_CPU_ISA"


def machines(own: str) -> list[tuple[str, str | None]]:
    """Return the runs that a CPU can make, names and limits, and say which it cannot."""
    able = [limit for limit in LIMITS if limit != own and cpu_isa(environ={VARIABLE: limit}) == limit]
    for limit in LIMITS:
        if limit not in (*able, own):
            print(f"{limit}: left out, this CPU has {own} and nothing above", flush=True)
    return [*((limit, limit) for limit in able), (f"{own}, this CPU's own", None)]


def run(name: str, limit: str | None, arguments: Sequence[str]) -> list[str] | None:
    """Run the tests in a process of their own, printing its lines with its name; return those on what failed."""
    environ = {key: value for key, value in os.environ.items() if key != VARIABLE}
    begin = time.monotonic()
    environ.update({"OMP_NUM_THREADS": "1", **({VARIABLE: limit} if limit else {})})
    child = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-m", "machine and not slow", *arguments],
                             cwd=PROJECT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)
    lines = []
    for line in child.stdout or ():
        lines.append(f"{name}: {line}")
        print(lines[-1], end="", flush=True)
    verdict = "passed" if child.wait() == 0 else "FAILED"
    print(f"{name}: {verdict} in {time.monotonic() - begin:.0f} s", flush=True)
    if child.returncode == 0:
        return None
    first = next((at for at, line in enumerate(lines) if "= FAILURES =" in line or "= ERRORS =" in line), 0)
    return lines[first:]


def main(arguments: Sequence[str]) -> int:
    """Run the tests on every machine that this one can pass for, all at once; what failed is printed last, again."""
    wanted = machines(cpu_isa(environ={}))
    print(f"testing on {len(wanted)} machines: {', '.join(name for name, _ in wanted)}", flush=True)
    with ThreadPoolExecutor(len(wanted)) as pool:
        failed = [lines for lines in pool.map(lambda each: run(*each, arguments), wanted) if lines is not None]
    for lines in failed:
        print("".join(lines), end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
