"""How long kernels and a detector's step take, in FP32 and in low precision."""
from __future__ import annotations

from functools import partial
from typing import Callable

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import nn

from .._mxnet.timing import interleaved, time_in_both
from ..audit.judge import message_of
from ..dtypes import FLOAT32, Support
from ..rules import LOWER, Policy
from ..runtime.autocast import autocast
from .isolation import INFO, SKIPPED, Found, Section, is_out_of_memory
from .results import low_type

_ROUNDS = 5
_DETECTOR = "SSD step"
Kernel = tuple  # operator, attributes and shapes


def _convolution(filters: int) -> Kernel:
    attrs = {"kernel": "(3, 3)", "pad": "(1, 1)", "num_filter": str(filters), "no_bias": "True"}
    return "Convolution", attrs, [(8, 64, 28, 28), (filters, 64, 3, 3)]


# The last two are what alignment of channels would change: 60 filters as they are, and padded to 64.
_KERNELS: dict[str, Kernel] = {
    "convolution": _convolution(128),
    "dense": ("FullyConnected", {"num_hidden": "512", "no_bias": "True"}, [(256, 512), (512, 512)]),
    "batched product": ("batch_dot", {}, [(32, 64, 64), (32, 64, 64)]),
    "LSTM": ("RNN", {"mode": "lstm", "state_size": "128", "num_layers": "1"},
             [(16, 16, 128), (4 * 128 * (128 + 128 + 2),), (1, 16, 128), (1, 16, 128)]),
    "60 channels": _convolution(60),
    "60 channels padded to 64": _convolution(64),
}


def _names(runs: Support) -> list[str]:
    return [] if low_type(runs) == FLOAT32 else [*_KERNELS, _DETECTOR]


def _timed(name: str, device: mx.Context, runs: Support) -> Found:
    low = low_type(runs)
    try:
        if name == _DETECTOR:
            fp32, lower = _time_detector(device, low)
        else:
            op, attrs, shapes = _KERNELS[name]
            fp32, lower = time_in_both(op, attrs, shapes, low, True, _ROUNDS, device)
    except mx.MXNetError as error:
        if name == _DETECTOR or not _is_refused(name, low, device, error):
            raise
        return (SKIPPED, f"MXNet does not run it in {low}, and AMP does not either",
                {"dtype": low, "error": message_of(error)})
    said = f"{fp32:.3g} ms in FP32, {lower:.3g} ms in {low}: {fp32 / lower:.2f} times as fast"
    return INFO, said, {"dtype": low, "milliseconds": {FLOAT32: fp32, low: lower}}


def _is_refused(name: str, low: str, device: mx.Context, error: mx.MXNetError) -> bool:
    """Tell whether MXNet lacks a type that AMP does not use for this operator; GPUs have them all."""
    op, attrs, shapes = _KERNELS[name]
    lowered = Policy(low).decide(op, attrs, shapes[0]).rule == LOWER
    return device.device_type != "gpu" and not lowered and not is_out_of_memory(str(error))


def _time_detector(device: mx.Context, low: str) -> tuple[float, float]:
    """Time a training step of a small detector, both ways in turns."""
    net = nn.HybridSequential()
    for channels in (32, 64, 128):
        net.add(nn.Conv2D(channels, 3, strides=2, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.Conv2D(4 * 25, 3, padding=1))  # four anchors, each with 21 classes and a box
    net.initialize(ctx=device)
    net.hybridize(static_alloc=True, static_shape=True)
    data = mx.nd.ones((4, 3, 128, 128), ctx=device)

    def step(region: Callable[[], autocast]) -> None:
        with region(), autograd.record():
            loss = net(data).square().mean()
        loss.backward()
        mx.nd.waitall()

    fp32, lower = interleaved([partial(step, partial(autocast, False)), partial(step, partial(autocast, True, low))], 3)
    return fp32, lower


TIMING = Section(_names, _timed, forked=False)
