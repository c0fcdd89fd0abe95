"""Operators that are not run, each with the reason."""
from __future__ import annotations

import re


def is_backward(op: str) -> bool:
    """Tell whether an operator exists only as the gradient of another one, with which it runs."""
    return "backward" in op


CUDA_ONLY = ("CuDNNBatchNorm", "_FusedOp", "_FusedOpHelper", "_FusedOpOutHelper", "_contrib_mrcnn_mask_target")

_PATTERNS = (
    (r"_(CrossDeviceCopy|CustomFunction|NDArray|Native|NoGradient)$", "internal: made by the engine, not callable"),
    (r"_npi_boolean_mask_assign_(scalar|tensor)$|_scatter_set_nd$",
     "writes into its first input in place: called by indexed assignment only"),
    (r"(_square_sum|cast_storage|_sparse_retain)$", "sparse storage: bfloat16 has none"),
    (r"Custom$", "runs the user's Python code, in the types that code declares"),
    (r"_sg_mkldnn_(conv|fully_connected)$",
     "made by MXNet's oneDNN graph partitioning for inference, needs a subgraph attribute"),
    (r"_copyto$", "a copy between arrays of the same type, called by NDArray.copyto only"),
    (r"_set_value$", "fills an array: no data input"),
    (r"_onehot_encode$", "deprecated function that writes into its second argument"),
    (r"_npx_constraint_check$", "takes a boolean"),
    (r"_npi_where_scalar2$", "takes a boolean condition and two numbers"),
    (r"reset_arrays$", "writes zeros into its inputs"),
    (r"_contrib_hawkesll$", "event sequences with integer marks, for point processes: not used in networks"),
    (r"(multi_|preloaded_|mp_|_multi_|_contrib_group_|_sparse_|_mp_)*(mp_)?"
     r"(adam|adamw|ftml|ftrl|lamb|nag_mom|rmsprop|rmspropalex|sgd|sgd_mom|signsgd|signum|adagrad|_adamw)"
     r"_update(_phase[12])?$", "optimizer update: weights and gradients have the types the optimizer gives them"),
    (r"_?multi_(mp_)?(adamw|lamb)_update$|_adamw_update$|multi_lars$", "optimizer update"),
    (r"_random_(?!pdf)|_sample_|_npi_(bernoulli|choice|exponential|gamma|gumbel|logistic|multinomial|normal|normal_n|"
     r"pareto|powerd|rayleigh|uniform|uniform_n|weibull)$|_shuffle$",
     "draws random numbers: results of different types are not comparable"),
    (r"_image_random_", "image augmentation with random numbers, before the network"),
    (r"_cv|_imdecode$", "reads or resizes images on the host, of 8-bit integers"),
    (r"_contrib_(quantize|quantized|dequantize|requantize|calibrate)", "8-bit quantisation"),
    (r"_contrib_dgl_|_contrib_edge_id$|_contrib_getnnz$", "takes sparse graphs (CSR)"),
    (r"_(foreach|while_loop|cond)$", "control flow: runs the operators of its subgraphs, by their own rules"),
    (r"(_npi_)?(_?)(arange|eye|full|linspace|logspace|ones|zeros|zeros_without_dtype|identity|indices|blackman|hamming|"
     r"hanning)$", "creates an array: no data input"),
    (r"_npi_(bitwise|lcm)", "integers only"),
    (r"_CachedOp", "runs a graph: each operator in it by its own rules"),
    (f"({'|'.join(CUDA_ONLY)})$", "in the CUDA build of MXNet only"),
)


def reason_of(op: str) -> str | None:
    """Say why an operator is not run; None for those that should have samples."""
    return next((reason for pattern, reason in _PATTERNS if re.match(pattern, op)), None)
