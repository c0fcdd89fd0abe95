"""Sample inputs: one or more records for every operator that has floating-point data, by family.

Operators without one are in :mod:`audit.samples.excluded`, with the reason.
"""
from __future__ import annotations

from typing import Mapping

from . import attention, detection, elementwise, linalg, losses, native, neural, numpy_style, reduce, shape
from .excluded import reason_of
from .sample import Sample

__all__ = ["FAMILIES", "NATIVE", "family_of", "reason_of", "sampled_operators", "samples_of"]

NATIVE = "Operators in C++ of gluon_amp"
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
    NATIVE: native.SAMPLES,
}


_BY_OPERATOR: dict[str, list[Sample]] = {}
for _samples in FAMILIES.values():
    for _sample in _samples:
        _BY_OPERATOR.setdefault(_sample.op, []).append(_sample)


def sampled_operators() -> list[str]:
    """Names of all operators that have samples, family by family."""
    return list(_BY_OPERATOR)


def samples_of(op: str) -> tuple[Sample, ...]:
    """All samples of an operator; empty when it has none."""
    return tuple(_BY_OPERATOR.get(op, ()))


def family_of(op: str) -> str:
    """Name the family that an operator is listed in."""
    return next(family for family, samples in FAMILIES.items() if samples_of(op)[0] in samples)
