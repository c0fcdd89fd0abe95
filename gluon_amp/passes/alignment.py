"""Convolutions in the form that the fast kernels need, and without work before them that is of no use.

``align_channels`` pads channels to the multiple of the kernels with filters of zeros, inside the graph: parameters,
gradients and files keep the user's shapes, and the values are exact. oneDNN has slow kernels only for other channels::

    Convolution(x, w)   ->   slice_axis(Convolution(x, Concat(w, zeros)))

Input channels are padded in bfloat16 training without AMX: such a convolution leaves its output in plain layout, for
which oneDNN's BatchNorm takes ten times as long.

``fold_stride`` turns a convolution of few channels with stride 2, such as a network's first, into one of four times the
channels without a stride, which fill AMX tiles. A convolution with zeros and ones puts the four pixels of every 2x2
square side by side as channels, and adds channels of zeros up to the multiple; it is exact::

    Convolution(x, w, stride=2)   ->   Convolution(squares(x), squares(w), stride=1)

``dilate_pointwise`` keeps converted graphs, which meet maps of any size, away from an AMX kernel that writes beyond its
output for some (:func:`gluon_amp.rules.shapes.overruns_amx_tiles`). Dilation means nothing to a filter of one element,
but that kernel refuses it, and oneDNN takes the general one, up to a fifth slower::

    Convolution(x, w, kernel=1)   ->   Convolution(x, w, kernel=1, dilate=2)

``fold_padding`` lets convolutions pad with zeros themselves. Xception and others that follow TensorFlow pad by an
operator, which copies every map, forward and backward::

    Convolution(Pad(x))   ->   Convolution(x, pad=...)

``shape_operands`` cuts a tensor that is computed for its shape only, as in GluonCV's detectors, and its gradient::

    slice_like(anchors, x * 0)   ->   slice_like(anchors, BlockGrad(x))
"""
from __future__ import annotations

from math import prod
from typing import Any

from ..graph import Consumers, Entry, Graph, Node, operator, redirect
from ..graph.attrs import SHAPE, integer, integers, is_channels_last, region_of
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..rules.shapes import can_fold_stride, is_pointwise
from ..rules.tables.groups import BATCH_NORMS
from .context import Context
from .gradients import with_plain_gradient

_MULTIPLE = {BFLOAT16: 16, FLOAT16: 8, FLOAT32: 16}
# In FP32 training of a 3x3 convolution takes up to 2.5 times as long without padding. There is no gain where no windows
# are copied (1x1), where the product is small (fewer input channels), and where padding the weight takes as long as the
# convolution (few places on the map). With multiples of 8, too: the AVX2 kernel leaves gradients in blocks of 8
# channels, and with data in blocks of 16 BatchNorm's gradient runs oneDNN's reference kernel.
_FP32_INPUT_CHANNELS, _FP32_PLACES = 128, 256


def _multiple_of(context: Context) -> int:
    return context.device.channel_multiple or _MULTIPLE[context.target]


def align_channels(graph: Graph, context: Context) -> int:
    """Pad every convolution of the target type that needs it and whose shapes are known; return how many."""
    if context.device.imitated:
        return 0
    consumers = Consumers(graph)
    nodes = [node for node in graph.operators()
             if node.op == "Convolution" and Entry(node).dtype == context.target
             and integer(node.attrs, "num_group", 1) == 1 and not is_channels_last(node.attrs)]
    padded = {Entry(node).key: _pad(graph, node, extra) for node in nodes
              for extra in [_missing_channels(node, consumers, context)] if extra}
    redirect(graph, padded)
    widened = [(node, extra) for node in nodes for extra in [_missing_inputs(node, context)] if extra]
    for node, extra in widened:
        _widen(graph, node, extra)
    return len(padded) + len(widened)


