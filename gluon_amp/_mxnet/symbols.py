"""Symbols to graphs and back, and what MXNet can infer about every tensor in them."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.symbol.numpy import _Symbol as NumpySymbol

from ..dtypes import BFLOAT16, BFLOAT16_DTYPE
from ..graph import Entry, Graph, Node
from ..passes.context import REGION_ATTRIBUTE

__all__ = ["analyse", "dtype_name", "from_graph", "to_graph",
           "was_traced_in_a_region"]

_BFLOAT16_FLAG = "12"  # MXNet's number of the type
Shape = Optional[Tuple[int, ...]]


def dtype_name(dtype: Any) -> str | None:
    """Name a data type as MXNet's Python side gives it; None for None."""
    if dtype is None:
        return None
    if isinstance(dtype, np.dtype) and dtype == BFLOAT16_DTYPE:
        return BFLOAT16
    return np.dtype(dtype).name


def to_graph(symbol: mx.sym.Symbol) -> Graph:
    """Read a symbol as a graph, casts of earlier conversions included."""
    return Graph.from_json(symbol.tojson(remove_amp_cast=False))


def from_graph(graph: Graph, like: mx.sym.Symbol) -> mx.sym.Symbol:
    """Build a symbol from a graph, of the same kind (legacy or NumPy) as ``like``."""
    symbol = mx.sym.load_json(graph.to_json())
    return symbol.as_np_ndarray() if isinstance(like, NumpySymbol) else symbol


def was_traced_in_a_region(symbol: mx.sym.Symbol) -> bool:
    """Whether some of a symbol's operators were traced inside an autocast region."""
    return f'"{REGION_ATTRIBUTE}"' in symbol.tojson(remove_amp_cast=False)


def analyse(symbol: mx.sym.Symbol, graph: Graph, dtypes: Mapping[str, str],
            shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Write the data type and shape of every tensor into the nodes of ``symbol``'s graph.

    Parameters
    ----------
    symbol : Symbol
        The symbol that ``graph`` was read from.
    graph : Graph
        Receives ``dtypes`` and ``shapes`` of every output; None where MXNet cannot tell.
    dtypes : mapping of str to str
        Types of the inputs, by name.
    shapes : mapping of str to tuple of int, optional
        Shapes of the inputs, by name.
    """
    nodes = graph.nodes()
    # Symbol.get_internals leaves out hidden outputs: make a symbol whose outputs are all tensors.
    entries = [Entry(node, index) for node in nodes for index in range(node.num_outputs)]
    with _typed_variables(nodes, dtypes):
        everything = from_graph(Graph(entries, graph.attrs), symbol)
    types = _infer(everything.infer_type_partial, {name: dtype for name, dtype in dtypes.items() if dtype != BFLOAT16})
    found = _infer(everything.infer_shape_partial, dict(shapes or {}))
    known_types, known_shapes = iter(types or [None] * len(entries)), iter(found or [None] * len(entries))
    for node in nodes:
        node.dtypes = [dtype_name(next(known_types)) for _ in range(node.num_outputs)]
        node.shapes = [_known(next(known_shapes)) for _ in range(node.num_outputs)]


@contextmanager
def _typed_variables(nodes: Sequence[Node], dtypes: Mapping[str, str]) -> Iterator[None]:
    """Say the type of bfloat16 variables on them for the time being: infer_type takes no bfloat16."""
    before = [(node, node.attrs) for node in nodes if node.is_variable and dtypes.get(node.name) == BFLOAT16]
    for node, attrs in before:
        node.attrs = {**attrs, "__dtype__": _BFLOAT16_FLAG}
    try:
        yield
    finally:
        for node, attrs in before:
            node.attrs = attrs


def _infer(method: Any, known: Mapping[str, Any]) -> Sequence[Any]:
    inferred = method(**known)[1]
    return inferred if inferred is not None else []


def _known(shape: Shape) -> Shape:
    unknown = -1 if mx.util.is_np_shape() else 0
    return None if shape is None or len(shape) == 0 or unknown in shape else tuple(shape)


def input_names(symbol: mx.sym.Symbol) -> list[str]:
    """Names of a symbol's arguments and auxiliary states, in the order that a cached op takes them."""
    return symbol.list_inputs()
