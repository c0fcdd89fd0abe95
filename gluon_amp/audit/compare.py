"""Compare the tensors of a low-precision run with those of the FP32 run. Pure NumPy."""
from __future__ import annotations

from typing import Mapping, NamedTuple

import numpy as np

__all__ = ["CRASH", "ERROR", "OK", "TIMEOUT", "UNUSABLE", "WRONG", "Comparison", "compare", "error_of"]

OK, WRONG, ERROR, CRASH, TIMEOUT = "ok", "wrong", "error", "crash", "timeout"
UNUSABLE = "not applicable"  # does not run in FP32 either


class Comparison(NamedTuple):
    """How far a run is from FP32.

    Attributes
    ----------
    verdict : str
        ``'ok'`` or ``'wrong'``.
    error : float
        Worst error over all tensors, see :func:`error_of`; infinite for shapes or NaN that disagree.
    where : str
        The tensor with the worst error.
    bias : float
        Mean relative change of magnitude of the most biased tensor; rounding to nearest gives almost 0,
        truncation to bfloat16 about -0.003.
    """

    verdict: str
    error: float
    where: str
    bias: float


def error_of(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest error of an element, relative to the element plus the tensor's root mean square.

    Small elements are thus judged by the tensor's scale and large ones by their own. NaN and infinities must agree.

    Examples
    --------
    >>> error_of(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    1.0
    """
    if found.shape != wanted.shape:
        return float("inf")
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(found[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    found, wanted = found[finite], wanted[finite]
    scale = np.abs(wanted) + np.sqrt(np.mean(wanted ** 2))
    return float(np.max(np.abs(found - wanted) / np.where(scale > 0, scale, 1.0)))


def bias_of(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the mean change of magnitude, 0 for tensors too small to tell.

    Examples
    --------
    >>> bias_of(np.full(100, 0.5), np.ones(100))
    -0.5
    """
    if found.shape != wanted.shape or wanted.size < 64:
        return 0.0
    finite = np.isfinite(wanted) & np.isfinite(found)
    total = np.abs(wanted[finite]).sum(dtype=np.float64)
    if total == 0:
        return 0.0
    return float(np.abs(found[finite]).sum(dtype=np.float64) / total - 1)


def compare(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], limit: float) -> Comparison:
    """Judge a run: every tensor that the FP32 run gave must be there and within ``limit``.

    Parameters
    ----------
    found, wanted : mapping of str to numpy.ndarray
        Outputs, gradients and changed states by name.
    limit : float
        Largest error that is right.
    """
    error, where, bias = 0.0, "", 0.0
    for name, reference in wanted.items():
        this = error_of(found[name], reference) if name in found else float("inf")
        if this > error:
            error, where = this, name
        if name in found and this < float("inf"):
            bias = max(bias, bias_of(found[name], reference), key=abs)
    return Comparison(OK if error <= limit else WRONG, error, where, bias)
