"""The range of low-precision types, and counts of values that do not fit in them."""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..dtypes import BFLOAT16, FLOAT16


@dataclass(frozen=True)
class Format:
    """The range of a floating-point type."""

    largest: float  # the largest finite value
    overflow: float  # absolute values from here on are rounded to infinity
    normal: float  # the smallest value with full resolution
    flush: float  # absolute values up to here are rounded to zero

    @classmethod
    def of(cls, fraction_bits: int, largest_exponent: int) -> Format:
        """Compute the range from a type's layout, for rounding to nearest, ties to even."""
        step = 2.0 ** (largest_exponent - fraction_bits)
        top = 2.0 ** largest_exponent * 2
        smallest_exponent = 1 - largest_exponent
        return cls(top - step, top - step / 2, 2.0 ** smallest_exponent, 2.0 ** (smallest_exponent - fraction_bits - 1))

    def headroom(self, largest: float) -> float:
        """Return how many times a value can double before it overflows; negative when it does already."""
        if math.isnan(largest) or math.isinf(largest):
            return -math.inf
        return math.log2(self.largest / largest) if largest > 0 else math.inf


FORMATS = {FLOAT16: Format.of(10, 15), BFLOAT16: Format.of(7, 127)}


@dataclass(frozen=True)
class Losses:
    """What happens to some values in a type."""

    count: int  # all values
    largest: float  # the largest finite absolute value; 0.0 when there is none
    # values that become infinite, that become zero without being zero, and that keep less than full resolution
    overflowed: int
    flushed: int
    subnormal: int
    not_finite: int  # values that are infinite or NaN as they are


def losses(values: np.ndarray, form: Format) -> Losses:
    """Count what a type cannot hold of some values."""
    size = np.abs(values)
    finite = np.isfinite(size)
    size = size[finite]
    flushed = (size > 0) & (size <= form.flush)
    return Losses(values.size, float(size.max()) if size.size else 0.0, int((size >= form.overflow).sum()),
                  int(flushed.sum()), int(((size > form.flush) & (size < form.normal)).sum()),
                  int(values.size - finite.sum()))
