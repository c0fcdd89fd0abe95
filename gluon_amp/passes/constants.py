"""The value of a tensor that is the same everywhere, whatever the data."""
from __future__ import annotations

import operator
from typing import Callable, Mapping

from ..graph import Entry
from ..rules.decision import constants_of, number

_FILLED: Mapping[str, float] = {**dict.fromkeys(("_ones", "_npi_ones", "ones_like"), 1.0),
                                **dict.fromkeys(("_zeros", "_npi_zeros", "zeros_like"), 0.0)}
_FILLED_WITH = ("_full", "_npi_full_like")
_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("_plus_scalar", "_npi_add_scalar"), operator.add),
    **dict.fromkeys(("_minus_scalar", "_npi_subtract_scalar"), operator.sub),
    **dict.fromkeys(("_mul_scalar", "_npi_multiply_scalar"), operator.mul),
    **dict.fromkeys(("_div_scalar", "_npi_true_divide_scalar"), lambda value, by: value / by if by else value)}
_PASSING = ("Reshape", "_np_reshape", "_npx_reshape", "expand_dims", "squeeze", "broadcast_to", "broadcast_like",
            "_npi_broadcast_to", "tile", "negative", "BlockGrad", "_copy")


def constant(entry: Entry) -> float | None:
    """Return the value of a tensor that is one constant, its sign aside; None for all others."""
    node = entry.node
    if node.op in _FILLED:
        return _FILLED[node.op]
    if node.op in _FILLED_WITH:
        return number(node.attrs.get(constants_of(node.op)[0]))
    if node.op in _PASSING:
        return constant(node.inputs[0])
    if node.op in _ARITHMETIC:
        first, second = constant(node.inputs[0]), number(node.attrs.get("scalar"))
        return None if first is None or second is None else _ARITHMETIC[node.op](first, second)
    return None
