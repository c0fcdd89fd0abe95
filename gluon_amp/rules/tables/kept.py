"""Operators that take their inputs as the program gives them, whatever the target type."""
from __future__ import annotations

from ..decision import KEEP, Rule
from .groups import arithmetic, system
from .rows import Rows

KEPT: Rows = (
    (system.CASTS, Rule(KEEP, safe=False, note="the program chooses the type")),
    ((*system.CREATION, *system.RANDOM), Rule(KEEP, safe=False, note="makes tensors of the type it names")),
    (system.IMAGES, Rule(KEEP, safe=False, note="prepares data, outside the network")),
    (system.OPTIMIZERS, Rule(KEEP, safe=False, note="updates weights in place; its inputs' types are its contract")),
    (system.IN_PLACE, Rule(KEEP, safe=False, note="writes into an array that has its type already")),
    (system.SPARSE_STORAGE, Rule(KEEP, safe=False, note="handles storage: sparse tensors are never cast")),
    (system.MACHINERY, Rule(KEEP, safe=False, note="inserted by MXNet where types are settled")),
    (arithmetic.INTEGER_ARITHMETIC, Rule(KEEP, safe=False, note="for integers only")),
)
