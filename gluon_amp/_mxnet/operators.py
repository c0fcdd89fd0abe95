"""Names of the operators that MXNet has registered."""
from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Mapping

from mxnet.base import _LIB, check_call, py_str

__all__ = ["registered_operators"]


@lru_cache(maxsize=1)
def registered_operators() -> Mapping[str, str]:
    """Map every name of an operator, aliases included, to the name it is registered under.

    Symbol JSON holds registered names only, users write aliases as well; MXNet offers no public way from one to
    the other.
    """
    size, array = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(array)))
    names = [py_str(array[i]) for i in range(size.value)]
    return {name: _registered_name(name) for name in names}


def _registered_name(name: str) -> str:
    handle, registered = ctypes.c_void_p(), ctypes.c_char_p()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    check_call(_LIB.MXSymbolGetAtomicSymbolName(handle, ctypes.byref(registered)))
    return py_str(registered.value)
