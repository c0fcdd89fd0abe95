"""MXNet's own converter to ONNX: at one opset, with its faults mended, and with the origin of each node known."""
from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from ..base.context import Replaced
from ..errors import GraphError
from ..graph import Graph, Node
from ..graph.attrs import integers, is_set

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

    recorder = _Recorder(theirs.MXNetGraph.convert_layer, graph,
                         [node["name"] for node in json.loads(symbol.tojson())["nodes"]])
    names = [name for name in symbol.list_inputs() if name in data]
    shapes = [data[name].shape for name in names]
    known = {np.dtype(name): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in _TYPES}
    mapping = SimpleNamespace(NP_TYPE_TO_TENSOR_TYPE=known,  # a module up to onnx 1.18
                              TENSOR_TYPE_TO_NP_TYPE={number: dtype for dtype, number in known.items()})
    replaced = Replaced()
    try:
        replaced.put(onnx, "mapping", mapping)
        types = [known[np.dtype(data[name].dtype)] for name in names]
        replaced.put(theirs.MXNetGraph, "convert_layer", staticmethod(recorder.convert))
        replaced.put(onnx.checker, "check_graph", lambda *_: None)  # by the newest opset
        with redirect_stdout(io.StringIO()):  # names of operators that it prints
            proto = theirs.MXNetGraph().create_onnx_graph_proto(symbol, dict(arrays), shapes, types,
                                                                opset_version=_WRITTEN_FOR)
        outputs = theirs.MXNetGraph.get_outputs(symbol, arrays, shapes, None, types)[1]
    finally:
        replaced.restore()
    _tidy(proto, list(data), list(outputs))
    model = onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
                                   producer_name="gluon_amp")
    return Exported(model, recorder.origin, recorder.values)


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

    def __init__(self, convert: Callable[..., Any], graph: Graph, names: Sequence[str]) -> None:
        self._convert = convert  # MXNet's
        self._nodes = {node.name: node for node in graph.nodes()}
        self._names = names  # of the symbol's nodes
        self.origin: dict[str, str] = {}
        self.values: dict[tuple[str, int], str] = {}

    def convert(self, node: Mapping[str, Any], **given: Any) -> Any:
        """Convert a node as MXNet's function does."""
        name, op = node["name"], node["op"]
        inputs = [given["outputs_lookup"][source][output] for source, output, *_ in node["inputs"]]
        ours = None if given["is_input"] else _OURS.get(op)
        try:
            if ours is None:
                nodes, dtypes = self._convert(node, **given)
            else:
                writer = _Writer(self._nodes[name], inputs, given["initializer"], given["weights"])
                dtypes, nodes = ours(writer), writer.nodes
        except (AttributeError, NotImplementedError, AssertionError, ValueError, KeyError) as error:
            raise GraphError(f"{name} ({op}) cannot be written in ONNX: {' '.join(str(error).split())}. Leave it "
                             "out of what is exported, and do its part in the program that serves it") from error
        for each in nodes:
            self.origin.update(dict.fromkeys(getattr(each, "output", ()), name))
        self.values.update(((self._names[source], output), each.name)
                           for (source, output, *_), each in zip(node["inputs"], inputs))
        return nodes, dtypes


