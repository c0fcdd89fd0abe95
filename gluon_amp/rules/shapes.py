"""Shapes for which bfloat16 kernels of oneDNN 2.4.4 are wrong or slow, convolutions are rewritten, or dots are sums.

:data:`SHAPE_RULES` comes before the operator tables. A rule that a graph pass makes needless names the pass.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Callable, Iterator, Mapping, Sequence

from ..graph.attrs import integer, integers, is_channels_last, is_set
from ..machine.dtypes import AVX2_VALUES, BFLOAT16, FLOAT16
from .decision import FP32, Cause, Decision

Attrs = Mapping[str, str]
Shape = Sequence[int]
BLOCK = 16  # channels that oneDNN keeps side by side


@dataclass(frozen=True)
class ShapeRule:
    """A rule that keeps an operator in FP32 for some shapes of its data."""

    op: str  # registered operator name
    target: str  # the low-precision type of the policies that it is for
    # takes the operator's attributes, the shape of its data (empty where unknown), and whether oneDNN uses AMX tiles
    holds: Callable[[Attrs, Shape, bool], bool]
    decision: Decision
    lifted_by: str = ""  # the pass that makes it needless when it is on
    # whether the policies that it is for train, run on AMX tiles, and imitate low precision; None for either way
    training: bool | None = None
    amx: bool | None = None
    imitated: bool | None = None


def has_idle_taps(attrs: Mapping[str, str], shape: Sequence[int]) -> bool:
    """Tell whether a part of a convolution's filters meets padding only, as with small maps and wide padding."""
    if is_channels_last(attrs):
        return False
    for kernel, stride, pad, dilate, size in _windows(attrs, shape):
        starts = [place * stride - pad for place in range(_positions(kernel, stride, pad, dilate, size))]
        if size > 0 and any(all(not 0 <= start + tap * dilate < size for start in starts) for tap in range(kernel)):
            return True
    return False


