"""Rows of data times one factor each, as channels in squeeze and excite, in C++: data and factors in either order.

A sum behind a product, and its rectifier, join it.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Sequence

from ..graph import Graph, Node, Readers
from . import channels_last
from .context import Context

OP = "_gluon_amp_scale_rows"
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
    """Let a product, if a node is one, say which input is which: variables have to keep their order."""
    if factors_come_first(node, [entry.shape or () for entry in node.inputs]):
        node.attrs = {**node.attrs, "factors_first": "True"}
        if node.decision is not None and node.decision.fp32_inputs:
            node.decision = replace(node.decision, fp32_inputs=(0,))


def take_sums(graph: Graph, context: Context) -> None:
    """Let products in C++ add a map that is added to them, and rectify the sum: a map less is kept for backward.

    In FP32 training. Products inside of chains are others.
    """
    if context.policy.lowers or not (context.facts.trains and context.facts.recorded):
        return
    channels_last.take_along(graph, list(graph.operators()), Readers(graph), OP, _limits_of)


def _limits_of(product: Node, node: Node) -> dict[str, str]:
    """Return the limits of a rectifier, which a product sets behind a sum."""
    rectifies = node.op == "relu" or (node.op == "Activation" and node.attrs.get("act_type") == "relu")
    return {"rectifies": "True"} if rectifies and "adds" in product.attrs and "rectifies" not in product.attrs else {}


def _are_factors(data: Sequence[int], factors: Sequence[int]) -> bool:
    axes = next((axis for axis in range(len(factors), 0, -1) if factors[axis - 1] != 1), 0)
    return len(data) == len(factors) and axes > 0 and data[:axes] == factors[:axes] and prod(data[axes:]) >= NARROW
