"""The arithmetic of an operator, counted from its shapes.

Floating-point operations of the forward pass: two per multiply-add of convolutions and matrix products, one per
element that anything else reads or writes, none for what only moves data. Operators whose shapes are unknown count 0.
"""
from __future__ import annotations

import re
from math import prod
from typing import Callable, Mapping, NamedTuple, Sequence

from ..graph import Node
from ..graph.attrs import is_set
from ..rules.tables import as_table, bfloat16, groups

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_MOVES_DATA = frozenset((*as_table(*bfloat16.SHAPES), *groups.CASTS, *groups.CREATION, *groups.EMBEDDINGS,
                         *groups.SEQUENCES))


class Shaped(NamedTuple):
    """An operator's attributes and the shapes of its inputs and of its first output."""

    attrs: Mapping[str, str]
    inputs: Sequence[Sequence[int]]
    output: Sequence[int]


Count = Callable[[Shaped], int]


def flops(node: Node) -> int:
    """Count the floating-point operations of an operator's forward pass."""
    count = _FUSED.get(node.op) or MATRIX_OPERATORS.get(node.kind)
    inputs, output = [entry.shape for entry in node.inputs], node.shapes[0] if node.shapes else None
    if count is None:
        return 0 if node.kind in _MOVES_DATA else max(prod(shape) if shape else 0 for shape in (output, *inputs[:1]))
    known = [shape for shape in inputs if shape is not None]
    return count(Shaped(node.attrs, known, output)) if output is not None and len(known) == len(inputs) else 0


def _sums(length: Count) -> Count:
    """Count a product by how many values each element of its output is the sum of."""
    return lambda op: 2 * prod(op.output) * length(op)


def _transposed_product(axis: int, transposed_axis: int) -> Count:
    """Count a matrix product that sums over the one or the other axis of its first input."""
    return _sums(lambda op: op.inputs[0][transposed_axis if is_set(op.attrs, "transpose_a") else axis])


def _axes_of_tensordot(op: Shaped) -> int:
    first = op.inputs[0]
    if "axes" in op.attrs:
        return prod(first[len(first) - int(op.attrs["axes"]):])
    return prod(first[int(axis)] for axis in re.findall(r"-?\d+", str(op.attrs.get("a_axes_summed", ""))))


def _einsum(op: Shaped) -> int:
    """Count the product over all indices at once, as einsum computes it unless told to optimise."""
    terms = re.sub(r"\s", "", op.attrs.get("subscripts", "")).split("->")[0].split(",")
    if any("." in term or len(term) != len(shape) for term, shape in zip(terms, op.inputs)):
        return 0
    return len(terms) * prod({index: size for pair in zip(terms, op.inputs) for index, size in zip(*pair)}.values())


def _attention_scores(arrays: int) -> Count:
    """Count the products of queries and keys, where the first input holds so many arrays."""
    return _sums(lambda op: op.inputs[0][-1] // (arrays * int(op.attrs["heads"])))


def _recurrent(op: Shaped) -> int:
    length, batch, width = op.inputs[0]
    hidden, count = int(op.attrs["state_size"]), int(op.attrs["num_layers"])
    directions = 2 if is_set(op.attrs, "bidirectional") else 1
    widths = [width] + [hidden * directions] * (count - 1)
    return 2 * length * batch * sum(_GATES[op.attrs["mode"]] * hidden * (each + hidden) * directions for each in widths)


def _attention(op: Shaped) -> int:
    """Count both products of attention in C++."""
    operands = op.attrs["operands"].split(",")
    values = op.inputs[operands.index("values" if "values" in operands else "projections")]
    return 4 * prod(op.output) * values[0 if op.attrs["layout"] == "interleaved" else 1]


# Operators in C++ that take the place of several.
_FUSED: Mapping[str, Count] = {"_gluon_amp_attention": _attention}

# A weight is (output channels, input channels of a group, kernel...), whatever the order of the last ones.
_CONVOLUTION = _sums(lambda op: prod(op.inputs[1][1:]))
_LAST_AXIS = _sums(lambda op: op.inputs[0][-1] if op.inputs[0] else 0)
_DENSE = _sums(lambda op: op.inputs[1][-1])
_TENSORDOT = _sums(_axes_of_tensordot)
MATRIX_OPERATORS: Mapping[str, Count] = {
    "Convolution": _CONVOLUTION,
    "_sg_mkldnn_conv": _CONVOLUTION,
    "_contrib_DeformableConvolution": _sums(lambda op: prod(op.inputs[2][1:])),
    "_contrib_ModulatedDeformableConvolution": _sums(lambda op: prod(op.inputs[3][1:])),
    "Deconvolution": lambda op: 2 * prod(op.inputs[0]) * prod(op.inputs[1][1:]),
    "FullyConnected": _DENSE,
    "_sg_mkldnn_fully_connected": _DENSE,
    "dot": _transposed_product(-1, 0),
    "batch_dot": _transposed_product(-1, -2),
    "_linalg_gemm": _transposed_product(-1, -2),
    "_linalg_gemm2": _transposed_product(-1, -2),
    "_np_dot": _LAST_AXIS,
    "_npi_matmul": _LAST_AXIS,
    "_npi_tensordot": _TENSORDOT,
    "_npi_tensordot_int_axes": _TENSORDOT,
    "_npi_einsum": _einsum,
    "_contrib_interleaved_matmul_selfatt_qk": _attention_scores(arrays=3),
    "_contrib_interleaved_matmul_encdec_qk": _attention_scores(arrays=1),
    "_contrib_interleaved_matmul_selfatt_valatt": _DENSE,
    "_contrib_interleaved_matmul_encdec_valatt": _DENSE,
    "_sg_mkldnn_selfatt_qk": _attention_scores(arrays=3),
    "_sg_mkldnn_selfatt_valatt": _DENSE,
    "RNN": _recurrent,
}
