"""Operator tables: for each target data type, the precision that each operator runs in. Data only.

Every operator that MXNet 1.9.1 registers has a record in each of them.
"""
from __future__ import annotations

from typing import Mapping

from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from . import bfloat16, float16
from .records import FP32, KEEP, LOWER, NEUTRAL, RULES, WIDEST, OpRule

__all__ = ["DEFAULT_RULE", "FP32", "KEEP", "LOWER", "NEUTRAL", "RULES", "SWITCHED_OFF", "WIDEST", "OpRule", "table"]

# What happens inside autocast(enabled=False) and excluded blocks.
SWITCHED_OFF = OpRule("*", FP32, note="inside an autocast(enabled=False) region, or an excluded block")

# What happens to an operator that is in no table: one from a library that was loaded, or a later MXNet's.
DEFAULT_RULE = OpRule("*", FP32, note="not in the operator tables: FP32 is safe for every operator")


def _index(records: tuple[OpRule, ...]) -> dict[str, tuple[OpRule, ...]]:
    found: dict[str, tuple[OpRule, ...]] = {}
    for record in records:
        found[record.name] = (*found.get(record.name, ()), record)
    return found


_TABLES = {BFLOAT16: _index(bfloat16.TABLE), FLOAT16: _index(float16.TABLE), FLOAT32: {}}


def table(target_dtype: str) -> Mapping[str, tuple[OpRule, ...]]:
    """Return the operator table of a target type: operator name to its records, in order of precedence.

    Examples
    --------
    >>> [record.rule for record in table('float16')['Convolution']]
    ['LOWER']
    """
    return _TABLES[target_dtype]
