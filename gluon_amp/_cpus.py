"""How many CPUs this process may use, and how many threads MXNet starts: in containers they do not fit.

MXNet takes half of the machine's logical processors, whatever a container is allowed, and its threads spin while they
wait for one another: a step takes up to ten times as long where they have to share.
"""
from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Mapping

THREADS = "OMP_NUM_THREADS"
_QUOTAS = (("sys/fs/cgroup/cpu.max",), ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def allowed(root: Path = Path("/")) -> int:
    """Return how many CPUs the process's affinity and its container's quota leave to it, rounded up."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in _QUOTAS:
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()[:2]
            if float(quota) > 0:
                cpus = min(cpus, max(1, math.ceil(float(quota) / float(period))))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return cpus


def threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many threads MXNet's operators run on."""
    first = environ.get(THREADS, "").split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) else max(1, (os.cpu_count() or 2) // 2)


def misfit(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Say what is wrong where there are more threads than CPUs, and what to set; empty where they fit."""
    running, cpus = threads(environ), allowed(root)
    if running <= cpus:
        return ""
    return (f"MXNet runs {running} threads, and this process may use {cpus} CPU{'s' * (cpus != 1)}: they wait for one "
            f"another. Set {THREADS}={cpus} before Python starts")
