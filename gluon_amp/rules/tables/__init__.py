"""Operator tables: for each target data type, the precision that each operator runs in. Data only.

Every operator that MXNet 1.9.1 registers has rules in each of them. A table is read from top to bottom; where operators
share a fate they share a row, under a name of :mod:`~gluon_amp.rules.tables.groups`.
"""
from __future__ import annotations

from typing import Mapping

from ...dtypes import BFLOAT16, FLOAT16, FLOAT32
from . import bfloat16, float16
from .rows import Table

__all__ = ["table"]

_TABLES: Mapping[str, Table] = {BFLOAT16: bfloat16.TABLE, FLOAT16: float16.TABLE, FLOAT32: {}}


def table(target_dtype: str) -> Table:
    """Return the operator table of a target type: operator name to its rules, in order of precedence."""
    return _TABLES[target_dtype]
