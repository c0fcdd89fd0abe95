"""Run the tests that depend on the CPU as on lesser ones, under limits of oneDNN's; `make test` runs them on this one.

    python tools/run_machines.py              # AVX2, AVX512_CORE
    python tools/run_machines.py -x -k docs   # more arguments for pytest
"""
from __future__ import annotations

import os
import subprocess
import sys

from apart import ROOT  # isort: skip  finds the package
from gluon_amp.machine.dtypes import cpu_isa

LIMITS, VARIABLE = ("AVX2", "AVX512_CORE"), "DNNL_MAX_CPU_ISA"


def main() -> int:
    """Run the tests under every limit that makes this CPU another one, all at once; say which limits are left out."""
    own = cpu_isa(environ={})
    command = [sys.executable, "-m", "pytest", "-q", "-m", "machine and not slow", *sys.argv[1:]]
    limits = [limit for limit in LIMITS if limit != own and cpu_isa(environ={VARIABLE: limit}) == limit]
    children = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: limit}) for limit in limits]
    for limit in LIMITS:
        if limit not in limits:
            print(f"{limit}: left out, this CPU has {own} and nothing above", flush=True)
    for limit, child in zip(limits, children):
        print(f"{limit}:\n{child.communicate()[0]}\n{limit}: {'FAILED' if child.returncode else 'passed'}", flush=True)
    return int(any(child.returncode for child in children))


if __name__ == "__main__":
    sys.exit(main())
