"""What is known of a network before it is converted, and what is to be said of it afterwards."""
from __future__ import annotations

from typing import Any, Mapping

import mxnet as mx

from .._mxnet.symbols import analyse, first_line, from_graph
from ..dtypes import FLOAT16, FLOAT32, FLOAT64, LOW_PRECISION
from ..errors import GraphError
from ..graph import CAST, Graph
from ..graph.attrs import CONVERSION, DTYPE, TYPE_FLAGS
from ..passes.float16 import widen
from ..rules import Cause, Device, Policy

# Why the operators of a network stay in FP32, where none is lowered, by what comes first in importance.
_REASONS = (
    ((Cause.REGION,), "its operators were made with AMP off, in amp.autocast(enabled=False) or in an excluded block"),
    ((Cause.EXCLUSION,), "its operators are excluded"),
    ((Cause.USER_LIST, Cause.NOT_LISTED, Cause.REGISTERED), "the given lists of operators leave nothing else"),
)


def analyse_network(symbol: mx.sym.Symbol, graph: Graph, weights: Any, dtypes: Mapping[str, str],
                    shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the type and shape of every tensor into a symbol's graph, once low precision in it is taken as FP32."""
    is_widened = _widened(graph, weights, dtypes)
    _note_types(graph, weights)
    symbol = from_graph(graph, symbol) if is_widened else symbol
    variables = graph.variables()
    untyped = [node.name for node in variables if node.attrs.get(DTYPE, "-1") == "-1" and node.name not in weights]
    known = {**weights.dtypes(), **dtypes}
    names = {node.name for node in variables}
    sizes = {name: shape for name, shape in {**weights.shapes(), **shapes}.items() if name in names}
    try:
        if FLOAT64 in known.values():  # its data is float64 as well
            analyse(symbol, graph, {name: dtype for name, dtype in known.items() if name in names}, sizes)
            known.update((node.name, FLOAT64) for node in variables if node.dtypes == [FLOAT64])
        floats = {dtype for dtype in known.values() if dtype.startswith(("float", "bfloat"))}
        known = {**dict.fromkeys(untyped, FLOAT64 if floats == {FLOAT64} else FLOAT32), **known}
        analyse(symbol, graph, {name: dtype for name, dtype in known.items() if name in names}, sizes)
    except mx.MXNetError as error:
        raise GraphError(f"the symbol does not fit its parameters or the example: {first_line(error)}. Give "
                         "the parameters of this network, and data of the shapes that it takes") from error


def _widened(graph: Graph, weights: Any, dtypes: Mapping[str, str]) -> bool:
    """Take a network in float16, or with parameters in low precision, as one in FP32; tell whether it changed."""
    if any(CONVERSION in node.attrs for node in graph.nodes()):
        return False  # a part of it was converted before, and has its types
    types, variables = weights.dtypes(), graph.variables()
    has_halves = any(node.attrs.get(DTYPE) == str(TYPE_FLAGS[FLOAT16]) for node in variables)
    low = [node for node in variables if types.get(node.name) in LOW_PRECISION]
    for node in low:
        weights.compute(node.name, CAST, {"dtype": FLOAT32}, [node.name])
        node.attrs = {key: value for key, value in node.attrs.items() if key != DTYPE}
    if not has_halves and FLOAT16 not in dtypes.values() and FLOAT16 not in types.values():
        return bool(low)
    data = [node.name for node in variables if node.name not in weights and DTYPE not in node.attrs]
    return bool(widen(graph, {**dict.fromkeys(data if has_halves else (), FLOAT16), **dtypes})) or bool(low)


def _note_types(graph: Graph, weights: Any) -> None:
    """Write the type on every parameter in low precision, because MXNet cannot infer it behind a cast."""
    types = weights.dtypes()
    for node in graph.variables():
        if types.get(node.name) in LOW_PRECISION:
            node.attrs = {**node.attrs, DTYPE: str(TYPE_FLAGS[types[node.name]])}


def reason_for_fp32(graph: Graph, policy: Policy, device: Device) -> str:
    """Say why a planned graph holds no low precision."""
    if not policy.lowers:
        return device.reason
    nodes = graph.operators()
    causes = {node.decision.cause for node in nodes if node.decision is not None}
    found = next((reason for some, reason in _REASONS if not causes.isdisjoint(some)), None)
    if found is None and any(FLOAT64 in node.dtypes for node in nodes):
        found = "its tensors are float64, which conversions leave as they are"
    return found or f"none of its operators gains from {policy.target_dtype}"
