"""Arrays: their types and casts, whether they are finite, and the parameters that passes change."""
from __future__ import annotations

import copy
import ctypes
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, nd
from mxnet.base import _LIB, SymbolHandle, check_call
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..graph.attrs import TYPE_FLAGS, parameters
from ..machine.dtypes import FLOAT32
from .invoke import Invoke, invoke, original_invoke, run_operator
from .symbols import dtype_name

FLOATS = {flag: name for name, flag in TYPE_FLAGS.items()}  # FP32 and low precision, by MXNet's numbers
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
    return function(value) if isinstance(value, NDArray) and not isinstance(value, BaseSparseNDArray) else value


def first_array(value: Any) -> NDArray | None:
    """Return the first array in nested lists and tuples; None where there is none, as in a call with symbols."""
    if isinstance(value, NDArray):
        return value
    items = value if isinstance(value, (list, tuple)) else ()
    return next((array for item in items for array in [first_array(item)] if array is not None), None)


def wait_for_statistics() -> None:
    """Wait until running statistics hold what the backward passes so far write to them."""
    # MXNet's graphs with static_shape, and its modules, do not tell the engine that they do: whoever reads or copies
    # the statistics before a backward pass is over gets those of a step before, even through asnumpy().
    mx.nd.waitall()


# Of arrays without a gradient that recorded operators read beside others, by the name that MXNet gives them.
_WITHOUT_GRADIENT = "null"


def is_recorded(array: Any) -> bool:
    """Tell whether backward would ask for an array's gradient: of one with a buffer, or computed from such ones."""
    symbol = _history(array)
    return symbol is not None and not (symbol.name or "").startswith(_WITHOUT_GRADIENT)


def needs_gradient(array: Any) -> bool:
    """Tell the same of arrays that may also be computed from ones without a gradient that are part of a recording."""
    symbol = _history(array)
    return symbol is not None and not all(name.startswith(_WITHOUT_GRADIENT) for name in symbol.list_inputs())


def _history(array: Any) -> mx.sym.Symbol | None:
    """Return what an array was computed by, as far as it was recorded."""
    handle = SymbolHandle()
    if not isinstance(array, NDArray) or _LIB.MXAutogradGetSymbol(array.handle, ctypes.byref(handle)) != 0:
        return None
    return mx.sym.Symbol(handle)


def load_library(path: Path) -> None:
    """Register the operators of a library, for symbols and for :func:`.invoke.invoke`."""
    # ``mx.library.load`` makes all of MXNet's Python functions anew as well, and would replace those that are wrapped.
    check_call(_LIB.MXLoadLib(str(path.resolve()).encode(), ctypes.c_uint(0)))


def bring_to_plain_layout(arrays: Iterable[NDArray]) -> None:
    """Wait for arrays and undo the layouts that inference by oneDNN leaves weights in."""
    # A library's operators get copies of arrays in such layouts, and what they write to a copy is lost.
    for array in arrays:
        array.wait_to_read()
        check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))


def cast_arrays(value: Any, dtype: str, given: Collection[str] = TYPE_FLAGS, function: Invoke | None = None) -> Any:
    """Cast FP32 and low-precision arrays, or those of the ``given`` types, to a type; other values pass."""
    def cast(array: NDArray) -> NDArray:
        name = FLOATS.get(flag_of(array))
        if name == dtype or name not in given:
            return array
        return run_operator(function or mx.ndarray.register._imperative_invoke, "amp_cast", [array], {"dtype": dtype},
                            is_np_op=isinstance(array, mx.np.ndarray))
    return map_arrays(cast, value)


def values_of(array: NDArray) -> np.ndarray:
    """Return an array's values."""
    # MXNet's own threads bring it out of oneDNN's layout, which Python's would do otherwise.
    return run_operator(original_invoke, "_mul_scalar", [array.as_nd_ndarray()], {"scalar": 1}).asnumpy()


Check = Callable[[Sequence[NDArray]], NDArray]  # its answer is 1 where all values of the arrays are finite, else 0
_LARGE = 100_000  # elements from which one call for an array pays
_ARRAYS_A_CALL = 200  # as many as MXNet's multi-tensor operators take comfortably


def are_finite(arrays: Iterable[NDArray], check: Check | None = None) -> bool:
    """Tell whether all values are finite; float32 arrays on a CPU are left to a check, where one is given."""
    return begin_check(grouped(arrays), check)()


