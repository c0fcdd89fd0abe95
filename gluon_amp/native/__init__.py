"""Operators in C++, where MXNet's own CPU kernels are slow or missing.

Everything works without them. :func:`load` says which there are, and why there are none.
"""
from .loader import OPERATORS, Library, any_is_available, is_available, load, obstacle_to, say_what_is_missing
from .updates import UPDATES, all_finite, update

__all__ = ["OPERATORS", "UPDATES", "Library", "all_finite", "any_is_available", "is_available", "load", "obstacle_to",
           "say_what_is_missing", "update"]
