"""Operator rules for float16 on CUDA GPUs. Operators in no record run in FP32."""
from __future__ import annotations

from .records import FP32, LOWER, NEUTRAL, WIDEST, OpRule, rules

_TENSOR_CORES = OpRule("", LOWER, note="matrix product: Tensor Cores take float16 and accumulate in FP32")
_ELEMENTWISE = OpRule("", NEUTRAL, note="bound by memory: follows its data")
_MOVES = OpRule("", NEUTRAL, note="moves data only: any precision is exact")
_MIXES = OpRule("", WIDEST, note="mixed inputs widen to FP32")
_RANGE = OpRule("", FP32, note="results leave float16's range easily")
_REDUCES = OpRule("", FP32, note="sums of many values need FP32's range and resolution")
_LOSS = OpRule("", FP32, note="probabilities and losses need FP32's resolution")
_DETECTION = OpRule("", FP32, note="box coordinates and scores need FP32's resolution")

TABLE: tuple[OpRule, ...] = (
    *rules(("Convolution", "Deconvolution", "FullyConnected", "RNN", "dot", "batch_dot", "_linalg_gemm2",
            "_contrib_interleaved_matmul_selfatt_qk", "_contrib_interleaved_matmul_selfatt_valatt",
            "_contrib_interleaved_matmul_encdec_qk", "_contrib_interleaved_matmul_encdec_valatt"), _TENSOR_CORES),
    *rules(("BatchNorm", "_contrib_BatchNormWithReLU"),
           OpRule("", NEUTRAL, fp32_inputs=(1, 2, 3, 4),
                  note="cuDNN normalises float16 data with FP32 scale, shift and statistics")),
    OpRule("Activation", FP32, when=("act_type", ("softrelu",)), note=_RANGE.note),
    OpRule("LeakyReLU", FP32, when=("act_type", ("elu", "selu")), note=_RANGE.note),
    OpRule("LeakyReLU", WIDEST, when=("act_type", ("prelu",)), note=_MIXES.note),
    *rules(("Activation", "LeakyReLU", "Pooling", "Dropout", "relu", "sigmoid", "tanh", "clip", "abs",
            "_plus_scalar", "_minus_scalar", "_rminus_scalar", "_mul_scalar", "_div_scalar", "_maximum_scalar",
            "_minimum_scalar", "hard_sigmoid"), _ELEMENTWISE),
    *rules(("_copy", "BlockGrad", "Flatten", "Reshape", "SliceChannel", "_split_v2", "slice", "slice_axis", "SwapAxis",
            "transpose", "expand_dims", "squeeze", "reverse", "tile", "repeat", "Pad", "broadcast_to",
            "broadcast_axis", "depth_to_space", "space_to_depth", "max", "min", "UpSampling",
            "_contrib_BilinearResize2D"), _MOVES),
    *rules(("elemwise_add", "elemwise_sub", "elemwise_mul", "add_n", "Concat", "stack", "where", "slice_like",
            "reshape_like", "broadcast_like", "broadcast_add", "broadcast_sub", "broadcast_mul", "broadcast_maximum",
            "broadcast_minimum"), _MIXES),
    *rules(("exp", "expm1", "log", "log1p", "log2", "log10", "square", "sqrt", "rsqrt", "cbrt", "rcbrt", "reciprocal",
            "_power_scalar", "_rpower_scalar", "_rdiv_scalar", "broadcast_power", "broadcast_div", "elemwise_div",
            "gamma", "gammaln", "erfinv", "cosh", "sinh", "tan"), _RANGE),
    *rules(("sum", "mean", "prod", "nansum", "nanprod", "norm", "moments", "LayerNorm", "GroupNorm", "InstanceNorm",
            "L2Normalization", "LRN", "_contrib_AdaptiveAvgPooling2D"), _REDUCES),
    OpRule("_contrib_SyncBatchNorm", FP32, safe=False, note="MXNet has no float16 kernel for it"),
    *rules(("softmax", "log_softmax", "softmin", "SoftmaxActivation", "SoftmaxOutput", "softmax_cross_entropy",
            "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput", "CTCLoss", "smooth_l1",
            "MakeLoss", "make_loss"), _LOSS),
    *rules(("_contrib_box_nms", "_contrib_box_iou", "_contrib_MultiBoxPrior", "_contrib_MultiBoxTarget",
            "_contrib_MultiBoxDetection", "ROIPooling", "_contrib_ROIAlign", "_contrib_Proposal",
            "_contrib_MultiProposal"), _DETECTION),
)
