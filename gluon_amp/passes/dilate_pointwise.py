"""Keep pointwise convolutions away from an AMX kernel that writes beyond its output for some shapes.

oneDNN's AMX kernel for one by one filters writes beyond its output for some map sizes
(:func:`gluon_amp.rules.shapes.overruns_amx_tiles`). A graph that meets maps of any size, as a converted network does,
has to avoid it. Dilation means nothing to a filter of one element, but that kernel refuses it, and oneDNN takes the
general one, which is sound and up to a fifth slower.
"""
from __future__ import annotations

from ..graph import Entry, Graph
from ..graph.attrs import integers
from ..rules.shapes import is_pointwise
from .context import Context


def is_needed(context: Context) -> bool:
    """Tell whether graphs run on maps of any size, with kernels that are wrong for some."""
    return context.device.amx and not context.policy.training


def run(graph: Graph, context: Context) -> int:
    """Dilate the pointwise convolutions that run in low precision; return how many."""
    convolutions = [node for node in graph.operators()
                    if node.op == "Convolution" and Entry(node).dtype == context.target and is_pointwise(node.attrs)]
    for node in convolutions:
        dimensions = len(integers(node.attrs, "kernel"))
        node.attrs = {**node.attrs, "dilate": str((2,) * dimensions)}
    return len(convolutions)
