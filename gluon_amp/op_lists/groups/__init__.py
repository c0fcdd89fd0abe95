"""Every operator that MXNet 1.9.1 registers, in groups of those that behave alike: tuples of registered names.

A group has what any data type's table needs to tell apart; every operator is in one group. Operators that compute
gradients are left out: they run as their forward operators do, and no program calls them (:func:`is_forward`).
"""
from __future__ import annotations

from . import arithmetic, layers, shapes, system

__all__ = ["arithmetic", "is_forward", "layers", "shapes", "system"]


def is_forward(name: str) -> bool:
    """Whether a registered operator is one that programs call, by MXNet's naming of the others.

    Examples
    --------
    >>> [is_forward(name) for name in ('Convolution', '_backward_Convolution', '_contrib_backward_quadratic')]
    [True, False, False]
    """
    return "backward" not in name
