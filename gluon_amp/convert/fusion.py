"""Let MXNet's oneDNN backend fuse operators, and only those whose results nothing else reads.

MXNet's fusion takes a layer together with what comes after it without a look at who else reads the layer's result.
Where that is an output of the network, or read twice, readers get the fused result, or the graph does not fit.
An operator that reads one tensor twice counts once, and outputs move behind identities to where they do not belong.
"""
from __future__ import annotations

import mxnet as mx

from .._mxnet.symbols import from_graph, fuse, to_graph
from ..graph import Entry, Graph, Node, unique_name
from ..passes.readers import Readers, redirect

__all__ = ["fused"]

_FUSED = "_sg_mkldnn"
# Their input must not be fused with them: MXNet folds BatchNorm in bfloat16 arithmetic, a percent off per layer, and
# loses which output of an operator an identity read.
_KEPT_APART = ("BatchNorm", "_copy", "Dropout")


def fused(graph: Graph, like: mx.sym.Symbol) -> tuple[Graph, int]:
    """Return the graph with fused operators, and how many there are.

    Parameters
    ----------
    graph : Graph
        Not to be used afterwards.
    like : Symbol
        Of the kind that the graph is, legacy or NumPy.
    """
    shields = _shield(graph)
    found = to_graph(fuse(from_graph(graph, like)))
    redirect(found, {Entry(node).key: node.inputs[0] for node in found.operators() if node.name in shields})
    return found, sum(node.op.startswith(_FUSED) for node in found.operators())


def _shield(graph: Graph) -> set[str]:
    """Put operators that the fusion does not know where it must not look through; return their names.

    Each reader gets one of its own, so that no fused operator has the same input twice.
    """
    names = {node.name for node in graph.nodes()}
    readers = Readers(graph)
    shields = set()
    for node in graph.operators():
        for position, entry in enumerate(node.inputs):
            if _is_apart(node, position) or _is_read_elsewhere(entry, node, readers):
                name = unique_name(f"{node.name}_shield", names)
                node.inputs[position] = Entry(Node("_mul_scalar", name, {"scalar": "1.0"}, [entry]))
                shields.add(name)
    return shields


def _is_apart(node: Node, position: int) -> bool:
    return position == 0 and node.op in _KEPT_APART


def _is_read_elsewhere(entry: Entry, reader: Node, readers: Readers) -> bool:
    """Whether a tensor has several readers; of variables only sums matter, the fusion begins behind them."""
    if entry.node.is_variable and reader.op != "elemwise_add":
        return False
    return len(readers.of(entry)) > 1 or readers.is_head(entry)
