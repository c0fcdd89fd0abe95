"""Names and aliases of data types, and the types that the CPU and GPU at hand can run."""
from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Mapping, NamedTuple

import numpy as np

from ..errors import DTypeError, expected
from . import host

FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = "float16", "bfloat16", "float32", "float64"
LOW_PRECISION = (FLOAT16, BFLOAT16)
INT8 = "int8"  # of conversions only, beside another type

# MXNet's Python side represents bfloat16 as this structured type.
BFLOAT16_DTYPE = np.dtype([("bfloat16", np.uint16)])


@dataclass(frozen=True)
class Format:
    """The range of a floating-point type."""

    largest: float  # the largest finite value
    overflow: float  # absolute values from here on are rounded to infinity
    normal: float  # the smallest value with full resolution
    flush: float  # absolute values up to here are rounded to zero
    roundoff: float  # the largest relative error of values with full resolution

    @classmethod
    def of(cls, fraction_bits: int, largest_exponent: int) -> Format:
        """Compute the range from a type's layout, for rounding to nearest, ties to even."""
        step = 2.0 ** (largest_exponent - fraction_bits)
        top = 2.0 ** largest_exponent * 2
        smallest_exponent = 1 - largest_exponent
        return cls(top - step, top - step / 2, 2.0 ** smallest_exponent, 2.0 ** (smallest_exponent - fraction_bits - 1),
                   2.0 ** (-fraction_bits - 1))

    def holds(self, value: float) -> bool:
        """Tell whether rounding a value changes it by no more than the roundoff."""
        size = abs(value)
        if not math.isfinite(size) or size == 0 or self.normal <= size < self.overflow:
            return True
        step = 2 * self.flush
        return size < self.normal and abs(round(size / step) * step - size) <= self.roundoff * size

    def headroom(self, largest: float) -> float:
        """Return how many times a value can double before it overflows; negative when it does already."""
        if math.isnan(largest) or math.isinf(largest):
            return -math.inf
        return math.log2(self.largest / largest) if largest > 0 else math.inf


FORMATS = {FLOAT16: Format.of(10, 15), BFLOAT16: Format.of(7, 127)}


# In lower case, as str() gives them, without the package that defines them (np.float16, torch.bfloat16).
_SPELLINGS = {"float16": FLOAT16, "fp16": FLOAT16, "half": FLOAT16, "bfloat16": BFLOAT16, "bf16": BFLOAT16,
              "float32": FLOAT32, "fp32": FLOAT32, "single": FLOAT32, str(BFLOAT16_DTYPE): BFLOAT16}


def normalize(dtype: object, name: str = "target_dtype", or_float32: bool = False) -> str:
    """Turn any accepted spelling of a type into its name."""
    known = _SPELLINGS.get(spelling(dtype))
    if known is None or (known == FLOAT32 and not or_float32):
        accepted = ", ".join(map(repr, (*LOW_PRECISION, FLOAT32) if or_float32 else LOW_PRECISION))
        raise DTypeError(expected(f"{accepted}, a short form such as 'bf16' or 'half', or np.float16", name, dtype))
    return known


def spelling(dtype: object) -> str:
    """Return the name of a type, however it is given."""
    text = dtype.__name__ if isinstance(dtype, type) else dtype if isinstance(dtype, str) else str(dtype)
    return text.strip().lower().rsplit(".", 1)[-1]


class Support(NamedTuple):
    """The type that a device runs in, and why."""

    dtype: str  # 'float32' where low precision would be slower
    native: bool  # False when the type is emulated or imitated, slower than FP32
    reason: str  # one clause for the log, reports and error messages
    on_request: str | None = None  # a type that it runs only when a user names it, slower than FP32
    imitated: bool = False  # on FP32 kernels: the engine has none for the type
    channel_multiple: int = 1  # of channels, that the fast convolution kernels need; 1 where it does not matter
    amx: bool = False  # whether the kernels use AMX tiles
    cost: str = ""  # one clause on what the type on request costs

    def requested(self, dtype: str) -> Support | None:
        """Return how the device runs a type that a user names; None when it does not."""
        if dtype == self.dtype:
            return self
        if dtype == FLOAT32:
            return Support(FLOAT32, True, "float32 was asked for", channel_multiple=min(self.channel_multiple, 16))
        if dtype != self.on_request:
            return None
        return self._replace(dtype=dtype, native=False, on_request=None, cost="", reason=f"{self.reason}: {self.cost}")


