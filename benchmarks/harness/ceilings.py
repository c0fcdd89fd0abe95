"""What the machine can compute and move at most, measured through MXNet. Start a backend before importing it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Mapping

import mxnet as mx
from mxnet.gluon import HybridBlock, nn

if TYPE_CHECKING:
    from .backends import Converter

# batch, channels in and out, side, kernel: convolutions that keep the arithmetic units busy
_CONVOLUTIONS = ((8, 256, 256, 32, 3), (8, 512, 512, 16, 3), (8, 1024, 256, 32, 1))
_COPIED = 64 * 2**20  # values, beyond any cache
_REPEATS = 8


class Ceilings:
    """Convolutions whose speed is to be read from oneDNN's log, and the speed of a copy.

    Parameters
    ----------
    backend : Converter
        Makes the low-precision ones.
    settings : mapping
        Not read.
    """

    samples_per_step = 1

    def __init__(self, backend: Converter, settings: Mapping[str, Any]):
        self.about = {"dtype": backend.dtype, "notes": backend.notes, "memory": _copy_speed()}
        self.runs: list[tuple[HybridBlock, mx.nd.NDArray]] = []
        for batch, before, after, side, kernel in _CONVOLUTIONS:
            data = mx.nd.ones((batch, before, side, side))
            net = nn.Conv2D(after, kernel, padding=kernel // 2, in_channels=before)
            net.initialize()
            net.hybridize(static_alloc=True, static_shape=True)
            self.runs += [(net, data), (backend.convert(net, [data]), data)]

    def step(self) -> dict[str, float]:
        """Run every convolution."""
        for net, data in self.runs:
            net(data).wait_to_read()
        return {}


def _copy_speed() -> float:
    """Return 1e9 bytes a second, those read and those written."""
    source, target = mx.nd.ones(_COPIED), mx.nd.zeros(_COPIED)
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        source.copyto(target)
        target.wait_to_read()
        times.append(time.perf_counter() - begin)
    return 2 * 4 * _COPIED / 1e9 / min(times[1:])
