"""Operator rules for bfloat16 on the CPU, where oneDNN 2.4.4 supplies the fast kernels.

Derived from runs in which each operator ran forward and backward: eager, in a CachedOp, with static
allocation, in plain and in blocked layouts. Only oneDNN's own kernels and kernels that move data run in bfloat16.
"""
from __future__ import annotations

from ...graph.attrs import CHANNELS_LAST
from ..decision import FP32, LOWER, NEUTRAL, WIDEST, Cause, Rule
from . import groups

_NATIVE = Rule(NEUTRAL, note="native bfloat16 kernel")
_MOVES = Rule(NEUTRAL, note="moves data only: any precision is exact")
_JOINS = Rule(WIDEST, note="moves data only; mixed inputs widen to FP32")
_NO_KERNEL = Rule(FP32, safe=False, note="MXNet has no bfloat16 kernel for it")
_WRONG = Rule(FP32, safe=False, note="MXNet's bfloat16 kernel gives wrong values")
_UNSOUND = Rule(FP32, safe=False, note="MXNet's bfloat16 kernels for it fail, or lose precision")
_BLOCKED = Rule(FP32, safe=False, note="MXNet's bfloat16 kernel fails on tensors in oneDNN's blocked layout")
_TRUNCATES = Rule(FP32, note="MXNet's bfloat16 kernel truncates and accumulates in bfloat16")
_PLAIN = Rule(FP32, note="correct in bfloat16, but not faster: MXNet has a plain kernel for it, not one of oneDNN")
_LOSS = Rule(FP32, note="probabilities and losses need FP32's resolution")
_POSITIONS = Rule(FP32, safe=False, note="positions and counts are exact up to 256 only in bfloat16")
_CHANNELS_LAST = Rule(FP32, when=("layout", CHANNELS_LAST), safe=False, cause=Cause.LAYOUT,
                      note="oneDNN is not used for this layout, and MXNet has no other bfloat16 kernel")

SHAPES = (
    ((*groups.IDENTITIES, *groups.FLATTENING, *groups.MOVES, *groups.SPLITS), _MOVES),
    (groups.JOINS, _JOINS),
    ("slice_like", Rule(NEUTRAL, note="moves data only; of the other tensor it reads the shape")),
    ("where", Rule(WIDEST, fp32_inputs=(0,), note=_JOINS.note)),
    ((*groups.RESHAPES, "reshape_like", "slice"), _BLOCKED),
    ("transpose", Rule(FP32, safe=False, note="MXNet's bfloat16 kernel corrupts memory")),
    (("_npi_where", *groups.NUMPY_WHERE_SCALAR, "Crop", "Pad", *groups.PATCHES, "_npi_broadcast_to"), _NO_KERNEL),
    ((*groups.SORTING, *groups.GATHERS), _UNSOUND),
    ((*groups.REPETITIONS, "broadcast_like"), _TRUNCATES),
    ((*groups.MOVED_AXES, *groups.DIAGONALS, *groups.FILLED_LIKE, "_npi_pad", *groups.SCATTERS, "_npi_full_like"),
     _PLAIN),
    ("pick", Rule(FP32, note="reads few values, most often of a loss")),
    ("take", _WRONG),
    (groups.COUNTS, _POSITIONS),
    ("_rnn_param_concat", Rule(FP32, note="the recurrent layer that it feeds runs in FP32")),
    (groups.INSERTIONS, Rule(FP32, note="rare in networks: FP32 is safe and costs little")),
    ("_shuffle", Rule(FP32, safe=False, note="random: nothing shows that it is right in bfloat16")),
    (groups.SHAPES, Rule(NEUTRAL, note="reads shapes, or which elements are zero: any precision is exact")),
)

