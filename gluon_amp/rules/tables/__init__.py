"""Operator tables: for each target data type, the precision that each operator runs in. Data only.

Every operator that MXNet 1.9.1 registers has rules in each of them. A table is read from top to bottom; where operators
share a fate they share a row, under a name of :mod:`~gluon_amp.rules.tables.groups`.
"""
from __future__ import annotations

from typing import Any, Mapping, Tuple

from ...machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..decision import FP32, KEEP, Rule
from . import bfloat16, float16, groups

Table = Mapping[str, Tuple[Rule, ...]]


def as_table(*rows: tuple[Any, ...]) -> Table:
    """Return ``{name: (Rule, ...)}`` of rows: names, or one name, and their rules in order of precedence."""
    found: dict[str, tuple[Rule, ...]] = {}
    for names, *rules in rows:
        for name in (names,) if isinstance(names, str) else names:
            if name in found:
                raise ValueError(f"the operator {name!r} is in two rows of the table")
            found[name] = tuple(rules)
    return found


# Whatever the target type: most of these operators take their inputs as the program gives them.
_COMMON = (
    (groups.CASTS, Rule(KEEP, safe=False, note="the program chooses the type")),
    ((*groups.CREATION, *groups.RANDOM), Rule(KEEP, safe=False, note="makes tensors of the type it names")),
    (groups.IMAGES, Rule(KEEP, safe=False, note="prepares data, outside the network")),
    (groups.OPTIMIZERS, Rule(KEEP, safe=False, note="updates weights in place; its inputs' types are its contract")),
    (groups.IN_PLACE, Rule(KEEP, safe=False, note="writes into an array that has its type already")),
    (groups.SPARSE_STORAGE, Rule(KEEP, safe=False, note="handles storage: sparse tensors are never cast")),
    (groups.MACHINERY, Rule(KEEP, safe=False, note="inserted by MXNet where types are settled")),
    (groups.INTEGER_ARITHMETIC, Rule(KEEP, safe=False, note="for integers only")),
    (groups.QUANTIZED, Rule(FP32, safe=False, note="eight-bit arithmetic with ranges in FP32")),
    (groups.CONTROL_FLOW,
     Rule(FP32, safe=False, note="its subgraph was built for the precision that the program gives it")),
    (groups.USER_CODE, Rule(FP32, note="written for FP32 unless its author says otherwise")),
)
_TABLES: Mapping[str, Table] = {
    BFLOAT16: as_table(*bfloat16.ROWS, *_COMMON), FLOAT16: as_table(*float16.ROWS, *_COMMON), FLOAT32: {}}
# What trains in FP32 where neither oneDNN nor an operator in C++ takes the place of MXNet's own bfloat16 kernel.
# Converted graphs keep the table's rules: oneDNN fuses a clip with the convolution before it if both run in bfloat16.
SLOW_IN_TRAINING = as_table(*bfloat16.SLOW_IN_TRAINING)

# Operators that run in low precision, too, when a network is cast as a whole: the tables keep them in FP32 for their
# resolution. They follow their data, and widen where some of it is FP32: anchors, indices and lengths keep their
# resolution. Sums, norms, losses, samples and positions are left out: MXNet adds up, or counts, in the type given.
WHOLE_NETWORK: Mapping[str, frozenset[str]] = {
    # MXNet's own kernels for elementwise arithmetic truncate bfloat16, and are slow: with them a training step of
    # MobileNetV3 takes 2.5 times as long. Only oneDNN's softmax is left.
    BFLOAT16: frozenset(groups.SOFTMAX),
    # softmax stays in FP32: it adds its exponentials up in float16, unless MXNET_SAFE_ACCUMULATION says otherwise.
    FLOAT16: frozenset((
        "Activation", "LeakyReLU", *groups.EXPONENTIALS, "_npi_hypot", *groups.STEEP, "_npi_arctan2",
        *groups.NUMPY_DIVISIONS)),
}


def table(target_dtype: str) -> Table:
    """Return the operator table of a target type: operator name to its rules, in order of precedence."""
    return _TABLES[target_dtype]
