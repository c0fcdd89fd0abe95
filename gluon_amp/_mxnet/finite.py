"""Tell whether arrays are finite, and the sums of their squares, at the speed of memory."""
from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np
from mxnet import Context, autograd, nd
from mxnet.ndarray import NDArray

from .invoke import original_invoke, run_operator

Check = Callable[[Sequence[NDArray]], NDArray]  # its answer is 1 where all values of the arrays are finite, else 0
_LARGE = 100_000  # elements from which one call for an array pays
_ARRAYS_A_CALL = 200  # as many as MXNet's multi-tensor operators take comfortably
_WIDTHS = range(2048, 63, -1)  # of rows that oneDNN adds up with all threads


def are_finite(arrays: Iterable[NDArray], check: Check | None = None) -> bool:
    """Tell whether all values are finite; float32 arrays on a CPU are left to a check, where one is given."""
    return begin_check(grouped(arrays), check)()


def begin_check(groups: Iterable[list[NDArray]], check: Check | None = None) -> Callable[[], bool]:
    """Begin to check arrays that :func:`grouped` put together; return a function that waits, and answers.

    The answer is that of :func:`are_finite`.
    """
    # A GPU runs MXNet's exact check at the speed of memory: each is asked once, whatever the number of arrays. A CPU
    # takes long for it, so that what has no check of its own is added up: a finite sum proves that its terms are, and
    # the exact check decides on one that is not, which may come from large finite values.
    on_gpus: dict[Context, list[list[NDArray]]] = defaultdict(list)
    checked: list[list[NDArray]] = []
    summed: list[list[NDArray]] = []
    for chunk in groups:
        if chunk[0].context.device_type == "gpu":
            on_gpus[chunk[0].context].append(chunk)
        else:
            (checked if check is not None and chunk[0].dtype == np.float32 else summed).append(chunk)
    with autograd.pause():
        answers = list(map(_checked, on_gpus.values()))
        if check is not None:
            answers += map(check, checked)
        sums = [_sums(chunk, _sum_of_rows) for chunk in summed]

    def answer() -> bool:
        with autograd.pause():
            return (all(bool(found.asscalar()) for found in answers)
                    and all(_have_finite_values(each) or all_finite(chunk) for each, chunk in zip(sums, summed)))
    return answer


def all_finite(arrays: list[NDArray]) -> bool:
    """Tell whether all values of arrays of one context and type are finite, by MXNet's own check."""
    with autograd.pause():
        return bool(nd.multi_all_finite(*map(_with_axis, arrays), num_arrays=len(arrays)).asscalar())


def _checked(chunks: list[list[NDArray]]) -> NDArray:
    """Check all arrays of one GPU; the answer, 0 or 1, stays there until it is read."""
    result = nd.multi_all_finite(*chunks[0], num_arrays=len(chunks[0]))
    for chunk in chunks[1:]:
        nd.multi_all_finite(*chunk, num_arrays=len(chunk), init_output=False, out=result)
    return result


def norm(arrays: Iterable[NDArray]) -> float:
    """Return the 2-norm of the values of all arrays together."""
    with autograd.pause():
        # Squares of float16 values are added up in float16.
        wide = (array.astype("float32") if array.dtype == np.float16 else array for array in arrays)
        sums = [total for chunk in grouped(wide) for total in _sums(chunk, _dot_with_itself)]
        return float(np.sqrt(sum(total.asnumpy().astype("float64").sum() for total in sums)))


def _with_axis(array: NDArray) -> NDArray:
    """Give an array without axes one: multi-tensor operators do not take NumPy's scalars."""
    return array if array.shape else array.as_nd_ndarray().reshape((1,))


def grouped(arrays: Iterable[NDArray]) -> Iterator[list[NDArray]]:
    """Group dense arrays by context and type, as multi-tensor operators need it."""
    groups: dict[tuple[Any, Any], list[NDArray]] = defaultdict(list)
    for array in map(_with_axis, arrays):
        groups[array.context, array.dtype].append(array)
    for group in groups.values():
        yield from (group[start:start + _ARRAYS_A_CALL] for start in range(0, len(group), _ARRAYS_A_CALL))


def _sums(chunk: list[NDArray], of_large: Callable[[NDArray], NDArray]) -> list[NDArray]:
    """Return sums that together cover arrays of one context and type; small arrays are squared first."""
    # On a CPU multi_sum_sq uses one thread for each array: others take a fraction of its time on large ones.
    has_others = chunk[0].context.device_type != "gpu" and chunk[0].dtype == np.float32
    large: list[NDArray] = []
    small: list[NDArray] = []
    for array in chunk:
        (large if has_others and array.size >= _LARGE else small).append(array)
    return [*map(of_large, large), *([nd.multi_sum_sq(*small, num_arrays=len(small))] if small else [])]


def _have_finite_values(arrays: list[NDArray]) -> bool:
    return all(np.isfinite(array.asnumpy()).all() for array in arrays)


def _sum_of_rows(array: NDArray) -> NDArray:
    """Return sums of rows by a dense layer of ones: oneDNN uses all threads for it, a dot product uses one."""
    width = _row_width(array.size)
    if width is None:
        return _dot_with_itself(array)
    # The gradient has to be the data: outside of training MXNet may change the layout of a weight in place.
    rows = array.as_nd_ndarray().reshape((-1, width))
    return _invoke("FullyConnected", [rows, _ones(width, array.context)], no_bias="True", num_hidden="1")


def _dot_with_itself(array: NDArray) -> NDArray:
    flat = array.as_nd_ndarray().reshape((-1,))
    return _invoke("dot", [flat, flat])


def _invoke(op: str, inputs: list[NDArray], **attrs: str) -> NDArray:
    """Run an operator in FP32, whatever precision policy is in force."""
    return run_operator(original_invoke, op, inputs, attrs)


@lru_cache(maxsize=None)
def _row_width(size: int) -> int | None:
    return next((width for width in _WIDTHS if size % width == 0), None)


@lru_cache(maxsize=None)
def _ones(width: int, context: Context) -> NDArray:
    return nd.ones((1, width), ctx=context)
