"""Fold BatchNorm into the convolution or dense layer before it: exact in inference, up to rounding.

With ``s = gamma / sqrt(var + eps)`` the normalised output is ``s * (w x + b - mean) + beta``, a layer of the same kind
with weight ``s w`` and bias ``s (b - mean) + beta`` (https://arxiv.org/abs/1712.05877, section 3.2).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from ..dtypes import FLOAT32, FLOAT64
from ..graph import VARIABLE, Entry, Graph, Node, Readers, redirect
from ..graph.attrs import MADE, integer, integers, is_channels_last, is_set, region
from .context import Context, Weights

_LAYERS = ("Convolution", "FullyConnected")  # oneDNN 2.4 adds the bias of a Deconvolution slower than a BatchNorm runs
_DEFAULT_EPS = 1e-3  # of MXNet's operator


def run(graph: Graph, context: Context) -> int:
    """Fold every BatchNorm that is the only reader of a layer with trained parameters; return how many."""
    # An excluded BatchNorm is folded only into a layer that is excluded as well.
    weights = context.weights
    if weights is None:
        return 0
    readers = Readers(graph)
    folding = _Folding(graph, weights)
    moved: dict[tuple[int, int], Entry] = {}
    for norm in graph.operators():
        if norm.op == "BatchNorm" and _is_foldable(norm, readers, weights):
            layer = norm.inputs[0].node
            if _settings(norm, context) != _settings(layer, context):
                continue
            folding.fold(norm, layer)
            moved[Entry(norm).key] = Entry(layer)
            layer.name = norm.name  # users find tensors by their names, and this is BatchNorm's
    redirect(graph, moved)
    return len(moved)


def _is_foldable(norm: Node, readers: Readers, weights: Weights) -> bool:
    layer = norm.inputs[0].node
    if layer.op not in _LAYERS or not readers.is_read_once(Entry(layer)):
        return False
    trained = (*norm.inputs[1:], *layer.inputs[1:])
    return (readers.is_first_only(norm) and _axis_fits(norm, layer)
            and all(entry.node.is_variable and entry.node.name in weights for entry in trained))


def _settings(node: Node, context: Context) -> tuple[bool, str | None]:
    return node.name in context.policy.excluded, region(node.attrs)


def _axis_fits(norm: Node, layer: Node) -> bool:
    """Whether BatchNorm normalises over the layer's output channels."""
    axis = integer(norm.attrs, "axis", 1)
    if layer.op == "FullyConnected":
        return axis == (1 if is_set(layer.attrs, "flatten", default=True) else -1)
    dimensions = 2 + len(integers(layer.attrs, "kernel"))
    return axis in ((dimensions - 1, -1) if is_channels_last(layer.attrs) else (1,))


@dataclass(frozen=True)
class _Folding:
    """Changes the parameters of layers."""

    graph: Graph
    weights: Weights

    @np.errstate(invalid="ignore")  # of values that are not finite the caller has been warned
    def fold(self, norm: Node, layer: Node) -> None:
        """Let a layer compute what the BatchNorm behind it gives."""
        gamma, beta, mean, variance = map(self._values, norm.inputs[1:])
        if is_set(norm.attrs, "fix_gamma", default=True):
            gamma = np.ones_like(gamma)
        scale = gamma / np.sqrt(variance + float(norm.attrs.get("eps", _DEFAULT_EPS)))
        data, weight, *biases = layer.inputs
        values = self._values(weight)
        along = scale.reshape(-1, *[1] * (values.ndim - 1))
        shift = ((self._values(biases[0]) if biases else 0.0) - mean) * scale + beta
        prefix = norm.inputs[1].node.name.rpartition("gamma")[0] or f"{norm.name}_"
        layer.inputs = [data, self._made(f"{prefix}weight", values * along, [weight], norm),
                        self._made(f"{prefix}bias", shift, biases or [weight], norm)]
        layer.attrs = {**layer.attrs, "no_bias": "False"}

    def _values(self, entry: Entry) -> np.ndarray:
        return self.weights.read(entry.node.name).astype(np.float64)

    def _made(self, name: str, values: np.ndarray, sources: Sequence[Entry], norm: Node) -> Entry:
        """Make a parameter, in the type of what it is made of, at least FP32."""
        # Under the name of what it is made of, that would be taken for it.
        name, (source, *_) = self.graph.new_name(name), sources
        dtype = FLOAT64 if source.dtype == FLOAT64 else FLOAT32
        self.weights.write(name, values.astype(dtype))
        return Entry(Node(VARIABLE, name, {MADE: f"{source.node.name} and the BatchNorm {norm.name}"}, dtypes=[dtype],
                          shapes=[values.shape]))
