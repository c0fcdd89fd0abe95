"""Operators that take their inputs as the program gives them, whatever the target type."""
from __future__ import annotations

from .groups import arithmetic, system
from .records import KEEP, OpRule, rules

__all__ = ["KEPT"]

KEPT: tuple[OpRule, ...] = (
    *rules(system.CASTS, OpRule("", KEEP, safe=False, note="the program chooses the type")),
    *rules((*system.CREATION, *system.RANDOM), OpRule("", KEEP, safe=False, note="makes tensors of the type it names")),
    *rules(system.IMAGES, OpRule("", KEEP, safe=False, note="prepares data, outside the network")),
    *rules(system.OPTIMIZERS, OpRule("", KEEP, safe=False,
                                     note="updates weights in place; its inputs' types are its contract")),
    *rules(system.IN_PLACE, OpRule("", KEEP, safe=False, note="writes into an array that has its type already")),
    *rules(system.SPARSE_STORAGE, OpRule("", KEEP, safe=False, note="handles storage: sparse tensors are never cast")),
    *rules(system.MACHINERY, OpRule("", KEEP, safe=False, note="inserted by MXNet where types are settled")),
    *rules(arithmetic.INTEGER_ARITHMETIC, OpRule("", KEEP, safe=False, note="for integers only")),
)
