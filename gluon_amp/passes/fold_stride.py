"""Turn a strided convolution of few channels into one of many channels without a stride.

The first convolution of a network for images reads 3 channels, which fill neither AMX tiles nor the layout of the
kernels after it. With stride 2 it computes the same as one with stride 1, and filters of half the size, on the four
pixels of every 2x2 square side by side as channels. A convolution with zeros and ones puts them there, and adds zero
channels up to the multiple that the kernels need; it is exact. Parameters, gradients and files keep the user's shapes.

Kept in FP32 such a convolution is as slow, and the largest maps of the network take twice the memory.
"""
from __future__ import annotations

from typing import Any

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, operator
from ..graph.attrs import integers
from ..rules.shapes import can_fold_stride
from .align_channels import multiple_of
from .context import Context


def is_needed(context: Context) -> bool:
    """Tell whether convolutions of few channels are faster with it."""
    return context.policy.trains_on_amx(context.device)


def run(graph: Graph, context: Context) -> int:
    """Fold the stride of every low-precision convolution that is faster without; return how many."""
    convolutions = [node for node in graph.operators()
                    if node.op == "Convolution" and Entry(node).dtype == context.target
                    and node.inputs[1].dtype == FLOAT32 and node.inputs[1].shape
                    and can_fold_stride(node.attrs, node.inputs[1].shape[1])]
    for node in convolutions:
        _fold(graph, node, context)
    return len(convolutions)


def _fold(graph: Graph, node: Node, context: Context) -> None:
    data, weight, *bias = node.inputs
    filters, channels, size, _ = weight.shape or ()
    squares = _squares(graph, node, channels, context)
    odd = size % 2  # odd filters get a last row and column of zeros
    pad = (integers(node.attrs, "pad") or [0])[0]
    folded_data = _folded(graph, node, data, squares, f"{node.name}_squares", pad + odd)
    folded_weight = _folded(graph, node, weight, squares, f"{weight.node.name}_squares", odd)
    halved = ((size + odd) // 2,) * 2
    folded_weight.node.shapes = [(filters, (squares.shape or ())[0], *halved)]
    node.inputs = [folded_data, folded_weight, *bias]
    node.attrs = {**node.attrs, "kernel": str(halved), "stride": "(1, 1)", "pad": "(0, 0)"}


def _squares(graph: Graph, node: Node, channels: int, context: Context) -> Entry:
    """Return filters that take the four pixels of a square apart, one each; the surplus ones give zeros."""
    weight = node.inputs[1]
    width = multiple_of(context)

    def add(op: str, inputs: list[Entry], made_shape: tuple[int, ...], **attrs: Any) -> Entry:
        made = operator(op, graph.new_name(f"{node.name}_select"), inputs, weight, **attrs)
        made.shapes = [made_shape]
        return Entry(made)

    shape: tuple[int, ...] = (width, channels, 2, 2)
    squares = add("_eye", [], (width, 4 * channels), N=width, M=4 * channels, k=0, dtype=weight.dtype)
    squares = add("Reshape", [squares], shape, shape=shape)
    if (weight.shape or ())[2] % 2 == 0:
        return squares
    # With a row and a column of zeros before them they find the last square of maps of even and of odd size.
    return add("Pad", [squares], (width, channels, 3, 3), mode="constant", pad_width=(0, 0, 0, 0, 1, 0, 1, 0))


def _folded(graph: Graph, node: Node, entry: Entry, squares: Entry, name: str, pad: int) -> Entry:
    """Return a tensor with its 2x2 squares as channels, in the precision of the convolution that reads it."""
    width, _, size, _ = squares.shape or ()
    folded = operator("Convolution", graph.new_name(name), [entry, squares], squares, kernel=(size, size),
                      stride=(2, 2), pad=(pad, pad), num_filter=width, no_bias=True)
    folded.shapes, folded.planned = [None], list(node.planned)
    return Entry(folded)
