"""Fold BatchNorm into the convolution or dense layer before it: exact in inference, up to rounding.

With ``s = gamma / sqrt(var + eps)`` the normalised output is ``s * (w x + b - mean) + beta``, a layer of the same kind
with weight ``s w`` and bias ``s (b - mean) + beta`` (https://arxiv.org/abs/1712.05877, section 3.2).
"""
from __future__ import annotations

from typing import Collection

import numpy as np

from ..graph import VARIABLE, Entry, Graph, Node, unique_name
from ..shape_rules import CHANNELS_LAST, is_set
from .context import REGION_ATTRIBUTE
from .readers import Readers, redirect
from .weights import Weights

__all__ = ["run"]

# The axis of the weight that counts the layer's output channels.
_OUTPUT_AXIS = {"Convolution": 0, "FullyConnected": 0, "Deconvolution": 1}
_DEFAULT_EPS = 1e-3  # of MXNet's operator


def run(graph: Graph, weights: Weights, excluded: Collection[str] = ()) -> int:
    """Fold every BatchNorm that is the only reader of a layer with trained parameters.

    Parameters
    ----------
    graph : Graph
        Edited in place.
    weights : Weights
        The trained parameters, changed with it.
    excluded : collection of str
        Nodes to keep in FP32: such a BatchNorm is folded into a layer that is excluded as well only.

    Returns
    -------
    int
        How many were folded.
    """
    readers = Readers(graph)
    names = {node.name for node in graph.nodes()}
    moved: dict[tuple[int, int], Entry] = {}
    for norm in graph.operators():
        if norm.op == "BatchNorm" and _is_foldable(norm, readers, weights):
            layer = norm.inputs[0].node
            if _precision(norm, excluded) != _precision(layer, excluded):
                continue
            _fold(norm, layer, readers, weights, names)
            moved[Entry(norm).key] = Entry(layer)
            if readers.is_head(Entry(norm)):
                layer.name = norm.name  # users find outputs by their names
    redirect(graph, moved)
    return len(moved)


def _is_foldable(norm: Node, readers: Readers, weights: Weights) -> bool:
    source = norm.inputs[0]
    layer = source.node
    if layer.op not in _OUTPUT_AXIS or readers.only(source) is not norm or source.output:
        return False
    if layer.op == "Deconvolution" and int(layer.attrs.get("num_group", 1)) > 1:
        return False
    if any(readers.of(Entry(norm, output)) or readers.is_head(Entry(norm, output)) for output in (1, 2)):
        return False
    trained = (*norm.inputs[1:], *layer.inputs[1:])
    return all(entry.node.is_variable and entry.node.name in weights for entry in trained) and _axis_fits(norm, layer)


def _precision(node: Node, excluded: Collection[str]) -> tuple[bool, str | None]:
    return node.name in excluded, node.attrs.get(REGION_ATTRIBUTE)


def _axis_fits(norm: Node, layer: Node) -> bool:
    """Whether BatchNorm normalises over the layer's output channels."""
    axis = int(norm.attrs.get("axis", 1))
    if layer.op == "FullyConnected":
        return axis == (1 if is_set(layer.attrs, "flatten", default=True) else -1)
    last = str(layer.attrs.get("layout")) in CHANNELS_LAST
    dimensions = 2 + layer.attrs["kernel"].count(",") + (not layer.attrs["kernel"].rstrip(") ").endswith(","))
    return axis in ((dimensions - 1, -1) if last else (1,))


def _fold(norm: Node, layer: Node, readers: Readers, weights: Weights, names: set[str]) -> None:
    gamma, beta, mean, variance = (weights.read(entry.node.name).astype(np.float64) for entry in norm.inputs[1:])
    if is_set(norm.attrs, "fix_gamma", default=True):
        gamma = np.ones_like(gamma)
    scale = gamma / np.sqrt(variance + float(norm.attrs.get("eps", _DEFAULT_EPS)))
    weight = weights.read(layer.inputs[1].node.name).astype(np.float64)
    axis = _OUTPUT_AXIS[layer.op]
    along = scale.reshape([-1 if position == axis else 1 for position in range(weight.ndim)])
    bias = weights.read(layer.inputs[2].node.name).astype(np.float64) if len(layer.inputs) > 2 else 0.0
    layer.inputs = [layer.inputs[0],
                    _written(layer.inputs[1], weight * along, readers, weights, names),
                    _bias(layer, (bias - mean) * scale + beta, readers, weights, names)]
    layer.attrs = {**layer.attrs, "no_bias": "False"}


def _bias(layer: Node, values: np.ndarray, readers: Readers, weights: Weights, names: set[str]) -> Entry:
    if len(layer.inputs) > 2:
        return _written(layer.inputs[2], values, readers, weights, names)
    return _added(f"{layer.inputs[1].node.name.rsplit('weight', 1)[0]}bias", values, weights, names)


def _written(entry: Entry, values: np.ndarray, readers: Readers, weights: Weights, names: set[str]) -> Entry:
    """Give a parameter other values; one that others read as well is left alone and replaced by a new one."""
    if len(readers.of(entry)) > 1:
        return _added(f"{entry.node.name}_folded", values, weights, names)
    weights.write(entry.node.name, values.astype(np.float32))
    return entry


def _added(name: str, values: np.ndarray, weights: Weights, names: set[str]) -> Entry:
    name = unique_name(name, names)
    weights.write(name, values.astype(np.float32))
    return Entry(Node(VARIABLE, name))
