"""How many CPUs this process may use, and how many threads MXNet starts: in containers they do not fit.

MXNet takes half of the machine's logical processors, whatever a container is allowed, and its threads spin while they
wait for one another: a step takes up to forty times as long where they have to share
(``benchmarks/shared_machine.py``).
"""
from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Mapping, MutableMapping

THREADS = "OMP_NUM_THREADS"
_WAITING, _SPINS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# How often a waiting thread of GNU's OpenMP looks again before it sleeps, by itself 300,000 times: as fast as that on
# a quiet machine, where 1,000 are not, and twenty times as fast where all processors are busy. 5,000 would do on CPUs
# whose instruction for waiting takes as long as Intel's since Skylake; on others it is several times as short.
_ENOUGH_SPINS = "20000"
_QUOTAS = (("sys/fs/cgroup/cpu.max",), ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"))

_chosen: dict[str, str] = {}  # by `share`


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


def share(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Let MXNet's threads get along with other programs and with the container, unless the user has set how.

    OpenMP reads both settings when MXNet is imported.
    """
    if "mxnet" in sys.modules:
        return
    if not {_WAITING, _SPINS} & environ.keys():
        _chosen[_SPINS] = _ENOUGH_SPINS
    if THREADS not in environ and threads(environ) > allowed(root):
        _chosen[THREADS] = str(allowed(root))
    environ.update(_chosen)


def as_users_set_it() -> dict[str, str]:
    """Return the environment without what :func:`share` has chosen for this process, for processes beside it."""
    return {name: value for name, value in os.environ.items() if _chosen.get(name) != value}


def misfit(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Say what is wrong where there are more threads than CPUs, and what to set; empty where they fit."""
    running, cpus = threads(environ), allowed(root)
    if running <= cpus:
        return ""
    return (f"MXNet runs {running} threads, and this process may use {cpus} CPU{'s' * (cpus != 1)}: they wait for one "
            f"another. Set {THREADS}={cpus} before Python starts")
