"""Symbols and their parameters: in files, and whether they belong together."""
from __future__ import annotations

import os
from numbers import Integral
from typing import Any, Collection, Iterable, Iterator, Mapping, NamedTuple, Sequence

import mxnet as mx

from .._mxnet.symbols import first_line, load_symbol, to_graph
from ..errors import GraphError, closest, expected
from ..files import replacing
from ..graph import Entry, Graph, Node
from ..graph.attrs import integer, integers, is_channels_last, is_set

Arrays = Mapping[str, mx.nd.NDArray]
Shape = Sequence[int]

# Which inputs of an operator are parameters, whatever their names: only data_names makes data of them.
_PARAMETERS = {"Convolution": (1, 2), "Deconvolution": (1, 2), "FullyConnected": (1, 2), "BatchNorm": (1, 2, 3, 4),
               "LayerNorm": (1, 2), "GroupNorm": (1, 2), "InstanceNorm": (1, 2), "Embedding": (1,), "RNN": (1,)}
# Operators that leave the channels of their first input alone.
_PASSING = {"Activation", "BatchNorm", "BlockGrad", "Cast", "Dropout", "GroupNorm", "InstanceNorm", "LRN", "LayerNorm",
            "LeakyReLU", "Pooling", "_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D", "_copy",
            "_div_scalar", "_minus_scalar", "_mul_scalar", "_npx_relu", "_npx_sigmoid", "_plus_scalar", "abs",
            "amp_cast", "clip", "exp", "log_softmax", "relu", "sigmoid", "softmax", "tanh"}
_SUMS = {"elemwise_add", "elemwise_sub", "elemwise_mul", "_grad_add"}


def save_model(prefix: str | os.PathLike, epoch: int, symbol: mx.sym.Symbol, arg_params: Arrays,
               aux_params: Arrays) -> tuple[str, str]:
    """Write ``prefix-symbol.json`` and ``prefix-NNNN.params``, casts included; both or neither."""
    files = f"{os.fspath(prefix)}-symbol.json", f"{os.fspath(prefix)}-{epoch:04d}.params"
    arrays = {f"{kind}:{name}": array.as_nd_ndarray() for kind, each in (("arg", arg_params), ("aux", aux_params))
              for name, array in each.items()}
    with replacing(*files) as (symbol_file, params_file):
        symbol.save(symbol_file, remove_amp_cast=False)
        mx.nd.save(params_file, arrays)
    return files


def load_model(symbol_file: str | os.PathLike, params_file: str | os.PathLike
               ) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Read a symbol and its parameters; raise GraphError, which names the file, where it holds none."""
    with open(symbol_file, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        symbol = load_symbol(text)
    except GraphError as error:
        raise GraphError(f"{os.fspath(symbol_file)}: {error}") from error
    with open(params_file, "rb"):
        pass  # MXNet's own error for a file that is not there does not say so
    try:
        loaded = mx.nd.load(os.fspath(params_file))
    except mx.MXNetError as error:
        raise GraphError(f"{os.fspath(params_file)}: expected parameters as MXNet saves them, found something else "
                         f"({first_line(error)})") from error
    if not isinstance(loaded, dict):
        raise GraphError(f"{os.fspath(params_file)}: expected parameters with names, as export() and save_checkpoint() "
                         "write them, found arrays without")
    return (symbol, *split(symbol, {key.split(":", 1)[1] if key.startswith(("arg:", "aux:")) else key: array
                                    for key, array in loaded.items()}))


def split(symbol: mx.sym.Symbol, arrays: Arrays) -> tuple[dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Tell a symbol's parameters from its auxiliary states."""
    auxiliary = set(symbol.list_auxiliary_states())
    return ({name: array for name, array in arrays.items() if name not in auxiliary},
            {name: array for name, array in arrays.items() if name in auxiliary})


def check_names(names: Iterable[str], known: Collection[str], argument: str) -> None:
    """Raise GraphError unless a symbol has inputs of these names."""
    if isinstance(names, str):
        raise TypeError(expected("a list of names", argument, names))
    for name in names:
        if name not in known:
            raise GraphError(f"{argument}: the symbol has no input {name!r}.{closest(name, known)}")


