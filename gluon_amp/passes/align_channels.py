"""Pad convolutions' channels to the multiple that the fast kernels need.

oneDNN falls back to slow kernels for bfloat16 convolutions whose channel counts are not multiples of 16 (of 32 where it
uses AMX tiles), and in FP32 to a matrix product of copied windows where they are not multiples of 8.
Zero filters are appended to the weight inside the graph and the extra outputs are sliced off, so parameters,
gradients and files keep the user's shapes, and the values are exact. Input channels are padded in bfloat16 training
without AMX: such a convolution runs as a matrix product and leaves its output in plain layout, for which oneDNN's
BatchNorm takes ten times as long.
"""
from __future__ import annotations

from math import prod

from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..graph import Entry, Graph, Node, Readers, operator, redirect
from ..graph.attrs import SHAPE, integer, is_channels_last
from ..rules.tables.groups import BATCH_NORMS
from .context import Context
from .split_concat import with_plain_gradient

_MULTIPLE = {BFLOAT16: 16, FLOAT16: 8, FLOAT32: 16}
_WIDE = 256
# In FP32 forward and backward of a 3x3 convolution of SSD's sizes take 1.05 to 2.5 times as long without padding, with
# AVX512 and with AVX2. There is no gain where no windows are copied (1x1), where the product is small (fewer input
# channels), and where padding the weight takes as long as the convolution (few places on the map). Multiples of 8 are
# padded to those of 16, too: by itself the AVX2 kernel is as fast, but it leaves gradients in blocks of 8 channels, and
# with data in blocks of 16 BatchNorm's gradient runs oneDNN's reference kernel, a tenth of a step of SSD.
_FP32_INPUT_CHANNELS, _FP32_PLACES = 128, 256


def is_needed(context: Context) -> bool:
    """Tell whether convolutions may gain: in low precision, and in FP32 in training."""
    return context.policy.lowers or context.policy.training


def multiple_of(context: Context) -> int:
    """Return what the number of channels should be a multiple of."""
    return context.device.channel_multiple or _MULTIPLE[context.target]


def run(graph: Graph, context: Context) -> int:
    """Pad every convolution of the target type that needs it and whose shapes are known; return how many."""
    if context.device.imitated:
        return 0
    nodes = graph.nodes()
    readers = Readers(graph)
    padded = {Entry(node).key: _pad(graph, node, extra) for node in nodes
              for extra in [_missing_channels(node, context)] if extra and not _is_normalised(node, readers, context)}
    redirect(graph, padded)
    widened = [(node, extra) for node in nodes for extra in [_missing_inputs(node, context)] if extra]
    for node, extra in widened:
        _widen(graph, node, extra)
    return len(padded) + len(widened)


def _is_convolution(node: Node, context: Context) -> bool:
    """Tell whether a node is a convolution in the target type, without groups, of channels in front of the map."""
    return (node.op == "Convolution" and Entry(node).dtype == context.target
            and integer(node.attrs, "num_group", 1) == 1 and not is_channels_last(node.attrs))


def _missing_channels(node: Node, context: Context) -> int:
    """Return how many output channels to add, 0 for none."""
    if (not _is_convolution(node, context) or not all(entry.node.is_variable for entry in node.inputs[1:])
            or (context.target == FLOAT32 and not _gains_in_fp32(node))):
        return 0
    weight, multiple = node.inputs[1].shape, multiple_of(context)
    # Fewer output channels than half a block would more than double the arithmetic. In inference the cut also keeps an
    # activation from being fused, and forward kernels mind the multiple less: only wide layers gain.
    least = multiple // 2 if context.policy.training else _WIDE
    if weight is None or 0 in weight or weight[0] < least:
        return 0
    return -weight[0] % multiple


def _missing_inputs(node: Node, context: Context) -> int:
    """Return how many input channels to add, 0 for none. Nothing was measured with AMX."""
    if (not context.policy.training or context.target != BFLOAT16 or context.device.amx
            or not _is_convolution(node, context)):
        return 0
    data, weight, multiple = node.inputs[0].shape, node.inputs[1].shape, multiple_of(context)
    if data is None or weight is None or not all((*data, *weight)) or len(data) != 4 or data[1] < multiple:
        return 0
    return -data[1] % multiple


