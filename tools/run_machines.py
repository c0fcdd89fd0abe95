"""Run the tests that depend on the CPU as on lesser ones, under limits of oneDNN's; `make test` runs them on this one.

    python tools/run_machines.py              # AVX2, AVX512_CORE
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


def lesser(own: str) -> list[str]:
    """Return the limits under which a CPU is another one, and say which are left out."""
    able = [limit for limit in LIMITS if limit != own and cpu_isa(environ={VARIABLE: limit}) == limit]
    for limit in LIMITS:
        if limit not in able:
            print(f"{limit}: left out, this CPU has {own} and nothing above", flush=True)
    return able


def run(limit: str, arguments: Sequence[str]) -> list[str] | None:
    """Run the tests in a process of their own, printing its lines with the limit; return those on what failed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: limit}
    begin = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "pytest", "-q", "-m", "machine and not slow", *arguments],
                             cwd=PROJECT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True)
    lines = []
    for line in child.stdout or ():
        lines.append(f"{limit}: {line}")
        print(lines[-1], end="", flush=True)
    verdict = "passed" if child.wait() == 0 else "FAILED"
    print(f"{limit}: {verdict} in {time.monotonic() - begin:.0f} s", flush=True)
    if child.returncode == 0:
        return None
    first = next((at for at, line in enumerate(lines) if "= FAILURES =" in line or "= ERRORS =" in line), 0)
    return lines[first:]


def main(arguments: Sequence[str]) -> int:
    """Run the tests under every limit, all at once; what failed is printed last, again."""
    limits = lesser(cpu_isa(environ={}))
    print(f"testing as on {len(limits)} lesser machines: {', '.join(limits) or 'none'}", flush=True)
    with ThreadPoolExecutor() as pool:
        failed = [lines for lines in pool.map(lambda limit: run(limit, arguments), limits) if lines is not None]
    for lines in failed:
        print("".join(lines), end="", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
