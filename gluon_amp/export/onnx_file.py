"""Write a trained network as an ONNX file, in FP32 or with the decisions of the float16 table: casts and weights."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from .. import passes
from .._mxnet import mx2onnx
from .._mxnet.arrays import NDArrayWeights, cast_arrays
from .._mxnet.symbols import dtype_name, first_line, from_graph, infer_shapes, to_graph
from ..base import checks
from ..base.files import replacing
from ..convert import ConversionOptions, analyse_network, conversion_of, flat, traced_network, uniquely_named
from ..convert.convert import Network
from ..errors import DTypeError, GraphError
from ..graph import CAST, MULTICAST, Entry, Graph, operator, redirect
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32, normalize
from ..passes import Context
from . import check

MAX_ERRORS = {FLOAT32: 1e-4, FLOAT16: 1e-2}  # of outputs, relative
_FLOAT16_MAX = float(np.finfo(np.float16).max)
_IN_FLOAT16 = "tensor(float16)"


@dataclass(frozen=True)
class OnnxExport:
    """The record of an export."""

    path: str
    target_dtype: str  # 'float16' or 'float32'
    opset: int  # version of ONNX's operators
    operators: int  # nodes of the graph, casts included
    low_precision: int  # MXNet's operators that run in float16
    casts: int  # between float16 and FP32
    # relative errors against MXNet in FP32, of outputs and of the tensors that decisions are made upon
    errors: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)  # types by name
    outputs: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """Return one line of text."""
        low = f"{self.low_precision} operators in low precision, " if self.target_dtype == FLOAT16 else ""
        casts = f" with {self.casts} casts" if self.casts else ""
        return (f"{self.path}: ONNX opset {self.opset}, {self.target_dtype}: {low}{self.operators} nodes{casts}; "
                f"{max(self.errors.values(), default=0.0):.2g} off MXNet in FP32")


def export_onnx(block: HybridBlock, path: str | os.PathLike, data_example: Any, target_dtype: object = FLOAT16, *,
                exclude: Any = None, fp32_ops: Sequence[str] | None = None,
                dynamic_batch: bool = False, max_error: float | None = None) -> OnnxExport:
    """Write a trained FP32 network as an ONNX file, for GPUs and runtimes that MXNet does not know.

    Operators that the float16 table lowers are in float16, with casts around them, as on a GPU under :func:`init`.
    Before the file is written onnxruntime runs it on the CPU beside MXNet in FP32. Needs ``onnx`` and ``onnxruntime``.

    Parameters
    ----------
    block : HybridBlock
        With parameters that have values. It is left as it is.
    path : path
        The file, in a directory that exists.
    data_example : NDArray or sequence of NDArray
        Arguments of a call. The file takes arrays of these shapes and types, and is checked with them: give real data.
    target_dtype : {'float16', 'float32'}
        The type of what is safe in it.
    exclude, fp32_ops
        What stays in FP32, as in :class:`ConversionOptions`.
    dynamic_batch : bool
        Whether a batch may have any size; the file is checked with another one, too.
    max_error : float, optional
        The most that outputs may differ from MXNet in FP32: 1e-4 in float32, 1e-2 in float16 by default.

    Returns
    -------
    OnnxExport
        What was written, and its errors. Where the result differs too much no file is written.

    Examples
    --------
    ::

        record = amp.export_onnx(net, 'net.onnx', images)
        print(record.summary())
        session = onnxruntime.InferenceSession('net.onnx')
        scores, = session.run(None, {'data': images.asnumpy()})
    """
    checks.instance("block", block, HybridBlock, "a HybridBlock")
    target = normalize(target_dtype, or_float32=True)
    if target == BFLOAT16:
        raise DTypeError("expected 'float16' or 'float32', received 'bfloat16', which few runtimes of ONNX know")
    options = ConversionOptions(FLOAT16, fp32_ops=fp32_ops, exclude=exclude, optimize="none", device=mx.gpu(0),
                                data_example=data_example)
    for array in flat(data_example) or [data_example]:
        checks.instance("data_example", array, mx.nd.NDArray, "an NDArray, or several in a list")
    onnx = check.package("onnx")
    allowed = MAX_ERRORS[target] if max_error is None else checks.above_zero("max_error", max_error)
    network = traced_network(block, options)
    symbol, graph, arrays, data = _in_fp32(network)
    made = mx2onnx.export(symbol, graph, arrays, data)
    comparison = check.Comparison(symbol, graph, made, arrays)
    model, checked, casts, low = made.model, comparison.model, 0, set()
    if target == FLOAT16:
        planned = graph.copy()
        passes.run(planned, Context.of(planned, network.policy))
        low = {node.name for node in planned.operators() if Entry(node).dtype == FLOAT16}
        lowered = {output: name in low for output, name in made.origin.items()}
        casts = Float16(model, lowered).casts
        Float16(checked, lowered)
    trials = [data]
    if dynamic_batch:
        trials.append(_another_batch(symbol, graph, data))
        for each in (model, checked):
            _free_batch(each, symbol, arrays, *trials)
    onnx.checker.check_model(model, full_check=True)
    if target == FLOAT16:
        check.round_behind_nodes(checked)
    found = [comparison.errors(model, checked, each, target == FLOAT16) for each in trials]
    errors = {name: max(each.get(name, 0.0) for each in found) for name in {**found[0], **found[-1]}}
    worst = max(errors, key=errors.__getitem__, default="")
    if errors and not errors[worst] <= allowed:
        raise GraphError(f"{worst!r} of the exported network is {errors[worst]:.2g} off MXNet in FP32, where "
                         f"max_error={allowed:g} is allowed: no file was written. Give data as the network sees it, "
                         "keep operators in FP32 by exclude= or fp32_ops=, or allow more")
    with replacing(path) as (temporary,):
        onnx.save(model, temporary)
    types = [{each.name: onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type).name for each in values}
             for values in (model.graph.input, model.graph.output)]
    return OnnxExport(os.fspath(path), target, mx2onnx.OPSET, len(model.graph.node), len(low), casts, errors, *types)


def _in_fp32(network: Network) -> tuple[mx.sym.Symbol, Graph, dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Return a network in FP32 on the CPU, whose operators have names of their own, and its analysed graph."""
    graph = to_graph(network.symbol)
    record = conversion_of(graph)
    if record is not None:
        raise GraphError(f"the network is already converted to {record.types}: export the FP32 network that it was "
                         "made from")
    redirect(graph, {Entry(node, output).key: entry for node in graph.operators() if node.op in (CAST, MULTICAST)
                     for output, entry in enumerate(node.inputs)})
    heads = graph.heads
    graph.heads = [Entry(operator("_copy", graph.new_name(head.node.name), [head], head))
                   if head.node.is_variable or head.key in [each.key for each in heads[:position]] else head
                   for position, head in enumerate(heads)]  # in ONNX an output is no input, and each is another
    symbol = uniquely_named(from_graph(graph, network.symbol))
    graph = to_graph(symbol)
    data, arrays = ({name: cast_arrays(array.as_nd_ndarray().as_in_context(mx.cpu()), FLOAT32)
                     for name, array in each.items()} for each in (network.example, network.arrays))
    weights = NDArrayWeights(arrays)
    analyse_network(symbol, graph, weights, {name: dtype_name(array.dtype) or "" for name, array in data.items()},
                    {name: array.shape for name, array in data.items()})
    return from_graph(graph, symbol), graph, weights.arrays, data


