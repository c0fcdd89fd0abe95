"""Libraries of operators for MXNet, and arrays whose memory such operators write."""
from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Iterable

import mxnet as mx
from mxnet.base import _LIB, check_call


def load_library(path: Path) -> None:
    """Register a library's operators, for symbols and for :func:`.invoke.invoke`."""
    # ``mx.library.load`` makes all of MXNet's Python functions anew as well, and would replace those that are wrapped.
    check_call(_LIB.MXLoadLib(str(path.resolve()).encode(), ctypes.c_uint(0)))


def bring_to_plain_layout(arrays: Iterable[mx.nd.NDArray]) -> None:
    """Wait for arrays and undo the layouts that inference by oneDNN leaves weights in."""
    # A library's operators get copies of arrays in such layouts: what they write would be lost.
    for array in arrays:
        array.wait_to_read()
        check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))
