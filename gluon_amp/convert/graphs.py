"""Convert one symbol, with its parameters where they are known."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx

from .. import passes
from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import analyse, first_line, from_graph, fuse, to_graph
from ..dtypes import FLOAT32, LOW_PRECISION
from ..errors import GraphError
from ..graph import CAST, Entry, Graph, Node, cast, redirect, unique_name
from ..graph.attrs import CONVERSION, DTYPE, TYPE_FLAGS
from ..passes import Context
from ..rules import Policy
from .settings import Conversion, conversion_of

__all__ = ["Request", "convert", "with_fp32_parameters"]


@dataclass(frozen=True)
class Request:
    """What is to be done to a symbol.

    Attributes
    ----------
    policy : Policy
        Decides each operator's precision, and which passes are off.
    keep_outputs : bool
        Whether outputs are cast back to FP32.
    on_cpu : bool
        Whether the network will run on a CPU.
    version : str
        Noted in the result.
    """

    policy: Policy
    keep_outputs: bool = True
    on_cpu: bool = True
    version: str = ""

    @property
    def target_dtype(self) -> str:
        """The type to convert to."""
        return self.policy.target_dtype

    @property
    def excluded(self) -> frozenset[str]:
        """Names of nodes to keep in FP32."""
        return self.policy.excluded


def convert(symbol: mx.sym.Symbol, weights: Any, request: Request, dtypes: Mapping[str, str],
            shapes: Mapping[str, tuple[int, ...]]) -> tuple[mx.sym.Symbol, Conversion]:
    """Convert a symbol; the caller's is left as it is.

    Parameters
    ----------
    symbol : Symbol
        In FP32. One that was converted before to the same type is returned as it is.
    weights : Weights
        The parameters, changed with the symbol.
    request : Request
        What to do.
    dtypes, shapes : mapping
        Of inputs, by name, where they are known; other inputs are FP32.

    Raises
    ------
    GraphError
        MXNet finds the symbol and its parameters inconsistent, or the symbol was converted to another type.
    """
    graph = to_graph(symbol)
    earlier = conversion_of(graph)
    if earlier is not None:
        if earlier.target_dtype != request.target_dtype:
            raise GraphError(f"the network is already converted to {earlier.target_dtype}: to get "
                             f"{request.target_dtype} convert the FP32 network that it was made from")
        return symbol, earlier
    outputs = [(head.node.name, head.node.num_outputs) for head in graph.heads]
    _analyse(symbol, graph, weights, dtypes, shapes)
    context = Context.of(graph, request.policy, request.keep_outputs, weights=weights, engine=_engine(symbol, request))
    counts = passes.run(graph, context)
    operators = graph.operators()
    low, casts = _low_operators(operators, request.target_dtype), sum(node.op == CAST for node in operators)
    counts.update(passes.finish(graph, context))
    steps = {each.name: counts[each.name] for each in passes.PASSES if each.is_step and each.name in counts}
    record = Conversion(request.target_dtype, len(operators), low, casts, steps, tuple(sorted(request.excluded)),
                        request.version, request.policy.reason)
    _name_outputs(graph, outputs)
    for head in graph.heads:
        head.node.attrs = {**head.node.attrs, CONVERSION: record.to_json()}
    return from_graph(graph, symbol), record


def _analyse(symbol: mx.sym.Symbol, graph: Graph, weights: Any, dtypes: Mapping[str, str],
             shapes: Mapping[str, tuple[int, ...]]) -> None:
    _note_types(graph, weights)
    variables = graph.variables()
    untyped = [node.name for node in variables if node.attrs.get(DTYPE, "-1") == "-1" and node.name not in weights]
    known = {**dict.fromkeys(untyped, FLOAT32), **weights.dtypes(), **dtypes}
    sizes = {**weights.shapes(), **shapes}
    try:
        analyse(symbol, graph, {node.name: known[node.name] for node in variables if node.name in known},
                {node.name: sizes[node.name] for node in variables if node.name in sizes})
    except mx.MXNetError as error:
        raise GraphError(f"the symbol does not fit its parameters or the example: {first_line(error)}") from error


def _note_types(graph: Graph, weights: Any) -> None:
    """Say on every parameter that is in low precision already that it is: behind a cast MXNet cannot infer it."""
    types = weights.dtypes()
    for node in graph.variables():
        if types.get(node.name) in LOW_PRECISION:
            node.attrs = {**node.attrs, DTYPE: str(TYPE_FLAGS[types[node.name]])}


def _engine(symbol: mx.sym.Symbol, request: Request) -> Callable[[Graph], Graph] | None:
    """Return what fuses operators: a GPU has no fused ones, and imitated types are not oneDNN's."""
    if not request.on_cpu or request.policy.imitated:
        return None
    return lambda graph: to_graph(fuse(from_graph(graph, symbol)))


def _low_operators(operators: Sequence[Node], target: str) -> int:
    if target == FLOAT32:
        return 0
    return sum(node.op != CAST and any(entry.dtype == target for entry in node.inputs) for node in operators)


def _name_outputs(graph: Graph, outputs: Sequence[tuple[str, int]]) -> None:
    """Give the outputs the names that users know them by, also where another operator gives them now."""
    nodes = graph.nodes()
    names = {node.name for node in nodes}
    for head, (name, count) in zip(graph.heads, outputs):
        if head.node.name == name or count > 1:
            continue
        for node in nodes:
            if node.name == name:
                node.name = unique_name(f"{name}_low", names)
        head.node.name = name


def with_fp32_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, Any]) -> tuple[mx.sym.Symbol, dict[str, Any]]:
    """Undo ``cast_params_offline``: parameters are FP32 again and cast in the graph, to the same values."""
    graph = to_graph(symbol)
    names = {node.name for node in graph.nodes()}
    moved = {}
    for node in graph.variables():
        dtype = _LOW_FLAGS.get(node.attrs.get(DTYPE, ""))
        if dtype is not None and node.name in arrays:
            moved[Entry(node).key] = cast(Entry(node), dtype, unique_name(f"{node.name}_{dtype}", names))
            node.attrs = {key: value for key, value in node.attrs.items() if key != DTYPE}
    redirect(graph, moved)
    return from_graph(graph, symbol), {name: cast_arrays(array, FLOAT32) for name, array in arrays.items()}


_LOW_FLAGS = {str(TYPE_FLAGS[dtype]): dtype for dtype in LOW_PRECISION}
