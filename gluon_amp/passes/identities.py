"""Identities before operators in C++, which MXNet does not tell that a gradient is to be added to what is there."""
from __future__ import annotations

from ..dtypes import FLOAT32
from ..graph import Entry, Role, operator, unique_name
from .assign_dtypes import data_precision, lower_outputs
from .context import Context


def behind_identity(entry: Entry, names: set[str], context: Context) -> Entry:
    """Return a tensor behind an identity, in the precision that it has."""
    made = operator("_copy", unique_name(f"{entry.node.name}_native", names), [entry], entry, Role.GUARD)
    made.dtypes, made.decision = [FLOAT32], context.policy.decide("_copy", made.attrs, entry.shape)
    if data_precision(made, context) == context.target:
        lower_outputs(made, context)
    return Entry(made)
