"""Checks of arguments; each returns the value, or raises an error that says which value was expected."""
from __future__ import annotations

import sys
from numbers import Integral, Real
from typing import Any, TypeVar

from ..errors import expected

Item = TypeVar("Item")


def is_number(value: object) -> bool:
    """Tell whether a value is a real number of Python or NumPy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int, what: str = "") -> int:
    """Return a whole number of at least ``least``; ``what`` replaces the words of the error."""
    if not is_number(value) or not isinstance(value, Integral) or value < least:
        raise ValueError(expected(what or f"a whole number from {least} on", name, value))
    return int(value)


def above_zero(name: str, value: Any, finite: bool = False) -> float:
    """Return a number above 0, which may be infinite unless it is to be ``finite``."""
    if not is_number(value) or not value > 0 or (finite and value > sys.float_info.max):
        raise ValueError(expected(f"a {'finite ' * finite}number above 0", name, value))
    return float(value)


def true_or_false(name: str, value: Any) -> bool:
    """Return True or False; raise TypeError for anything else."""
    if not isinstance(value, bool):
        raise TypeError(expected("True or False", name, value))
    return value


def instance(name: str, value: object, kind: Any, what: str) -> None:
    """Raise TypeError unless a value is of a kind; ``what`` names it with its article."""
    if not isinstance(value, kind):
        raise TypeError(expected(what, name, value))


def one_or_several(name: str, value: Any, kind: type[Item], what: str) -> list[Item]:
    """Return a value of a kind, or several in a list or tuple, as a list; raise TypeError for others, and for none."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    wrong = [item for item in items if not isinstance(item, kind)]
    if wrong or not items:
        raise TypeError(expected(f"{what} or a list of them", name, wrong[0] if wrong else value))
    return items