class _Writer:
    """The ONNX nodes of one operator of MXNet's."""

    def __init__(self, node: Node, inputs: Sequence[Any], initializer: list[Any], weights: Mapping[str, Any]) -> None:
        self.name, self.attrs, self.node = node.name, node.attrs, node
        self.initializer, self.weights = initializer, weights
        self.inputs: list[str] = [each.name for each in inputs]
        self.dtype: np.dtype | None = inputs[0].dtype if inputs else None
        self.nodes: list[Any] = []

    def add(self, op: str, *inputs: str, to: str | None = None, outputs: int = 1, **attrs: Any) -> Any:
        """Add a node; return the name of its output, or names."""
        from onnx import helper
        names = [to] if to else [f"{self.name}_{op.lower()}{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=names[0], **attrs))
        return names[0] if outputs == 1 else names

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        """Add a constant; return its name."""
        from onnx import numpy_helper
        name = f"{self.name}_constant{len(self.initializer)}"
        self.initializer.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def part(self, data: str, axis: int, begin: int, end: int) -> str:
        """Add a slice of an axis."""
        return self.add("Slice", data, *map(self.constant, ([begin], [end], [axis])))

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the first input."""
        shape = self.node.inputs[0].shape
        if shape is None:
            raise NotImplementedError("the shape of its data is not known")
        return shape


def _weight(writer: _Writer) -> Any:
    """Write a weight as bytes: MXNet's function writes it number by number."""
    from onnx import helper, numpy_helper
    values = writer.weights[writer.name]
    writer.initializer.append(numpy_helper.from_array(values, writer.name))
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    writer.nodes.append(helper.make_tensor_value_info(writer.name, kind, values.shape))
    return (values.dtype,)


def _reshape(writer: _Writer) -> None:
    """Write a shape as numbers, the first dimension open: MXNet's function does not know all codes of MXNet's."""
    made = writer.node.shapes[0]
    codes = integers(writer.attrs, "shape")
    if made is None or not codes:
        raise NotImplementedError("the shape of its result is not known")
    first = codes[0] if codes[0] > 0 else 0 if codes[0] in (0, -2) else -1
    if is_set(writer.attrs, "reverse"):
        first = 0 if made[:1] == writer.shape()[:1] else -1
    writer.add("Reshape", writer.inputs[0], writer.constant([first, *made[1:]]), to=writer.name)


def _adaptive_average(writer: _Writer) -> None:
    """Write average pooling to any size as products with two matrices of shares: MXNet's knows one pixel only."""
    sizes = [int(size) for size in re.findall(r"\d+", writer.attrs.get("output_size", "1"))] or [1]
    rows, columns = sizes * 2 if len(sizes) == 1 else sizes
    if (rows, columns) == (1, 1):
        writer.add("GlobalAveragePool", writer.inputs[0], to=writer.name)
        return
    height, width = writer.shape()[2:]
    left = writer.constant(_shares(height, rows), writer.dtype)
    right = writer.constant(_shares(width, columns).T, writer.dtype)
    writer.add("MatMul", writer.add("MatMul", left, writer.inputs[0]), right, to=writer.name)


def _shares(size: int, parts: int) -> np.ndarray:
    """Return which share of each of ``parts`` means every one of ``size`` values has."""
    shares = np.zeros((parts, size))
    for part in range(parts):
        begin, end = part * size // parts, -(-(part + 1) * size // parts)
        shares[part, begin:end] = 1 / (end - begin)
    return shares


def _box_nms(writer: _Writer) -> None:
    """Write the suppression of boxes class by class: MXNet's function lets boxes suppress those of other classes."""
    read = writer.attrs.get
    count, width = writer.shape()[-2:]
    if read("in_format", "corner") != read("out_format", "corner"):
        raise NotImplementedError("expected out_format to be in_format")
    most = int(read("topk", -1))
    kept = min(most, count) if most > 0 else count
    score, label, first = int(read("score_index", 1)), int(read("id_index", -1)), int(read("coord_start", 2))
    data = writer.add("Reshape", writer.inputs[0], writer.constant([-1, count, width]))
    rows, scores = _best(writer, data, kept, score, label)
    boxes = writer.part(rows, 2, first, first + 4)
    if label >= 0 and not is_set(writer.attrs, "force_suppress"):
        boxes = _apart(writer, boxes, writer.part(rows, 2, label, label + 1))
    chosen = writer.add("NonMaxSuppression", boxes, writer.add("Unsqueeze", scores, writer.constant([1])),
                        writer.constant([kept]), writer.constant([read("overlap_thresh", 0.5)], np.float32),
                        writer.constant([read("valid_thresh", 0)], np.float32),
                        center_point_box=int(read("in_format", "corner") == "center"))
    found = _first_ones(writer, rows, scores, chosen, kept)
    if kept < count:
        padding = writer.constant([0, 0, 0, 0, count - kept, 0])
        found = writer.add("Pad", found, padding, writer.constant(-1, np.float32))
    writer.add("Reshape", found, writer.add("Shape", writer.inputs[0]), to=f"{writer.name}0")


def _best(writer: _Writer, data: str, kept: int, score: int, label: int) -> tuple[str, str]:
    """Add the rows with the highest scores, and these scores."""
    scores = writer.part(data, 2, score, score + 1)
    if label >= 0:  # rows of class -1 count for nothing either
        background = int(writer.attrs.get("background_id", -1))
        is_nothing = writer.add("Equal", writer.part(data, 2, label, label + 1),
                                writer.constant(background, np.float32))
        scores = writer.add("Where", is_nothing, writer.constant(-3e38, np.float32), scores)  # below each score
    best, where = writer.add("TopK", scores, writer.constant([kept]), outputs=2, axis=1)
    return _rows(writer, data, where), writer.add("Squeeze", best, writer.constant([2]))


def _rows(writer: _Writer, data: str, where: str) -> str:
    """Add the rows of each sample at some places, (samples, rows, 1)."""
    width = writer.part(writer.add("Shape", data), 0, 2, 3)
    shape = writer.add("Concat", writer.part(writer.add("Shape", where), 0, 0, 2), width, axis=0)
    return writer.add("GatherElements", data, writer.add("Expand", where, shape), axis=1)


def _apart(writer: _Writer, boxes: str, labels: str) -> str:
    """Move the boxes of each class to where no other class has any."""
    span = writer.add("Sub", writer.add("ReduceMax", boxes, keepdims=0), writer.add("ReduceMin", boxes, keepdims=0))
    step = writer.add("Add", span, writer.constant(1, np.float32))
    is_center = writer.attrs.get("in_format", "corner") == "center"
    moved = writer.constant([1, 0, 0, 0] if is_center else [1, 0, 1, 0], np.float32)
    return writer.add("Add", boxes, writer.add("Mul", writer.add("Mul", labels, step), moved))


def _first_ones(writer: _Writer, rows: str, scores: str, chosen: str, count: int) -> str:
    """Add the chosen rows in their order, and -1 in the place of the others behind them."""
    none = writer.add("ConstantOfShape", writer.add("Shape", scores))  # FP32 zeros
    places = writer.add("Gather", chosen, writer.constant([0, 2]), axis=1)
    one = writer.add("Expand", writer.constant([1], np.float32), writer.part(writer.add("Shape", chosen), 0, 0, 1))
    is_chosen = writer.add("ScatterND", none, places, one)
    order = writer.add("Sub", writer.add("Mul", is_chosen, writer.constant(count, np.float32)),
                       writer.constant(np.arange(count)[None], np.float32))
    best, where = writer.add("TopK", order, writer.constant([count]), outputs=2, axis=1)
    last = writer.constant([2])
    ordered = _rows(writer, rows, writer.add("Unsqueeze", where, last))
    is_kept = writer.add("Greater", writer.add("Unsqueeze", best, last), writer.constant(0, np.float32))
    return writer.add("Where", is_kept, ordered, writer.constant(-1, np.float32))


# The gates of recurrent layers: ONNX's operator, and where in ONNX's order MXNet's lie.
_RECURRENT: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, Any]]] = {
    "lstm": ("LSTM", (0, 3, 1, 2), {}),  # in MXNet input, forget, cell, output; in ONNX input, output, forget, cell
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "rnn_tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "rnn_relu": ("RNN", (0,), {"activations": ["Relu"]}),
}


