"""Fold BatchNorm into the convolution or dense layer before it: exact in inference, up to rounding.

With ``s = gamma / sqrt(var + eps)`` the normalised output is ``s * (w x + b - mean) + beta``, a layer of the same kind
with weight ``s w`` and bias ``s (b - mean) + beta`` (https://arxiv.org/abs/1712.05877, section 3.2).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import FLOAT32, FLOAT64
from ..graph import VARIABLE, Entry, Graph, Node, Readers, redirect
from ..graph.attrs import REGION, integer, integers, is_channels_last, is_set
from .context import Context, Weights

_LAYERS = ("Convolution", "FullyConnected", "Deconvolution")
_DEFAULT_EPS = 1e-3  # of MXNet's operator


def run(graph: Graph, context: Context) -> int:
    """Fold every BatchNorm that is the only reader of a layer with trained parameters; return how many."""
    # An excluded BatchNorm is folded only into a layer that is excluded as well.
    weights = context.weights
    if weights is None:
        return 0
    readers = Readers(graph)
    folding = _Folding(graph, readers, weights)
    moved: dict[tuple[int, int], Entry] = {}
    for norm in graph.operators():
        if norm.op == "BatchNorm" and _is_foldable(norm, readers, weights):
            layer = norm.inputs[0].node
            if _settings(norm, context) != _settings(layer, context):
                continue
            folding.fold(norm, layer)
            moved[Entry(norm).key] = Entry(layer)
            if readers.is_head(Entry(norm)):
                layer.name = norm.name  # users find outputs by their names
    redirect(graph, moved)
    return len(moved)


def _is_foldable(norm: Node, readers: Readers, weights: Weights) -> bool:
    layer = norm.inputs[0].node
    if layer.op not in _LAYERS or not readers.is_read_once(Entry(layer)):
        return False
    if layer.op == "Deconvolution" and integer(layer.attrs, "num_group", 1) > 1:
        return False
    trained = (*norm.inputs[1:], *layer.inputs[1:])
    return (readers.is_first_only(norm) and _axis_fits(norm, layer)
            and all(entry.node.is_variable and entry.node.name in weights for entry in trained))


def _settings(node: Node, context: Context) -> tuple[bool, str | None]:
    return node.name in context.policy.excluded, node.attrs.get(REGION)


def _axis_fits(norm: Node, layer: Node) -> bool:
    """Whether BatchNorm normalises over the layer's output channels."""
    axis = integer(norm.attrs, "axis", 1)
    if layer.op == "FullyConnected":
        return axis == (1 if is_set(layer.attrs, "flatten", default=True) else -1)
    dimensions = 2 + len(integers(layer.attrs, "kernel"))
    return axis in ((dimensions - 1, -1) if is_channels_last(layer.attrs) else (1,))


def _output_axis(layer: Node) -> int:
    """Return the axis of the weight that counts the layer's output channels."""
    if layer.op != "Deconvolution":
        return 0
    return -1 if is_channels_last(layer.attrs) else 1


@dataclass(frozen=True)
class _Folding:
    """Changes the parameters of layers."""

    graph: Graph
    readers: Readers
    weights: Weights

    def fold(self, norm: Node, layer: Node) -> None:
        """Let a layer compute what the BatchNorm behind it gives."""
        gamma, beta, mean, variance = map(self._values, norm.inputs[1:])
        if is_set(norm.attrs, "fix_gamma", default=True):
            gamma = np.ones_like(gamma)
        scale = gamma / np.sqrt(variance + float(norm.attrs.get("eps", _DEFAULT_EPS)))
        data, weight, *biases = layer.inputs
        values = self._values(weight)
        along = np.moveaxis(scale.reshape(-1, *[1] * (values.ndim - 1)), 0, _output_axis(layer))
        shift = ((self._values(biases[0]) if biases else 0.0) - mean) * scale + beta
        layer.inputs = [data, self._written(weight, values * along),
                        self._written(biases[0], shift) if biases else
                        self._added(f"{weight.node.name.rsplit('weight', 1)[0]}bias", shift, weight.dtype)]
        layer.attrs = {**layer.attrs, "no_bias": "False"}

    def _values(self, entry: Entry) -> np.ndarray:
        return self.weights.read(entry.node.name).astype(np.float64)

    def _written(self, entry: Entry, values: np.ndarray) -> Entry:
        """Give a parameter other values; where something else reads it too, make a new one instead."""
        if not self.readers.is_read_once(entry):
            return self._added(f"{entry.node.name}_folded", values, entry.dtype)
        entry.node.dtypes = [self._write(entry.node.name, values, entry.dtype)]
        return entry

    def _added(self, name: str, values: np.ndarray, dtype: str | None) -> Entry:
        name = self.graph.new_name(name)
        return Entry(Node(VARIABLE, name, dtypes=[self._write(name, values, dtype)], shapes=[values.shape]))

    def _write(self, name: str, values: np.ndarray, dtype: str | None) -> str:
        """Write values in the type of what they replace, at least FP32; return it."""
        written = FLOAT64 if dtype == FLOAT64 else FLOAT32
        self.weights.write(name, values.astype(written))
        return written
