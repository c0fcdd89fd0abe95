"""Functions of MXNet 1.9.1 that give other results, or fail, with NumPy 2.

Nobody mends it there: apache/mxnet #21165 and #21224 ask for it. Names that are gone: :mod:`gluon_amp.machine.start`.
"""
from __future__ import annotations

from types import FunctionType
from typing import Any, Callable

import mxnet as mx
import numpy as np
from mxnet import _ctypes, metric, recordio

from ..machine.start import is_numpy_2


def mend() -> None:
    """Let MXNet's functions give the same with NumPy 2 as with NumPy 1; does nothing there."""
    if is_numpy_2(np):
        for owner, name, value in MENDS:
            setattr(owner, name, value)


def _written(value: Any) -> str:
    """Write an attribute of an operator: NumPy 2 writes ``(np.int64(2),)`` for a tuple of one of its numbers."""
    return str(_plain(value))


attribute_text: Callable[[Any], str] = _written if is_numpy_2(np) else str  # of an operator's attribute


def _plain(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _in_float64(name: str) -> property:
    """Return the sum of a metric, in float64: 0.0 and a float32 number of NumPy 2 would give float32."""
    def read(metric: Any) -> Any:
        if name not in vars(metric):
            raise AttributeError(f"{type(metric).__name__!r} object has no attribute {name!r}")
        return vars(metric)[name]
    return property(read, lambda metric, value: vars(metric).update(
        {name: np.float64(value) if type(value) is float else value}))


def _with_tobytes(function: FunctionType) -> FunctionType:
    """Return a function of MXNet's that asks arrays for ``tobytes``: NumPy 2.3 dropped ``tostring``."""
    names = tuple("tobytes" if name == "tostring" else name for name in function.__code__.co_names)
    return FunctionType(function.__code__.replace(co_names=names), function.__globals__, function.__name__,
                        function.__defaults__)


def _as_array(array: mx.nd.NDArray, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """Give the values to functions of NumPy's, as ``np.all``: NumPy 1 took arrays of MXNet's for nested lists."""
    if copy is False:
        raise ValueError("expected copy=None or True: the values of an array of MXNet's are always copied")
    values = array.asnumpy()
    return values if dtype is None else values.astype(dtype, copy=False)


# The attributes of MXNet that are replaced.
MENDS: tuple[tuple[Any, str, Any], ...] = (
    (_ctypes.ndarray, "str", _written), (_ctypes.symbol, "str", _written),
    *((metric.EvalMetric, name, _in_float64(name)) for name in ("sum_metric", "global_sum_metric")),
    (mx.nd.NDArray, "__array__", _as_array),
    *((recordio, name, _with_tobytes(getattr(recordio, name))) for name in ("pack", "pack_img")),
)
