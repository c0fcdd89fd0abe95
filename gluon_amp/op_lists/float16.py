"""Operator rules for float16 on CUDA GPUs: products on Tensor Cores, what needs range or resolution in FP32.

What has a float16 kernel is read off the type switches in MXNet's sources, and off the errors that operators
sharing their code with the CPU raise there.
"""
from __future__ import annotations

from .groups import arithmetic, layers, shapes, system
from .kept import KEPT
from .records import FP32, KEEP, LOWER, NEUTRAL, WIDEST, OpRule, rules

_TENSOR_CORES = OpRule("", LOWER, note="matrix product: Tensor Cores take float16 and accumulate in FP32")
_ELEMENTWISE = OpRule("", NEUTRAL, note="bound by memory: follows its data")
_MOVES = OpRule("", NEUTRAL, note="moves data only: any precision is exact")
_SHAPED = OpRule("", NEUTRAL, note="moves data only; of the other tensor it reads the shape")
_SELECTS = OpRule("", NEUTRAL, note="picks values or judges them: exact in the precision of its data")
_INDEXED = OpRule("", NEUTRAL, fp32_inputs=(1,),
                  note="moves data only; indices stay FP32: float16 counts exactly up to 2048 only")
_MIXES = OpRule("", WIDEST, note="mixed inputs widen to FP32")
_CHOOSES = OpRule("", WIDEST, fp32_inputs=(0,), note="moves data only; mixed inputs widen to FP32")
_RANGE = OpRule("", FP32, note="results leave float16's range easily")
_STEEP = OpRule("", FP32, note="steep: magnifies the rounding of its inputs")
_REDUCES = OpRule("", FP32, note="sums of many values need FP32's range and resolution")
_LOSS = OpRule("", FP32, note="probabilities and losses need FP32's resolution")
_BOXES = OpRule("", FP32, note="box coordinates and scores need FP32's resolution")
_COORDINATES = OpRule("", FP32, note="coordinates between pixels need FP32's resolution")
_POSITIONS = OpRule("", FP32, note="positions and counts are exact up to 2048 only in float16")
_RARE = OpRule("", FP32, note="rare in networks: FP32 is safe and costs little")
_RANDOM = OpRule("", FP32, note="distributions and their parameters need FP32's range and resolution")
_NO_KERNEL = OpRule("", FP32, safe=False, note="MXNet has no float16 kernel for it")
_USER_CODE = OpRule("", FP32, note="written for FP32 unless its author says otherwise")
_SUBGRAPHS = OpRule("", FP32, safe=False, note="its subgraph was built for the precision that the program gives it")
_INTEGERS = OpRule("", FP32, safe=False, note="eight-bit arithmetic with ranges in FP32")

LAYERS = (
    *rules((*layers.CONVOLUTION, *layers.DECONVOLUTION, *layers.FULLY_CONNECTED, *layers.RECURRENT, *layers.ATTENTION),
           _TENSOR_CORES),
    *rules(layers.ONEDNN_SUBGRAPHS, OpRule("", FP32, safe=False, note="exists on the CPU only")),
    *rules(layers.DEFORMABLE_CONVOLUTIONS, _COORDINATES),
    *rules(layers.BATCH_NORMS, OpRule("", NEUTRAL, fp32_inputs=(1, 2, 3, 4),
                                      note="cuDNN normalises float16 data with FP32 scale, shift and statistics")),
    *rules(layers.SYNC_BATCH_NORM, _NO_KERNEL),
    *rules((*layers.NORMS, *layers.LOCAL_NORM, *layers.ADAPTIVE_POOLING), _REDUCES),
    *rules(layers.ACTIVATION, OpRule("", FP32, when=("act_type", ("softrelu",)), note=_RANGE.note)),
    *rules(layers.LEAKY_RELU, OpRule("", FP32, when=("act_type", ("elu", "selu")), note=_RANGE.note)),
    *rules(layers.LEAKY_RELU, OpRule("", WIDEST, when=("act_type", ("prelu",)), note=_MIXES.note)),
    *rules((*layers.ACTIVATION, *layers.LEAKY_RELU, *layers.RELU, *layers.SIGMOIDS, *layers.PIECEWISE_SIGMOIDS,
            *layers.DROPOUT, *layers.POOLING, *layers.RESIZING), _ELEMENTWISE),
    *rules(layers.OLD_LAYERS, OpRule("", FP32, note="superseded: its float16 kernels are not kept up")),
    *rules((*layers.SOFTMAX, *layers.OTHER_SOFTMAX, *layers.LOSS_OUTPUTS, *layers.LOSSES), _LOSS),
    *rules(layers.EMBEDDINGS, OpRule("", NEUTRAL, fp32_inputs=(0,),
                                     note="reads rows of its weight, in the weight's precision; indices stay FP32")),
    *rules(layers.SEQUENCES, _INDEXED),
    *rules((*layers.BOXES, *layers.REGIONS), _BOXES),
    *rules(layers.GRIDS, _COORDINATES),
)