def _windows(attrs: Mapping[str, str], shape: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield kernel, stride, padding, dilation and size of the data along each axis of the map."""
    kernel, stride, pad, dilate = (integers(attrs, name) for name in ("kernel", "stride", "pad", "dilate"))
    count = len(kernel)
    return zip(kernel, stride or [1] * count, pad or [0] * count, dilate or [1] * count, shape[2:])


def _positions(kernel: int, stride: int, pad: int, dilate: int, size: int) -> int:
    return (size + 2 * pad - dilate * (kernel - 1) - 1) // stride + 1


def pools_out_of_order(attrs: Mapping[str, str], shape: Sequence[int], amx: bool, block: int = BLOCK) -> bool:
    """Tell whether a pooling's gradient has an order of axes that only oneDNN's slow reference kernels take."""
    # Where the result has height or width 1, its strides do not tell the order of that axis and of its neighbours any
    # more, and oneDNN takes the larger ones of the data for the outer ones. The neighbours are the blocks of channels
    # and, between AMX kernels, which keep channels innermost, the batch.
    if len(shape) != 4 or is_channels_last(attrs) or not all(shape):
        return False
    blocks = -(-shape[1] // block)
    if max(shape[2:]) <= (min(shape[0], blocks) if amx else blocks):
        return False
    return is_set(attrs, "global_pool") or any(_positions(*window) == 1 for window in _windows(attrs, shape))


_TILE_ROWS = 16  # of an AMX tile
_SMALL_MAP = 32


def overruns_amx_tiles(attrs: Mapping[str, str], shape: Sequence[int]) -> bool:
    """Tell whether oneDNN's AMX kernel for pointwise convolutions writes beyond its output."""
    # The kernel takes pixels in groups as large as a tile allows, two tiles at a time and those in pairs; with three
    # groups in all it stores a fourth (``jit_avx512_core_amx_1x1_conv_kernel`` of oneDNN 2.4.4; found with guard pages
    # behind every allocation, for all maps up to 33x33).
    if not is_pointwise(attrs):
        return False
    *rows, columns = (1, *shape[2:])
    height = prod(rows)
    counted = height if height >= _SMALL_MAP else height * columns
    group = next(size for size in range(_TILE_ROWS, 0, -1) if counted % size == 0)
    return height * columns == 3 * group


def is_pointwise(attrs: Mapping[str, str]) -> bool:
    """Tell whether a convolution may run oneDNN's 1x1 kernel: no stride, padding, dilation or groups."""
    ones = (integers(attrs, name) for name in ("kernel", "stride", "dilate", "num_group"))
    return all(number == 1 for numbers in ones for number in numbers) and not any(integers(attrs, "pad"))


_MOST_FOLDED = 8  # channels: four pixels of each fill one AMX tile
_LEAST_FILTERS = 16


def can_fold_stride(attrs: Mapping[str, str], channels: int) -> bool:
    """Tell whether AMX runs a convolution faster without its stride, on four times the channels."""
    kernel, stride, pad, others = (integers(attrs, name) for name in ("kernel", "stride", "pad", "dilate"))
    square = stride == [2, 2] and len(set(kernel)) == 1 and len(set(pad)) <= 1 and len(kernel) == 2 and kernel[0] > 2
    plain = all(number == 1 for number in others) and integer(attrs, "num_group", 1) == 1
    wide = 0 < channels <= _MOST_FOLDED and integer(attrs, "num_filter", 0) >= _LEAST_FILTERS
    return square and plain and wide and not is_channels_last(attrs)


SHAPE_RULES: tuple[ShapeRule, ...] = (
    *(ShapeRule(op, FLOAT16, lambda attrs, shape, amx: len(shape) == 1,
                Decision(FP32, Cause.SHAPE, "a product of vectors is a sum of many values, as in "
                                            "gluon.utils.clip_global_norm, and needs FP32's range and resolution; "
                                            "Tensor Cores have no use for it")) for op in ("dot", "_np_dot")),
    ShapeRule("Deconvolution", FLOAT16, lambda attrs, shape, amx: len(integers(attrs, "kernel")) == 3,
              Decision(FP32, Cause.SHAPE, "only oneDNN has a kernel for three dimensions, whose backward ends the "
                                          "process where the weight is cast", safe=False),
              training=True, imitated=True),
    ShapeRule("Convolution", BFLOAT16, lambda attrs, shape, amx: is_pointwise(attrs),
              Decision(FP32, Cause.SHAPE, "the pass dilate_pointwise is off, and oneDNN's AMX kernel writes beyond its "
                                          "output for some map sizes", safe=False),
              lifted_by="dilate_pointwise", training=False, amx=True),
    ShapeRule("Convolution", BFLOAT16, lambda attrs, shape, amx: has_idle_taps(attrs, shape),
              Decision(FP32, Cause.SHAPE, "parts of its filters meet padding only, and oneDNN's bfloat16 kernel leaves "
                                          "garbage in their gradient", safe=False), training=True),
    ShapeRule("Convolution", BFLOAT16, lambda attrs, shape, amx: len(shape) > 0 and overruns_amx_tiles(attrs, shape),
              Decision(FP32, Cause.SHAPE, "its map divides into three tiles, for which oneDNN's AMX kernel writes "
                                          "beyond its output", safe=False), training=True, amx=True),
    ShapeRule("Convolution", BFLOAT16,  # depthwise, as MobileNet v3's and Xception's
              lambda attrs, shape, amx: (integer(attrs, "num_group", 1) == integer(attrs, "num_filter", 0) > 1 and
                                         integer(attrs, "num_filter", 0) % BLOCK != 0 and not is_channels_last(attrs)),
              Decision(FP32, Cause.SHAPE, f"its channels are no multiple of {BLOCK}: in bfloat16 oneDNN computes "
                                          "each as a product of matrices"), training=False, amx=False),
    ShapeRule("BatchNorm", BFLOAT16,
              lambda attrs, shape, amx: len(shape) > 1 and integer(attrs, "axis", 1) == 1 and shape[1] % BLOCK != 0,
              Decision(FP32, Cause.SHAPE, f"its channels are no multiple of {BLOCK}: in bfloat16 oneDNN normalises "
                                          "such maps value by value"), training=False, amx=False),
    ShapeRule("Pooling", BFLOAT16, pools_out_of_order,
              Decision(FP32, Cause.SHAPE, "it leaves one pixel of a map with more rows than there are images, or "
                                          "blocks of channels: in bfloat16 its gradient, and those before it, would "
                                          "take thirty times as long"), training=True),
)


def pools_to_means(attrs: Mapping[str, str]) -> bool:
    """Tell whether a pooling takes the means of all channels of images, which come behind the batch."""
    return is_set(attrs, "global_pool") and attrs.get("pool_type") == "avg" and not is_channels_last(attrs)


def has_avx2_kernel(attrs: Mapping[str, str], data: Sequence[int] | None, result: Sequence[int] | None) -> bool:
    """Tell whether oneDNN has a kernel for a convolution without AVX512: others are products of matrices to it."""
    # Channels are whole blocks of 8, or an image's. Padding is at most 3 wide, and not wider than the result. Filters
    # of more than 7 columns have no padding where they have strides. Unknown shapes count as fitting.
    if not data or not result:
        return True
    groups, before, after = integer(attrs, "num_group", 1), data[1], result[1]
    if groups == after:
        return after % AVX2_VALUES == 0
    is_whole = (groups == 1 and before < AVX2_VALUES) or before // groups % AVX2_VALUES == 0
    pads, is_strided = integers(attrs, "pad") or [0], any(stride > 1 for stride in integers(attrs, "stride"))
    return (is_whole and after // groups % AVX2_VALUES == 0 and pads[-1] <= min(3, result[-1])
            and not (is_strided and any(pads) and integers(attrs, "kernel")[-1] > 7))


def has_avx512_kernel(attrs: Mapping[str, str], weight: Sequence[int] | None) -> bool:
    """Tell whether oneDNN has a kernel for an FP32 convolution with AVX512: others are products of matrices to it."""
    # Output channels are whole blocks of 16, or of 8 where the input's are, or the input is an image; channels of each
    # group are multiples of 4, and depthwise ones of 8. Unknown shapes count as fitting.
    if not weight:
        return True
    groups, after, before = integer(attrs, "num_group", 1), weight[0], weight[1]
    if groups == after > 1:
        return after % AVX2_VALUES == 0
    if groups > 1:
        return before % 4 == after // groups % 4 == 0
    return after % BLOCK == 0 or (after % AVX2_VALUES == 0 and (before < 4 or before % AVX2_VALUES == 0))


def values_behind(shape: Sequence[int], axis: int) -> int:
    """Return how many values of a tensor lie behind one along an axis: 1 for the last one."""
    return prod(shape[axis % len(shape) + 1:]) if shape else 1


def lacks_softmax(op: str, attrs: Attrs, shape: Shape, narrow: int, is_recorded: bool, has_avx512: bool) -> bool:
    """Tell whether oneDNN does not run a softmax, with ``narrow`` values behind its axis, or a logarithm's gradient."""
    behind = values_behind(shape, integer(attrs, "axis", -1))
    return behind >= narrow or (behind == 1 and op == "log_softmax" and is_recorded and not has_avx512
                                and (shape or (0,))[-1] >= AVX2_VALUES)


def is_slow_sum(attrs: Attrs, shape: Sequence[int]) -> bool:
    """Tell whether MXNet's sum or mean is of all values, for which it has one thread, or out of order in memory."""
    axes = integers(attrs, "axis")
    return not is_set(attrs, "exclude") and (not axes or (len(axes) == 1 and values_behind(shape, axes[0]) >= BLOCK))
