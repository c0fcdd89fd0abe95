"""Operators that networks spend their time in: what they compute in low precision, and how long they take."""
from __future__ import annotations

from functools import partial, reduce
from typing import Any, Mapping

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn

from .._mxnet.arrays import cast_arrays, round_in_place
from .._mxnet.symbols import dtype_name
from .._mxnet.timing import interleaved
from ..debug.report import report
from ..dtypes import FLOAT32, FORMATS, Support
from ..session.autocast import autocast, deinit, init
from .isolation import INFO, OK, WRONG, Found, Section

_ROUNDS = 5
_ROUNDOFFS = 4.0  # how far a result may be off, of the largest element
_DETECTOR = "SSD step"
Kernel = tuple  # name in mx.nd and mx.sym, attributes and shapes


def _convolution(filters: int, groups: int = 1) -> Kernel:
    attrs = {"kernel": "(3, 3)", "pad": "(1, 1)", "num_filter": str(filters), "num_group": str(groups),
             "no_bias": "True"}
    return "Convolution", attrs, [(8, 64, 28, 28), (filters, 64 // groups, 3, 3)]


# The last two are what alignment of channels would change: 60 filters as they are, and padded to 64.
_KERNELS: dict[str, Kernel] = {
    "convolution": _convolution(128),
    "depthwise convolution": _convolution(64, 64),
    "transposed convolution": ("Deconvolution", {"kernel": "(2, 2)", "stride": "(2, 2)", "num_filter": "32"},
                               [(8, 64, 14, 14), (64, 32, 2, 2)]),
    "dense": ("FullyConnected", {"num_hidden": "512", "no_bias": "True"}, [(256, 512), (512, 512)]),
    "product": ("dot", {"transpose_b": "True"}, [(256, 128), (64, 128)]),
    "batched product": ("batch_dot", {}, [(32, 64, 64), (32, 64, 64)]),
    "attention": ("contrib.interleaved_matmul_selfatt_qk", {"heads": "4"}, [(64, 8, 384)]),
    "LSTM": ("RNN", {"mode": "lstm", "state_size": "128", "num_layers": "1"},
             [(16, 16, 128), (4 * 128 * (128 + 128 + 2),), (1, 16, 128), (1, 16, 128)]),
    "pooling": ("Pooling", {"kernel": "(2, 2)", "stride": "(2, 2)", "pool_type": "avg"}, [(8, 64, 28, 28)]),
    "rectifier": ("relu", {}, [(8, 64, 28, 28)]),
    "sum": ("elemwise_add", {}, [(8, 64, 28, 28), (8, 64, 28, 28)]),
    "60 channels": _convolution(60),
    "60 channels padded to 64": _convolution(64),
}
_TIMED = ("convolution", "dense", "batched product", "LSTM", "60 channels", "60 channels padded to 64")


def low_type(runs: Support) -> str:
    """Return the low-precision type of a device, also one that runs on request only; FP32 without."""
    return runs.dtype if runs.dtype != FLOAT32 else runs.on_request or FLOAT32


def error_of(actual: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error, relative to the largest element; infinite where numbers are not finite."""
    error = float(np.abs(actual - wanted).max() / np.abs(wanted).max())
    return error if np.isfinite(error) else float("inf")


class _Operator(HybridBlock):
    """An operator, in a graph as networks have it."""

    def __init__(self, op: str, attrs: Mapping[str, str]):
        super().__init__()
        self._path, self._attrs = op.split("."), attrs
        self.hybridize(static_alloc=True, static_shape=True)

    def hybrid_forward(self, F: Any, *inputs: Any) -> Any:
        return reduce(getattr, self._path, F)(*inputs, **self._attrs)


def _compared(name: str, device: mx.Context, runs: Support) -> Found:
    """Compare an operator under AMP with FP32 on the CPU, forward and backward."""
    low = low_type(runs)
    found, wanted = _results(name, low, low, device), _results(name, FLOAT32, low, mx.cpu())
    error = max(map(error_of, found, wanted))
    limit = _ROUNDOFFS * FORMATS[low].roundoff
    return OK if error <= limit else WRONG, f"error {error:.1g}", {"dtype": low, "error": error}


def _results(name: str, dtype: str, rounding: str, device: mx.Context) -> list[np.ndarray]:
    """Return an operator's output and gradients, of inputs that are rounded to a type and the same on all devices."""
    op, attrs, shapes = _KERNELS[name]
    random, net = np.random.RandomState(1), _Operator(op, attrs)
    inputs = [_rounded(random.normal(scale=0.1, size=shape), rounding, device) for shape in shapes]
    for array in inputs:
        array.attach_grad()
    with _region(dtype), autograd.record():
        output = net(*inputs)
    head = _rounded(random.normal(size=output.shape), rounding, device)
    autograd.backward([output], [cast_arrays(head, dtype_name(output.dtype) or FLOAT32)])
    return [cast_arrays(array, FLOAT32).asnumpy() for array in (output, *(each.grad for each in inputs))]


def _region(dtype: str) -> autocast:
    return autocast(False) if dtype == FLOAT32 else autocast(True, dtype)


def _rounded(values: np.ndarray, dtype: str, device: mx.Context) -> mx.nd.NDArray:
    array = mx.nd.array(values, ctx=mx.cpu())
    round_in_place(array, dtype)
    return array.as_in_context(device)


def _timed(name: str, device: mx.Context, runs: Support) -> Found:
    """Time forward and backward without AMP and with it, in the type that it chooses here, in turns."""
    if name == _DETECTOR:
        net, inputs = _detector(device), [mx.nd.ones((4, 3, 128, 128), ctx=device)]
    else:
        op, attrs, shapes = _KERNELS[name]
        net = _Operator(op, attrs)
        inputs = [mx.nd.random.normal(scale=0.1, shape=shape, ctx=device) for shape in shapes]
    for array in inputs:
        array.attach_grad()

    def step(has_amp: bool) -> None:
        with autocast(has_amp), autograd.record():
            output = net(*inputs)
        output.backward()
        mx.nd.waitall()

    init()
    try:
        without, under = interleaved([partial(step, has_amp) for has_amp in (False, True)], _ROUNDS)
        in_cpp = any(row.native for row in report(net, tuple(inputs), train=True).operators)
    finally:
        deinit()
    said = (f"{without:.3g} ms without AMP, {under:.3g} ms under it ({runs.dtype}{', in C++' if in_cpp else ''}): "
            f"{without / under:.2f} times as fast")
    return INFO, said, {"dtype": runs.dtype, "in_cpp": in_cpp, "milliseconds": {"without": without, "under": under}}


def _detector(device: mx.Context) -> HybridBlock:
    """Return a small detector."""
    net = nn.HybridSequential()
    for channels in (32, 64, 128):
        net.add(nn.Conv2D(channels, 3, strides=2, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(4 * 25, 3, padding=1))  # four anchors, each with 21 classes and a box
    net.initialize(ctx=device)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


OPERATORS = Section(lambda runs: [] if low_type(runs) == FLOAT32 else list(_KERNELS), _compared)
TIMING = Section(lambda runs: [*_TIMED, _DETECTOR], _timed, forked=False)
