"""Operator rules for bfloat16 on the CPU, where oneDNN 2.4.4 supplies the fast kernels.

Derived from docs/operator_audit.md, in which each operator ran forward and backward: eager, in a CachedOp, with
static allocation, in plain and in blocked layouts. Only oneDNN's own kernels and those that move data run in bfloat16.
"""
from __future__ import annotations

from .groups import arithmetic, layers, shapes, system
from .kept import KEPT
from .records import FP32, LOWER, NEUTRAL, WIDEST, OpRule, rules

_CHANNELS_LAST = ("NHWC", "NWC", "NDHWC")

_NATIVE = OpRule("", NEUTRAL, note="native bfloat16 kernel")
_NATIVE_SUM = OpRule("", WIDEST, note="native bfloat16 kernel; mixed inputs widen")
_MOVES = OpRule("", NEUTRAL, note="moves data only: any precision is exact")
_JOINS = OpRule("", WIDEST, note="moves data only; mixed inputs widen to FP32")
_NO_KERNEL = OpRule("", FP32, safe=False, note="MXNet has no bfloat16 kernel for it")
_WRONG = OpRule("", FP32, safe=False, note="MXNet's bfloat16 kernel gives wrong values")
_UNSOUND = OpRule("", FP32, safe=False, note="MXNet's bfloat16 kernels for it fail, or lose precision")
_CORRUPTS = OpRule("", FP32, safe=False, note="MXNet's bfloat16 kernel corrupts memory")
_BLOCKED = OpRule("", FP32, safe=False, note="MXNet's bfloat16 kernel fails on tensors in oneDNN's blocked layout")
_TRUNCATES = OpRule("", FP32, note="MXNet's bfloat16 kernel truncates and accumulates in bfloat16")
_PLAIN = OpRule("", FP32, note="right in bfloat16, but a plain kernel without oneDNN: nothing is gained")
_LOSS = OpRule("", FP32, note="probabilities and losses need FP32's resolution")
_POSITIONS = OpRule("", FP32, safe=False, note="positions and counts are exact up to 256 only in bfloat16")
_CHANNELS = OpRule("", FP32, when=("layout", _CHANNELS_LAST), safe=False,
                   note="oneDNN is not used for this layout, and MXNet has no other bfloat16 kernel")

LAYERS = (
    *rules(layers.CONVOLUTION, _CHANNELS),
    *rules(layers.CONVOLUTION, OpRule("", LOWER, min_channels=16, note="bfloat16 convolutions run about 2x as fast as "
                                                                       "FP32 from 16 input channels on")),
    *rules(layers.CONVOLUTION, OpRule("", FP32, note="with fewer than 16 input channels bfloat16 gains nothing and "
                                                     "leaves its output in plain layout, which slows down the "
                                                     "operators after it")),
    *rules(layers.FULLY_CONNECTED, OpRule("", LOWER, note="bfloat16 matrix products run about 2x as fast as FP32")),
    *rules(layers.DECONVOLUTION, OpRule("", FP32, safe=False,
                                        note="its backward ends the process when the weight is not a parameter itself, "
                                             "as behind a cast")),
    *rules((*layers.RECURRENT, *layers.ATTENTION, *layers.DEFORMABLE_CONVOLUTIONS), _NO_KERNEL),
    *rules(layers.ONEDNN_SUBGRAPHS, OpRule("", FP32, safe=False, note="fused for FP32 and eight-bit inference")),
    *rules(layers.BATCH_NORMS, OpRule("", NEUTRAL, fp32_inputs=(1, 2, 3, 4),
                                      note="oneDNN normalises bfloat16 data with FP32 scale, shift and statistics")),
    *rules((*layers.SYNC_BATCH_NORM, *layers.NORMS), _NO_KERNEL),
    *rules(layers.ACTIVATION, OpRule("", FP32, when=("act_type", ("softsign",)), safe=False, note=_NO_KERNEL.note)),
    *rules(layers.LEAKY_RELU, OpRule("", FP32, when=("act_type", ("prelu", "selu", "rrelu")), safe=False,
                                     note=_NO_KERNEL.note)),
    *rules(layers.POOLING, OpRule("", FP32, when=("pool_type", ("sum", "lp")), safe=False, note=_NO_KERNEL.note)),
    *rules(layers.POOLING, _CHANNELS),
    *rules((*layers.LOCAL_NORM, *layers.ACTIVATION, *layers.LEAKY_RELU, *layers.POOLING), _NATIVE),
    *rules(layers.RELU, _MOVES),
    *rules(layers.SIGMOIDS, _TRUNCATES),
    *rules((*layers.PIECEWISE_SIGMOIDS, *layers.DROPOUT), _NO_KERNEL),
    *rules(layers.ADAPTIVE_POOLING, _WRONG),
    OpRule("UpSampling", FP32, safe=False, note=_NO_KERNEL.note),
    OpRule("_contrib_BilinearResize2D", FP32, safe=False, note=_WRONG.note),
    *rules(layers.OLD_LAYERS, OpRule("", FP32, safe=False, note="superseded: nothing shows that it is right in "
                                                                "bfloat16")),
    *rules(layers.SOFTMAX, OpRule("", FP32, when=("dtype", ("float32", "float64", "float16")), safe=False,
                                  note="MXNet's bfloat16 kernel does not convert types")),
    *rules(layers.SOFTMAX, OpRule("", FP32, when=("use_length", ("True", "1")), safe=False, note=_NO_KERNEL.note)),
    *rules(layers.SOFTMAX, _LOSS),
    *rules((*layers.OTHER_SOFTMAX, *layers.LOSS_OUTPUTS, *layers.LOSSES),
           OpRule("", FP32, safe=False, note=_LOSS.note)),
    *rules(layers.EMBEDDINGS, _WRONG),
    *rules(layers.SEQUENCES, OpRule("", NEUTRAL, fp32_inputs=(1,), note="moves data only; lengths stay FP32: bfloat16 "
                                                                        "counts exactly up to 256 only")),
    *rules((*layers.BOXES, *layers.REGIONS, *layers.GRIDS), _NO_KERNEL),
)

