"""The costs of casts, and of operators that may run in either precision. Data only.

Measured with ``benchmarks/kernel_costs.py`` on an Intel Xeon with AMX-BF16, one thread, MXNet 1.9.1: the difference of
many copies of an operator and few, shortest of 9 runs, tensors of 6.4 MB in the layout that oneDNN's convolutions
leave. The machine was shared: figures differ by a fifth from run to run, and where neither precision was clearly faster
both have the mean. What is not listed costs the same in both. oneDNN's kernels are bound by memory, in which they
gain; MXNet's own handle bfloat16 one element at a time.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from ..dtypes import BFLOAT16

# Other machines differ from the one measured: an operator is not moved for less than this.
_CLEARLY_SLOWER = 1.1


@dataclass(frozen=True)
class Rates:
    """Nanoseconds in FP32 and in low precision, per byte that the tensors read and written have in FP32."""

    training: tuple[float, float]  # of the forward and the backward pass
    inference: tuple[float, float] = (0.0, 0.0)  # of the forward pass, in converted graphs


@dataclass(frozen=True)
class Costs:
    """The costs on one kind of device."""

    # nanoseconds of a cast per byte of its tensor in FP32: forward, and forward and backward
    casts: tuple[float, float]
    call: int  # nanoseconds of a cast of any size
    kernels: Mapping[str, Rates]  # by operator

    def cast(self, size: int, backward: bool) -> int:
        """Return the nanoseconds that casting a tensor of some bytes takes, and its gradient."""
        return round(self.casts[backward] * size) + self.call * (1 + backward)

    def kernel(self, op: str, size: int, training: bool, is_low: bool) -> tuple[int, int]:
        """Return an operator's nanoseconds in FP32 and in low precision, with a margin on the one that it is not in."""
        rates = self.kernels.get(op)
        if rates is None:
            return 0, 0
        fp32, low = rates.training if training else rates.inference
        return (round(fp32 * size * (_CLEARLY_SLOWER if is_low else 1)),
                round(low * size * (1 if is_low else _CLEARLY_SLOWER)))


# In converted graphs oneDNN fuses Activation, clip and BatchNorm with convolutions of the same precision, which makes
# them cost next to nothing there: their times are left out.
COSTS: Mapping[str, Costs] = {
    BFLOAT16: Costs(
        casts=(0.07, 0.135),
        call=5000,
        kernels={
            "BatchNorm": Rates((0.22, 0.22)),
            "Activation": Rates((0.2, 0.2)),
            "LeakyReLU": Rates((0.17, 0.17), (0.05, 0.05)),
            "relu": Rates((0.3, 3.5), (0.31, 1.2)),
            "_npx_relu": Rates((0.3, 3.5), (0.31, 1.2)),
            "clip": Rates((0.3, 2.9)),
            "abs": Rates((0.3, 3.9), (0.3, 1.1)),
            "_npi_absolute": Rates((0.3, 3.9), (0.3, 1.1)),
            "_gluon_amp_layer_norm": Rates((0.19, 0.15), (0.07, 0.05)),
            "_gluon_amp_dropout": Rates((0.19, 0.13)),
            "_gluon_amp_gelu": Rates((0.25, 0.25)),
            "LRN": Rates((7.5, 21.0), (0.53, 0.53)),
            "Pooling": Rates((0.74, 0.74), (0.1, 0.1)),
            "elemwise_add": Rates((0.135, 0.19), (0.045, 0.012)),
            "Concat": Rates((0.22, 0.115), (0.072, 0.04)),
            "SliceChannel": Rates((0.33, 0.5), (0.12, 0.12)),
            "slice_axis": Rates((0.12, 0.12), (0.036, 0.009)),
            "Flatten": Rates((0.24, 0.43), (0.11, 0.13)),
            "SwapAxis": Rates((1.8, 1.8), (0.95, 0.95)),
            "where": Rates((0.47, 0.57), (0.18, 0.21)),
            "stack": Rates((0.35, 0.35), (0.1, 0.1)),
        },
    ),
}