def _widen(graph: Graph, node: Node, extra: int) -> None:
    """Append channels of zeros to a convolution's data, and to its weight."""
    data, weight = node.inputs[:2]
    if data.node.is_variable:  # a monitor hears of every operator that reads a variable
        data = Entry(operator("_copy", graph.new_name(f"{data.node.name}_read"), [data], data))
    # Zeros like some of the channels fit images of any number and size: one plan serves several.
    some = operator("slice_axis", graph.new_name(f"{data.node.name}_some"), [data], data, axis=1, begin=0,
                    end=extra)
    zeros = operator("zeros_like", graph.new_name(f"{data.node.name}_zeros"), [Entry(some)], data)
    joined = _concatenated(graph, data, zeros, 1, extra, "widened")
    plain = with_plain_gradient(graph, joined, node.name)
    node.inputs = [Entry(plain), _appended(graph, weight, 1, extra, "widened"), *node.inputs[2:]]


def _concatenated(graph: Graph, entry: Entry, zeros: Node, axis: int, extra: int, suffix: str) -> Entry:
    """Append zeros on an axis."""
    shape, name = entry.shape or (), graph.new_name(f"{entry.node.name}_{suffix}")
    if entry.node.is_variable:  # MXNet infers its shape wrongly when a symbol is bound or reshaped: say it
        entry.node.attrs = {**entry.node.attrs, SHAPE: str(shape)}
    zeros.shapes = [(*shape[:axis], extra, *shape[axis + 1:])]
    joined = operator("Concat", name, [entry, Entry(zeros)], entry, dim=axis, num_args=2)
    joined.shapes = [(*shape[:axis], shape[axis] + extra, *shape[axis + 1:])]
    return Entry(joined)


def _gains_in_fp32(node: Node) -> bool:
    """Tell whether an FP32 convolution of images was measured to train faster with more output channels."""
    output, weight = node.shapes[0], node.inputs[1].shape
    if output is None or weight is None or len(weight) != 4:
        return False
    _, channels, *kernel = weight
    return (prod(kernel) > 1 and channels >= _FP32_INPUT_CHANNELS
            and output[0] * prod(output[2:]) >= _FP32_PLACES)


def _is_normalised(node: Node, readers: Readers, context: Context) -> bool:
    """Tell whether the cut would cost more than it gains: with AMX kernels, in training, before BatchNorm."""
    # A cut leaves its output in plain layout, for which oneDNN has a slow kernel of BatchNorm only. Without AMX odd
    # channel counts fall back to kernels that are far slower.
    return (context.device.amx and context.policy.training
            and any(reader.op in BATCH_NORMS for reader in readers.of(Entry(node))))


def _pad(graph: Graph, node: Node, extra: int) -> Entry:
    """Pad a convolution in place and return its output cut back to the user's channels."""
    channels = node.shapes[0]
    filters = int(node.attrs["num_filter"])
    cut = operator("slice_axis", graph.new_name(f"{node.name}_unpad"), [Entry(node)], Entry(node), axis=1, begin=0,
                   end=filters)
    cut.stands_for = node.name
    node.attrs = {**node.attrs, "num_filter": str(filters + extra)}
    if channels is not None:
        node.shapes = [(channels[0], filters + extra, *channels[2:])]
    node.inputs = [node.inputs[0], *(_appended(graph, entry, 0, extra, "padded") for entry in node.inputs[1:])]
    return Entry(cut)


def _appended(graph: Graph, entry: Entry, axis: int, extra: int, suffix: str) -> Entry:
    """Append zeros to a weight or bias on an axis."""
    shape = entry.shape or ()
    zeros = operator("_zeros", graph.new_name(f"{entry.node.name}_zeros"), [], entry,
                     shape=(*shape[:axis], extra, *shape[axis + 1:]), dtype=entry.dtype)
    return _concatenated(graph, entry, zeros, axis, extra, suffix)