ARITHMETIC = (
    *rules((*arithmetic.MATRIX_PRODUCTS, *arithmetic.GEMM, *arithmetic.LINEAR_ALGEBRA, *arithmetic.KHATRI_RAO,
            *arithmetic.TRANSFORMS), _NO_KERNEL),
    *rules((*arithmetic.ABSOLUTE, *arithmetic.CLIPPING, *arithmetic.NEGATION), _MOVES),
    *rules((*arithmetic.SIGNS, *arithmetic.ROUNDING, *arithmetic.SCALAR_SELECTION, *arithmetic.SELECTION,
            *arithmetic.EXTREMES, *arithmetic.SCALAR_COMPARISONS, *arithmetic.COMPARISONS, *arithmetic.PREDICATES,
            *arithmetic.DECIMALS, *arithmetic.SPARSE_ARITHMETIC), _PLAIN),
    *rules(arithmetic.ELEMWISE_ADDITIONS, _NATIVE_SUM),
    *rules((*arithmetic.NUMPY_DIVISIONS, *arithmetic.NUMPY_SCALAR_DIVISION, *arithmetic.NUMPY_HYPOT,
            *arithmetic.NUMPY_ARCTAN2, *arithmetic.NUMPY_SUMS, *arithmetic.SCALAR_COPYSIGN, *arithmetic.NAN_TO_NUM,
            *arithmetic.CLOSENESS), _NO_KERNEL),
    *rules(arithmetic.OTHER_REDUCTIONS, _UNSOUND),
    *rules((*arithmetic.BOUNDED, *arithmetic.EXPONENTIALS, *arithmetic.POWERS, *arithmetic.STEEP,
            *arithmetic.DIVISIONS, *arithmetic.SCALAR_ARITHMETIC, *arithmetic.ADDITIONS, *arithmetic.GRADIENT_SUM),
           _TRUNCATES),
    *rules((*arithmetic.SUMS, *arithmetic.NORMS_OF_TENSORS, *arithmetic.CUMULATIVE_SUM, *arithmetic.REMAINDERS),
           _WRONG),
    *rules(arithmetic.HISTOGRAMS, _POSITIONS),
)

SHAPES = (
    *rules((*shapes.IDENTITIES, *shapes.FLATTENING, *shapes.SWAPS, *shapes.REVERSALS, *shapes.BLOCKS, *shapes.SPLITS,
            *shapes.AXIS_SLICES), _MOVES),
    *rules(shapes.JOINS, _JOINS),
    *rules(shapes.SLICE_LIKE, OpRule("", NEUTRAL, note="moves data only; of the other tensor it reads the shape")),
    *rules(shapes.WHERE, OpRule("", WIDEST, fp32_inputs=(0,), note=_JOINS.note)),
    *rules((*shapes.RESHAPES, *shapes.RESHAPE_LIKE, *shapes.SLICES), _BLOCKED),
    *rules(shapes.TRANSPOSE, _CORRUPTS),
    *rules((*shapes.NUMPY_WHERE, *shapes.NUMPY_WHERE_SCALAR, *shapes.CROPS, *shapes.PADDING, *shapes.PATCHES),
           _NO_KERNEL),
    *rules((*shapes.SORTING, *shapes.GATHERS), _UNSOUND),
    *rules((*shapes.REPETITIONS, *shapes.BROADCAST_LIKE), _TRUNCATES),
    *rules(shapes.NUMPY_BROADCAST, _NO_KERNEL),
    *rules((*shapes.MOVED_AXES, *shapes.DIAGONALS, *shapes.FILLED_LIKE, *shapes.NUMPY_PADDING, *shapes.SCATTERS,
            *shapes.FULL_LIKE), _PLAIN),
    *rules(shapes.PICK, OpRule("", FP32, note="reads few values, most often of a loss")),
    *rules(shapes.TAKE, _WRONG),
    *rules((*shapes.ARGMAX, *shapes.INDICES, *shapes.POSITIONS), _POSITIONS),
    *rules(shapes.RNN_PARAMETERS, OpRule("", FP32, note="the recurrent layer that it feeds runs in FP32")),
    *rules(shapes.INSERTIONS, OpRule("", FP32, note="rare in networks: FP32 is safe and costs little")),
    *rules(shapes.SHUFFLES, OpRule("", FP32, safe=False, note="random: nothing shows that it is right in bfloat16")),
    *rules(shapes.SHAPES, OpRule("", NEUTRAL, note="reads shapes, or which elements are zero: any precision is exact")),
)

SYSTEM = (
    *rules(system.GRADIENT_CHECKS, _NO_KERNEL),
    *rules((*system.SAMPLES, *system.DENSITIES),
           OpRule("", FP32, safe=False, note="distributions and their parameters need FP32's resolution")),
    *rules(system.QUANTIZED, OpRule("", FP32, safe=False, note="eight-bit arithmetic with ranges in FP32")),
    *rules(system.CONTROL_FLOW, OpRule("", FP32, safe=False,
                                       note="its subgraph was built for the precision that the program gives it")),
    *rules(system.USER_CODE, OpRule("", FP32, note="written for FP32 unless its author says otherwise")),
)

TABLE: tuple[OpRule, ...] = (*LAYERS, *ARITHMETIC, *SHAPES, *SYSTEM, *KEPT)
