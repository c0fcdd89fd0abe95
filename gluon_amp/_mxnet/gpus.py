"""How many GPUs MXNet finds, also where it fails to tell, and why it finds none."""
from __future__ import annotations

import ctypes

import mxnet as mx


def count() -> int:
    """Return the number of GPUs; 0 where the driver does not work: that must not break programs on the CPU."""
    try:
        return mx.context.num_gpus()
    except mx.MXNetError:
        return 0


def problem() -> str | None:
    """Return CUDA's message where its driver does not work; None where it does, or there is none."""
    try:
        found, told = mx.context.num_gpus(), None
    except mx.MXNetError as error:
        found, told = 0, str(error).strip().splitlines()[-1].split("CUDA: ")[-1]
    return None if found else _answer_of_cuda() or told


def _answer_of_cuda() -> str | None:
    """Return CUDA's message where it finds no GPU: MXNet does not pass on that the driver is too old, or a stub."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        return None
    for library in (ctypes.CDLL(None), mx.base._LIB):  # where MXNet itself has CUDA's functions from
        try:
            ask, name = library.cudaGetDeviceCount, library.cudaGetErrorString
        except AttributeError:
            continue
        name.restype = ctypes.c_char_p
        code = ask(ctypes.byref(ctypes.c_int()))
        # 0 is no error, and 100 no device beside a driver that works.
        return None if code in (0, 100) else f"{(name(code) or b'').decode(errors='replace')} (CUDA error {code})"
    return None
