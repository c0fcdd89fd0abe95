"""The CUDA driver and its run-time compiler, asked directly: what MXNet does not tell of GPUs."""
from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Callable

NO_FUSION = "MXNET_USE_FUSION"  # 0: MXNet compiles no operators at run time
_DRIVER, _NVRTC = "libcuda.so.1", "libnvrtc.so.11.2"
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute
# Of the libraries that MXNet may load, those that a report needs.
_TOLD = re.compile(r"lib(mxnet|cuda|cudart|nvrtc|nvrtc-builtins|nvToolsExt|cublas|cublasLt|cudnn\w*|cufft|curand|"
                   r"cusolver|nccl|gomp|iomp5|openblas|dnnl|mkldnn)\b[^/]*\.so[^/]*$")


def driver_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver knows; None without a driver that works."""
    cuda, version = _driver(), ctypes.c_int()
    if cuda is None or cuda.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value <= 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def nvrtc_version() -> tuple[int, int] | None:
    """Return the version of the compiler that MXNet's CUDA build loads; None where there is none."""
    try:
        nvrtc = ctypes.CDLL(_NVRTC)
    except OSError:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    return major.value, minor.value


def fusion_problem(driver: tuple[int, int] | None, nvrtc: tuple[int, int] | None) -> str | None:
    """Say why the operators that MXNet compiles at run time cannot run; None where they can, or nothing is known."""
    if driver is None or nvrtc is None or driver >= nvrtc:
        return None
    return (f"the driver knows CUDA {dotted(driver)}, and the run-time compiler (NVRTC) is of CUDA {dotted(nvrtc)}: "
            "the driver refuses what it compiles")


def dotted(version: tuple[int, int] | None) -> str:
    """Write a version, or a compute capability, as people do."""
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def compute_capability(device_id: int = 0) -> tuple[int, int] | None:
    """Ask the driver for a device's compute capability; None without driver or device."""
    numbers = [_attribute(attribute, device_id) for attribute in (_MAJOR, _MINOR)]
    return None if numbers[0] is None or numbers[1] is None else (numbers[0], numbers[1])


def device_name(device_id: int = 0) -> str | None:
    """Ask the driver for a device's name; None without driver or device."""
    name = ctypes.create_string_buffer(256)
    known = _ask(device_id, lambda cuda, device: cuda.cuDeviceGetName(name, len(name), device))
    return name.value.decode(errors="replace") if known else None


def loaded_libraries() -> list[str]:
    """Return the paths of the libraries behind MXNet that this process has loaded, whatever was installed."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(None, 5)[5] for line in lines if line.count(" ") >= 5 and "/" in line}
    return sorted(path for path in paths if _TOLD.match(os.path.basename(path)))


def _attribute(attribute: int, device_id: int) -> int | None:
    value = ctypes.c_int()
    known = _ask(device_id, lambda cuda, device: cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return value.value if known else None


def _ask(device_id: int, question: Callable[[ctypes.CDLL, ctypes.c_int], int]) -> bool:
    """Ask the driver about a device; return whether it answered."""
    cuda, device = _driver(), ctypes.c_int()
    return (cuda is not None and cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), device_id) == 0
            and question(cuda, device) == 0)


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError:
        return None
