"""What the measurements ran on: processor, memory, versions. Nothing here imports a framework."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

# the flags of /proc/cpuinfo that decide which kernels oneDNN can use
_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_PACKAGES = ("mxnet", "mxnet-cu112", "torch", "gluon_amp", "gluoncv", "numpy")
_SETTING_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MXNET_", "DNNL_", "ONEDNN_", "OPENBLAS_", "CUDA_VISIBLE")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _records(cpuinfo: str) -> list[dict[str, str]]:
    """Split the text of /proc/cpuinfo into one mapping a logical processor."""
    records = []
    for block in cpuinfo.strip().split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        records.append({key.strip(): value.strip() for key, _, value in pairs})
    return records


def physical_cores(cpuinfo: str | None = None, usable: set[int] | None = None) -> int:
    """Count the physical cores that this process may use.

    Parameters
    ----------
    cpuinfo : str, optional
        The text of /proc/cpuinfo, read from this machine by default.
    usable : set of int, optional
        The logical processors to count, those of this process by default.
    """
    if usable is None:
        everything = set(range(os.cpu_count() or 1))
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything
    cores = set()
    for record in _records(_read("/proc/cpuinfo") if cpuinfo is None else cpuinfo):
        number = record.get("processor", "")
        if number.isdigit() and int(number) in usable:
            cores.add((record.get("physical id", "0"), record.get("core id", number)))
    return len(cores) or len(usable)


def describe() -> dict[str, Any]:
    """Return the machine: processor, instruction sets, cores, memory in bytes, system and Python."""
    first = _records(_read("/proc/cpuinfo"))[0]
    flags = _flags()
    return {
        "kind": kind(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": first.get("model name") or platform.processor() or "unknown",
        "cpu_family_model": f"{first.get('cpu family', '?')}/{first.get('model', '?')}",
        "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
        "isa_limit": isa_limit(),
        "bfloat16": has_bfloat16(),
        "physical_cores": physical_cores(),
        "logical_cores": os.cpu_count() or 1,
        "memory": _meminfo("MemTotal"),
        "memory_available": available_memory(),
        "python": platform.python_version(),
    }


def isa_limit() -> str:
    """Return the instruction set that MXNet's oneDNN is told to stop at, such as ``AVX2``; empty for none."""
    limit = os.environ.get("DNNL_MAX_CPU_ISA", "").upper()
    return "" if limit in ("ALL", "DEFAULT", "AVX512_CORE_AMX") else limit


def _flags() -> set[str]:
    return set(_records(_read("/proc/cpuinfo"))[0].get("flags", "").split())


def has_amx() -> bool:
    """Return whether the CPU has AMX for bfloat16, and oneDNN may use it."""
    return "amx_bf16" in _flags() and not isa_limit()


def has_bfloat16() -> bool:
    """Return whether the CPU has BF16 instructions, and oneDNN may use them."""
    return bool(_flags() & {"avx512_bf16", "amx_bf16"}) and isa_limit() in ("", "AVX512_CORE_BF16")


def kind() -> str:
    """Return what decides which kernels run here, for the heading of a table."""
    if has_amx():
        return "AMX-BF16"
    if has_bfloat16():
        return "AVX512-BF16"
    limit = isa_limit()
    wide = "avx512f" in _flags() and (not limit or limit.startswith("AVX512"))
    return "AVX512 without BF16" if wide else "AVX2"


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part, for those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def library_settings() -> dict[str, str]:
    """Return the environment variables that change how the numerical libraries run."""
    return {key: value for key, value in sorted(os.environ.items()) if key.startswith(_SETTING_PREFIXES)}


def _meminfo(field: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def available_memory() -> int:
    """Return the bytes that new processes can use: the machine's, or the container's if it has fewer."""
    available = _meminfo("MemAvailable")
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available or int(limit), max(0, int(limit) - int(used)))
    return available


def memory() -> int:
    """Return the bytes of host memory that this process holds now, 0 where there is no /proc."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def flush() -> None:
    """Write out what C libraries have printed; they collect it when they do not print to a terminal."""
    if sys.platform != "win32":
        ctypes.CDLL(None).fflush(None)


def return_free_memory() -> None:
    """Let the C library give memory back that was freed, so that `memory` tells what is in use."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def forget_peak_memory() -> None:
    """Let `peak_memory` begin with what is held now: what came before does not count."""
    gc.collect()
    return_free_memory()
    with contextlib.suppress(OSError):  # no Linux
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the most bytes of host memory that this process has held so far, or since they were last forgotten."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    # where there is no /proc; there it may count what the parent process held before exec
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class OtherLoad:
    """Watches how much of the machine other programs use, from its creation on."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        fields = _read("/proc/stat").partition("\n")[0].split()[1:9]
        # user, nice, system, irq, softirq and steal; not idle and iowait
        ticks = sum(int(value) for place, value in enumerate(fields) if place not in (3, 4))
        own = os.times()
        own_seconds = own.user + own.system + own.children_user + own.children_system
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), own_seconds

    def share(self) -> float:
        """Return the mean share of all processors, 0 to 1; child processes count as own once they have ended."""
        elapsed, busy, own = (now - before for now, before in zip(self._now(), self._begin))
        return max(0.0, min(1.0, (busy - own) / max(elapsed, 1e-9) / (os.cpu_count() or 1)))
