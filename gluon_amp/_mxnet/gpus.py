"""How many GPUs MXNet finds, also where it fails to tell, and why it finds none."""
from __future__ import annotations

import ctypes
import re

import mxnet as mx

# Of cudaGetDeviceCount: no error, and no device beside a driver that works.
_NORMAL = (0, 100)
_FAILED = re.compile(r"\((\d+) vs\. 0\)\s*:\s*(.+)")  # MXNet's message: CUDA's number, and its words


def count() -> int:
    """Return the number of GPUs; 0 where the driver does not work: that must not break programs on the CPU."""
    try:
        return mx.context.num_gpus()
    except mx.MXNetError:
        return 0


def problem() -> str | None:
    """Return CUDA's message where its driver does not work; None where it does, or there is none."""
    try:
        found = mx.context.num_gpus()
    except mx.MXNetError as error:
        last = str(error).strip().splitlines()[-1].split("CUDA: ")[-1]
        told = _FAILED.search(last)
        return last if told is None else _message(int(told[1]), told[2])
    return None if found else _silent_problem()


def _silent_problem() -> str | None:
    """Return CUDA's message where MXNet finds no GPU and does not say why: the driver is too old, or a stub."""
    if not mx.runtime.Features().is_enabled("CUDA"):
        return None
    for library in (ctypes.CDLL(None), mx.base._LIB):  # where MXNet itself has CUDA's functions from
        try:
            ask, name = library.cudaGetDeviceCount, library.cudaGetErrorString
        except AttributeError:
            continue
        name.restype = ctypes.c_char_p
        code = ask(ctypes.byref(ctypes.c_int()))
        return None if code in _NORMAL else _message(code, (name(code) or b"").decode(errors="replace"))
    return None


def _message(code: int, text: str) -> str:
    return f"{text} (CUDA error {code})"
