"""Custom operators (``mx.operator.CustomOp``) were written for FP32: their code runs in it, forward and backward.

MXNet runs their Python code in threads of its own, outside of all blocks and regions.
"""
from __future__ import annotations

import functools
import threading
from collections import UserDict
from typing import Any, Callable, Mapping

import mxnet as mx
from mxnet.operator import CustomOp, CustomOpProp

from .._mxnet.arrays import flag_of
from ..graph.attrs import LOW_FLAGS, parameters
from ..state.in_force import in_force, under


class References(UserDict):
    """MXNet's references to custom operators, by number; operators that are added are kept in FP32."""

    def __init__(self, entries: dict[int, Any]):
        super().__init__()
        self.data = entries

    def __setitem__(self, number: int, value: Any) -> None:
        if isinstance(value, CustomOpProp):
            _thread.latest = value
            value.infer_storage_type_backward = _with_known_storage(value.infer_storage_type_backward)
        if isinstance(value, CustomOp) and not hasattr(value, "_amp_kept_in_fp32"):  # a script may return one twice
            for name in ("forward", "backward"):
                setattr(value, name, _in_fp32(getattr(value, name)))
            value._amp_kept_in_fp32 = True
        self.data[number] = value


_thread = threading.local()  # its ``latest`` are the properties of a custom operator that it made last


def inputs_with_own_gradient(attrs: Mapping[str, str]) -> int:
    """Return how many inputs a custom operator has that get a gradient of its own: none where it reads its outputs'."""
    made = _properties(attrs)
    if made is None:
        return 0
    inputs, outputs = len(made.list_arguments()), len(made.list_outputs())
    needed = made.declare_backward_dependency(list(range(outputs)), list(range(outputs, outputs + inputs)),
                                              list(range(outputs + inputs, 2 * outputs + inputs)))
    return 0 if set(range(outputs)).intersection(needed) else inputs


def number_of_states(attrs: Mapping[str, str]) -> int:
    """Return how many auxiliary states a custom operator has, which are its last inputs."""
    made = _properties(attrs)
    return 0 if made is None else len(made.list_auxiliary_states())


def _properties(attrs: Mapping[str, str]) -> CustomOpProp | None:
    """Return the properties of a custom operator; None of one that is not written in Python."""
    _thread.latest = None
    mx.sym.Custom(name="amp_asked", **parameters(attrs))  # makes an object of the user's class, as each call does
    return _thread.latest


def _with_known_storage(method: Callable) -> Callable:
    """Let gradients be dense where a user's function leaves the storage open."""
    # Gradients of arrays that a program made have a storage; gradients of the casts that AMP puts before an operator do
    # not yet, and MXNet refuses to leave them so (``CustomOpProp.infer_storage_type_backward`` in mxnet/operator.py).
    @functools.wraps(method)
    def infer(*args: Any) -> list[list[str]]:
        return [["default" if storage == "undefined" else storage for storage in part] for part in method(*args)]
    return infer


def _in_fp32(method: Callable) -> Callable:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        state = in_force.current()
        # One that is to run in low precision gets its data so: see register_op.
        if state is None or any(flag_of(array) in LOW_FLAGS for array in kwargs.get("in_data", ())):
            return method(*args, **kwargs)
        with under(state.disabled()):
            return method(*args, **kwargs)
    return run
