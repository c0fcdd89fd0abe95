"""Imperative operator calls that operators in C++ serve, where a call is large enough to gain."""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .. import native
from .._mxnet.invoke import Invoke
from .._mxnet.operators import handle_of
from .._mxnet.symbols import dtype_name
from ..dtypes import AVX2_VALUES, FLOAT32, cpu_support


class _Kernel(NamedTuple):
    """What serves calls of an operator."""

    handle: int
    default: Mapping[str, str]  # the only values of attributes that it knows
    trains: bool  # whether it gains only with a gradient, of rows that fill a vector


# With a gradient every input goes through a view of itself first: MXNet does not tell operators of libraries that a
# gradient is to be added, and nobody knows yet who else will read the input. MXNet copies a view's gradient.
_view = NDArray.reshape
_KERNELS = {"LayerNorm": ("_gluon_amp_layer_norm", {"axis": "-1", "output_mean_var": "False"}),
            "clip": ("_gluon_amp_clip", {}),
            "log_softmax": ("_gluon_amp_log_softmax", {"axis": "-1", "temperature": "None", "dtype": "None",
                                                       "use_length": "False"})}
_WITHOUT_AVX512 = frozenset({"log_softmax"})  # what gains there only, with a gradient
# Values of the data from which on all gain 1.4 times, forward and with a gradient: measured on an AMD EPYC, 2 threads.
_LEAST = 65536


@lru_cache(maxsize=1)
def _kernels() -> Mapping[int, _Kernel]:
    is_narrow = cpu_support().channel_multiple == AVX2_VALUES
    return {handle_of(name): _Kernel(handle_of(op), default, name in _WITHOUT_AVX512)
            for name, (op, default) in _KERNELS.items()
            if native.is_available(op) and (is_narrow or name not in _WITHOUT_AVX512)}


def make_native_invoke(original: Invoke, is_on: Callable[[], bool]) -> Invoke:
    """Make a function that runs calls in C++ where that is faster, and all others as MXNet does."""
    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        if out is None and inputs and handle in served and is_on():
            kernel = _kernels().get(handle)
            if kernel is not None and _fits(kernel, inputs, keys, values):
                handle = kernel.handle
                if autograd.is_recording():
                    inputs = [_view(array, array.shape) for array in inputs]
        return original(handle, inputs, keys, values, out, is_np_op, output_is_list)

    served = frozenset(map(handle_of, _KERNELS))
    return invoke


def _fits(kernel: _Kernel, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any]) -> bool:
    return (not any(isinstance(array, BaseSparseNDArray) for array in inputs)
            and inputs[0].size >= _LEAST and inputs[0].context.device_type != "gpu"
            and (not kernel.trains or (autograd.is_recording() and inputs[0].shape[-1] >= AVX2_VALUES))
            and all(kernel.default.get(key, str(value)) == str(value) for key, value in zip(keys, values))
            and all(dtype_name(array.dtype) == FLOAT32 for array in inputs))
