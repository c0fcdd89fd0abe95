"""Let MXNet's quantizer put layers, and what stands between them, into INT8, for inference on the CPU."""
from __future__ import annotations

from ..graph import Graph
from .context import Context


def run(graph: Graph, context: Context) -> int:
    """Replace the graph by what MXNet makes of it; return how many layers run in INT8."""
    if context.int8 is None:
        return 0
    made = context.int8.quantized(graph)
    graph.heads, graph.attrs = made.heads, made.attrs
    return len(context.int8.layers)
