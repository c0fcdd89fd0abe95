"""Types of arrays, and casts of those that stand in nested arguments."""
from __future__ import annotations

import copy
import ctypes
from typing import Any, MutableMapping

import mxnet as mx
import numpy as np
from mxnet.base import _LIB
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from .invoke import original_invoke, run_operator
from .symbols import dtype_name

FLOATS = (FLOAT32, FLOAT16, BFLOAT16)
_get_dtype = _LIB.MXNDArrayGetDType


def flag_of(array: NDArray) -> int:
    """Return the number of an array's data type in MXNet."""
    flag = ctypes.c_int()
    _get_dtype(array.handle, ctypes.byref(flag))
    return flag.value


def map_arrays(function: Any, value: Any) -> Any:
    """Apply a function to every dense array in nested lists, tuples and mappings, which keep their classes."""
    if isinstance(value, (list, tuple)):
        items = [map_arrays(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)  # of its own class
        for key, item in value.items():
            mapped[key] = map_arrays(function, item)
        return mapped
    dense = isinstance(value, NDArray) and not isinstance(value, BaseSparseNDArray)
    return function(value) if dense else value


def wait_for_statistics() -> None:
    """Wait until running statistics hold what the backward passes so far write to them."""
    # MXNet's graphs with static_shape, and its modules, do not tell the engine that they do: whoever reads or copies
    # the statistics before a backward pass is over gets those of a step before, even through asnumpy().
    mx.nd.waitall()


def first_array(value: Any) -> NDArray | None:
    """Return the first array in nested lists and tuples; None where there is none, as in a call with symbols."""
    if isinstance(value, NDArray):
        return value
    items = value if isinstance(value, (list, tuple)) else ()
    return next((array for item in items for array in [first_array(item)] if array is not None), None)


def is_recorded(array: Any) -> bool:
    """Tell whether backward would ask for an array's gradient: of one with a buffer, or computed from such ones."""
    handle = ctypes.c_void_p()
    if not isinstance(array, NDArray) or _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(handle)) != 0:
        return False
    # An array that a recorded operator has read is a variable there, also without a buffer.
    return mx.sym.Symbol(handle).get_children() is not None or array.grad is not None


def cast_arrays(value: Any, dtype: str) -> Any:
    """Cast FP32 and low-precision arrays to a type; other values pass."""
    def cast(array: NDArray) -> NDArray:
        name = dtype_name(array.dtype)
        return array if name == dtype or name not in FLOATS else _amp_cast(array, dtype)
    return map_arrays(cast, value)


def round_in_place(array: NDArray, dtype: str) -> None:
    """Round an FP32 array's values through a low-precision type; arrays of other types, and sparse ones, pass."""
    if dtype_name(array.dtype) == FLOAT32 and not isinstance(array, BaseSparseNDArray) and array.size:
        # Behind an elementwise operator a grouped convolution's weight is in a layout that amp_cast can read.
        plain = array * 1.0 if array.ndim > 2 else array
        _amp_cast(_amp_cast(plain, dtype), FLOAT32, out=array)


def _amp_cast(array: NDArray, dtype: str, out: NDArray | None = None) -> NDArray:
    is_np = isinstance(array, mx.np.ndarray)
    return run_operator(mx.ndarray.register._imperative_invoke, "amp_cast", [array], {"dtype": dtype}, out, is_np)


# From this size on MXNet copies arrays in several threads (MXNET_CPU_PARALLEL_SIZE). Where Python's own thread does so,
# the OpenMP library has more threads than processors, and lets them sleep between operators: MobileNet v2 in INT8 takes
# 4.8 ms in place of 1.9 from then on.
_PIECE = 200_000 - 1


def values_of(array: NDArray) -> np.ndarray:
    """Return an array's values, copied in pieces that one thread copies."""
    # MXNet's own threads bring it out of oneDNN's layout, which Python's would do otherwise.
    plain = run_operator(original_invoke, "_mul_scalar", [array.as_nd_ndarray()], {"scalar": 1})
    if array.size <= _PIECE:
        return plain.asnumpy()
    flat, values = plain.reshape((-1,)), np.empty(array.size, array.dtype)
    for start in range(0, array.size, _PIECE):
        values[start:start + _PIECE] = flat[start:start + _PIECE].asnumpy()
    return values.reshape(array.shape)


def array_of(values: np.ndarray, ctx: mx.Context) -> NDArray:
    """Return an array of values, which a thread of MXNet's copies."""
    return mx.nd.from_numpy(np.array(values, order="C")).copyto(ctx) if values.size else mx.nd.array(values, ctx)