def _recurrent(writer: _Writer) -> Any:
    """Write recurrent layers: MXNet's function knows neither several layers in both directions nor NTC."""
    read = writer.attrs.get
    for name in ("projection_size", "use_sequence_length", "lstm_state_clip_min"):
        if read(name, "None") not in ("None", "False", "0"):
            raise NotImplementedError(f"expected {name} to be unset")
    op, order, attrs = _RECURRENT[writer.attrs["mode"]]
    layers, hidden = int(writer.attrs["num_layers"]), int(writer.attrs["state_size"])
    directions = 2 if is_set(writer.attrs, "bidirectional") else 1
    size = writer.shape()[2]
    parts = _parameters(writer, layers, directions, size, hidden, order)
    # Empty names stand for zeros, which have the size of a batch.
    states = ["" if entry.node.op in ("_zeros", "_npi_zeros") else name
              for entry, name in zip(writer.node.inputs[2:], writer.inputs[2:])]
    kind = {"direction": "bidirectional" if directions == 2 else "forward", "hidden_size": hidden,
            **{name: value * directions if name == "activations" else value for name, value in attrs.items()}}
    data, last = writer.inputs[0], []
    for layer in range(layers):
        begin = [writer.part(each, 0, layer * directions, (layer + 1) * directions) if each else "" for each in states]
        found = writer.add(op, data, *parts[layer], "", *begin, outputs=3 if op == "LSTM" else 2, **kind)
        last.append(found[1:])
        swapped = writer.add("Transpose", found[0], perm=[0, 2, 1, 3])
        data = writer.add("Reshape", swapped, writer.constant([0, 0, directions * hidden]),
                          to=writer.name if layer == layers - 1 else None)
    if is_set(writer.attrs, "state_outputs"):
        for number, each in enumerate(zip(*last), 1):
            writer.add("Concat", *each, to=f"{writer.name}{number}", axis=0)
        return (writer.dtype,) * (1 + len(last[0]))
    return (writer.dtype,)


def _parameters(writer: _Writer, layers: int, directions: int, size: int, hidden: int,
                order: tuple[int, ...]) -> list[list[str]]:
    """Add both weights and the biases of each layer, cut out of the vector that MXNet holds them in."""
    gates, place = len(order), 0

    def taken(*shape: int) -> str:
        """Add the next values of the vector, with the gates in ONNX's order."""
        nonlocal place
        count = hidden * int(np.prod(shape))
        begins = [place + gate * count for gate in order]
        place += gates * count
        rows = [writer.part(writer.inputs[1], 0, begin, begin + count) for begin in begins]
        return writer.add("Reshape", joined(rows, 0), writer.constant((1, gates * hidden, *shape)))

    def joined(names: Sequence[str], axis: int) -> str:
        return writer.add("Concat", *names, axis=axis)

    weights = []
    for layer in range(layers):
        pairs = [(taken(directions * hidden if layer else size), taken(hidden)) for _ in range(directions)]
        weights.append([joined(each, 0) for each in zip(*pairs)])
    for each in weights:
        each.append(joined([joined([taken(), taken()], 1) for _ in range(directions)], 0))
    return weights


# Each adds an operator's nodes, and returns the types of its outputs, or None for the type of its first input.
_OURS: Mapping[str, Callable[[_Writer], Any]] = {
    "null": _weight, "_contrib_AdaptiveAvgPooling2D": _adaptive_average, "_contrib_box_nms": _box_nms,
    "RNN": _recurrent, "Reshape": _reshape,
}
