"""Follow the channels of tensors through a graph: layer by layer, parameters of another network may look right."""
from __future__ import annotations

from collections import defaultdict
from typing import Iterator, Mapping, NamedTuple, Sequence

from ..graph import Entry, Graph, Node
from ..graph.attrs import integer, is_channels_last, is_set

Shapes = Mapping[str, Sequence[int]]

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


def misfits(graph: Graph, shapes: Shapes) -> dict[str, list[tuple[str, Sequence[int], str]]]:
    """Return, by the name of a layer, its parameters that do not fit the channels of its data."""
    known: dict[tuple[int, int], _Channels] = {}
    wrong_of: dict[str, list[tuple[str, Sequence[int], str]]] = defaultdict(list)
    for node in graph.operators():
        data = known.get(node.inputs[0].key) if node.inputs else None
        if data is not None:
            wrong_of[node.name].extend(_of_layer(node, data, shapes))
        made = _result(node, [known.get(entry.key) for entry in node.inputs])
        if made is not None:
            known[Entry(node).key] = made
    return {name: wrong for name, wrong in wrong_of.items() if wrong}


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


def _of_layer(node: Node, data: _Channels, shapes: Shapes) -> Iterator[tuple[str, Sequence[int], str]]:
    """Yield the parameters of a layer that do not fit its data."""
    wanted = _wanted(node, data)
    for position, (axis, count) in wanted.items():
        variable = node.inputs[position].node if position < len(node.inputs) else None
        shape = shapes.get(variable.name) if variable is not None and variable.is_variable else None
        if variable is None or shape is None or axis >= len(shape) or shape[axis] == count:
            continue
        yield variable.name, shape, f"{count} along axis {axis}, as its data has {data.number} channels"


def _wanted(node: Node, data: _Channels) -> dict[int, tuple[int, int]]:
    """Return, by the position of a layer's parameters, the size that an axis of each must have."""
    if node.op == "Convolution" and data.is_map and not is_channels_last(node.attrs):
        return {1: (1, data.number // integer(node.attrs, "num_group", 1))}
    if node.op == "Deconvolution" and data.is_map and not is_channels_last(node.attrs):
        return {1: (0, data.number)}
    if node.op == "BatchNorm" and data.is_map and node.attrs.get("axis", "1") == "1":
        return dict.fromkeys(range(1, 5), (0, data.number))
    flat = is_set(node.attrs, "flatten", default=True)
    if node.op == "FullyConnected" and (data.places == 1 if flat else not data.is_map):
        return {1: (1, data.number)}
    return {}
