"""Gradients of gradients, which MXNet has of dense layers in FP32, but neither of casts nor in low precision.

While a network runs nobody knows that its gradients will be differentiated. A sign of it is that its data has a
gradient buffer, as for gradient penalties: dense layers that MXNet could differentiate twice keep FP32 then.
"""
from __future__ import annotations

from typing import Any, Sequence

from mxnet import autograd
from mxnet.ndarray import NDArray

NOT_TWICE = ("AMP is on, and MXNet differentiates neither casts nor operators in low precision twice. For gradients of "
             "gradients run the network and autograd.grad inside `with amp.autocast(enabled=False):`, and do not "
             "hybridize it: MXNet has none of hybridized networks")
TWICE_DIFFERENTIABLE = frozenset(("FullyConnected", "dot", "batch_dot"))


def are_recorded(data: Sequence[Any]) -> bool:
    """Tell whether gradients are recorded for an array among the data, or in a list in it."""
    return autograd.is_recording() and any(
        array.grad is not None if isinstance(array, NDArray) else isinstance(array, (list, tuple)) and
        are_recorded(array) for array in data)
