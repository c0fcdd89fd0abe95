"""Counts of values that do not fit in a low-precision type."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import Format


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
