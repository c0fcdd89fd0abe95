"""MXNet's own converter to ONNX: at one opset, with what is mended, and with the origin of each node known.

It takes the newest opset that ``onnx`` knows for the one that its nodes are of, needs a module that ``onnx`` no longer
has, writes weights number by number, ignores classes in ``box_nms`` and pools to one pixel only.
"""
from __future__ import annotations

import json
from types import ModuleType
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from ..errors import GraphError, some_of
from ..graph import Graph
from ..replaced import Replaced
from . import onnx_operators

# What MXNet writes is for opset 13 and valid in 15, where BatchNorm's statistics may have another type than its data.
OPSET, IR_VERSION, _WRITTEN_FOR = 15, 8, 13
_TYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64", "bool", "uint32", "uint64", "int16")


class Exported(NamedTuple):
    """An FP32 network in ONNX."""

    model: Any  # onnx.ModelProto
    origin: Mapping[str, str]  # by the first output of each ONNX node: the name of MXNet's operator
    values: Mapping[tuple[str, int], str]  # by the name of MXNet's operator and the number of its output: ONNX's name


def export(symbol: mx.sym.Symbol, graph: Graph, arrays: Mapping[str, mx.nd.NDArray],
           data: Mapping[str, mx.nd.NDArray]) -> Exported:
    """Return a symbol, whose operators have names of their own, in ONNX; ``graph`` is the same with known shapes."""
    import onnx
    from mxnet.onnx.mx2onnx import _export_onnx as theirs

    recorder = _Recorder(theirs.MXNetGraph, graph, [node["name"] for node in json.loads(symbol.tojson())["nodes"]])
    recorder.check(graph)
    names = [name for name in symbol.list_inputs() if name in data]
    shapes = [data[name].shape for name in names]
    replaced = Replaced()
    try:
        if not hasattr(onnx, "mapping"):  # onnx 1.19 and newer
            replaced.put(onnx, "mapping", _mapping(onnx.helper))
        types = [vars(onnx)["mapping"].NP_TYPE_TO_TENSOR_TYPE[np.dtype(data[name].dtype)] for name in names]
        replaced.put(theirs.MXNetGraph, "convert_layer", staticmethod(recorder.convert))
        replaced.put(onnx.checker, "check_graph", lambda *_: None)  # by the newest opset
        proto = theirs.MXNetGraph().create_onnx_graph_proto(symbol, dict(arrays), shapes, types,
                                                            opset_version=_WRITTEN_FOR)
        outputs = theirs.MXNetGraph.get_outputs(symbol, arrays, shapes, None, types)[1]
    finally:
        replaced.restore()
    _tidy(proto, list(data), list(outputs))
    model = onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
                                   producer_name="gluon_amp")
    return Exported(model, recorder.origin, recorder.values)


def _mapping(helper: ModuleType) -> ModuleType:
    """Return the module ``onnx.mapping`` that there was up to onnx 1.18."""
    module = ModuleType("onnx.mapping")
    types = {np.dtype(name): helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in _TYPES}
    vars(module).update(NP_TYPE_TO_TENSOR_TYPE=types,
                        TENSOR_TYPE_TO_NP_TYPE={value: key for key, value in types.items()})
    return module


def _tidy(proto: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Leave out what nobody reads, and weights among the inputs; put inputs and outputs in the network's order."""
    used, nodes = set(outputs), []
    for node in reversed(proto.node):
        if used.intersection(node.output):
            used.update(node.input)
            nodes.append(node)
    del proto.node[:]
    proto.node.extend(reversed(nodes))
    for values, names in ((proto.input, inputs), (proto.output, outputs)):
        known = {each.name: each for each in values}
        del values[:]
        values.extend(known[name] for name in names if name in known)


class _Recorder:
    """Converts operators, and remembers what became of each."""

    def __init__(self, converter: Any, graph: Graph, names: Sequence[str]) -> None:
        self._convert: Callable[..., Any] = converter.convert_layer
        self._known = {op for version, known in converter.registry_.items() if version <= _WRITTEN_FOR for op in known}
        self._nodes = {node.name: node for node in graph.nodes()}
        self._names = names  # of the symbol's nodes
        self.origin: dict[str, str] = {}
        self.values: dict[tuple[str, int], str] = {}

    def check(self, graph: Graph) -> None:
        """Raise GraphError for operators that there is no conversion of."""
        unknown = [f"{node.op} ({node.name})" for node in graph.operators()
                   if node.op not in self._known and node.op not in onnx_operators.OURS]
        if unknown:
            raise GraphError(f"MXNet's converter to ONNX knows no {some_of(unknown)}: leave such operators out of the "
                             "network that is exported, and do their part in the program that serves it")

    def convert(self, node: Mapping[str, Any], **given: Any) -> Any:
        """Convert a node as MXNet's function does."""
        name, op = node["name"], node["op"]
        inputs = [given["outputs_lookup"][source][output] for source, output, *_ in node["inputs"]]
        ours = None if given["is_input"] else onnx_operators.OURS.get(op)
        try:
            nodes, dtypes = self._convert(node, **given) if ours is None else ours(self._nodes[name], {
                **given, "names": [each.name for each in inputs], "dtype": inputs[0].dtype if inputs else None})
        except (AttributeError, NotImplementedError, AssertionError, ValueError, KeyError) as error:
            raise GraphError(f"{name} ({op}) cannot be written in ONNX: {' '.join(str(error).split())}") from error
        for each in nodes:
            self.origin.update(dict.fromkeys(getattr(each, "output", ()), name))
        self.values.update(((self._names[source], output), each.name)
                           for (source, output, *_), each in zip(node["inputs"], inputs))
        return nodes, dtypes