def begin_check(groups: Iterable[list[NDArray]], check: Check | None = None) -> Callable[[], bool]:
    """Begin to check arrays that :func:`grouped` put together; return a function that waits, and answers."""
    # A GPU runs MXNet's exact check at the speed of memory: each is asked once, whatever the number of arrays. A CPU
    # takes a hundred times as long for it, so that squares are added up where there is no other check: a finite sum
    # proves that its terms are, and the exact check decides on one that is not, which may come of large values.
    on_gpus: dict[Context, list[list[NDArray]]] = defaultdict(list)
    answers, sums = [], []
    with autograd.pause():
        for chunk in groups:
            if chunk[0].context.device_type == "gpu":
                on_gpus[chunk[0].context].append(chunk)
            elif check is not None and chunk[0].dtype == np.float32:
                answers.append(check(chunk))
            else:
                sums.append((chunk, _sums_of_squares(chunk)))
        answers += map(_checked, on_gpus.values())

    def answer() -> bool:
        with autograd.pause():
            return (all(bool(found.asscalar()) for found in answers)
                    and all(all(np.isfinite(each.asnumpy()).all() for each in some)
                            or bool(_checked([chunk]).asscalar()) for chunk, some in sums))
    return answer


def _checked(chunks: list[list[NDArray]]) -> NDArray:
    """Check all arrays of one device by MXNet's own check; the answer, 0 or 1, stays there until it is read."""
    result = nd.multi_all_finite(*chunks[0], num_arrays=len(chunks[0]))
    for chunk in chunks[1:]:
        nd.multi_all_finite(*chunk, num_arrays=len(chunk), init_output=False, out=result)
    return result


def norm(arrays: Iterable[NDArray]) -> float:
    """Return the 2-norm of the values of all arrays together."""
    with autograd.pause():
        # Squares of float16 values are added up in float16.
        wide = (array.astype("float32") if array.dtype == np.float16 else array for array in arrays)
        sums = [total for chunk in grouped(wide) for total in _sums_of_squares(chunk)]
        return float(np.sqrt(sum(total.asnumpy().astype("float64").sum() for total in sums)))


def grouped(arrays: Iterable[NDArray]) -> Iterator[list[NDArray]]:
    """Group dense arrays by context and type, as multi-tensor operators need it."""
    groups: dict[tuple[Any, Any], list[NDArray]] = defaultdict(list)
    for array in arrays:  # multi-tensor operators do not take NumPy's scalars
        groups[array.context, array.dtype].append(array if array.shape else array.as_nd_ndarray().reshape((1,)))
    for group in groups.values():
        yield from (group[start:start + _ARRAYS_A_CALL] for start in range(0, len(group), _ARRAYS_A_CALL))


def _sums_of_squares(chunk: list[NDArray]) -> list[NDArray]:
    """Return sums that together cover arrays of one context and type, in FP32 whatever policy is in force."""
    # On a CPU multi_sum_sq uses one thread for each array: products take a fraction of its time on large ones.
    takes_products = chunk[0].context.device_type != "gpu" and chunk[0].dtype == np.float32
    flat = [array.as_nd_ndarray().reshape((-1,)) for array in chunk if takes_products and array.size >= _LARGE]
    small = [array for array in chunk if not (takes_products and array.size >= _LARGE)]
    return [*(run_operator(original_invoke, "dot", [array, array], {}) for array in flat),
            *([nd.multi_sum_sq(*small, num_arrays=len(small))] if small else [])]


class NDArrayWeights:
    """Trained parameters that passes change, by name."""

    def __init__(self, arrays: Mapping[str, NDArray], are_known: bool = True):
        self.arrays = dict(arrays)  # shared with the caller's
        self.are_known = are_known  # False for the parameters of a symbol alone: only their types can change

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def dtypes(self) -> dict[str, str | None]:
        """Name every parameter's data type."""
        return {name: dtype_name(array.dtype) for name, array in self.arrays.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape, as far as it is known."""
        return {name: array.shape for name, array in self.arrays.items() if self.are_known}

    def not_finite(self) -> list[str]:
        """Name the parameters with infinite or NaN values."""
        wide = {name: cast_arrays(array.as_nd_ndarray(), FLOAT32) for name, array in self.arrays.items()
                if array.size and flag_of(array) in FLOATS}
        if are_finite(wide.values()):
            return []
        return [name for name, array in wide.items() if not are_finite([array])]

    def read(self, name: str) -> np.ndarray:
        """Return a parameter's values, as FP32 where NumPy does not know their type."""
        return values_of(cast_arrays(self.arrays[name], FLOAT32))

    def write(self, name: str, values: np.ndarray) -> None:
        """Give a parameter other values, or add one; a thread of MXNet's copies them."""
        ctx = self._context()
        self.arrays[name] = (nd.from_numpy(np.array(values, order="C")).copyto(ctx) if values.size
                             else nd.array(values, ctx))

    def compute(self, name: str, op: str, attrs: Mapping[str, str], inputs: Sequence[str]) -> None:
        """Add the result of an operator on parameters as a parameter."""
        with self._context():
            arrays = [self.arrays[source].as_nd_ndarray() for source in inputs]
            self.arrays[name] = invoke(op, arrays, parameters(attrs))[0]

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""
        self.arrays[new] = self.arrays.pop(old)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other parameters."""
        self.arrays = {name: array for name, array in self.arrays.items() if name in names}

    def _context(self) -> Context:
        return next((array.context for array in self.arrays.values()), mx.cpu())
