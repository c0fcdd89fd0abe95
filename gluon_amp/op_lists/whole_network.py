"""Operators that run in low precision beside the tables' own when a network is cast as a whole. Data only.

The tables keep them in FP32 for resolution or speed, not because a kernel is missing or wrong. In a network that is cast
they follow their data, and widen to FP32 where some of it is FP32: anchors, indices and lengths keep their resolution.
Sums, norms, losses, samples and positions are left out: MXNet adds them up, or counts, in the type that it is given.
"""
from __future__ import annotations

from .groups import arithmetic, layers, shapes

__all__ = ["WHOLE_NETWORK"]

WHOLE_NETWORK: frozenset[str] = frozenset((
    *layers.SOFTMAX, *layers.SIGMOIDS, *layers.ACTIVATION, *layers.LEAKY_RELU,
    *arithmetic.SIGNS, *arithmetic.ROUNDING, *arithmetic.BOUNDED, *arithmetic.EXPONENTIALS, *arithmetic.POWERS,
    *arithmetic.NUMPY_HYPOT, *arithmetic.STEEP, *arithmetic.NUMPY_ARCTAN2, *arithmetic.DIVISIONS,
    *arithmetic.NUMPY_DIVISIONS, *arithmetic.NUMPY_SCALAR_DIVISION, *arithmetic.SCALAR_ARITHMETIC,
    *arithmetic.SCALAR_SELECTION, *arithmetic.SCALAR_COMPARISONS, *arithmetic.ADDITIONS, *arithmetic.GRADIENT_SUM,
    *arithmetic.SELECTION, *arithmetic.COMPARISONS, *arithmetic.EXTREMES,
    *shapes.MOVED_AXES, *shapes.REPETITIONS, *shapes.BROADCAST_LIKE, *shapes.DIAGONALS, *shapes.FILLED_LIKE,
))
