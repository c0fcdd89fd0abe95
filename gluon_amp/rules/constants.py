"""Constants of operators that a low-precision type cannot hold.

In float16 ``log(x + 1e-8)`` is the logarithm of x, ``x * 1e6`` is infinite, and 1e-5 is off by a thousandth. bfloat16
has the range of FP32: it cannot hold FP32's largest numbers only.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Mapping

from ..dtypes import FORMATS
from .decision import FP32, Cause, Decision, may_lower

_SCALAR = ("scalar",)
# The parameters of an operator that are values like those of its data.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "clip": ("a_min", "a_max"), "hard_sigmoid": ("alpha", "beta"), "LeakyReLU": ("slope",), "Pad": ("constant_value",),
    "_npi_pad": ("constant_value",), "SequenceMask": ("value",), "_npi_nan_to_num": ("nan", "posinf", "neginf"),
    "_np_max": ("initial",), "_np_min": ("initial",), "_npi_full_like": ("fill_value",), "_full": ("value",)}


def constants_of(op: str) -> tuple[str, ...]:
    """Name the parameters of an operator that are values like those of its data."""
    return _SCALAR if op.endswith("scalar") else _PARAMETERS.get(op, ())


def number(text: str | None) -> float | None:
    """Read a parameter; None where it is no number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def within_range(decision: Decision, op: str, attrs: Mapping[str, str], dtype: str) -> Decision:
    """Return a decision on an operator, or FP32 where the type cannot hold one of its constants."""
    for name in constants_of(op) if may_lower(decision) else ():
        value = number(attrs.get(name))
        if value is not None and not FORMATS[dtype].holds(value):
            return in_fp32(decision, f"{dtype} cannot hold its {name}={value:g}")
    return decision


def in_fp32(decision: Decision, note: str) -> Decision:
    """Return a decision for FP32 because of a constant."""
    return replace(decision, rule=FP32, cause=Cause.CONSTANT, note=note, rounded_inputs=())
