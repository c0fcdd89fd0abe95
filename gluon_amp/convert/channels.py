"""Compare parameters with their layers, and with the channels of their data, which are followed through the graph."""
from __future__ import annotations

from typing import Iterator, Mapping, NamedTuple, Sequence

from ..graph import Entry, Graph, Node
from ..graph.attrs import integer, integers, is_channels_last, is_set

Shape = Sequence[int]
Shapes = Mapping[str, Shape]

# What leaves the channels of its first input alone.
_PASSING = {"Activation", "BatchNorm", "BlockGrad", "Cast", "Dropout", "GroupNorm", "InstanceNorm", "LRN", "LayerNorm",
            "LeakyReLU", "Pooling", "_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D", "_copy",
            "_div_scalar", "_minus_scalar", "_mul_scalar", "_npx_relu", "_npx_sigmoid", "_plus_scalar", "abs",
            "amp_cast", "clip", "exp", "log_softmax", "relu", "sigmoid", "softmax", "tanh"}
_SUMS = {"elemwise_add", "elemwise_sub", "elemwise_mul", "_grad_add"}


class _Channels(NamedTuple):
    """How many channels a tensor has, and where: on axis 1 of a map, or on the last axis."""

    number: int
    is_map: bool
    places: int | None = None  # of the map, where that is known to be one


def misfits(graph: Graph, shapes: Shapes) -> Iterator[tuple[Node, str, Shape, str]]:
    """Yield the parameters that do not fit their layer or its data: the layer, name and shape, and what would fit."""
    known: dict[tuple[int, int], _Channels] = {}
    for node in graph.operators():
        inputs = [known.get(entry.key) for entry in node.inputs]
        for entry, wanted in zip(node.inputs[1:], _wanted(node, next(iter(inputs), None))):
            shape = shapes.get(entry.node.name) if entry.node.is_variable else None
            if shape is not None and not _fits(shape, wanted):
                yield node, entry.node.name, shape, str(wanted).replace("None", "any")
        made = _result(node, inputs)
        if made is not None:
            known[Entry(node).key] = made


def _fits(actual: Shape, wanted: Sequence[int | None]) -> bool:
    return len(actual) == len(wanted) and all(size is None or size == other for other, size in zip(actual, wanted))


def _result(node: Node, inputs: Sequence[_Channels | None]) -> _Channels | None:
    """Return the channels of a node's first output; None where they cannot be told."""
    first = inputs[0] if inputs else None
    if node.op in ("Convolution", "Deconvolution") and not is_channels_last(node.attrs):
        return _Channels(integer(node.attrs, "num_filter", 0), True)
    if node.op == "FullyConnected":
        flat = is_set(node.attrs, "flatten", default=True)
        return _Channels(integer(node.attrs, "num_hidden", 0), False, 1 if flat else None)
    if node.op == "Pooling" and first is not None:
        return first._replace(places=1) if is_set(node.attrs, "global_pool") else first._replace(places=None)
    if node.op == "Flatten" and first is not None:
        return _Channels(first.number, False, 1) if first.places == 1 else None
    if node.op in _PASSING:
        return first
    if node.op in _SUMS:
        return first if all(other == first for other in inputs) else None
    if node.op == "Concat" and integer(node.attrs, "dim", 1) == 1 and all(each and each.is_map for each in inputs):
        return _Channels(sum(each.number for each in inputs if each), True)
    return None


def _wanted(node: Node, data: _Channels | None) -> list[tuple[int | None, ...]]:
    """Return the shapes that a layer's parameters must have, in the order of its inputs; None for any size."""
    attrs = node.attrs
    channels = data.number if data is not None and data.is_map and not is_channels_last(attrs) else None
    group, filters, kernel = integer(attrs, "num_group", 1), integer(attrs, "num_filter", 0), integers(attrs, "kernel")
    if node.op == "Convolution":
        read = None if channels is None else channels // group
        return [(filters, *kernel, read) if is_channels_last(attrs) else (filters, read, *kernel), (filters,)]
    if node.op == "Deconvolution":
        written = filters // group
        return [(channels, *kernel, written) if is_channels_last(attrs) else (channels, written, *kernel), (filters,)]
    if node.op == "BatchNorm" and attrs.get("axis", "1") == "1":
        return [(channels,)] * 4
    if node.op == "FullyConnected":
        hidden, flat = integer(attrs, "num_hidden", 0), is_set(attrs, "flatten", default=True)
        width = None if data is None or (data.places != 1 if flat else data.is_map) else data.number
        return [(hidden, width), (hidden,)]
    if node.op == "Embedding":
        return [(integer(attrs, "input_dim", 0), integer(attrs, "output_dim", 0))]
    return []
