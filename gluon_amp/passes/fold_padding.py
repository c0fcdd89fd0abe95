"""Let convolutions pad their data themselves, where an operator pads it with zeros before them.

Xception and other networks that follow TensorFlow pad by an operator. It copies every map, forward and backward, and
hands plain arrays from one convolution to the next. A convolution that pads is the same sum of products.
"""
from __future__ import annotations

from ..graph import Entry, Graph, Node, Readers
from ..graph.attrs import integers, is_channels_last
from .context import Context


def run(graph: Graph, context: Context) -> int:
    """Drop the paddings that convolutions alone read, and that they can do; return how many."""
    readers = Readers(graph)
    count = 0
    for node in graph.operators():
        convolutions = readers.of(Entry(node))
        if (_pads_evenly(node) and not readers.is_head(Entry(node)) and convolutions
                and all(_may_pad(each, node) for each in convolutions)):
            for each in convolutions:
                given = integers(each.attrs, "pad") or [0] * len(_widths(node))
                each.attrs = {**each.attrs, "pad": str(tuple(map(sum, zip(given, _widths(node)))))}
                each.inputs = [node.inputs[0], *each.inputs[1:]]
            count += 1
    return count


def _widths(pad: Node) -> list[int]:
    """Return how much is put before each axis of the map."""
    return integers(pad.attrs, "pad_width")[4::2]


def _pads_evenly(node: Node) -> bool:
    """Tell whether an operator puts as many zeros before the axes of maps as behind them, and leaves the others."""
    if node.op != "Pad" or node.attrs.get("mode") != "constant" or float(node.attrs.get("constant_value", 0)) != 0:
        return False
    widths = integers(node.attrs, "pad_width")
    return not any(widths[:4]) and widths[::2] == widths[1::2]


def _may_pad(node: Node, pad: Node) -> bool:
    """Tell whether a reader is a convolution, with channels first, that reads the padded maps as its data."""
    return (node.op == "Convolution" and not is_channels_last(node.attrs) and len(integers(node.attrs, "kernel")) ==
            len(_widths(pad)) and all(entry.node is not pad for entry in node.inputs[1:]))