def shapes_in(example: Mapping[str, Any], argument: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name; a shape may stand in the place of an array."""
    shapes = {name: getattr(value, "shape", value) for name, value in example.items()}
    for name, shape in shapes.items():
        if not isinstance(shape, (tuple, list)) or not all(isinstance(size, Integral) for size in shape):
            raise TypeError(expected("an NDArray or a shape", f"{argument}[{name!r}]", example[name]))
    return {name: tuple(shape) for name, shape in shapes.items()}


def is_label(name: str) -> bool:
    """Tell whether an input is one of labels, by the name that MXNet's losses and modules give them."""
    return name.endswith("_label")


def check_parameters(symbol: mx.sym.Symbol, arrays: Arrays, data_names: Sequence[str] | None) -> None:
    """Raise GraphError unless the parameters are those of the symbol."""
    graph = to_graph(symbol)
    read = {node.inputs[position].node.name for node in graph.operators() for position in _PARAMETERS.get(node.op, ())
            if position < len(node.inputs) and node.inputs[position].node.is_variable}
    needed = ({*read, *symbol.list_auxiliary_states()} if data_names is None else
              {name for name in symbol.list_inputs() if name not in data_names and not is_label(name)})
    missing = [name for name in symbol.list_inputs() if name in needed.difference(arrays)]
    if missing:
        data = f" (now {', '.join(data_names)})" if data_names else ""
        raise GraphError(f"the parameters lack {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which the "
                         f"symbol reads: they do not belong together, or name these in data_names{data}."
                         f"{closest(missing[0], arrays)}")
    for node, name, shape, wanted in misfits(graph, {name: array.shape for name, array in arrays.items()}):
        raise GraphError(f"the parameter {name!r} has shape {tuple(shape)}, the operator {node.name!r} ({node.op}) "
                         f"needs {wanted}: the symbol and the parameters do not belong together")


class _Channels(NamedTuple):
    """How many channels a tensor has, and where: on axis 1 of a map, or on the last axis."""

    number: int
    is_map: bool
    places: int | None = None  # of the map, where that is known to be one


def misfits(graph: Graph, shapes: Mapping[str, Shape]) -> Iterator[tuple[Node, str, Shape, str]]:
    """Yield the parameters that do not fit their layer or its data: the layer, name and shape, and what would fit.

    The channels of data are followed through the graph.
    """
    known: dict[tuple[int, int], _Channels] = {}
    for node in graph.operators():
        inputs = [known.get(entry.key) for entry in node.inputs]
        for entry, wanted in zip(node.inputs[1:], _wanted(node, next(iter(inputs), None))):
            shape = shapes.get(entry.node.name) if entry.node.is_variable else None
            if shape is not None and not (len(shape) == len(wanted)
                                          and all(size in (None, own) for own, size in zip(shape, wanted))):
                yield node, entry.node.name, shape, str(wanted).replace("None", "any")
        made = _result(node, inputs)
        if made is not None:
            known[Entry(node).key] = made


def _result(node: Node, inputs: Sequence[_Channels | None]) -> _Channels | None:
    """Return the channels of a node's first output; None where they cannot be told."""
    first = inputs[0] if inputs else None
    if node.op in ("Convolution", "Deconvolution") and not is_channels_last(node.attrs):
        return _Channels(integer(node.attrs, "num_filter", 0), True)
    if node.op == "FullyConnected":
        flat = is_set(node.attrs, "flatten", default=True)
        return _Channels(integer(node.attrs, "num_hidden", 0), False, 1 if flat else None)
    if node.op == "Pooling" and first is not None:
        return first._replace(places=1 if is_set(node.attrs, "global_pool") else None)
    if node.op == "Flatten" and first is not None:
        return _Channels(first.number, False, 1) if first.places == 1 else None
    if node.op in _PASSING or (node.op in _SUMS and all(other == first for other in inputs)):
        return first
    if node.op == "Concat" and integer(node.attrs, "dim", 1) == 1 and all(each and each.is_map for each in inputs):
        return _Channels(sum(each.number for each in inputs if each), True)
    return None


def _wanted(node: Node, data: _Channels | None) -> list[tuple[int | None, ...]]:
    """Return the shapes that a layer's parameters must have, in the order of its inputs; None for any size."""
    attrs = node.attrs
    channels = data.number if data is not None and data.is_map and not is_channels_last(attrs) else None
    group, filters, kernel = integer(attrs, "num_group", 1), integer(attrs, "num_filter", 0), integers(attrs, "kernel")
    if node.op in ("Convolution", "Deconvolution"):
        is_plain = node.op == "Convolution"
        first = filters if is_plain else channels
        second = (None if channels is None else channels // group) if is_plain else filters // group
        return [(first, *kernel, second) if is_channels_last(attrs) else (first, second, *kernel), (filters,)]
    if node.op == "BatchNorm" and attrs.get("axis", "1") == "1":
        return [(channels,)] * 4
    if node.op == "FullyConnected":
        hidden, flat = integer(attrs, "num_hidden", 0), is_set(attrs, "flatten", default=True)
        width = None if data is None or (data.places != 1 if flat else data.is_map) else data.number
        return [(hidden, width), (hidden,)]
    if node.op == "Embedding":
        return [(integer(attrs, "input_dim", 0), integer(attrs, "output_dim", 0))]
    return []
