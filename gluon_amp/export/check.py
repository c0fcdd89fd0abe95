"""Compare an ONNX model with the network that it was made from, in onnxruntime on the CPU.

Where a network sorts or compares (``topk``, the suppression of boxes, ``x == maximum``), a difference in the last bit
decides. There what is decided upon is compared, and not what comes of it.
"""
from __future__ import annotations

from typing import Any, Container, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from .._mxnet.invoke import Program
from .._mxnet.symbols import from_graph
from ..errors import GraphError
from ..graph import Entry, Graph
from ..metrics import relative_error
from .packages import onnx_package, runtime_package

# What sorts, counts or compares: of ``broadcast_`` too, and of a tensor with a number.
_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal", "less", "less_equal")
_DECIDING = frozenset({
    "topk", "sort", "argsort", "argmax", "argmax_channel", "argmin", "_npi_argmax", "_npi_argmin", "_contrib_box_nms",
    "_contrib_bipartite_matching", "_contrib_Proposal", "_contrib_MultiBoxDetection", "floor", "ceil", "round", "rint",
    "fix", "trunc", "sign", *(form.format(name) for name in _COMPARISONS for form in
                              ("_{}", "broadcast_{}", "_{}_scalar", "_npi_{}", "_npi_{}_scalar"))})


class Compared(NamedTuple):
    """A tensor that both give."""

    name: str  # in ONNX
    entry: Entry  # in the graph


def compared(graph: Graph, outputs: Sequence[str], values: Mapping[tuple[str, int], str],
             parameters: Container[str]) -> list[Compared]:
    """Return what is to be compared: outputs, and what is decided upon in the place of those behind that."""
    computed: set[int] = set()  # from parameters, with rounding
    behind: set[int] = set()
    before: dict[str, Compared] = {}
    for node in graph.nodes():
        if any(id(entry.node) in computed for entry in node.inputs) or node.name in parameters:
            computed.add(id(node))
        read = [entry for entry in node.inputs if id(entry.node) in computed and not entry.node.is_variable]
        decides = node.op in _DECIDING and bool(read)
        if decides or any(id(entry.node) in behind for entry in node.inputs):
            behind.add(id(node))
        for entry in read if decides else ():
            if id(entry.node) not in behind:
                name = values[entry.node.name, entry.output]
                before[name] = Compared(name, entry)
    found = [Compared(name, head) for name, head in zip(outputs, graph.heads) if id(head.node) not in behind]
    return found + [each for each in before.values() if each.name not in outputs]


class Reference:
    """What the network gives in FP32, in MXNet."""

    def __init__(self, symbol: mx.sym.Symbol, graph: Graph, arrays: Mapping[str, mx.nd.NDArray],
                 what: Sequence[Compared]) -> None:
        heads, graph.heads = graph.heads, [each.entry for each in what]
        self._program = Program(from_graph(graph, symbol), arrays)
        graph.heads = heads

    def __call__(self, data: Mapping[str, mx.nd.NDArray]) -> list[np.ndarray]:
        """Run it."""
        return [each.asnumpy() for each in self._program(data)]


def found(model: Any, what: Sequence[Compared], data: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return what onnxruntime gives on the CPU."""
    onnx, runtime = onnx_package(), runtime_package()
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    given = {each.name for each in model.graph.output}  # onnxruntime knows the types of others
    watched.graph.output.extend(onnx.ValueInfoProto(name=each.name) for each in what if each.name not in given)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    try:
        session = runtime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feed = {each.name: _fitting(data[each.name], each.type) for each in session.get_inputs()}
        return list(session.run([each.name for each in what], feed))
    except Exception as error:  # onnxruntime's own classes
        told = " ".join(str(error).split())[:500]
        raise GraphError(f"onnxruntime cannot run the exported network: {told}") from error


def _fitting(values: np.ndarray, kind: str) -> np.ndarray:
    """Return data in the type that the model takes."""
    return values.astype(np.float16) if kind == "tensor(float16)" else values


def error(wanted: np.ndarray, actual: np.ndarray) -> float:
    """Return the 2-norm of the difference over that of what is wanted."""
    if wanted.shape != actual.shape:
        return float("inf")
    return relative_error([(wanted.astype(np.float64), actual.astype(np.float64))])
