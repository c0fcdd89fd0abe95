"""The rules of the operator tables, and the decision on an operator that follows from one.

A constant that the type cannot hold keeps an operator in FP32: in float16 ``log(x + 1e-8)`` is the logarithm of x, and
``x * 1e6`` is infinite. bfloat16 cannot hold FP32's largest numbers only.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Mapping, Sequence

from ..graph import Cause, Decision
from ..machine.dtypes import FORMATS

LOWER = "LOWER"  # all floating-point inputs are cast to the target type
FP32 = "FP32"  # all low-precision inputs are cast to FP32
WIDEST = "WIDEST"  # FP32 as soon as one floating-point input is FP32, otherwise the target type
NEUTRAL = "NEUTRAL"  # the precision that the data (first) input has already
KEEP = "KEEP"  # inputs exactly as the program gives them: casts, optimizer updates, integer and random operators
RULES = (LOWER, FP32, WIDEST, NEUTRAL, KEEP)


@dataclass(frozen=True)
class Rule:
    """A line of an operator table, or of a user's list."""

    rule: str  # ``'LOWER'``, ``'FP32'``, ``'WIDEST'``, ``'NEUTRAL'`` or ``'KEEP'``
    when: tuple[str, tuple[str, ...]] | None = None  # attribute and values for which it holds; always, when None
    fp32_inputs: tuple[int, ...] = ()  # inputs that stay FP32 whatever the data does; so do outputs after the first
    min_channels: int = 0  # it holds for inputs of at least this many channels (axis 1), where the shape is known
    # False when the target type has no kernel for the operator, or one that is wrong or corrupts memory: user lists
    # cannot force it into low precision
    safe: bool = True
    note: str = ""  # the reason, shown to users
    cause: Cause = Cause.TABLE  # the kind of reason

    @cached_property
    def decision(self) -> Decision:
        """The decision where the rule holds."""
        return Decision(self.rule, self.cause, self.note, self.fp32_inputs, self.safe)


SWITCHED_OFF = Decision(FP32, Cause.REGION, "inside an autocast(enabled=False) region, or an excluded block")
OUTSIDE = Decision(FP32, Cause.OUTSIDE, "outside of every autocast region")
FOR_SECOND_GRADIENTS = Decision(FP32, Cause.TABLE, "gradients of the network's data are recorded, which may be "
                                "differentiated again: MXNet can do so in FP32 only")
READS_SPARSE = Decision(KEEP, Cause.STORAGE, "reads sparse tensors, which are never cast")
BEHIND_LOOP = Decision(FP32, Cause.STORAGE, "an executor knows no shape behind a while_loop, and MXNet adds no "
                       "gradients in low precision there (NDArray::Reorder2DefaultFloatFormat in ndarray.cc)")
IN_INT8 = Decision(FP32, Cause.INT8, "in INT8: MXNet's quantizer takes FP32 tensors and rounds them")
EXCLUDED = Decision(FP32, Cause.EXCLUSION, "excluded by name")


def may_lower(decision: Decision) -> bool:
    """Tell whether an operator runs in low precision where its data is, or is cast so."""
    return decision.rule in (LOWER, NEUTRAL, WIDEST)


def precision(decision: Decision, types: Sequence[Any], fp32: Any, low: Any) -> Any:
    """Return the precision that an operator's floating-point data takes; None when it has no such data."""
    data = [kind for position, kind in enumerate(types)
            if kind in (fp32, low) and position not in decision.fp32_inputs]
    if not data:
        return None
    if decision.rule == LOWER:
        return low
    if decision.rule == NEUTRAL:
        return data[0]
    return low if decision.rule == WIDEST and fp32 not in data else fp32


# The parameters of an operator that are values like its data's.
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "clip": ("a_min", "a_max"), "hard_sigmoid": ("alpha", "beta"), "LeakyReLU": ("slope",), "Pad": ("constant_value",),
    "_npi_pad": ("constant_value",), "SequenceMask": ("value",), "_npi_nan_to_num": ("nan", "posinf", "neginf"),
    "_np_max": ("initial",), "_np_min": ("initial",), "_npi_full_like": ("fill_value",), "_full": ("value",)}


def constants_of(op: str) -> tuple[str, ...]:
    """Name the parameters of an operator that are values like its data's."""
    return ("scalar",) if op.endswith("scalar") else _PARAMETERS.get(op, ())


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
    return replace(decision, rule=FP32, cause=Cause.CONSTANT, note=note)