IMITATED_FLOAT16 = Support(FLOAT16, False, "the CPU has no float16 kernels: FP32 kernels run on values rounded through "
                                           "float16, to test its numerics, never for speed", imitated=True)
# The device that a bfloat16 network is made for on a machine that cannot run it: the kernels of AVX512-BF16.
FOREIGN_BFLOAT16 = Support(BFLOAT16, False, "it needs a CPU with AVX512, and is fast with BF16 instructions",
                           channel_multiple=16)


# From the least to the most capable, as in oneDNN's DNNL_MAX_CPU_ISA.
_ISA_LEVELS = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
               "AVX512_CORE_AMX")
_ISA_FLAGS = ((host.AMX, ("amx_bf16", "amx_tile")), ("AVX512_CORE_BF16", ("avx512_bf16",)),
              ("AVX512_CORE_VNNI", ("avx512_vnni",)),
              ("AVX512_CORE", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
              ("AVX2", ("avx2",)), ("AVX", ("avx",)))
_AMX_BLOCK = 32  # channels that AMX kernels take together
AVX2_VALUES = 8  # FP32 values in a vector of AVX2, and so channels in a block


def cpu_isa(cpuinfo: str | None = None, environ: Mapping[str, str] = os.environ, amx: bool | None = None) -> str:
    """Name the instruction set that oneDNN will use on this CPU."""
    amx = host.amx_outcome() in (host.GRANTED, host.GRANTED_LATE) if amx is None else amx
    flags = host.cpu_flags(cpuinfo)
    found = next((isa for isa, needed in _ISA_FLAGS if flags.issuperset(needed) and (amx or isa != host.AMX)),
                 "SSE41")
    limit = environ.get(host.MAX_ISA, "").upper()
    return min(found, limit, key=_ISA_LEVELS.index) if limit in _ISA_LEVELS else found


def isa_of_blocks(channels: int) -> str:
    """Name the instruction set whose kernels want multiples of so many channels."""
    return {AVX2_VALUES: "AVX2", _AMX_BLOCK: host.AMX}.get(channels, "AVX512_CORE_BF16")


def isa_distance(one: str, other: str) -> int:
    """Return how many levels lie between two instruction sets."""
    return abs(_ISA_LEVELS.index(one) - _ISA_LEVELS.index(other))


def cpu_support(isa: str | None = None) -> Support:
    """Say which type this CPU runs in through MXNet's oneDNN, and why."""
    isa = cpu_isa() if isa is None else isa
    level = _ISA_LEVELS.index(isa)
    if level >= _ISA_LEVELS.index("AVX512_CORE_BF16"):
        amx = isa == host.AMX
        return Support(BFLOAT16, True, f"this CPU has BF16 instructions ({isa})",
                       channel_multiple=_AMX_BLOCK if amx else 16, amx=amx)
    runs_bfloat16 = level >= _ISA_LEVELS.index("AVX512_CORE")
    return Support(FLOAT32, True, f"this CPU has no BF16 instructions ({isa})", BFLOAT16 if runs_bfloat16 else None,
                   channel_multiple=16 if runs_bfloat16 else AVX2_VALUES,
                   cost="oneDNN emulates bfloat16, about 2x slower than FP32" if runs_bfloat16 else "")


def cuda_support(capability: tuple | None) -> Support:
    """Say which type MXNet's published CUDA wheels run in on a device of this compute capability."""
    # cuDNN from 7.3 on pads channels to the multiple of 8 that Tensor Cores take, as MXNet lets it for float16.
    if capability is None:
        return Support(FLOAT16, True, "the GPU's compute capability is unknown: float16 is assumed to work")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if not (5, 0) <= capability < (9, 0):
        return Support(FLOAT32, True, f"the GPU has {name}, and MXNet's wheels hold kernels for 5.0 to 8.9 only, so "
                                      "that no operator runs there in any type")
    cores = "Tensor Cores" if capability >= (7, 0) else "no Tensor Cores: memory traffic is halved, not arithmetic"
    return Support(FLOAT16, True, f"the GPU has {name} ({cores})")


# How another machine's device of a kind runs a type.
FOREIGN = {("gpu", FLOAT16): cuda_support(None), ("cpu", FLOAT16): IMITATED_FLOAT16,
           ("cpu", BFLOAT16): FOREIGN_BFLOAT16}
