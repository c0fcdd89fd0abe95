"""Operators that are not run, each with the reason."""
from __future__ import annotations

import re

from ..records import merge

__all__ = ["is_backward", "reason_of"]


def is_backward(op: str) -> bool:
    """Whether an operator exists only as the gradient of another one.

    MXNet registers those under names with ``backward`` in them, most of them beginning with ``_backward_``; they are
    run whenever the forward operator's gradient is, and cannot be called by users.

    Examples
    --------
    >>> is_backward('_backward_Convolution'), is_backward('_split_v2_backward'), is_backward('Convolution')
    (True, True, False)
    """
    return "backward" in op


_PATTERNS = (
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
)
_NAMED = merge(
    dict.fromkeys(("_CrossDeviceCopy", "_CustomFunction", "_NDArray", "_Native", "_NoGradient"),
                  "internal: made by the engine, not callable"),
    dict.fromkeys(("_npi_boolean_mask_assign_scalar", "_npi_boolean_mask_assign_tensor", "_scatter_set_nd"),
                  "writes into its first input in place: called by indexed assignment only"),
    {
        "_square_sum": "sparse storage: bfloat16 has none",
        "Custom": "runs the user's Python code, in the types that code declares",
        "_sg_mkldnn_conv": "made by MXNet's oneDNN graph partitioning for inference, needs a subgraph attribute",
        "_sg_mkldnn_fully_connected": "made by MXNet's oneDNN graph partitioning for inference, needs a subgraph "
                                      "attribute",
        "_copyto": "a copy between arrays of the same type, called by NDArray.copyto only",
        "_set_value": "fills an array: no data input",
        "_onehot_encode": "deprecated function that writes into its second argument",
        "cast_storage": "sparse storage: bfloat16 has none",
        "_sparse_retain": "sparse storage: bfloat16 has none",
        "_npx_constraint_check": "takes a boolean",
        "_npi_bitwise_not": "integers only",
        "_npi_where_scalar2": "takes a boolean condition and two numbers",
        "reset_arrays": "writes zeros into its inputs",
        "_contrib_hawkesll": "event sequences with integer marks, for point processes: not used in networks",
    },
)


def reason_of(op: str) -> str | None:
    """Say why an operator is not run; None for those that should have samples.

    Examples
    --------
    >>> reason_of('_zeros')
    'creates an array: no data input'
    """
    if op in _NAMED:
        return _NAMED[op]
    return next((reason for pattern, reason in _PATTERNS if re.match(pattern, op)), None)
