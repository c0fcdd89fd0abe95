"""Let oneDNN use the CPU's AMX tiles, several times as fast in bfloat16 as its vector units.

oneDNN 2.4.4 has AMX kernels but does not choose them unless ``DNNL_MAX_CPU_ISA`` says so, and it does not ask Linux
for the tiles, without which the first AMX instruction ends the process. Both are done here. oneDNN reads its setting
once, with its first operator: :func:`request` comes before that, :func:`settle` runs it.
"""
from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Callable, MutableMapping, NamedTuple

VARIABLE, AMX = "DNNL_MAX_CPU_ISA", "AVX512_CORE_AMX"
_ALLOWS_AMX = (AMX, "ALL")
_AMX_FLAGS = frozenset({"amx_bf16", "amx_tile"})
# Numbers of Linux's system call on x86-64, of the request for a feature, and of the feature.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

# What became of the request for AMX; of one that came after MXNet was imported, oneDNN may know nothing.
GRANTED, GRANTED_LATE, REFUSED = "granted", "granted after MXNet was imported", "refused by the operating system"
_outcome: list[str] = []
_settings: list[MutableMapping[str, str]] = []  # environments to clean up


def request(cpuinfo: str | None = None, environ: MutableMapping[str, str] | None = None,
            ask: Callable[[], bool] | None = None) -> bool:
    """Ask for AMX where the CPU has it and the user has not set another instruction set."""
    environ = os.environ if environ is None else environ
    wanted = environ.get(VARIABLE, AMX).upper() in _ALLOWS_AMX
    if not (wanted and cpu_flags(cpuinfo) >= _AMX_FLAGS):
        return False
    if not (ask or request_tiles)():
        _outcome.append(REFUSED)
        return False
    _outcome.append(GRANTED_LATE if "mxnet" in sys.modules else GRANTED)
    if VARIABLE not in environ:
        environ[VARIABLE] = AMX
        _settings.append(environ)
    return True


def granted() -> bool:
    """Tell whether this process may use AMX tiles."""
    return outcome() in (GRANTED, GRANTED_LATE)


def outcome() -> str | None:
    """Return what became of the request for AMX; None where the CPU has none, or the user asked for less."""
    return _outcome[-1] if _outcome else None


def settle(run_operator: Callable[[], object]) -> None:
    """Make oneDNN read the setting now and take it out of the environment again."""
    # A child process would inherit it, but not the right to the tiles.
    while _settings:
        try:
            run_operator()
        finally:
            _settings.pop().pop(VARIABLE, None)


def cpu_flags(cpuinfo: str | None = None) -> set[str]:
    """Return the CPU's instruction sets, as Linux names them."""
    lines = (line for line in (cpuinfo if cpuinfo is not None else _cpuinfo()).splitlines() if line.startswith("flags"))
    return next((set(line.split(":", 1)[1].split()) for line in lines), set())


def cpu_name(cpuinfo: str | None = None) -> str:
    """Return the CPU's name, as Linux gives it."""
    lines = (cpuinfo if cpuinfo is not None else _cpuinfo()).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


class Cpu(NamedTuple):
    """What kind of CPU it is: what was measured on one holds for all of its kind."""

    vendor: str
    family: int
    model: int

    def __str__(self) -> str:
        vendor = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(self.vendor, self.vendor)
        return f"{vendor} family {self.family}, model {self.model}"


def cpu_kind(cpuinfo: str | None = None) -> Cpu:
    """Return the kind of CPU, of numbers -1 where Linux does not give them."""
    fields: dict[str, str] = {}
    for line in (cpuinfo if cpuinfo is not None else _cpuinfo()).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    family, model = (int(fields[name]) if fields.get(name, "").isdigit() else -1 for name in ("cpu family", "model"))
    return Cpu(fields.get("vendor_id", "unknown CPU"), family, model)


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def request_tiles() -> bool:
    """Ask Linux to let this process use AMX tiles; return whether it may."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
