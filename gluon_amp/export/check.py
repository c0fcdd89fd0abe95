"""Compare an ONNX model with the network that it was made from, in onnxruntime on the CPU.

Where a network sorts or compares, the last bit decides: both read what MXNet computes, and go on from its decision.

    x -> topk -> y        becomes        x -> output;  x_given -> topk -> output;  topk_given -> y
"""
from __future__ import annotations

import importlib
from typing import Any, Container, Mapping, Sequence

import mxnet as mx
import numpy as np

from .._mxnet.engine import Program
from .._mxnet.mx2onnx import Exported
from .._mxnet.symbols import from_graph
from ..base.metrics import relative_error
from ..errors import GraphError
from ..graph import VARIABLE, Entry, Graph, Node
from ..rules.tables.groups import CHOOSE_BY_ORDER

# Others that decide: of ``broadcast_`` too, and of a tensor with a number.
_COMPARISONS = ("equal", "not_equal", "greater", "greater_equal", "lesser", "lesser_equal", "less", "less_equal")
_DECIDING = CHOOSE_BY_ORDER.union(
    ("floor", "ceil", "round", "rint", "fix", "trunc", "sign"),
    (form.format(name) for name in _COMPARISONS
     for form in ("_{}", "broadcast_{}", "_{}_scalar", "_npi_{}", "_npi_{}_scalar")))
_GIVEN = "_given"


def package(name: str) -> Any:
    """Return a package that only exports need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"an export to ONNX needs the packages onnx and onnxruntime ({error}).\n"
                          "Run: python -m pip install 'gluon_amp[onnx]'") from error


def tensor_types(model: Any, **options: Any) -> dict[str, int]:
    """Return the type of each tensor of a model."""
    inferred = package("onnx").shape_inference.infer_shapes(model, **options).graph
    values = [*inferred.input, *inferred.value_info, *inferred.output]
    return {**{each.name: each.type.tensor_type.elem_type for each in values},
            **{each.name: each.data_type for each in model.graph.initializer}}


class Comparison:
    """The tensors that both compute, and MXNet's programs for them."""

    def __init__(self, symbol: mx.sym.Symbol, graph: Graph, made: Exported, arrays: Mapping[str, mx.nd.NDArray]):
        self._deciding = _deciding(graph, arrays)
        named = {made.values[node.name, output]: Entry(node, output) for node in graph.operators()
                 for output in range(node.num_outputs) if (node.name, output) in made.values}
        read = {entry.key for node in self._deciding.values() for entry in node.inputs}
        # By their names in ONNX: what is decided upon, and decisions.
        self._given = {name: entry for name, entry in named.items() if entry.key in read}
        self._decisions = {name: entry for name, entry in named.items() if entry.node.name in self._deciding}
        self.outputs = [each.name for each in made.model.graph.output]
        self._heads = {**self._given, **self._decisions, **dict(zip(self.outputs, graph.heads))}
        self._before = Program(from_graph(Graph(list(self._given.values()), graph.attrs), symbol), arrays
                               ) if self._given else None
        apart = graph.copy()
        nodes = {node.name: node for node in apart.operators()}
        given = {entry.key: Entry(Node(VARIABLE, name + _GIVEN)) for name, entry in self._given.items()}
        for name, node in self._deciding.items():
            nodes[name].inputs = [given.get(old.key, new) for old, new in zip(node.inputs, nodes[name].inputs)]
        heads = [Entry(nodes[entry.node.name], entry.output) for entry in self._heads.values()]
        self._program = Program(from_graph(Graph(heads, graph.attrs), symbol), arrays)
        # A copy of the model, in which deciding operators, and the users of decisions, read other inputs.
        onnx, types = package("onnx"), tensor_types(made.model)
        self._types = {}
        self.model = onnx.ModelProto()
        self.model.CopyFrom(made.model)
        for node in self.model.graph.node:
            moved = self._given if made.origin.get(node.output[0]) in self._deciding else self._decisions
            for position, name in enumerate(node.input):
                if name in moved:
                    node.input[position] = name + _GIVEN
                    self._types[name + _GIVEN] = types[name]
        self.model.graph.input.extend(onnx.helper.make_tensor_value_info(name, kind, None)
                                      for name, kind in self._types.items())

    def errors(self, model: Any, checked: Any, data: Mapping[str, mx.nd.NDArray], is_low: bool) -> dict[str, float]:
        """Return how far a model, and that for checking, are from MXNet, by the names of tensors."""
        # onnxruntime first, where an error is one: MXNet may end the process where a batch does not fit.
        arrays = {name: array.asnumpy() for name, array in data.items()}
        found = dict(zip(self.outputs, run(model, self.outputs, arrays)))
        given = [] if self._before is None else [each.asnumpy() for each in self._before(data)]
        given = [each.astype(np.float16).astype(each.dtype) if is_low and each.dtype == np.float32 else each
                 for each in given]  # so that both decide upon the same numbers
        fed = {name + _GIVEN: mx.nd.array(each, dtype=each.dtype) for name, each in zip(self._given, given)}
        wanted = dict(zip(self._heads, (each.asnumpy() for each in self._program({**data, **fed}))))
        for name in self.outputs:
            if wanted[name].size and not np.isfinite(wanted[name]).any():
                raise GraphError("expected data_example for which the network gives numbers, received some for which "
                                 f"none of {name!r} is finite: nothing can be compared")
        to_numpy = package("onnx").helper.tensor_dtype_to_np_dtype
        values = {**{name + _GIVEN: each for name, each in wanted.items()}, **dict(zip(fed, given))}
        arrays.update((name, values[name].astype(to_numpy(kind))) for name, kind in self._types.items())
        found.update((name, each) for name, each in zip(self._heads, run(checked, list(self._heads), arrays))
                     if name not in found or found[name].shape == wanted[name].shape)
        errors = {name: error(each, found[name]) for name, each in wanted.items()}
        return {name: each for name, each in errors.items()
                if not (each and self._is_anybodys(self._heads[name], values))}

    def _is_anybodys(self, entry: Entry, values: Mapping[str, np.ndarray]) -> bool:
        """Tell whether a tensor is a choice among equal values."""
        node = self._deciding.get(entry.node.name)
        if node is None or node.op not in CHOOSE_BY_ORDER:
            return False
        read = {other.key for other in node.inputs}
        return any(np.unique(values[name + _GIVEN]).size < values[name + _GIVEN].size
                   for name, other in self._given.items() if other.key in read)


