"""Let MXNet's quantizer put layers, and what stands between them, into INT8, for inference on the CPU.

Which layers is decided before; all others have their precision, and their casts, already. oneDNN fuses the graph first,
as without INT8.
"""
from __future__ import annotations

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node
from ..rules.tables.groups.layers import RELU
from . import fuse
from .context import Context

LAYERS = ("Convolution", "FullyConnected")
_BETWEEN = ("Pooling", "Concat", "Flatten", "elemwise_add", "Activation", "BatchNorm")  # whose INT8 operators are right
_FUSED = (*LAYERS, "BatchNorm", "elemwise_add")


def is_needed(context: Context) -> bool:
    """Tell whether layers are to run in INT8."""
    return context.int8 is not None


def run(graph: Graph, context: Context) -> int:
    """Replace the graph by what MXNet makes of it; return how many layers run in INT8."""
    if context.int8 is None:
        return 0
    for node in graph.operators():
        # MXNet fuses this rectifier with what is before it, and not the other, which differs for NaN only.
        if node.op in RELU and node.inputs[0].node.op in _FUSED and Entry(node).dtype == FLOAT32:
            node.op, node.attrs = "Activation", {**node.attrs, "act_type": "relu"}
    following = {node.name for node in graph.operators() if _may_follow(node)}
    chosen = context.int8.layers | (following - context.int8.apart)
    fuse.run(graph, context)
    made = context.int8.quantized(graph, chosen)
    graph.heads, graph.attrs = made.heads, made.attrs
    return len(context.int8.layers)


def _may_follow(node: Node) -> bool:
    return node.op in _BETWEEN and all(entry.dtype == FLOAT32 for entry in (Entry(node), *node.inputs))
