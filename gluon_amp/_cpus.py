"""How many CPUs this process may use, and how many threads MXNet starts: in containers they do not fit.

MXNet takes half of the machine's logical processors, whatever a container is allowed, and its threads spin while they
wait for one another: a step takes up to forty times as long where they have to share
(``benchmarks/shared_machine.py``).
"""
from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Mapping, MutableMapping

THREADS = "OMP_NUM_THREADS"
_WAITING, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# How often a waiting thread of GNU's OpenMP looks again before it sleeps: 300,000 times by itself. Where all processors
# are busy with other programs a step of 0.12 s takes up to 5 s so, and 0.23 s with this. On a quiet machine small
# networks, whose threads wait for Python between operators, take up to 1.4 times as long with this.
_FEW_SPINS = "20000"
_LOOKS, _BETWEEN = 5, 0.002  # at what runs on the machine, and the seconds between them
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


def others_running(root: Path = Path("/")) -> int:
    """Return how many other threads of the machine run or wait for a processor, the least of a few looks."""
    least = 0
    for look in range(_LOOKS):
        try:
            running = int((root / "proc/loadavg").read_text().split()[3].split("/")[0]) - 1
        except (OSError, ValueError, IndexError):  # no such file, as on other systems than Linux
            return 0
        least = min(least, running) if look else running
        if not least:
            break
        time.sleep(_BETWEEN)
    return least


def share(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Let MXNet's threads get along with other programs and with the container, unless the user has set how.

    OpenMP reads both settings when MXNet is imported.
    """
    if "mxnet" in sys.modules:
        return
    if not {_WAITING, _SPINS} & environ.keys() and others_running(root) >= (os.cpu_count() or 1):
        environ[_SPINS] = _FEW_SPINS
    if THREADS not in environ and threads(environ) > allowed(root):
        environ[THREADS] = str(allowed(root))


def misfit(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Say what is wrong where there are more threads than CPUs, and what to set; empty where they fit."""
    running, cpus = threads(environ), allowed(root)
    if running <= cpus:
        return ""
    return (f"MXNet runs {running} threads, and this process may use {cpus} CPU{'s' * (cpus != 1)}: they wait for one "
            f"another. Set {THREADS}={cpus} before Python starts")