def _deciding(graph: Graph, parameters: Container[str]) -> dict[str, Node]:
    """Return the operators that decide upon tensors computed with rounding, by name."""
    computed: set[int] = set()  # from parameters
    found = {}
    for node in graph.nodes():
        read = [entry.node for entry in node.inputs if id(entry.node) in computed]
        if read or node.name in parameters:
            computed.add(id(node))
        if node.op in _DECIDING and not all(other.is_variable for other in read):
            found[node.name] = node
    return found


def round_behind_nodes(model: Any) -> None:
    """Let a model compute with FP32 arithmetic, and float16 rounding behind each node."""
    # onnxruntime computes float16 models in FP32 from node to node on a CPU, where nothing overflows.
    onnx = package("onnx")
    float16, float32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    nodes, raised, types = [], set(), tensor_types(model)
    for node in model.graph.node:
        after = []
        for position, name in enumerate(node.input if node.op_type != "Cast" else ()):
            if types.get(name) == float16:
                if name not in raised:
                    raised.add(name)
                    nodes.append(onnx.helper.make_node("Cast", [name], [f"{name}_raised"], to=float32))
                node.input[position] = f"{name}_raised"
        for position, name in enumerate(node.output if node.op_type != "Cast" else ()):
            if types.get(name) == float16:
                node.output[position] = f"{name}_wide"
                after.append(onnx.helper.make_node("Cast", [f"{name}_wide"], [name], to=float16))
        nodes += [node, *after]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)


def run(model: Any, names: Sequence[str], data: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return what onnxruntime gives on the CPU for these tensors."""
    onnx, runtime = package("onnx"), package("onnxruntime")
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    given = {each.name for each in model.graph.output}  # onnxruntime knows the types of others
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in given)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    try:
        session = runtime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feed = {each.name: data[each.name].astype(np.float16) if each.type == "tensor(float16)" else data[each.name]
                for each in session.get_inputs()}
        return list(session.run(list(names), feed))
    except Exception as error:  # onnxruntime's own classes
        told = " ".join(str(error).split())[:500]
        raise GraphError(f"onnxruntime cannot run the exported network: {told}") from error


def error(wanted: np.ndarray, actual: np.ndarray) -> float:
    """Return the 2-norm of the difference over that of the wanted values; infinite where others are not finite."""
    odd = ~np.isfinite(wanted)
    if wanted.shape != actual.shape or not np.array_equal(wanted[odd], actual[odd], equal_nan=bool(odd.any())):
        return float("inf")
    return relative_error([(wanted.astype(np.float64), actual.astype(np.float64))])
