"""The arithmetic of an operator, counted from its shapes.

Floating-point operations of the forward pass: two per multiply-add of convolutions and matrix products, one per
element that anything else reads or writes, none for what only moves data. Operators whose shapes are unknown count 0.
"""
from __future__ import annotations

import re
from math import prod as _product
from typing import Callable, Mapping, Sequence

from ...graph import Node
from ...graph.attrs import is_set
from ...rules.tables import as_table, bfloat16, groups

Shape = Sequence[int]
Count = Callable[[Node], int]

_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}

_MOVES_DATA = frozenset((*as_table(*bfloat16.SHAPES), *groups.CASTS, *groups.CREATION, *groups.EMBEDDINGS,
                         *groups.SEQUENCES))


class _UnknownShape(Exception):
    """An operator's arithmetic cannot be counted."""


def flops(node: Node) -> int:
    """Count the floating-point operations of an operator's forward pass."""
    count = _FUSED.get(node.op) or MATRIX_OPERATORS.get(node.kind)
    if count is None:
        return 0 if node.kind in _MOVES_DATA else _elementwise(node)
    try:
        return count(node)
    except _UnknownShape:
        return 0


def _input(node: Node, position: int) -> Shape:
    shape = node.inputs[position].shape if position < len(node.inputs) else None
    return _known(shape)


def _output(node: Node) -> Shape:
    return _known(node.shapes[0] if node.shapes else None)


def _known(shape: Shape | None) -> Shape:
    if shape is None:
        raise _UnknownShape
    return shape


def _elementwise(node: Node) -> int:
    sizes = [_product(entry.shape) for entry in node.inputs[:1] if entry.shape]
    sizes += [_product(node.shapes[0])] if node.shapes and node.shapes[0] else []
    return max(sizes, default=0)


def _sums(length: Callable[[Node], int]) -> Count:
    """Count a product by how many values each element of its output is the sum of."""
    return lambda node: 2 * _product(_output(node)) * length(node)


def _convolution(weight: int) -> Count:
    # A weight is (output channels, input channels of a group, kernel...), whatever the order of the last ones.
    return _sums(lambda node: _product(_input(node, weight)[1:]))


def _deconvolution(node: Node) -> int:
    return 2 * _product(_input(node, 0)) * _product(_input(node, 1)[1:])


def _transposed_product(axis: int, transposed_axis: int) -> Count:
    """Count a matrix product that sums over the one or the other axis of its first input."""
    return _sums(lambda node: _input(node, 0)[transposed_axis if is_set(node.attrs, "transpose_a") else axis])


def _axes_of_tensordot(node: Node) -> int:
    first = _input(node, 0)
    if "axes" in node.attrs:
        return _product(first[len(first) - int(node.attrs["axes"]):])
    return _product(first[int(axis)] for axis in re.findall(r"-?\d+", str(node.attrs.get("a_axes_summed", ""))))


def _einsum(node: Node) -> int:
    """Count the product over all indices at once, as einsum computes it unless told to optimise."""
    terms = re.sub(r"\s", "", node.attrs.get("subscripts", "")).split("->")[0].split(",")
    lengths: dict[str, int] = {}
    for position, term in enumerate(terms):
        shape = _input(node, position)
        if "." in term or len(term) != len(shape):
            raise _UnknownShape
        lengths.update(zip(term, shape))
    return len(terms) * _product(lengths.values())


def _attention_scores(arrays: int) -> Count:
    """Count the products of queries and keys, where the first input holds so many arrays."""
    return _sums(lambda node: _input(node, 0)[-1] // (arrays * int(node.attrs["heads"])))


def _recurrent(node: Node) -> int:
    length, batch, width = _input(node, 0)
    hidden, count = int(node.attrs["state_size"]), int(node.attrs["num_layers"])
    directions = 2 if is_set(node.attrs, "bidirectional") else 1
    widths = [width] + [hidden * directions] * (count - 1)
    weights = sum(_GATES[node.attrs["mode"]] * hidden * (each + hidden) * directions for each in widths)
    return 2 * length * batch * weights


def _attention(node: Node) -> int:
    """Count both products of attention in C++."""
    operands = node.attrs["operands"].split(",")
    values = _input(node, operands.index("values" if "values" in operands else "projections"))
    keys = values[0 if node.attrs["layout"] == "interleaved" else 1]
    return 4 * _product(_output(node)) * keys


# Operators in C++ that take the place of several.
_FUSED: Mapping[str, Count] = {"_gluon_amp_attention": _attention}

_LAST_AXIS = _sums(lambda node: _input(node, 0)[-1] if _input(node, 0) else 0)
_DENSE = _sums(lambda node: _input(node, 1)[-1])
_TENSORDOT = _sums(_axes_of_tensordot)
MATRIX_OPERATORS: Mapping[str, Count] = {
    "Convolution": _convolution(weight=1),
    "_sg_mkldnn_conv": _convolution(weight=1),
    "_contrib_DeformableConvolution": _convolution(weight=2),
    "_contrib_ModulatedDeformableConvolution": _convolution(weight=3),
    "Deconvolution": _deconvolution,
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
