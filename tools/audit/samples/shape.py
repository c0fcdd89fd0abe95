"""Samples of operators that move data: shapes, slices, joins, indexing."""
from __future__ import annotations

from typing import Iterable

from .sample import Sample, fixed, low, sample

_DATA = low(2, 16, 6, 8)
_MATRIX = low(24, 40)


def _reshaping() -> Iterable[Sample]:
    yield sample("Reshape", _DATA, shape="(0, -1)")
    yield sample("Reshape", _DATA, shape="(0, 0, -1)")
    yield sample("Reshape", _DATA, shape="(-1, 4, 4)", note="channels split up")
    yield sample("Reshape", _MATRIX, shape="(-1, 8)", note="a matrix")
    yield sample("Flatten", _DATA)
    yield sample("reshape_like", (_DATA, low(2, 768)))
    for axis in (0, 1, 2, -1):
        yield sample("expand_dims", _DATA, axis=axis)
    yield sample("expand_dims", low(2, 16, 6), axis=3, note="a 3D tensor")
    yield sample("squeeze", low(2, 16, 1, 8), axis=2)
    yield sample("squeeze", low(2, 16, 1, 1))
    for axes in ("(0, 2, 3, 1)", "(0, 2, 1, 3)", "(0, 1, 3, 2)"):
        yield sample("transpose", _DATA, axes=axes)
    yield sample("transpose", _MATRIX, note="a matrix")
    yield sample("transpose", low(8, 16, 12), axes="(1, 0, 2)")
    yield sample("transpose", low(2, 16, 3, 4, 5), axes="(0, 2, 3, 4, 1)")
    yield sample("transpose", low(2, 2, 3, 4, 3, 2), axes="(0, 2, 1, 4, 3, 5)")
    yield sample("SwapAxis", _DATA, dim1=1, dim2=2)
    yield sample("SwapAxis", _MATRIX, dim1=0, dim2=1)
    yield sample("depth_to_space", _DATA, block_size=2)
    yield sample("space_to_depth", _DATA, block_size=2)
    yield sample("diag", low(20, 20), k=1)
    yield sample("im2col", _DATA, kernel="(3, 3)", pad="(1, 1)")
    yield sample("col2im", low(2, 144, 48), output_size="(6, 8)", kernel="(3, 3)", pad="(1, 1)")


def _slicing() -> Iterable[Sample]:
    yield sample("slice", _DATA, begin="(0, 0, 1, 2)", end="(2, 16, 5, 8)")
    yield sample("slice", _DATA, begin="(None, 2)", end="(None, 9)", step="(None, 2)")
    yield sample("slice", _MATRIX, begin="(2, 3)", end="(20, 33)")
    for axis in (0, 1, 3):
        yield sample("slice_axis", _DATA, axis=axis, begin=0, end=1)
    yield sample("slice_axis", low(2, 32, 6, 8), axis=1, begin=0, end=16, note="16 of 32 channels")
    yield sample("slice_like", (_DATA, low(2, 16, 3, 4)), axes="(2, 3)")
    yield sample("Crop", _DATA, num_args=1, offset="(1, 1)", h_w="(4, 4)")
    yield sample("SliceChannel", low(2, 32, 6, 8), num_outputs=2, axis=1)
    yield sample("SliceChannel", _MATRIX, num_outputs=4, axis=1, note="a matrix")
    yield sample("SliceChannel", low(2, 16, 6, 8), num_outputs=2, axis=0, squeeze_axis=True)
    yield sample("_split_v2", low(2, 32, 6, 8), indices="(0, 16)", axis=1)
    yield sample("_slice_assign", (_DATA, low(1, 16, 6, 8)), begin="(0,)", end="(1,)")
    yield sample("_slice_assign_scalar", _DATA, scalar=0.5, begin="(0, 2)", end="(2, 5)")
    yield sample("reverse", _DATA, axis="(2,)")
    yield sample("Pad", _DATA, mode="constant", pad_width="(0, 0, 0, 0, 1, 1, 2, 2)")
    yield sample("Pad", _DATA, mode="edge", pad_width="(0, 0, 0, 0, 1, 1, 2, 2)")
    yield sample("Pad", _DATA, mode="reflect", pad_width="(0, 0, 0, 0, 1, 1, 2, 2)")


