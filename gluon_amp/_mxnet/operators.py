"""Names of the operators that MXNet has registered."""
from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Mapping

from mxnet.base import _LIB, MXNetError, check_call, py_str

_OWN = ("_gluon_amp_", "_backward__gluon_amp_")


@lru_cache(maxsize=1)
def registered_operators() -> Mapping[str, str]:
    """Map every name of an operator of MXNet, aliases included, to the name it is registered under."""
    # The operators in C++ of this package are left out: they take the place of others after these were decided on.
    # Symbol JSON holds registered names only, users write aliases as well; MXNet offers no public way from one to the
    # other.
    size, array = ctypes.c_uint(), ctypes.POINTER(ctypes.c_char_p)()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(array)))
    names = [py_str(array[i]) for i in range(size.value)]
    return {name: _registered_name(name) for name in names if not name.startswith(_OWN)}


def _registered_name(name: str) -> str:
    registered = ctypes.c_char_p()
    check_call(_LIB.MXSymbolGetAtomicSymbolName(ctypes.c_void_p(handle_of(name)), ctypes.byref(registered)))
    return py_str(registered.value)


def is_registered(name: str) -> bool:
    """Tell whether there is an operator of this registered name or alias."""
    try:
        return bool(handle_of(name))
    except MXNetError:
        return False


@lru_cache(maxsize=None)
def handle_of(name: str) -> int:
    """Return the handle that MXNet's generated functions call an operator by; aliases share it."""
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return handle.value or 0


@lru_cache(maxsize=None)
def parameters_of(name: str) -> Mapping[str, str]:
    """Return the parameters of an operator, inputs among them, each with what MXNet says of its type."""
    texts = [ctypes.c_char_p() for _ in range(4)]  # name, description, what counts the inputs, result
    count = ctypes.c_uint()
    lists = [ctypes.POINTER(ctypes.c_char_p)() for _ in range(3)]  # names, types, descriptions
    check_call(_LIB.MXSymbolGetAtomicSymbolInfo(
        ctypes.c_void_p(handle_of(name)), *map(ctypes.byref, texts[:2]), ctypes.byref(count),
        *map(ctypes.byref, lists), *map(ctypes.byref, texts[2:])))
    names, types, _ = lists
    return {py_str(names[i]): py_str(types[i]) for i in range(count.value)}
