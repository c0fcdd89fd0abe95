"""Names and aliases of data types, and what the CPU and GPU at hand can run.

Nothing here imports MXNet: a data type is its name (``'bfloat16'``) everywhere above the engine.
"""
from __future__ import annotations

import ctypes
import os
from typing import Mapping, NamedTuple

import numpy as np

from . import _isa
from .errors import DTypeError, expected

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "Support", "cpu_isa", "cpu_support", "cuda_support", "normalize"]

FLOAT16, BFLOAT16, FLOAT32 = "float16", "bfloat16", "float32"
LOW_PRECISION = (FLOAT16, BFLOAT16)

# MXNet's Python side represents bfloat16 as this structured type.
BFLOAT16_DTYPE = np.dtype([("bfloat16", np.uint16)])


def normalize(dtype: object, name: str = "target_dtype") -> str:
    """Turn any accepted spelling of a low-precision type into its name.

    Parameters
    ----------
    dtype : str, numpy.dtype or type
        ``'float16'``, ``'bfloat16'``, ``np.float16``, MXNet's structured bfloat16 type.
    name : str
        The argument's name, for the error message.

    Returns
    -------
    str
        ``'float16'`` or ``'bfloat16'``.

    Raises
    ------
    DTypeError
        For every other value.

    Examples
    --------
    >>> normalize(np.float16)
    'float16'
    """
    if isinstance(dtype, str) and dtype in LOW_PRECISION:
        return dtype
    as_numpy = None if isinstance(dtype, str) else _as_numpy(dtype)
    if as_numpy == BFLOAT16_DTYPE:
        return BFLOAT16
    if as_numpy == np.float16:
        return FLOAT16
    raise DTypeError(expected("'float16', 'bfloat16', np.float16 or None (chosen by the machine)", name, dtype))


def _as_numpy(dtype: object) -> np.dtype | None:
    try:
        return np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError:
        return None


class Support(NamedTuple):
    """Whether a device runs a low-precision type, and why.

    Attributes
    ----------
    dtype : str or None
        The type this device should run in, None when it has none.
    native : bool
        False when the engine emulates the type, slower than FP32.
    reason : str
        One sentence for the log and for error messages.
    imitated : bool
        True when the engine has no kernels for the type, and this package imitates it on FP32 ones.
    channel_multiple : int
        The multiple of channels that the fast convolution kernels need; 1 where it does not matter.
    amx : bool
        Whether the kernels use AMX tiles.
    """

    dtype: str | None
    native: bool
    reason: str
    imitated: bool = False
    channel_multiple: int = 1
    amx: bool = False


IMITATED_FLOAT16 = Support(FLOAT16, False, "the CPU has no float16 kernels: FP32 kernels run on values rounded through "
                                           "float16, to test its numerics, never for speed", imitated=True)


# From the least to the most capable, as in oneDNN's DNNL_MAX_CPU_ISA.
_ISA_LEVELS = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
               "AVX512_CORE_AMX")
_ISA_FLAGS = ((_isa.AMX, ("amx_bf16", "amx_tile")), ("AVX512_CORE_BF16", ("avx512_bf16",)),
              ("AVX512_CORE_VNNI", ("avx512_vnni",)),
              ("AVX512_CORE", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
              ("AVX2", ("avx2",)), ("AVX", ("avx",)))


def cpu_isa(cpuinfo: str | None = None, environ: Mapping[str, str] | None = None, amx: bool | None = None) -> str:
    """Name the instruction set that oneDNN will use on this CPU.

    Parameters
    ----------
    cpuinfo : str, optional
        Text in the form of ``/proc/cpuinfo``; read from the machine when None.
    environ : mapping, optional
        The environment; ``DNNL_MAX_CPU_ISA`` lowers the answer as it lowers oneDNN's own choice.
    amx : bool, optional
        Whether this process may use AMX tiles; asked of :mod:`gluon_amp._isa` when None.

    Returns
    -------
    str
        One of oneDNN's names, such as ``'AVX512_CORE_BF16'``.

    Examples
    --------
    >>> cpu_isa("flags : fpu avx avx2", environ={})
    'AVX2'
    """
    environ = os.environ if environ is None else environ
    amx = _isa.granted() if amx is None else amx
    flags = _isa.cpu_flags(cpuinfo)
    found = next((isa for isa, needed in _ISA_FLAGS if flags.issuperset(needed) and (amx or isa != _isa.AMX)), "SSE41")
    limit = environ.get(_isa.VARIABLE, "").upper()
    if limit in _ISA_LEVELS:
        found = min(found, limit, key=_ISA_LEVELS.index)
    return found


def cpu_support(isa: str | None = None) -> Support:
    """Say which low-precision type this CPU runs through MXNet's oneDNN, and how well.

    Examples
    --------
    >>> cpu_support('AVX2').dtype is None
    True
    """
    isa = cpu_isa() if isa is None else isa
    level = _ISA_LEVELS.index(isa)
    amx = isa == _isa.AMX
    multiple = 32 if amx else 16
    if level >= _ISA_LEVELS.index("AVX512_CORE_BF16"):
        return Support(BFLOAT16, True, f"the CPU has bfloat16 instructions ({isa})", channel_multiple=multiple, amx=amx)
    if level >= _ISA_LEVELS.index("AVX512_CORE"):
        return Support(BFLOAT16, False, f"the CPU has AVX512 without bfloat16 instructions ({isa}): oneDNN emulates "
                                        "bfloat16, about 2x slower than FP32", channel_multiple=multiple)
    return Support(None, False, f"the CPU has no AVX512 ({isa}): oneDNN has no bfloat16 kernels for it")


_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


def cuda_compute_capability(device_id: int = 0) -> tuple | None:
    """Ask the CUDA driver for a device's compute capability; None without driver or device.

    Examples
    --------
    >>> cuda_compute_capability(10_000) is None
    True
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), device_id) != 0:
        return None
    found = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
        found.append(value.value)
    return tuple(found)


_TENSOR_CORES = 8  # the multiple of channels that they need in float16


def cuda_support(capability: tuple | None) -> Support:
    """Say whether MXNet's published CUDA wheels run float16 on a device of this compute capability.

    Examples
    --------
    >>> cuda_support((7, 5)).dtype
    'float16'
    >>> cuda_support((9, 0)).dtype is None
    True
    """
    if capability is None:
        return Support(FLOAT16, True, "the GPU's compute capability is unknown: float16 is assumed to work",
                       channel_multiple=_TENSOR_CORES)
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (9, 0):
        return Support(None, False, f"the GPU has {name}: MXNet's wheels hold kernels for 5.0 to 8.9 only, and no PTX")
    if capability < (5, 0):
        return Support(None, False, f"the GPU has {name}: MXNet's wheels hold kernels for 5.0 to 8.9 only")
    cores = "Tensor Cores" if capability >= (7, 0) else "no Tensor Cores: memory traffic is halved, not arithmetic"
    return Support(FLOAT16, True, f"the GPU has {name} ({cores})", channel_multiple=_TENSOR_CORES)
