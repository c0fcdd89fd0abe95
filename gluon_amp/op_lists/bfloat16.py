"""Operator rules for bfloat16 on the CPU, where oneDNN 2.4.4 supplies the fast kernels.

Derived from running each operator forward and backward on MXNet 1.9.1: eager, in a CachedOp, and with
static allocation. Operators in no record run in FP32.
"""
from __future__ import annotations

from .records import FP32, LOWER, NEUTRAL, WIDEST, OpRule, rules

_BATCH_NORM = OpRule("", NEUTRAL, fp32_inputs=(1, 2, 3, 4),
                     note="oneDNN normalises bfloat16 data with FP32 scale, shift and statistics")
_NO_KERNEL = OpRule("", FP32, safe=False, note="MXNet has no bfloat16 kernel for it")
_WRONG = OpRule("", FP32, safe=False, note="MXNet's bfloat16 kernel gives wrong values")
_BLOCKED = OpRule("", FP32, safe=False,
                  note="MXNet's bfloat16 kernel fails on tensors in oneDNN's blocked layout")
_TRUNCATES = OpRule("", FP32, note="MXNet's bfloat16 kernel truncates and accumulates in bfloat16")
_MOVES = OpRule("", NEUTRAL, note="moves data only: any precision is exact")

_CHANNELS_LAST = ("NHWC", "NWC", "NDHWC")

TABLE: tuple[OpRule, ...] = (
    # Arithmetic that pays.
    OpRule("Convolution", FP32, when=("layout", _CHANNELS_LAST), note="oneDNN is not used for this layout"),
    OpRule("Convolution", LOWER, min_channels=16,
           note="bfloat16 convolutions run about 2x as fast as FP32 from 16 input channels on"),
    OpRule("Convolution", FP32, note="with fewer than 16 input channels bfloat16 gains nothing and leaves its output "
                                     "in plain layout, which slows down the operators after it"),
    OpRule("FullyConnected", LOWER, note="bfloat16 matrix products run about 2x as fast as FP32"),

    # Native kernels whose precision follows their data.
    *rules(("BatchNorm", "_contrib_BatchNormWithReLU"), _BATCH_NORM),
    OpRule("LRN", NEUTRAL, note="native bfloat16 kernel"),
    OpRule("Activation", FP32, when=("act_type", ("softsign",)), safe=False, note=_NO_KERNEL.note),
    OpRule("Activation", NEUTRAL, note="native bfloat16 kernel"),
    OpRule("LeakyReLU", FP32, when=("act_type", ("prelu", "selu", "rrelu")), safe=False, note=_NO_KERNEL.note),
    OpRule("LeakyReLU", NEUTRAL, note="native bfloat16 kernel"),
    OpRule("Pooling", FP32, when=("pool_type", ("sum", "lp")), safe=False, note=_NO_KERNEL.note),
    OpRule("Pooling", FP32, when=("layout", _CHANNELS_LAST), note="oneDNN is not used for this layout"),
    OpRule("Pooling", NEUTRAL, note="native bfloat16 kernel"),
    *rules(("elemwise_add", "add_n", "Concat"), OpRule("", WIDEST, note="native bfloat16 kernel; mixed inputs widen")),

    # Exact in any precision.
    *rules(("relu", "clip", "abs", "_copy", "BlockGrad", "Flatten", "SliceChannel", "slice_axis", "SwapAxis",
            "squeeze", "reverse", "depth_to_space", "space_to_depth", "_split_v2"), _MOVES),
    *rules(("stack", "where", "slice_like"), OpRule("", WIDEST, note=_MOVES.note)),

    # FP32, each for its reason.
    OpRule("transpose", FP32, safe=False, note="MXNet's bfloat16 kernel corrupts memory"),
    OpRule("Deconvolution", FP32, safe=False,
           note="its backward ends the process when the weight is not a parameter itself, as behind a cast"),
    *rules(("Reshape", "reshape_like", "expand_dims"), _BLOCKED),
    *rules(("norm", "_np_cumsum", "_contrib_AdaptiveAvgPooling2D", "Embedding", "take", "argmax", "argmin",
            "_contrib_arange_like"), _WRONG),
    *rules(("dot", "batch_dot", "_linalg_gemm", "_linalg_gemm2", "_contrib_interleaved_matmul_selfatt_qk",
            "_contrib_interleaved_matmul_selfatt_valatt", "_contrib_interleaved_matmul_encdec_qk",
            "_contrib_interleaved_matmul_encdec_valatt", "RNN", "LayerNorm", "GroupNorm", "InstanceNorm",
            "L2Normalization", "_contrib_SyncBatchNorm", "Dropout", "Pad", "UpSampling", "hard_sigmoid",
            "SoftmaxOutput", "SoftmaxActivation", "LinearRegressionOutput", "LogisticRegressionOutput",
            "MAERegressionOutput", "CTCLoss", "sort", "argsort", "_contrib_box_nms", "_contrib_box_iou",
            "_contrib_MultiBoxPrior", "_contrib_MultiBoxTarget", "_contrib_MultiBoxDetection", "ROIPooling",
            "_contrib_ROIAlign", "_contrib_DeformableConvolution", "_contrib_ModulatedDeformableConvolution",
            "gather_nd", "Crop", "moments"), _NO_KERNEL),
    *rules(("sigmoid", "tanh", "exp", "log", "sqrt", "square", "_plus_scalar", "_minus_scalar", "_rminus_scalar",
            "_mul_scalar", "_div_scalar", "_rdiv_scalar", "_power_scalar", "elemwise_sub", "elemwise_mul",
            "elemwise_div", "broadcast_add", "broadcast_sub", "broadcast_mul", "broadcast_div", "sum", "mean",
            "tile", "repeat", "broadcast_to", "broadcast_like", "broadcast_axis", "_contrib_BilinearResize2D"),
           _TRUNCATES),
    *rules(("softmax", "log_softmax", "softmin", "softmax_cross_entropy"),
           OpRule("", FP32, note="probabilities and losses need FP32's resolution")),
)