def _missing_channels(node: Node, consumers: Consumers, context: Context) -> int:
    """Return how many output channels to add, 0 for none."""
    output, weight, trains = Entry(node).shape, node.inputs[1].shape, context.policy.training
    if weight is None or 0 in weight or not all(entry.node.is_variable for entry in node.inputs[1:]):
        return 0
    if context.target == FLOAT32 and trains and (
            output is None or len(weight) != 4 or prod(weight[2:]) == 1 or weight[1] < _FP32_INPUT_CHANNELS
            or output[0] * prod(output[2:]) < _FP32_PLACES):
        return 0
    # The cut leaves plain layout, for which oneDNN has a slow kernel of BatchNorm only. Without AMX odd channels are
    # far slower still.
    if context.device.amx and trains and any(each.op in BATCH_NORMS for each in consumers.of(Entry(node))):
        return 0
    # Fewer output channels than half a block would more than double the arithmetic. In inference the cut also keeps an
    # activation from being fused: with AMX only wide layers gain, without it those of windows that are not an image's,
    # which oneDNN computes as products of matrices otherwise, or by half of a vector.
    multiple = _multiple_of(context)
    copies = not context.device.amx and len(weight) == 4 and prod(weight[2:]) > 1 and weight[1] >= multiple // 2
    return -weight[0] % multiple if weight[0] >= (multiple // 2 if trains or copies else 256) else 0


def _pad(graph: Graph, node: Node, extra: int) -> Entry:
    """Pad a convolution in place and return its output cut back to the user's channels."""
    output, filters = node.shapes[0], int(node.attrs["num_filter"])
    cut = operator("slice_axis", graph.new_name(f"{node.name}_unpad"), [Entry(node)], Entry(node), axis=1, begin=0,
                   end=filters)
    cut.stands_for = node.name
    node.attrs = {**node.attrs, "num_filter": str(filters + extra)}
    if output is not None:
        node.shapes = [(output[0], filters + extra, *output[2:])]
    node.inputs = [node.inputs[0], *(_appended(graph, entry, 0, extra, "padded") for entry in node.inputs[1:])]
    return Entry(cut)


def _missing_inputs(node: Node, context: Context) -> int:
    """Return how many input channels to add, 0 for none. Nothing was measured with AMX."""
    data, weight, multiple = node.inputs[0].shape, node.inputs[1].shape, _multiple_of(context)
    if (not context.policy.training or context.target != BFLOAT16 or context.device.amx or data is None
            or weight is None or not all((*data, *weight)) or len(data) != 4 or data[1] < multiple):
        return 0
    return -data[1] % multiple


def _widen(graph: Graph, node: Node, extra: int) -> None:
    """Append channels of zeros to a convolution's data, and to its weight."""
    data, weight = node.inputs[:2]
    if data.node.is_variable:  # a monitor hears of every operator that reads a variable
        data = Entry(operator("_copy", graph.new_name(f"{data.node.name}_read"), [data], data))
    # Zeros like some of the channels fit images of any number and size: one plan serves several.
    some = operator("slice_axis", graph.new_name(f"{data.node.name}_some"), [data], data, axis=1, begin=0, end=extra)
    zeros = operator("zeros_like", graph.new_name(f"{data.node.name}_zeros"), [Entry(some)], data)
    joined = _concatenated(graph, data, zeros, 1, extra, "widened")
    plain = with_plain_gradient(graph, joined, node.name)
    node.inputs = [Entry(plain), _appended(graph, weight, 1, extra, "widened"), *node.inputs[2:]]


def _appended(graph: Graph, entry: Entry, axis: int, extra: int, suffix: str) -> Entry:
    """Append zeros to a weight or bias on an axis."""
    shape = entry.shape or ()
    size = (*shape[:axis], extra, *shape[axis + 1:])
    zeros = operator("_zeros", graph.new_name(f"{entry.node.name}_zeros"), [], entry, shape=size, dtype=entry.dtype)
    return _concatenated(graph, entry, zeros, axis, extra, suffix)


def _concatenated(graph: Graph, entry: Entry, zeros: Node, axis: int, extra: int, suffix: str) -> Entry:
    """Append zeros on an axis."""
    shape, name = entry.shape or (), graph.new_name(f"{entry.node.name}_{suffix}")
    if entry.node.is_variable:  # MXNet infers its shape wrongly when a symbol is bound or reshaped: say it
        entry.node.attrs = {**entry.node.attrs, SHAPE: str(shape)}
    zeros.shapes = [(*shape[:axis], extra, *shape[axis + 1:])]
    return Entry(operator("Concat", name, [entry, Entry(zeros)], entry, dim=axis, num_args=2,
                          shapes=[(*shape[:axis], shape[axis] + extra, *shape[axis + 1:])]))


def fold_stride(graph: Graph, context: Context) -> int:
    """Fold the stride of every low-precision convolution that is faster without; return how many."""
    convolutions = [node for node in graph.operators()
                    if node.op == "Convolution" and Entry(node).dtype == context.target
                    and node.inputs[1].dtype == FLOAT32 and node.inputs[1].shape
                    and can_fold_stride(node.attrs, node.inputs[1].shape[1])]
    for node in convolutions:
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
    return len(convolutions)


def _squares(graph: Graph, node: Node, channels: int, context: Context) -> Entry:
    """Return filters that take the four pixels of a square apart, one each; the surplus ones give zeros."""
    weight, width = node.inputs[1], _multiple_of(context)

    def add(op: str, inputs: list[Entry], made_shape: tuple[int, ...], **attrs: Any) -> Entry:
        return Entry(operator(op, graph.new_name(f"{node.name}_select"), inputs, weight, shapes=[made_shape], **attrs))

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


def dilate_pointwise(graph: Graph, context: Context) -> int:
    """Dilate the pointwise convolutions that run in low precision; return how many."""
    convolutions = [node for node in graph.operators()
                    if node.op == "Convolution" and Entry(node).dtype == context.target and is_pointwise(node.attrs)]
    for node in convolutions:
        node.attrs = {**node.attrs, "dilate": str((2,) * len(integers(node.attrs, "kernel")))}
    return len(convolutions)


def fold_padding(graph: Graph, context: Context) -> int:
    """Drop the paddings that convolutions alone read, and that they can do; return how many."""
    consumers, count = Consumers(graph), 0
    for node in graph.operators():
        convolutions, widths = consumers.of(Entry(node)), integers(node.attrs, "pad_width")
        if (node.op == "Pad" and node.attrs.get("mode") == "constant"
                and float(node.attrs.get("constant_value", 0)) == 0
                and not any(widths[:4]) and widths[::2] == widths[1::2]  # maps alone, by as much before as behind
                and convolutions and not consumers.is_head(Entry(node))
                and all(each.op == "Convolution" and not is_channels_last(each.attrs)
                        and len(integers(each.attrs, "kernel")) == len(widths[4::2])
                        and all(entry.node is not node for entry in each.inputs[1:]) for each in convolutions)):
            for each in convolutions:
                given = integers(each.attrs, "pad") or [0] * len(widths[4::2])
                each.attrs = {**each.attrs, "pad": str(tuple(map(sum, zip(given, widths[4::2]))))}
                each.inputs = [node.inputs[0], *each.inputs[1:]]
            count += 1
    return count


_LIKE_ANOTHER = ("slice_like", "reshape_like", "broadcast_like", "_contrib_BilinearResize2D")


def shape_operands(graph: Graph, context: Context) -> int:
    """Replace operands that give only their shape by a cheap tensor of that shape; return how many."""
    count = 0
    for node in graph.operators():
        if node.op not in _LIKE_ANOTHER or len(node.inputs) < 2:
            continue
        source = operand = node.inputs[1]
        while (source.node.op in ("_mul_scalar", "_plus_scalar", "_minus_scalar")
               and source.node.inputs[0].dtype == operand.dtype):
            source = source.node.inputs[0]
        if source.dtype is not None and source is not operand:
            block = operator("BlockGrad", graph.new_name(f"{node.name}_shape"), [source], source)
            block.attrs = region_of(node.attrs)
            node.inputs[1] = Entry(block)
            count += 1
    return count
