"""Call a symbol as one calls a network: inputs that are not given are filled with ones."""
from __future__ import annotations

from typing import Any, Callable, Mapping

import mxnet as mx
from mxnet.ndarray import NDArray

from ..._mxnet.arrays import cast_arrays
from ..._mxnet.symbols import dtype_name, of_inputs
from ...dtypes import BFLOAT16, FLOAT32
from ...errors import GraphError, closest
from ...runtime.graph_applier import RewritingCachedOp


def call_symbol(symbol: mx.sym.Symbol, data: Mapping[str, Any], gradients: bool = False) -> Callable[[], Any]:
    """Make a function that runs a symbol on arrays or shapes, with gradients for its FP32 inputs if wanted."""
    names = symbol.list_inputs()
    for name in data:
        if name not in names:
            raise GraphError(f"data: the symbol has no input {name!r}.{closest(name, names)}")
    shapes, dtypes = _inferred(symbol, data)
    given = next((value for value in data.values() if isinstance(value, NDArray)), None)
    device = mx.context.current_context() if given is None else given.context
    with device:
        arrays = [data[name] if isinstance(data.get(name), NDArray) else _ones(shapes[name], dtypes[name])
                  for name in names]
    if gradients:
        arrays = [array.copy() for array in arrays]
        for array in arrays:
            if dtype_name(array.dtype) == FLOAT32:
                array.attach_grad()
    operation = RewritingCachedOp(symbol, ())
    return lambda: operation(*arrays)


def _ones(shape: tuple[int, ...], dtype: str) -> NDArray:
    if dtype == BFLOAT16:  # MXNet makes no such arrays
        return cast_arrays(mx.nd.ones(shape), BFLOAT16)
    return mx.nd.ones(shape, dtype=dtype)


def _inferred(symbol: mx.sym.Symbol, data: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    known = {name: tuple(getattr(value, "shape", value)) for name, value in data.items()}
    shapes = {**of_inputs(symbol, symbol.infer_shape_partial(**known)), **known}
    missing = [name for name, shape in shapes.items() if not shape or 0 in shape]
    if missing or not shapes:
        raise GraphError(f"data leaves the shapes of {', '.join(missing) or 'all inputs'} unknown: give arrays or "
                         "shapes of more inputs")
    types = {name: value.dtype for name, value in data.items() if isinstance(value, NDArray)}
    kinds = symbol.infer_type_partial(**{name: kind for name, kind in types.items() if dtype_name(kind) != BFLOAT16})
    return shapes, {name: dtype_name(kind) or FLOAT32 for name, kind in of_inputs(symbol, kinds).items()}