def _joining() -> Iterable[Sample]:
    yield sample("Concat", (_DATA, _DATA), num_args=2, dim=1)
    yield sample("Concat", (_DATA, low(2, 8, 6, 8)), num_args=2, dim=1, note="16 and 8 channels")
    yield sample("Concat", (_DATA, _DATA), num_args=2, dim=0)
    yield sample("Concat", (_DATA, _DATA), num_args=2, dim=3)
    yield sample("Concat", (_MATRIX, low(24, 8)), num_args=2, dim=1, note="matrices")
    yield sample("stack", (_DATA, _DATA), num_args=2, axis=0)
    yield sample("stack", (_DATA, _DATA), num_args=2, axis=2)
    yield sample("_rnn_param_concat", (low(200), low(56)), num_args=2, dim=0)
    yield sample("tile", low(2, 16, 3, 4), reps="(1, 1, 2, 2)")
    yield sample("repeat", low(2, 16, 3, 4), repeats=2, axis=2)
    yield sample("broadcast_to", low(1, 16, 1, 1), shape="(8, 16, 16, 16)")
    yield sample("broadcast_axis", low(2, 16, 1, 1), axis="(2, 3)", size="(16, 16)")
    yield sample("broadcast_like", (low(1, 16, 1, 1), low(4, 16, 8, 8)))


def _indexing() -> Iterable[Sample]:
    few, many = fixed(12, values="grid_index:40"), fixed(512, values="labels:40")
    for name in ("Embedding", "_contrib_SparseEmbedding"):
        yield sample(name, (few, low(40, 16)), input_dim=40, output_dim=16, note="12 different rows")
        yield sample(name, (many, low(40, 16)), input_dim=40, output_dim=16, note="512 of 40 rows")
    for mode in ("clip", "wrap", "raise"):
        yield sample("take", (low(40, 16), few), axis=0, mode=mode, note="12 different rows")
    yield sample("take", (low(40, 16), many), axis=0, note="512 of 40 rows")
    yield sample("take", (low(4, 40, 16), fixed(12, kind="int32", values="grid_index:40")), axis=1)
    yield sample("batch_take", (low(24, 40), fixed(24, kind="int32", values="labels:40")))
    yield sample("pick", (low(24, 40), fixed(24, values="labels:40")), axis=1)
    yield sample("pick", (low(4, 400), low(4, values="labels:400")), axis=1, gradient=False,
                 note="index in low precision, above 256")
    yield sample("gather_nd", (low(24, 40), fixed(2, 16, kind="int32", values="labels:24")))
    yield sample("scatter_nd", (low(16), fixed(1, 16, kind="int32", values="grid_index:24")), shape="(24,)")
    yield sample("one_hot", low(24, values="labels:40"), depth=40, gradient=False, note="index in low precision")
    yield sample("where", (fixed(2, 16, 6, 8, values="valid"), _DATA, _DATA), note="FP32 condition")
    yield sample("where", (low(2, 16, 6, 8, values="valid"), _DATA, _DATA), note="condition in low precision")
    yield sample("_contrib_boolean_mask", (low(24, 40), fixed(24, values="valid")), axis=0)
    yield sample("_contrib_index_copy", (low(24, 8), fixed(4, kind="int64", values="grid_index:24"), low(4, 8)))
    yield sample("_contrib_index_array", low(4, 300), gradient=False)
    yield sample("_unravel_index", low(20, values="labels:200"), shape="(20, 10)", gradient=False)
    yield sample("_ravel_multi_index", low(2, 20, values="labels:10"), shape="(40, 10)", gradient=False)
    yield sample("fill_element_0index", (low(24, 40), low(24), fixed(24, values="labels:40")), gradient=False)


def _sequences() -> Iterable[Sample]:
    length = fixed(4, values="length:10")
    for name in ("SequenceLast", "SequenceMask", "SequenceReverse"):
        yield sample(name, (low(10, 4, 16), length), use_sequence_length=True)
        yield sample(name, low(10, 4, 16))
    yield sample("SequenceMask", (low(4, 16, 6), length), use_sequence_length=True, axis=1)


SAMPLES: tuple[Sample, ...] = (*_reshaping(), *_slicing(), *_joining(), *_indexing(), *_sequences())
