"""Operators that run in low precision beside the tables' own when a network is cast as a whole. Data only.

The tables keep them in FP32 for resolution, not because a kernel is missing, wrong or slow. In a network that is cast
they follow their data, and widen to FP32 where some of it is FP32: anchors, indices and lengths keep their resolution.
Sums, norms, losses, samples and positions are left out: MXNet adds them up, or counts, in the type that it is given.
"""
from __future__ import annotations

from typing import Mapping

from ...dtypes import BFLOAT16, FLOAT16
from .groups import arithmetic, layers

WHOLE_NETWORK: Mapping[str, frozenset[str]] = {
    # MXNet's own kernels for elementwise arithmetic truncate bfloat16, and are slow: with them a training step of
    # MobileNetV3 takes 2.5 times as long. Only what oneDNN computes is left.
    BFLOAT16: frozenset(layers.SOFTMAX),
    # softmax stays in FP32: it adds its exponentials up in float16, unless MXNET_SAFE_ACCUMULATION says otherwise.
    FLOAT16: frozenset((
        "Activation", "LeakyReLU",
        *arithmetic.EXPONENTIALS, *arithmetic.POWERS, "_npi_hypot", *arithmetic.STEEP,
        "_npi_arctan2", *arithmetic.DIVISIONS, *arithmetic.NUMPY_DIVISIONS,
    )),
}
