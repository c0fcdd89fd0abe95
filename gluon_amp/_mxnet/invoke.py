"""Run any registered operator by its registered name.

MXNet generates Python functions for most operators only, scattered over a dozen modules, some under other names.
"""
from __future__ import annotations

from typing import Mapping, Sequence

import mxnet as mx
from mxnet.ndarray import register

from .operators import handle_of

# MXNet's own, whatever takes their place later.
StockCachedOp = mx.ndarray.CachedOp
original_invoke = register._imperative_invoke


def invoke(op: str, inputs: Sequence[mx.nd.NDArray], attrs: Mapping[str, str]) -> list[mx.nd.NDArray]:
    """Run an operator imperatively."""
    names, values = list(attrs), list(attrs.values())
    return register._imperative_invoke(handle_of(op), list(inputs), names, values, None, False, True)


def run_onednn_operator() -> None:
    """Run an operator of oneDNN, so that oneDNN reads its settings."""
    mx.nd.Activation(mx.nd.zeros((1, 1), ctx=mx.cpu()), act_type="relu").wait_to_read()
