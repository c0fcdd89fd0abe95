"""Groups of operators that tables treat alike: tuples of registered names.

No operator is in two groups, and one that is alone in its row is in none. Operators that compute gradients are left
out: they run as their forward operators do, and no program calls them.
"""
from __future__ import annotations

from . import arithmetic, layers, shapes, system

__all__ = ["arithmetic", "layers", "shapes", "system"]
