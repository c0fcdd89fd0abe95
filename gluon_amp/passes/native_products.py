"""Rows of data times one factor each, as channels in squeeze and excite, in C++: data and factors in either order."""
from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Sequence

from ..graph import Node

PRODUCTS = ("broadcast_mul", "_npi_multiply")
NARROW = 16  # values in a row, below which they cannot be vectorised

Shapes = Sequence[Sequence[int]]


def follows(node: Node, shapes: Shapes) -> bool:
    """Tell whether rows of data are times one factor each."""
    return _are_factors(*shapes) or factors_come_first(node, shapes)


def factors_come_first(node: Node, shapes: Shapes) -> bool:
    """Tell whether a node multiplies rows by factors, and these are its first input."""
    return node.op in PRODUCTS and not _are_factors(*shapes) and _are_factors(*shapes[::-1])


def note_order(node: Node) -> None:
    """Let a product that will run in C++ say which input is which: variables have to keep their order."""
    if factors_come_first(node, [entry.shape or () for entry in node.inputs]):
        node.attrs = {**node.attrs, "factors_first": "True"}
        if node.decision is not None and node.decision.fp32_inputs:
            node.decision = replace(node.decision, fp32_inputs=(0,))


def _are_factors(data: Sequence[int], factors: Sequence[int]) -> bool:
    axes = next((axis for axis in range(len(factors), 0, -1) if factors[axis - 1] != 1), 0)
    return len(data) == len(factors) and axes > 0 and data[:axes] == factors[:axes] and prod(data[axes:]) >= NARROW
