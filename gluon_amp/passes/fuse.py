"""Let oneDNN fuse convolutions and dense layers with activations and sums, for inference on the CPU.

MXNet's fusion takes a layer together with what comes after it without a look at who else reads the layer's result.
Where that is an output of the network, or read twice, readers get the fused result, or the graph does not fit.
An operator that reads one tensor twice counts once, and outputs move behind identities to where they do not belong.
Operators that the fusion does not know stand in its way wherever it would go wrong.
"""
from __future__ import annotations

from ..dtypes import AVX2_VALUES
from ..graph import Entry, Graph, Node, Readers, guard, redirect
from ..rules.shapes import has_avx2_kernel
from . import prepare_int8
from .context import Context

_FUSED, _LAYERS = "_sg_mkldnn", ("Convolution", "FullyConnected")
# Their input must not be fused with them: MXNet folds BatchNorm in bfloat16 arithmetic, a percent off per layer, and
# loses which output of an operator an identity read.
_KEPT_APART = ("BatchNorm", "_copy", "Dropout")
_SHIELD = "__gluon_amp_shield__"


def run(graph: Graph, context: Context) -> int:
    """Insert operators that stop the fusion where it must not happen, or does not gain; return how many."""
    # Each reader gets one of its own, so that no fused operator has the same input twice.
    readers = Readers(graph)
    spares_products = context.int8 is None and context.policy.channel_multiple == AVX2_VALUES
    places = [(node, position) for node in graph.operators() for position, entry in enumerate(node.inputs)
              if (_is_apart(node, position) or _is_read_elsewhere(entry, node, readers)
                  or (spares_products and _is_product(entry.node))
                  or prepare_int8.stays_apart(node, context))]
    for node, position in places:
        node.inputs[position] = shield = guard(node.inputs[position], graph.new_name(f"{node.name}_shield"))
        shield.node.attrs[_SHIELD] = node.name
    return len(places)


def unshield(graph: Graph) -> int:
    """Remove the operators that `run` inserted from a fused graph; return how many fused operators it has."""
    operators = graph.operators()
    redirect(graph, {Entry(node).key: node.inputs[0] for node in operators if _SHIELD in node.attrs})
    return sum(node.op.startswith(_FUSED) for node in operators)


def is_fusible(graph: Graph) -> bool:
    """Tell whether there is a layer in a graph that the fusion begins with."""
    return any(node.op in _LAYERS for node in graph.operators())


def _is_product(node: Node) -> bool:
    """Tell whether oneDNN computes a convolution as a product of matrices without AVX512.

    What it then fuses with that, it computes value by value: a sum takes 10 ns each, 25 times its own operator's.
    """
    return node.op == "Convolution" and not has_avx2_kernel(node.attrs, node.inputs[0].shape, node.shapes[0])


def _is_apart(node: Node, position: int) -> bool:
    return position == 0 and node.op in _KEPT_APART


def _is_read_elsewhere(entry: Entry, reader: Node, readers: Readers) -> bool:
    """Tell whether a tensor has several readers; of variables only sums matter, the fusion begins behind them."""
    if entry.node.is_variable and reader.op != "elemwise_add":
        return False
    return not readers.is_read_once(entry)
