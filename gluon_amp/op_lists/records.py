"""The record that operator tables are made of."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable

__all__ = ["FP32", "KEEP", "LOWER", "NEUTRAL", "RULES", "WIDEST", "OpRule", "rules"]

LOWER = "LOWER"  # all floating-point inputs are cast to the target type
FP32 = "FP32"  # all low-precision inputs are cast to FP32
WIDEST = "WIDEST"  # FP32 as soon as one floating-point input is FP32, otherwise the target type
NEUTRAL = "NEUTRAL"  # the precision that the data (first) input has already
KEEP = "KEEP"  # inputs exactly as the program gives them: casts, optimizer updates, integer and random operators
RULES = (LOWER, FP32, WIDEST, NEUTRAL, KEEP)


@dataclass(frozen=True)
class OpRule:
    """The precision rule of one operator.

    Attributes
    ----------
    name : str
        Registered operator name, as in symbol JSON.
    rule : str
        ``'LOWER'``, ``'FP32'``, ``'WIDEST'``, ``'NEUTRAL'`` or ``'KEEP'``.
    when : (str, tuple of str), optional
        Attribute and values under which the record holds; always, when None.
    fp32_inputs : tuple of int
        Positions of inputs that stay FP32 whatever the data runs in. Outputs after the first stay FP32 too.
    rounded_inputs : tuple of int
        Positions of inputs that stay FP32 in type, and are rounded to values of the target type.
    min_channels : int
        The record holds only for inputs with at least this many channels (axis 1), where the shape is known.
    safe : bool
        False when the target type has no kernel for the operator, or one that is wrong or corrupts memory:
        user lists cannot force it into low precision.
    note : str
        The reason, shown to users.
    """

    name: str
    rule: str
    when: tuple[str, tuple[str, ...]] | None = None
    fp32_inputs: tuple[int, ...] = ()
    rounded_inputs: tuple[int, ...] = ()
    min_channels: int = 0
    safe: bool = True
    note: str = ""


def rules(names: Iterable[str], like: OpRule) -> tuple[OpRule, ...]:
    """Make one record per name with everything else as in ``like``.

    Examples
    --------
    >>> [r.name for r in rules(['sin', 'cos'], OpRule('', FP32))]
    ['sin', 'cos']
    """
    return tuple(replace(like, name=name) for name in names)
