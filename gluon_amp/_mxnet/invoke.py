"""Run any registered operator by its registered name.

MXNet generates Python functions for most operators only, scattered over a dozen modules, some under other names.
"""
from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Mapping, Sequence

import mxnet as mx
from mxnet.base import _LIB, check_call
from mxnet.ndarray import register

__all__ = ["invoke"]


def invoke(op: str, inputs: Sequence[mx.nd.NDArray], attrs: Mapping[str, str]) -> list[mx.nd.NDArray]:
    """Run an operator imperatively.

    Parameters
    ----------
    op : str
        Registered name.
    inputs : sequence of NDArray
        All inputs in the operator's order, auxiliary states included.
    attrs : mapping of str to str
        Operator parameters.

    Returns
    -------
    list of NDArray
        The visible outputs.

    Examples
    --------
    >>> invoke('_plus_scalar', [mx.nd.zeros(1)], {'scalar': '2.0'})[0].asscalar()
    2.0
    """
    return register._imperative_invoke(_handle(op), list(inputs), list(attrs), list(attrs.values()), None, False, True)


@lru_cache(maxsize=None)
def _handle(op: str) -> int:
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(op.encode(), ctypes.byref(handle)))
    return int(handle.value or 0)
