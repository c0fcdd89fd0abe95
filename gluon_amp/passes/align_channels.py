"""Pad convolutions' output channels to the multiple that the fast low-precision kernels need.

oneDNN falls back to slow kernels for bfloat16 convolutions whose channel counts are not multiples of 16 (of 32 where it
uses AMX tiles).
Zero filters are appended to the weight inside the graph and the extra outputs are sliced off, so parameters,
gradients and files keep the user's shapes, and the values are exact.
"""
from __future__ import annotations

from ..dtypes import BFLOAT16, FLOAT16
from ..graph import Entry, Graph, Node, Readers, operator, redirect, unique_name
from ..graph.attrs import SHAPE, integer
from ..rules.tables.groups.layers import BATCH_NORMS
from .context import Context

__all__ = ["MULTIPLE", "run"]

MULTIPLE = {BFLOAT16: 16, FLOAT16: 8}
_WIDE = 256


def run(graph: Graph, context: Context) -> int:
    """Pad every low-precision convolution that needs it and whose shapes are known; return how many."""
    if context.policy.imitated:
        return 0
    nodes = graph.nodes()
    names = {node.name for node in nodes}
    readers = Readers(graph)
    padded = {Entry(node).key: _pad(node, extra, names, context) for node in nodes
              for extra in [_missing_channels(node, context)] if extra and not _is_normalised(node, readers, context)}
    redirect(graph, padded)
    return len(padded)


def _missing_channels(node: Node, context: Context) -> int | None:
    """Return how many output channels to add; None when the node is to be left alone."""
    if node.op != "Convolution" or Entry(node).dtype != context.target or integer(node.attrs, "num_group", 1) != 1:
        return None
    weight = node.inputs[1].shape
    if not all(entry.node.is_variable for entry in node.inputs[1:]):
        return None
    multiple = context.policy.channel_multiple or MULTIPLE[context.target]
    # Fewer output channels than half a block would more than double the arithmetic. In inference the cut also keeps an
    # activation from being fused, and forward kernels mind the multiple less: only wide layers gain.
    least = multiple // 2 if context.policy.training else _WIDE
    if weight is None or 0 in weight or weight[0] < least:
        return None
    return -weight[0] % multiple or None


def _is_normalised(node: Node, readers: Readers, context: Context) -> bool:
    """Whether the cut would cost more than it gains: with AMX kernels, in training, before BatchNorm.

    A cut leaves its output in plain layout, for which oneDNN has a slow kernel of BatchNorm only. Without AMX
    odd channel counts fall back to kernels that are far slower.
    """
    return (context.policy.amx and context.policy.training
            and any(reader.op in BATCH_NORMS for reader in readers.of(Entry(node))))


def _pad(node: Node, extra: int, names: set[str], context: Context) -> Entry:
    """Pad a convolution in place and return its output cut back to the user's channels."""
    channels = node.shapes[0]
    filters = int(node.attrs["num_filter"])
    cut = operator("slice_axis", unique_name(f"{node.name}_unpad", names), [], Entry(node), axis=1, begin=0,
                   end=filters)
    node.attrs = {**node.attrs, "num_filter": str(filters + extra)}
    if channels is not None:
        node.shapes = [(channels[0], filters + extra, *channels[2:])]
    node.inputs = [node.inputs[0], *(_appended(entry, extra, names) for entry in node.inputs[1:])]
    cut.inputs = [Entry(node)]
    return Entry(cut)


def _appended(entry: Entry, extra: int, names: set[str]) -> Entry:
    """Append ``extra`` zero rows to a weight or bias."""
    shape = entry.shape or ()
    # Behind a Concat MXNet infers a variable's shape wrongly when a symbol is bound or reshaped: say it.
    entry.node.attrs = {**entry.node.attrs, SHAPE: str(shape)}
    zeros = operator("_zeros", unique_name(f"{entry.node.name}_zeros", names), [], entry,
                     shape=(extra, *shape[1:]), dtype=entry.dtype)
    zeros.shapes = [(extra, *shape[1:])]
    joined = operator("Concat", unique_name(f"{entry.node.name}_padded", names), [entry, Entry(zeros)], entry,
                      dim=0, num_args=2)
    joined.shapes = [(shape[0] + extra, *shape[1:])]
    return Entry(joined)
