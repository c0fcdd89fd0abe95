"""Cut what is computed for its shape only.

``slice_like(anchors, x * 0)``, an idiom of GluonCV's detectors, computes a tensor as large as a feature map and
sends a zero gradient of that size back. Reading ``x`` itself behind a BlockGrad gives the same result.
"""
from __future__ import annotations

from ..graph import Entry, Graph, operator
from ..graph.attrs import region_of
from .context import Context

_SHAPE_OPERANDS = {"slice_like": 1, "reshape_like": 1, "broadcast_like": 1, "_contrib_BilinearResize2D": 1}
_KEEPS_SHAPE_AND_TYPE = {"_mul_scalar", "_plus_scalar", "_minus_scalar"}


def run(graph: Graph, context: Context) -> int:
    """Replace operands that give only their shape by a cheap tensor of that shape; return how many."""
    count = 0
    for node in graph.operators():
        position = _SHAPE_OPERANDS.get(node.op)
        if position is None or position >= len(node.inputs):
            continue
        operand = node.inputs[position]
        source = operand
        while source.node.op in _KEEPS_SHAPE_AND_TYPE and source.node.inputs[0].dtype == operand.dtype:
            source = source.node.inputs[0]
        if source.dtype is None or source is operand:
            continue
        block = operator("BlockGrad", graph.new_name(f"{node.name}_shape"), [source], source)
        block.attrs = region_of(node.attrs)
        node.inputs[position] = Entry(block)
        count += 1
    return count