ROWS = (
    # Layers.
    ("Convolution", _CHANNELS_LAST,
     Rule(LOWER, min_channels=16, note="bfloat16 convolutions run about 2x as fast as FP32 from 16 input channels on"),
     Rule(FP32, cause=Cause.CHANNELS,
          note="with fewer than 16 input channels bfloat16 is not faster, and leaves its output in plain layout, which "
               "slows down the operators after it")),
    ("FullyConnected", Rule(LOWER, note="bfloat16 matrix products run about 2x as fast as FP32")),
    ("Deconvolution",
     Rule(FP32, safe=False,
          note="its backward ends the process when the weight is not a parameter itself, as behind a cast")),
    (("RNN", *groups.ATTENTION), _NO_KERNEL),
    (groups.ONEDNN_SUBGRAPHS, Rule(FP32, safe=False, note="fused for FP32 and eight-bit inference")),
    (groups.BATCH_NORMS,
     Rule(NEUTRAL, fp32_inputs=(1, 2, 3, 4),
          note="oneDNN normalises bfloat16 data with FP32 scale, shift and statistics")),
    (("_contrib_SyncBatchNorm", *groups.NORMS), _NO_KERNEL),
    ("Activation", Rule(FP32, when=("act_type", ("softsign",)), safe=False, note=_NO_KERNEL.note), _NATIVE),
    ("LeakyReLU", Rule(FP32, when=("act_type", ("prelu", "selu", "rrelu")), safe=False, note=_NO_KERNEL.note), _NATIVE),
    ("Pooling", Rule(FP32, when=("pool_type", ("sum", "lp")), safe=False, note=_NO_KERNEL.note), _CHANNELS_LAST,
     _NATIVE),
    ("LRN", _NATIVE),
    (groups.RELU, _MOVES),
    ((*groups.PIECEWISE_SIGMOIDS, "Dropout", "UpSampling"), _NO_KERNEL),
    (("_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D"), _WRONG),
    (groups.OLD_LAYERS, Rule(FP32, safe=False, note="superseded: nothing shows that it is right in bfloat16")),
    (groups.SOFTMAX,
     Rule(FP32, when=("dtype", ("float32", "float64", "float16")), safe=False,
          note="MXNet's bfloat16 kernel does not convert types"),
     Rule(FP32, when=("use_length", ("True", "1")), safe=False, note=_NO_KERNEL.note),
     _LOSS),
    ((*groups.LOSS_OUTPUTS, *groups.LOSSES), Rule(FP32, safe=False, note=_LOSS.note)),
    (groups.EMBEDDINGS, _WRONG),
    (groups.SEQUENCES,
     Rule(NEUTRAL, fp32_inputs=(1,),
          note="moves data only; lengths stay FP32: bfloat16 counts exactly up to 256 only")),
    ((*groups.BOXES, *groups.GRIDS), _NO_KERNEL),
    # Arithmetic.
    ((*groups.PLAIN_PRODUCTS, *groups.BATCHED_PRODUCTS, "_npi_einsum", *groups.LINEAR_ALGEBRA, *groups.TRANSFORMS),
     _NO_KERNEL),
    ("clip", _MOVES),
    ((*groups.SELECTS, *groups.ROUNDING, *groups.SELECTION, *groups.SCALAR_COMPARISONS, *groups.COMPARISONS,
      "_npi_around", *groups.SPARSE_ARITHMETIC), _PLAIN),
    (groups.ELEMWISE_ADDITIONS, Rule(WIDEST, note="native bfloat16 kernel; mixed inputs widen")),
    ((*groups.NUMPY_DIVISIONS, "_npi_true_divide_scalar", "_npi_hypot", "_npi_arctan2",
      *groups.NUMPY_SUMS, *groups.SCALAR_COPYSIGN, "_npi_nan_to_num", "_contrib_allclose"), _NO_KERNEL),
    (groups.OTHER_REDUCTIONS, _UNSOUND),
    ((*groups.BOUNDED, *groups.EXPONENTIALS, *groups.STEEP, *groups.SCALAR_ARITHMETIC, *groups.ADDITIONS, "_grad_add"),
     _TRUNCATES),
    (("_histogram", "_npi_bincount"), _POSITIONS),
    ((*groups.SUMS, *groups.NORMS_OF_TENSORS, "_np_cumsum", *groups.REMAINDERS), _WRONG),
    # Everything else.
    *SHAPES,
    (groups.GRADIENT_CHECKS, _NO_KERNEL),
    (groups.SAMPLES, Rule(FP32, safe=False, note="distributions and their parameters need FP32's resolution")),
)

SLOW_IN_TRAINING = (
    (("clip", *groups.RELU),
     Rule(FP32, note="MXNet's bfloat16 kernel takes one element at a time, longer than FP32 with its casts")),
    ("LRN", Rule(FP32, note="its gradient takes three times as long in bfloat16 as in FP32")),
)
