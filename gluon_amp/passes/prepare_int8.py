"""Bring a graph whose precisions are decided into the form that MXNet's INT8 quantizer runs well, and right."""
from __future__ import annotations

from math import prod

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, operator
from ..graph.attrs import integer, is_set
from ..rules.tables.groups.layers import RELU
from .context import Context

LAYERS = ("Convolution", "FullyConnected")  # which layers run in INT8 is decided before
FLATTEN = "Flatten"
# The operators that may run in INT8 between layers: MXNet computes these right, and others wrong.
_BETWEEN = ("Pooling", "Concat", FLATTEN, "elemwise_add", "Activation", "BatchNorm")
_FUSED = (*LAYERS, "BatchNorm", "elemwise_add")


def is_needed(context: Context) -> bool:
    """Tell whether layers are to run in INT8."""
    return context.int8 is not None


def run(graph: Graph, context: Context) -> int:
    """Rename rectifiers, and flatten maps before dense layers; return how many nodes changed."""
    relus = [node for node in graph.operators()
             if node.op in RELU and node.inputs[0].node.op in _FUSED and Entry(node).dtype == FLOAT32]
    for node in relus:  # MXNet fuses Activation with what is before it, and not relu, which differs for NaN only
        node.op, node.attrs = "Activation", {**node.attrs, "act_type": "relu"}
    dense = [node for node in graph.operators()
             if context.int8 is not None and node.name in context.int8.layers and _reads_maps(node)]
    for node in dense:
        _flatten(graph, node)
    return len(relus) + len(dense)


def between(graph: Graph) -> frozenset[str]:
    """Name the FP32 operators that may run in INT8 between layers."""
    return frozenset(node.name for node in graph.operators() if node.op in _BETWEEN and not _joins_ends(node)
                     and all(entry.dtype == FLOAT32 for entry in (Entry(node), *node.inputs)))


def stays_apart(node: Node, context: Context) -> bool:
    """Tell whether an operator must not be fused with a layer that runs in INT8."""
    if context.int8 is None:
        return False
    excluded = context.policy.excluded
    return node.name in context.int8.wide or (node.name in excluded and any(
        entry.node.name not in excluded for entry in node.inputs if not entry.node.is_variable))


def _joins_ends(node: Node) -> bool:
    """Tell whether an operator joins tensors on an axis that MXNet does not know in INT8."""
    return node.op == "Concat" and integer(node.attrs, "dim", 1) < 1


def _reads_maps(node: Node) -> bool:
    return (node.op == "FullyConnected" and is_set(node.attrs, "flatten", default=True)
            and len(node.inputs[0].shape or ()) != 2 and node.inputs[0].node.op != FLATTEN)


def _flatten(graph: Graph, dense: Node) -> None:
    """Flatten maps before a dense layer: in INT8 MXNet fails on what lies in oneDNN's layout (mkldnn_fc.cc)."""
    data = dense.inputs[0]
    made = operator(FLATTEN, graph.new_name(f"{dense.name}_flat"), [data], data)
    made.shapes = [None if data.shape is None else (data.shape[0], prod(data.shape[1:]))]
    dense.inputs = [Entry(made), *dense.inputs[1:]]