def _another_batch(symbol: mx.sym.Symbol, graph: Graph,
                   data: Mapping[str, mx.nd.NDArray]) -> dict[str, mx.nd.NDArray]:
    """Return data with twice as many samples; of the states of recurrent layers MXNet tells the axis of samples."""
    states = {entry.node.name for node in graph.operators() if node.op == "RNN" for entry in node.inputs[2:]}
    shapes = {name: (2 * array.shape[0], *array.shape[1:]) for name, array in data.items() if name not in states}
    try:
        inferred = dict(zip(symbol.list_arguments(), symbol.infer_shape_partial(**shapes)[0]))
    except mx.MXNetError as error:
        raise GraphError(f"the network cannot run on another size of batch: {first_line(error)}") from error
    shapes.update((name, inferred[name]) for name in states.intersection(data))
    return {name: mx.nd.tile(array, [new // max(old, 1) for new, old in zip(shapes[name], array.shape)])
            for name, array in data.items()}


def _free_batch(model: Any, symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray],
                *trials: Mapping[str, mx.nd.NDArray]) -> None:
    """Let the dimensions of inputs and outputs that differ between two batches have any size."""
    known = [{name: array.shape for name, array in {**arrays, **data}.items()} for data in trials]
    outputs = [infer_shapes(symbol, shapes) for shapes in known]
    pairs = [*((trials[0][name].shape, trials[1][name].shape) for name in trials[0]), *zip(*outputs)]
    for each, (one, other) in zip([*model.graph.input[:len(trials[0])], *model.graph.output], pairs):
        for axis, dimension in enumerate(each.type.tensor_type.shape.dim):
            if one is None or other is None or one[axis] != other[axis]:
                dimension.Clear()
                dimension.dim_param = "batch" if axis == 0 or one is not None else ""
    del model.graph.value_info[:]


class Float16:
    """Puts casts to and from float16 into an FP32 model, from its inputs to its outputs."""

    def __init__(self, model: Any, lowered: Mapping[str, bool]) -> None:
        self.onnx = check.package("onnx")
        self.kinds = self.onnx.TensorProto
        self.graph = model.graph
        self.lowered = lowered  # by the first output of each node: whether that runs in float16
        self.types = check.tensor_types(model, strict_mode=True)
        self.weights = {each.name: each for each in model.graph.initializer}
        self.version = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        self.made: dict[tuple[str, int], str] = {}  # casts, and weights in another type
        self.nodes: list[Any] = []
        self.casts = 0  # how many there are
        outputs = {each.name: each.type.tensor_type.elem_type for each in self.graph.output}
        for node in list(self.graph.node):
            self._lower(node)
            self.nodes.append(node)
        for name, kind in outputs.items():
            if self.types.get(name) != kind:
                self._cast_output(name, kind)
        del self.graph.node[:], self.graph.value_info[:]
        self.graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in node.input}.union(outputs)
        kept = [each for each in self.weights.values() if each.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)

    def _lower(self, node: Any) -> None:
        """Give a node the types of its inputs and outputs, and casts before it."""
        kinds, schema = self.kinds, self.onnx.defs.get_schema(node.op_type, self.version, node.domain)
        known = {each.type_param_str: _IN_FLOAT16 in each.allowed_type_strs for each in schema.type_constraints}
        read, given = _variables(schema.inputs, node.input), _variables(schema.outputs, node.output)
        floats = {variable for name, variable in zip(node.output, given) if self.types.get(name) == kinds.FLOAT}
        # Nodes that are told their type by an attribute are not touched.
        may = self.lowered.get(node.output[0]) and node.op_type not in ("Cast", "Constant", "ConstantOfShape")
        low = {variable for variable in floats if may and known.get(variable)}
        if not all(self._fits(name) for name, variable in zip(node.input, read) if variable in low):
            low = set()
        # What gives no values, as Shape and Greater, reads float16 where it is given nothing else.
        for variable in {variable for variable in read if known.get(variable)} - floats:
            types = {self.types.get(name) for name, each in zip(node.input, read) if each == variable}
            low.update([variable] if types == {kinds.FLOAT16} else [])
        for position, (name, variable) in enumerate(zip(node.input, read)):
            kind = kinds.FLOAT16 if variable in low else kinds.FLOAT
            if self.types.get(name) in (kinds.FLOAT, kinds.FLOAT16) and self.types[name] != kind:
                node.input[position] = self._in_type(name, kind)
        for name, variable in zip(node.output, given):
            if self.types.get(name) == kinds.FLOAT and variable in low:
                self.types[name] = kinds.FLOAT16

    def _fits(self, name: str) -> bool:
        """Tell whether float16 can hold a constant: those of masks are large. What is computed is not known here."""
        weight = self.weights.get(name)
        if weight is None or weight.data_type != self.kinds.FLOAT:
            return True
        values = np.abs(self.onnx.numpy_helper.to_array(weight))
        return bool((values[np.isfinite(values)] <= _FLOAT16_MAX).all())

    def _in_type(self, name: str, kind: int) -> str:
        """Return the name of a tensor in another type."""
        if (name, kind) not in self.made:
            to = "fp16" if kind == self.kinds.FLOAT16 else "fp32"
            self.made[name, kind] = made = f"{name}_{to}"
            if name in self.weights:
                values = self.onnx.numpy_helper.to_array(self.weights[name]).astype(np.float16)
                self.weights[made] = self.onnx.numpy_helper.from_array(values, made)
            else:
                self.nodes.append(self.onnx.helper.make_node("Cast", [name], [made], name=f"{made}_cast", to=kind))
                self.casts += 1
            self.types[made] = kind
        return self.made[name, kind]

    def _cast_output(self, name: str, kind: int) -> None:
        """Let an output keep its name in another type than its producer gives."""
        inner = f"{name}_inner"
        for node in self.nodes:
            for names in (node.input, node.output):
                for position, each in enumerate(names):
                    if each == name:
                        names[position] = inner
        self.nodes.append(self.onnx.helper.make_node("Cast", [inner], [name], name=f"{name}_cast", to=kind))
        self.casts += 1


def _variables(formal: Any, names: Any) -> list[str]:
    """Return the type of each input or output by the schema, whose last one may stand for several."""
    known = [formal[min(position, len(formal) - 1)] for position in range(len(names))]
    return [each.type_str if each.is_homogeneous else "" for each in known]
