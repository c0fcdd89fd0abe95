"""The machine below MXNet: CPUs and threads, oneDNN's instructions, glibc's memory, and the CUDA driver."""
from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, Mapping, MutableMapping, NamedTuple, Sequence

# Threads. MXNet takes half of the machine's logical processors, whatever a container is allowed, and its threads spin
# while they wait for one another: a step takes up to forty times as long where they have to share.
_THREADS, _WAITING, _SPINS = "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
# How often a waiting thread of GNU's OpenMP looks before it sleeps: 300,000 times by itself, so that a step of 0.12 s
# takes up to 5 s on a busy machine, and 0.23 s with this. On a quiet one small networks take up to 1.4 times as long.
_FEW_SPINS = "20000"
_LOOKS, _BETWEEN = 5, 0.002  # at the machine's threads, and the seconds between them
_QUOTAS = (("sys/fs/cgroup/cpu.max",), ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"))
_KERNELS, _PARALLEL_COPY = "MXNET_MKLDNN_CACHE_NUM", "MXNET_CPU_PARALLEL_SIZE"


def prepare() -> None:
    """Make the settings that MXNet reads when it is imported, or with its first operator, unless the user has."""
    share_cpus()
    request_amx()
    # MXNet keeps a kernel of oneDNN for every shape, for good, where it is not told: half a megabyte for each new shape
    # of a small network. oneDNN keeps the last 1,024 of all operators itself, from which MXNet's are made in no time.
    os.environ.setdefault(_KERNELS, "512")
    # The thread that calls MXNet copies arrays of 200,000 values to NumPy and back on OpenMP threads of its own: with
    # more threads than CPUs GNU's OpenMP lets them sleep, and small networks take 1.8 times as long (mxnet#4552).
    os.environ.setdefault(_PARALLEL_COPY, str(2**31 - 1))


def allowed_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs the process's affinity and its container's quota leave to it, rounded up."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in _QUOTAS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            quota, period = " ".join((root / name).read_text() for name in names).split()[:2]
            if float(quota) > 0:
                cpus = min(cpus, max(1, math.ceil(float(quota) / float(period))))
    return cpus


def threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many threads MXNet's operators run on."""
    first = environ.get(_THREADS, "").split(",")[0].strip()
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


def share_cpus(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Let MXNet's threads get along with other programs and with the container, unless the user has set how."""
    if "mxnet" in sys.modules:
        return
    if not {_WAITING, _SPINS} & environ.keys() and others_running(root) >= (os.cpu_count() or 1):
        environ[_SPINS] = _FEW_SPINS
    if _THREADS not in environ and threads(environ) > allowed_cpus(root):
        environ[_THREADS] = str(allowed_cpus(root))


def threads_advice(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[bool, str]:
    """Say that threads are more than the CPUs, or fewer and not chosen by the user; and whether that is a fault."""
    running, cpus = threads(environ), allowed_cpus(root)
    told = (f"MXNet runs {running} thread{'s' * (running != 1)}, and this process may use {cpus} "
            f"CPU{'s' * (cpus != 1)}")
    if running > cpus:
        return True, f"{told}: they wait for one another. Set {_THREADS}={cpus} before Python starts"
    return False, "" if environ.get(_THREADS) or running == cpus else (
        f"{told}. Where each of them is a core of its own, {_THREADS}={cpus} before Python starts makes FP32 and AMP "
        "faster")


# AMX tiles, several times as fast in bfloat16 as the vector units. oneDNN 2.4.4 chooses its kernels for them only where
# DNNL_MAX_CPU_ISA says so, and does not ask Linux for the tiles: without, the first AMX instruction ends the process.
MAX_ISA, AMX = "DNNL_MAX_CPU_ISA", "AVX512_CORE_AMX"
# Numbers of Linux's system call on x86-64, of the request for a feature, and of the feature.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# What became of the request for AMX; of one that came after MXNet was imported, oneDNN may know nothing.
GRANTED, GRANTED_LATE, REFUSED = "granted", "granted after MXNet was imported", "refused by the operating system"
_outcome: list[str] = []
_settings: list[MutableMapping[str, str]] = []  # environments to clean up


def request_amx(cpuinfo: str | None = None, environ: MutableMapping[str, str] = os.environ,
                ask: Callable[[], bool] | None = None) -> bool:
    """Ask for AMX where the CPU has it and the user has not set another instruction set."""
    wanted = environ.get(MAX_ISA, AMX).upper() in (AMX, "ALL")
    if not (wanted and cpu_flags(cpuinfo) >= {"amx_bf16", "amx_tile"}):
        return False
    if not (ask or _request_tiles)():
        _outcome.append(REFUSED)
        return False
    _outcome.append(GRANTED_LATE if "mxnet" in sys.modules else GRANTED)
    if MAX_ISA not in environ:
        environ[MAX_ISA] = AMX
        _settings.append(environ)
    return True


def _request_tiles() -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def amx_outcome() -> str | None:
    """Return what became of the request for AMX; None where the CPU has none, or the user asked for less."""
    return _outcome[-1] if _outcome else None


def settle(run_operator: Callable[[], object]) -> None:
    """Make oneDNN read the setting now and take it out of the environment again."""
    # A child process would inherit it, but not the right to the tiles.
    while _settings:
        try:
            run_operator()
        finally:
            _settings.pop().pop(MAX_ISA, None)


def cpu_fields(text: str | None = None) -> dict[str, str]:
    """Return what Linux says of the first CPU."""
    path = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in (text if text is not None else path.read_text() if path.exists() else "").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def cpu_flags(cpuinfo: str | None = None) -> set[str]:
    """Return the CPU's instruction sets, as Linux names them."""
    return set(cpu_fields(cpuinfo).get("flags", "").split())


class Cpu(NamedTuple):
    """A kind of CPU: measurements on one hold for all of its kind."""

    vendor: str
    family: int
    model: int

    def __str__(self) -> str:
        vendor = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(self.vendor, self.vendor)
        return f"{vendor} family {self.family}, model {self.model}"


def cpu_kind(cpuinfo: str | None = None) -> Cpu:
    """Return the kind of CPU, of numbers -1 where Linux does not give them."""
    fields = cpu_fields(cpuinfo)
    family, model = (int(fields[name]) if fields.get(name, "").isdigit() else -1 for name in ("cpu family", "model"))
    return Cpu(fields.get("vendor_id", "unknown CPU"), family, model)


# Memory. MXNet takes every array on a CPU from malloc, and glibc gives large ones back, so that the system clears each
# page of the next step's arrays anew: a fifth of an LSTM's step, half of MobileNet v2's inference. Large arrays of the
# first step, many of which stay, are mapped: glibc would put them in gaps, and take new memory for others in the next
# step; and those that are never written take no memory on fresh pages.
KEEP_MEMORY = "GLUON_AMP_KEEP_MEMORY"
_SEARCH, _RANGE = "NNVM_AUTO_SEARCH_MATCH_RANGE", "NNVM_EXEC_MATCH_RANGE"
_SPACES, _WORKERS = "MXNET_CPU_TEMP_COPY", "MXNET_CPU_WORKER_NTHREADS"
# What glibc calls a setting, its number for mallopt, and the value: in the first step, and from the second one on.
_FIRST = (("MMAP_THRESHOLD", -3, 1 << 17),)  # where glibc begins; it raises this with the first large array that goes
_LATER = (
    ("TRIM_THRESHOLD", -1, 1 << 30),  # bytes that stay free at the end of the main heap
    ("TOP_PAD", -2, 1 << 26),  # as large as a heap of another thread: empty ones stay
    ("MMAP_THRESHOLD", -3, 1 << 25),  # the most that glibc takes; larger arrays are mapped, and go back at once
)
_seen: set[str] = set()


def take_little_memory() -> None:
    """Let MXNet's graphs take little memory, unless the user has set how much."""
    if _RANGE not in os.environ:  # the smallest of five plans of a graph's memory
        os.environ.setdefault(_SEARCH, "1")
    # Operators take temporary memory from four spaces in turns, which all grow to the largest request. Two do for the
    # one thread that hands out a CPU's operators. MXNet reads this when the first operator asks for such a space.
    if os.environ.get(_WORKERS, "1") == "1":
        os.environ.setdefault(_SPACES, "2")


def note_step(event: str) -> None:
    """Take note of what happens once a step; the first step is over when the same event comes again."""
    if event in _seen:
        keep_freed_memory()
    elif not _seen:
        _tell_glibc(_FIRST)
    _seen.add(event)


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory, for the rest of the process, unless there is an obstacle."""
    _seen.add("kept")
    _tell_glibc(_LATER)


def _tell_glibc(settings: Sequence[tuple[str, int, int]]) -> None:
    if not memory_obstacle(os.environ):
        libc = ctypes.CDLL(None)
        for _, number, value in settings:
            libc.mallopt(number, value)


def memory_obstacle(environ: Mapping[str, str]) -> str:
    """Return what speaks against keeping memory: another allocator, or the user's word; empty when nothing does."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "the C library is not glibc"
    if environ.get(KEEP_MEMORY) == "0":
        return f"{KEEP_MEMORY}=0"
    tunables = environ.get("GLIBC_TUNABLES", "")
    theirs = [f"MALLOC_{name}_" for name, *_ in _LATER if f"MALLOC_{name}_" in environ]
    theirs += [f"glibc.malloc.{name.lower()}" for name, *_ in _LATER if f"glibc.malloc.{name.lower()}=" in tunables]
    return f"{theirs[0]} is set, and wins" if theirs else ""


# The CUDA driver and its run-time compiler, which MXNet does not tell of.
NO_FUSION = "MXNET_USE_FUSION"  # 0: MXNet compiles no operators at run time
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute
# The libraries that MXNet may load and that a report names.
_TOLD = re.compile(r"lib(mxnet|cuda|cudart|nvrtc|nvrtc-builtins|nvToolsExt|cublas|cublasLt|cudnn\w*|cufft|curand|"
                   r"cusolver|nccl|gomp|iomp5|openblas|dnnl|mkldnn)\b[^/]*\.so[^/]*$")


def _library(name: str) -> ctypes.CDLL | None:
    with suppress(OSError):
        return ctypes.CDLL(name)
    return None


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver knows; None without a driver that works."""
    cuda, version = _library("libcuda.so.1"), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value <= 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def nvrtc_version() -> tuple[int, int] | None:
    """Return the version of the compiler that MXNet's CUDA build loads; None where there is none."""
    nvrtc, major, minor = _library("libnvrtc.so.11.2"), ctypes.c_int(), ctypes.c_int()
    known = nvrtc is not None and nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return (major.value, minor.value) if known else None


def fusion_problem(driver: tuple[int, int] | None, nvrtc: tuple[int, int] | None) -> str | None:
    """Say why the operators that MXNet compiles at run time cannot run; None where they can, or nothing is known."""
    if driver is None or nvrtc is None or driver >= nvrtc:
        return None
    return (f"the driver knows CUDA {dotted(driver)}, and the run-time compiler (NVRTC) is of CUDA {dotted(nvrtc)}: "
            "the driver refuses what it compiles")


def dotted(version: tuple[int, int] | None) -> str:
    """Write a version, or a compute capability, as people do."""
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def gpu(number: int) -> tuple[str | None, tuple[int, int] | None]:
    """Ask the driver for a GPU's name and compute capability; None for both without driver or device."""
    cuda, device, name = _library("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if cuda is None or (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), number)
                        or cuda.cuDeviceGetName(name, len(name), device)
                        or cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
                        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)):
        return None, None
    return name.value.decode(errors="replace"), (major.value, minor.value)


def loaded_libraries() -> list[str]:
    """Return the paths of the libraries behind MXNet that this process has loaded, whatever was installed."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(None, 5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    return sorted(path for path in paths if _TOLD.match(os.path.basename(path)))
