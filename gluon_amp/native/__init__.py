"""Operators in C++, where MXNet's own CPU kernels are slow or missing: everything works without them."""
from .loader import (
    OPERATORS,
    UPDATES,
    Library,
    all_finite,
    any_is_available,
    is_available,
    load,
    obstacle_to,
    say_what_is_missing,
    update,
)

__all__ = ["OPERATORS", "UPDATES", "Library", "all_finite", "any_is_available", "is_available", "load", "obstacle_to",
           "say_what_is_missing", "update"]
