"""Operators whose gradient is zero, and a defect of MXNet's backward pass behind them.

MXNet makes the gradient of BlockGrad ``zeros_like(input)``, and that of elementwise operators before it, casts among
them, ``zeros_like`` of their own inputs. Outside of graphs those inputs may not have been saved: the process ends with
a segmentation fault, as in ``BlockGrad(FullyConnected(x, w) * 2)``. AMP puts casts behind operators that had none, so
that programs which ran without it would end. Behind SliceChannel, here with one output, zeros are not passed on by
name: it computes its gradient from the array of zeros that it is given.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.invoke import Invocation, Invoke, handle_of, registered_operators, run_operator
from .._mxnet.symbols import dtype_name
from ..dtypes import FLOAT16, FLOAT32

_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal", "logical_and", "logical_or",
                "logical_xor")
_NUMPY_COMPARISONS = ("equal", "not_equal", "greater", "less", "greater_equal", "less_equal")
_ROUNDING = ("rint", "ceil", "floor", "trunc", "fix")
_FIRST_TWO = (0, 1)
# The inputs whose gradients are zero whatever comes back, by the operator's registered name.
_POSITIONS: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("BlockGrad", "zeros_like", "ones_like", "round", "logical_not", "argmax", "argmin", "argsort",
                     "topk", "one_hot", "shape_array", "size_array", "_contrib_arange_like", "_contrib_index_array",
                     "_ravel_multi_index", "_unravel_index", "_sample_multinomial", *_ROUNDING), _FIRST_TWO),
    **dict.fromkeys((f"broadcast_{name}" for name in _COMPARISONS), _FIRST_TWO),
    **dict.fromkeys((f"_{name}" for name in _COMPARISONS), _FIRST_TWO),
    **dict.fromkeys((f"_{name}_scalar" for name in _COMPARISONS), _FIRST_TWO),
    **dict.fromkeys((f"_npi_{name}" for name in (*_NUMPY_COMPARISONS, *_ROUNDING)), _FIRST_TWO),
    **dict.fromkeys((f"_npi_{name}_scalar" for name in _NUMPY_COMPARISONS), _FIRST_TWO),
    **dict.fromkeys(("_np_any", "_np_all", "_npi_argmax", "_npi_argmin", "_npi_logical_not", "_npi_isnan", "_npi_isinf",
                     "_npi_isposinf", "_npi_isneginf", "_npi_isfinite", "_npi_around", "_npi_full_like", "_npi_std",
                     "_npi_var", "_npi_percentile", "_npi_unique", "_npi_bincount", "_npx_nonzero",
                     "_npx_constraint_check", "_npi_where_scalar2"), _FIRST_TWO),
    **dict.fromkeys(("_contrib_box_encode", "_contrib_box_decode"), tuple(range(6))),
    **dict.fromkeys(("where", "_npi_where", "_npi_where_lscalar", "_npi_where_rscalar"), (0,)),
    **dict.fromkeys(("pick", "gather_nd", "scatter_nd", "broadcast_like", "reshape_like",
                     "_identity_with_attr_like_rhs"), (1,)),
}
_FLOATS = frozenset((FLOAT16, FLOAT32, "float64"))  # AMP puts no casts to bfloat16 before these operators


def saving_invocations() -> Mapping[int, Callable[[Invoke, Invocation], Any]]:
    """Return how to run imperative calls of such operators, by their handles."""
    known = set(registered_operators().values())
    return {handle_of(name): _make_run(positions) for name, positions in _POSITIONS.items() if name in known}


def _make_run(positions: Sequence[int]) -> Callable[[Invoke, Invocation], Any]:
    def run(invoke: Invoke, call: Invocation) -> Any:
        return invoke(*call._replace(inputs=[_saved(invoke, array) if i in positions and _may_be_cast(array) else array
                                             for i, array in enumerate(call.inputs)]))
    return run


def _saved(invoke: Invoke, array: NDArray) -> NDArray:
    return run_operator(invoke, "SliceChannel", [array], {"num_outputs": 1, "axis": 0},
                        is_np_op=isinstance(array, mx.np.ndarray))


def _may_be_cast(array: NDArray) -> bool:
    return (not isinstance(array, BaseSparseNDArray) and dtype_name(array.dtype) in _FLOATS and array.ndim > 0
            and array.size > 0)
