"""Verdicts: how far a low-precision run is from the FP32 run, and what several modes say together. Pure NumPy."""
from __future__ import annotations

from typing import Mapping, NamedTuple

import numpy as np

OK, WRONG, ERROR, CRASH, TIMEOUT = "ok", "wrong", "error", "crash", "timeout"
UNUSABLE = "not applicable"  # does not run in FP32 either
BAD = (CRASH, TIMEOUT, WRONG, ERROR)  # the worst first


class Result(NamedTuple):
    """What running one mode gave."""

    verdict: str
    detail: str = ""  # the engine's message, or the tensor that is wrong
    error: float = 0.0  # the worst of all tensors, see error_of
    bias: float = 0.0  # that of the most biased tensor, see bias_of
    gradient: bool = False  # whether gradients were compared


def error_of(actual: np.ndarray, desired: np.ndarray) -> float:
    """Return the largest error of an element, relative to the element plus the tensor's root mean square."""
    # Small elements are thus judged by the tensor's scale and large ones by their own. NaN and infinities must agree;
    # where they or the shapes do not, the error is infinite.
    if actual.shape != desired.shape:
        return float("inf")
    actual, desired = actual.astype(np.float64), desired.astype(np.float64)
    finite = np.isfinite(desired)
    if not np.array_equal(actual[~finite], desired[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    actual, desired = actual[finite], desired[finite]
    scale = np.abs(desired) + np.sqrt(np.mean(desired ** 2))
    return float(np.max(np.abs(actual - desired) / np.where(scale > 0, scale, 1.0)))


def bias_of(actual: np.ndarray, desired: np.ndarray) -> float:
    """Return the mean relative change of magnitude, 0 for tensors too small to tell."""
    # Rounding to nearest gives almost 0, truncation to bfloat16 about -0.003.
    if actual.shape != desired.shape or desired.size < 64:
        return 0.0
    finite = np.isfinite(desired) & np.isfinite(actual)
    total = np.abs(desired[finite]).sum(dtype=np.float64)
    return float(np.abs(actual[finite]).sum(dtype=np.float64) / total - 1) if total else 0.0


def judge(actual: Mapping[str, np.ndarray], desired: Mapping[str, np.ndarray], limit: float) -> Result:
    """Judge a run: every tensor that the FP32 run gave must be there, with an error of at most ``limit``."""
    errors = {name: error_of(actual[name], value) if name in actual else float("inf")
              for name, value in desired.items()}
    worst = max(errors, key=errors.__getitem__, default="")
    error = errors.get(worst, 0.0)
    bias = max((bias_of(actual[name], desired[name]) for name in errors if errors[name] < float("inf")), key=abs,
               default=0.0)
    return Result(OK, "", error, bias) if error <= limit else Result(WRONG, f"{worst} off by {error:.1g}", error, bias)


def overall(verdicts: Mapping[str, str], fp32: Mapping[str, str]) -> str:
    """Return the worst verdict of all modes."""
    # Errors that FP32 gives as well do not count. Neither does ``addlow``, unless it ends the process: AMP keeps
    # gradient buffers in FP32, and where two inputs get the very same gradient it is the engine's copy that does not
    # add.
    own = [verdict for mode, verdict in verdicts.items()
           if verdict == CRASH or not (mode.endswith("/addlow") or (verdict == ERROR and mode in fp32))]
    return min(own or verdicts.values(), key=(*BAD, OK, UNUSABLE).index)
