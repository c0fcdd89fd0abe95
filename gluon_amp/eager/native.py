"""Imperative operator calls that faster operators serve, in C++ or MXNet's, where a call is large enough to gain."""
from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .. import native
from .._mxnet.invoke import Invoke, handle_of
from .._mxnet.symbols import dtype_name
from ..machine.dtypes import AVX2_VALUES, FLOAT32, cpu_support
from ..passes.activations import SQUARES, is_square
from ..rules.shapes import is_slow_sum, lacks_softmax
from ..rules.tables.groups import SOFTMAX, SUMS


class _Kernel(NamedTuple):
    """What serves calls of an operator."""

    op: str  # registered name
    default: Mapping[str, str]  # the only values of attributes that it knows
    # takes the attributes and the data of a call, and says whether it gains
    gains: Callable[[Mapping[str, Any], NDArray], bool] = lambda attrs, data: True


@lru_cache(maxsize=1)
def _has_avx512() -> bool:
    return cpu_support().channel_multiple != AVX2_VALUES  # reads what Linux says of the CPU


def _is_slow_softmax(op: str, attrs: Mapping[str, Any], data: NDArray) -> bool:
    return lacks_softmax(op, attrs, data.shape, AVX2_VALUES, autograd.is_recording(), _has_avx512())


# With a gradient every input of C++ goes through a view of itself first: MXNet does not tell operators of libraries
# that a gradient is to be added, and nobody knows yet who else will read the input. MXNet copies a view's gradient.
_view = NDArray.reshape
_OF_SOFTMAX = {"temperature": "None", "dtype": "None", "use_length": "False"}
_KERNELS = {**{op: _Kernel(f"_gluon_amp_{op}", {}, lambda attrs, data: is_slow_sum(attrs, data.shape)) for op in SUMS},
            **{op: _Kernel(square, {}, lambda attrs, data: is_square(attrs)) for op, square in SQUARES.items()},
            "LayerNorm": _Kernel("_gluon_amp_layer_norm", {"axis": "-1", "output_mean_var": "False"}),
            "clip": _Kernel("_gluon_amp_clip", {}),
            **{op: _Kernel(f"_gluon_amp_{op}", _OF_SOFTMAX, partial(_is_slow_softmax, op)) for op in SOFTMAX},
            "_contrib_BilinearResize2D": _Kernel("_gluon_amp_resize", {"mode": "size", "scale_height": "None",
                                                                       "scale_width": "None"})}
# Values of the data from which on all gain 1.4 times, forward and with a gradient: measured on an AMD EPYC, 2 threads.
_LEAST = 65536


@lru_cache(maxsize=1)
def _kernels() -> Mapping[int, tuple[_Kernel, int]]:
    """Map handles of MXNet's operators to what serves them, with its own handle."""
    return {handle_of(name): (kernel, handle_of(kernel.op)) for name, kernel in _KERNELS.items()
            if kernel.op not in native.OPERATORS or native.is_available(kernel.op)}


def make_native_invoke(original: Invoke, is_on: Callable[[], bool]) -> Invoke:
    """Make a function that runs calls by faster operators where there are, and all others as MXNet does."""
    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        if out is None and inputs and handle in served and is_on():
            kernel, served_by = _kernels().get(handle, (None, 0))
            if kernel is not None and _fits(kernel, inputs, keys, values):
                handle = served_by
                if autograd.is_recording() and kernel.op in native.OPERATORS:
                    inputs = [_view(array, array.shape) for array in inputs]
        return original(handle, inputs, keys, values, out, is_np_op, output_is_list)

    served = frozenset(map(handle_of, _KERNELS))
    return invoke


def _fits(kernel: _Kernel, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any]) -> bool:
    return (not any(isinstance(array, BaseSparseNDArray) for array in inputs)
            and inputs[0].size >= _LEAST and inputs[0].context.device_type != "gpu"
            and kernel.gains(dict(zip(keys, values)), inputs[0])
            and all(kernel.default.get(key, str(value)) == str(value) for key, value in zip(keys, values))
            and all(dtype_name(array.dtype) == FLOAT32 for array in inputs))
