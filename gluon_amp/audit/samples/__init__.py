"""Sample inputs: one or more records for every operator that has floating-point data, by family.

Operators without one are in :mod:`gluon_amp.audit.samples.excluded`, with the reason.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Mapping

from ..records import Sample
from . import attention, detection, elementwise, linalg, losses, neural, numpy_style, reduce, shape
from .excluded import reason_of

__all__ = ["FAMILIES", "family_of", "reason_of", "sampled_operators", "samples_of"]

FAMILIES: Mapping[str, tuple[Sample, ...]] = {
    "Layers": neural.SAMPLES,
    "Matrix products and attention": attention.SAMPLES,
    "Elementwise": elementwise.SAMPLES,
    "Reduction, sorting": reduce.SAMPLES,
    "Shape and indexing": shape.SAMPLES,
    "Losses and output layers": losses.SAMPLES,
    "Detection and vision": detection.SAMPLES,
    "Linear algebra": linalg.SAMPLES,
    "NumPy style (other than elementwise)": numpy_style.SAMPLES,
}


@lru_cache(maxsize=1)
def _by_operator() -> dict[str, tuple[str, list[Sample]]]:
    table: dict[str, tuple[str, list[Sample]]] = {}
    for family, samples in FAMILIES.items():
        for item in samples:
            known = table.setdefault(item.op, (family, []))
            if known[0] != family or item.condition in [other.condition for other in known[1]]:
                raise ValueError(f"{item.op} is listed twice: {item.condition!r} in {known[0]} and {family}")
            known[1].append(item)
    return table


def sampled_operators() -> list[str]:
    """Names of all operators that have samples, family by family."""
    return list(_by_operator())


def samples_of(op: str) -> tuple[Sample, ...]:
    """All samples of an operator; empty when it has none.

    Examples
    --------
    >>> samples_of('relu')[0].condition
    'default'
    """
    return tuple(_by_operator().get(op, ("", []))[1])


def family_of(op: str) -> str:
    """Name the family that an operator is listed in."""
    return _by_operator()[op][0]
