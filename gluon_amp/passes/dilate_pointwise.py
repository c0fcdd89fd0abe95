"""Keep pointwise convolutions away from a kernel that is not sound for all shapes.

oneDNN's AMX kernel for one by one filters writes beyond its output for some map sizes
(:func:`gluon_amp.shape_rules.overruns_amx_tiles`). A graph that meets maps of any size, as a converted network does,
has to avoid it. Dilation means nothing to a filter of one element, but that kernel refuses it, and oneDNN takes the
general one, which is sound and up to a fifth slower.
"""
from __future__ import annotations

from ..graph import Entry, Graph
from ..policy import Policy
from ..shape_rules import is_pointwise
from .context import Context

__all__ = ["is_needed", "run"]


def is_needed(policy: Policy) -> bool:
    """Whether graphs of a policy meet maps of any size, with kernels that are not sound for all."""
    return policy.amx and not policy.training


def run(graph: Graph, context: Context) -> bool:
    """Dilate the pointwise convolutions that run in low precision.

    Returns
    -------
    bool
        Whether there was one.
    """
    found = [node for node in graph.operators()
             if node.op == "Convolution" and Entry(node).dtype == context.target and is_pointwise(node.attrs)]
    for node in found:
        dimensions = node.attrs["kernel"].count("1")
        node.attrs = {**node.attrs, "dilate": str((2,) * dimensions)}
    return bool(found)
