"""Operator rules for float16 on CUDA GPUs: products on Tensor Cores; FP32 where range or resolution matter.

Which operators have a float16 kernel, which library call they end in, and in which type it adds up, was read off
MXNet's sources, off errors of operators that share their code with the CPU, and off what the CUDA wheel sends to a
device. cuBLAS 11 uses Tensor Cores for float16 wherever it can, from 7.0 on.
"""
from __future__ import annotations

from ..decision import FP32, KEEP, LOWER, NEUTRAL, WIDEST, Rule
from . import groups

_ADDS_IN_FLOAT16 = Rule(FP32, note="MXNet calls cublasHgemmStridedBatched for it, which adds up in float16: products "
                                   "lose digits, and overflow above 65504")
_ELEMENTWISE = Rule(NEUTRAL, note="bound by memory: follows its data")
_MOVES = Rule(NEUTRAL, note="moves data only: any precision is exact")
_SHAPED = Rule(NEUTRAL, note="moves data only; of the other tensor it reads the shape")
_INDEXED = Rule(NEUTRAL, fp32_inputs=(1,),
                note="moves data only; indices stay FP32: float16 counts exactly up to 2048 only")
_MIXES = Rule(WIDEST, note="mixed inputs widen to FP32")
_RANGE = Rule(FP32, note="results leave float16's range easily")
_STEEP = Rule(FP32, note="steep: magnifies the rounding of its inputs")
_REDUCES = Rule(FP32, note="sums of many values need FP32's range and resolution")
_LOSS = Rule(FP32, note="probabilities and losses need FP32's resolution")
_POSITIONS = Rule(FP32, note="positions and counts are exact up to 2048 only in float16")
_RARE = Rule(FP32, note="rare in networks: FP32 is safe and costs little")
_NO_KERNEL = Rule(FP32, safe=False, note="MXNet has no float16 kernel for it")

ROWS = (
    # Layers.
    (("Convolution", "Deconvolution"), Rule(LOWER, note="cuDNN convolves float16 on Tensor Cores and adds up in FP32")),
    ("FullyConnected", Rule(LOWER, note="cublasGemmEx on float16, for Tensor Cores; it adds up in FP32")),
    (groups.ATTENTION, Rule(LOWER, note="cublasGemmStridedBatchedEx on float16, for Tensor Cores; it adds up in FP32")),
    ("RNN", Rule(FP32, note="MXNet forbids it Tensor Cores in float16; cuDNN may use them for FP32 data")),
    (groups.ONEDNN_SUBGRAPHS, Rule(FP32, safe=False, note="exists on the CPU only")),
    (groups.BATCH_NORMS,
     Rule(NEUTRAL, fp32_inputs=(1, 2, 3, 4),
          note="cuDNN normalises float16 data with FP32 scale, shift and statistics")),
    ("_contrib_SyncBatchNorm", _NO_KERNEL),
    ((*groups.NORMS, "LRN", "_contrib_AdaptiveAvgPooling2D"), _REDUCES),
    ("Activation", Rule(FP32, when=("act_type", ("softrelu",)), note=_RANGE.note), _ELEMENTWISE),
    ("LeakyReLU", Rule(FP32, when=("act_type", ("elu", "selu")), note=_RANGE.note),
     Rule(WIDEST, when=("act_type", ("prelu",)), note=_MIXES.note),
     _ELEMENTWISE),
    ((*groups.RELU, *groups.PIECEWISE_SIGMOIDS, "Dropout", "Pooling", *groups.RESIZING), _ELEMENTWISE),
    (groups.OLD_LAYERS, Rule(FP32, note="superseded: its float16 kernels are not kept up")),
    ((*groups.SOFTMAX, *groups.LOSS_OUTPUTS, *groups.LOSSES), _LOSS),
    ("_contrib_SparseEmbedding", Rule(FP32, note="its gradient is sparse, and sparse tensors are never cast")),
    ("Embedding",
     Rule(NEUTRAL, fp32_inputs=(0,), note="reads rows of its weight, in the weight's precision; indices stay FP32")),
    (groups.SEQUENCES, _INDEXED),
    (groups.BOXES, Rule(FP32, note="box coordinates and scores need FP32's resolution")),
    (groups.GRIDS, Rule(FP32, note="coordinates between pixels need FP32's resolution")),
    # Arithmetic.
    (groups.PLAIN_PRODUCTS, Rule(LOWER, note="cublasSgemmEx on float16, for Tensor Cores; it adds up in FP32")),
    (groups.BATCHED_PRODUCTS, _ADDS_IN_FLOAT16),
    ("_npi_einsum", Rule(FP32, note="MXNet's own kernel, without Tensor Cores: nothing is gained")),
    (groups.LINEAR_ALGEBRA, _NO_KERNEL),
    ((*groups.BOUNDED, *groups.SCALAR_ARITHMETIC, "_npi_true_divide_scalar"), _ELEMENTWISE),
    ((*groups.SELECTS, "clip", *groups.ROUNDING, *groups.SCALAR_COPYSIGN, *groups.SCALAR_COMPARISONS,
      "_npi_nan_to_num"), Rule(NEUTRAL, note="picks values or judges them: exact in the precision of its data")),
    ((*groups.EXPONENTIALS, "_npi_hypot", *groups.NUMPY_DIVISIONS), _RANGE),
    ((*groups.STEEP, "_npi_arctan2", *groups.REMAINDERS, "_npi_around"), _STEEP),
    ((*groups.ELEMWISE_ADDITIONS, *groups.ADDITIONS, "_grad_add", *groups.SELECTION,
      *groups.COMPARISONS), _MIXES),
    ((*groups.SUMS, *groups.NUMPY_SUMS, *groups.NORMS_OF_TENSORS, "_np_cumsum",
      *groups.OTHER_REDUCTIONS, *groups.TRANSFORMS), _REDUCES),
    (("_contrib_allclose", *groups.SPARSE_ARITHMETIC), _RARE),
    # Shapes.
    ((*groups.IDENTITIES, *groups.RESHAPES, *groups.FLATTENING, "transpose", *groups.MOVED_AXES, *groups.MOVES,
      *groups.SPLITS, "slice", *groups.REPETITIONS, "_npi_broadcast_to", "Pad", "_npi_pad", *groups.DIAGONALS,
      *groups.PATCHES, *groups.FILLED_LIKE), _MOVES),
    (("slice_like", "reshape_like", "broadcast_like"), _SHAPED),
    ((*groups.JOINS, "_rnn_param_concat"), _MIXES),
    (("where", "_npi_where"), Rule(WIDEST, fp32_inputs=(0,), note="moves data only; mixed inputs widen to FP32")),
    (groups.NUMPY_WHERE_SCALAR, Rule(NEUTRAL, fp32_inputs=(0,), note=_MOVES.note)),
    (("pick", "take", *groups.GATHERS), _INDEXED),
    (groups.SCATTERS, Rule(WIDEST, fp32_inputs=(1,), note=_INDEXED.note)),
    (("Crop", "_shuffle"), _NO_KERNEL),
    ((*groups.SORTING, *groups.COUNTS, "_histogram", "_npi_bincount"), _POSITIONS),
    ((*groups.INSERTIONS, "_npi_full_like"), _RARE),
    (groups.SHAPES, Rule(NEUTRAL, note="reads shapes, or which elements are zero: any precision is exact")),
    # Everything else.
    (groups.GRADIENT_CHECKS, Rule(KEEP, note="looks at gradients as they are")),
    (groups.SAMPLES, Rule(FP32, note="distributions and their parameters need FP32's range and resolution")),
)
