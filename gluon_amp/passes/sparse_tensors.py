"""Operators that read sparse tensors: casts would turn those, and their gradients, into dense ones."""
from __future__ import annotations

from typing import Collection

from ..graph import Graph, Node
from ..graph.attrs import is_set

# Their results are dense whatever they read. Of others a result may be sparse: they are the safer guess.
_GIVE_DENSE = {"FullyConnected", "Embedding", "_contrib_SparseEmbedding", "sum", "mean", "norm", "take"}
_MAKES_SPARSE, _DENSE = "cast_storage", "default"


def readers(graph: Graph, variables: Collection[str]) -> set[int]:
    """Return the ids of the operators that may read a sparse tensor, where these variables are sparse."""
    found: set[int] = set()
    sparse = {id(node) for node in graph.variables() if node.name in variables}
    for node in graph.operators():
        reads = [id(entry.node) in sparse for entry in node.inputs]
        if any(reads):
            found.add(id(node))
        if node.op == _MAKES_SPARSE:
            gives = node.attrs.get("stype") != _DENSE
        else:
            gives = any(reads) and node.op not in _GIVE_DENSE and not (node.op == "dot" and _is_dense_dot(node, reads))
        if gives:
            sparse.add(id(node))
    return found


def _is_dense_dot(node: Node, reads: list[bool]) -> bool:
    """Tell whether a product of a sparse tensor is dense: that comes first, as it is, and nothing else is asked for."""
    return reads[0] and not is_set(node.attrs, "transpose_a") and node.attrs.get("forward_stype", "None") == "None"