ARITHMETIC = (
    *rules(arithmetic.MATRIX_PRODUCTS, _TENSOR_CORES),
    *rules((*arithmetic.GEMM, *arithmetic.LINEAR_ALGEBRA, *arithmetic.KHATRI_RAO), _NO_KERNEL),
    *rules((*arithmetic.BOUNDED, *arithmetic.SCALAR_ARITHMETIC, *arithmetic.NUMPY_SCALAR_DIVISION), _ELEMENTWISE),
    *rules((*arithmetic.ABSOLUTE, *arithmetic.CLIPPING, *arithmetic.NEGATION, *arithmetic.SIGNS, *arithmetic.ROUNDING,
            *arithmetic.SCALAR_SELECTION, *arithmetic.SCALAR_COPYSIGN, *arithmetic.SCALAR_COMPARISONS,
            *arithmetic.PREDICATES, *arithmetic.NAN_TO_NUM, *arithmetic.EXTREMES), _SELECTS),
    *rules((*arithmetic.EXPONENTIALS, *arithmetic.POWERS, *arithmetic.NUMPY_HYPOT, *arithmetic.DIVISIONS,
            *arithmetic.NUMPY_DIVISIONS), _RANGE),
    *rules((*arithmetic.STEEP, *arithmetic.NUMPY_ARCTAN2, *arithmetic.REMAINDERS, *arithmetic.DECIMALS), _STEEP),
    *rules((*arithmetic.ELEMWISE_ADDITIONS, *arithmetic.ADDITIONS, *arithmetic.GRADIENT_SUM, *arithmetic.SELECTION,
            *arithmetic.COMPARISONS), _MIXES),
    *rules((*arithmetic.SUMS, *arithmetic.NUMPY_SUMS, *arithmetic.NORMS_OF_TENSORS, *arithmetic.CUMULATIVE_SUM,
            *arithmetic.OTHER_REDUCTIONS, *arithmetic.TRANSFORMS), _REDUCES),
    *rules(arithmetic.HISTOGRAMS, _POSITIONS),
    *rules((*arithmetic.CLOSENESS, *arithmetic.SPARSE_ARITHMETIC), _RARE),
)

SHAPES = (
    *rules((*shapes.IDENTITIES, *shapes.RESHAPES, *shapes.FLATTENING, *shapes.TRANSPOSE, *shapes.SWAPS,
            *shapes.MOVED_AXES, *shapes.REVERSALS, *shapes.BLOCKS, *shapes.SPLITS, *shapes.AXIS_SLICES,
            *shapes.SLICES, *shapes.REPETITIONS, *shapes.NUMPY_BROADCAST, *shapes.PADDING, *shapes.NUMPY_PADDING,
            *shapes.DIAGONALS, *shapes.PATCHES, *shapes.SHUFFLES, *shapes.FILLED_LIKE), _MOVES),
    *rules((*shapes.SLICE_LIKE, *shapes.RESHAPE_LIKE, *shapes.BROADCAST_LIKE), _SHAPED),
    *rules((*shapes.JOINS, *shapes.RNN_PARAMETERS), _MIXES),
    *rules((*shapes.WHERE, *shapes.NUMPY_WHERE), _CHOOSES),
    *rules(shapes.NUMPY_WHERE_SCALAR, OpRule("", NEUTRAL, fp32_inputs=(0,), note=_MOVES.note)),
    *rules((*shapes.PICK, *shapes.TAKE, *shapes.GATHERS), _INDEXED),
    *rules(shapes.SCATTERS, OpRule("", WIDEST, fp32_inputs=(1,), note=_INDEXED.note)),
    *rules(shapes.CROPS, _NO_KERNEL),
    *rules((*shapes.SORTING, *shapes.ARGMAX, *shapes.INDICES, *shapes.POSITIONS), _POSITIONS),
    *rules((*shapes.INSERTIONS, *shapes.FULL_LIKE), _RARE),
    *rules(shapes.SHAPES, OpRule("", NEUTRAL, note="reads shapes, or which elements are zero: any precision is exact")),
)

SYSTEM = (
    *rules(system.GRADIENT_CHECKS, OpRule("", KEEP, note="looks at gradients as they are")),
    *rules((*system.SAMPLES, *system.DENSITIES), _RANDOM),
    *rules(system.QUANTIZED, _INTEGERS),
    *rules(system.CONTROL_FLOW, _SUBGRAPHS),
    *rules(system.USER_CODE, _USER_CODE),
)

TABLE: tuple[OpRule, ...] = (*LAYERS, *ARITHMETIC, *SHAPES, *SYSTEM, *KEPT)
