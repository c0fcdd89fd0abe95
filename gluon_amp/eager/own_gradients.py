"""Gradients that operators make on their own carry the loss scale, as all others do.

SoftmaxOutput and its kin ignore the gradient that comes back to them, and with it the scale of the loss, by which the
trainer divides all the same. While gradients are recorded their data is multiplied by an array of one value, which is 1
at that time. During a backward pass of scaled losses it is the loss scale, so that the gradient is multiplied by it:
MXNet reads and writes an array in the order in which it was asked to.
"""
from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.invoke import Invocation, Invoke, original_invoke, run_operator
from .._mxnet.operators import handle_of
from .._mxnet.symbols import dtype_name
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from ..errors import StateError
from ..graph import CAST
from ..rules.tables.groups import ADDS_GRADIENT, CUSTOM, WITH_OWN_GRADIENT
from . import scaled_losses
from .custom_operators import inputs_with_own_gradient

_FLOATS = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)


class _Scale:
    """The loss scale of the backward pass that is under way, on every device that has such operators."""

    def __init__(self) -> None:
        self._arrays: dict[mx.Context, NDArray] = {}
        self.lock = threading.RLock()  # held while operators that read it are asked for, so that it is theirs alone
        self._read = False  # whether the scale has been read since the last backward pass
        self._out_of_reach = ""  # an operator since then whose gradient cannot carry it

    def on(self, context: mx.Context) -> NDArray:
        """Return the array of a device; every use gets a handle of its own, as MXNet ties its readers together."""
        with self.lock:
            if context not in self._arrays:
                self._arrays[context] = run_operator(original_invoke, "_ones", [], {"shape": (1,), "ctx": str(context)})
            self._read = True
            return self._arrays[context].detach()

    def cannot_reach(self, operator: str) -> None:
        """Note that an operator runs whose gradient cannot carry the scale."""
        self._out_of_reach = operator

    @contextmanager
    def of(self, heads: Sequence[NDArray]) -> Iterator[None]:
        """Let the gradients of a backward pass, which the body asks for, carry the scale of the losses."""
        if not (self._arrays or self._out_of_reach):
            yield
            return
        with self.lock:
            try:
                scale = self._scale_of(heads)
            finally:
                self.forget()
            with self.at(scale):
                yield

    def forget(self) -> None:
        """Begin anew."""
        self._read, self._out_of_reach = False, ""

    def _scale_of(self, heads: Sequence[NDArray]) -> float:
        scales = scaled_losses.scales_behind(heads)
        if not scales:
            return 1.0
        if self._out_of_reach:
            raise StateError(f"the gradient of {self._out_of_reach} cannot carry the loss scale: the operator makes it "
                             "on its own, inside of a loop, a branch, a partition or of sparse data. Take the operator "
                             "out of there, or train with a scale of 1: amp.init_trainer(trainer, loss_scaler=1)")
        if len(scales) > 1 and self._read:
            raise StateError(f"one backward pass of losses with different scales ({sorted(scales)}) has operators that "
                             "make their own gradient, such as SoftmaxOutput, which can carry one only. Run a backward "
                             "pass for each scale, or give the trainers one scaler")
        return max(scales)

    @contextmanager
    def at(self, scale: float) -> Iterator[None]:
        """Let gradients that are computed in the body carry a scale."""
        if scale == 1.0:
            yield
            return
        with self.lock:
            self._fill(scale)
            try:
                yield
            finally:
                self._fill(1.0)

    def _fill(self, value: float) -> None:
        with autograd.pause():
            for array in self._arrays.values():
                run_operator(original_invoke, "_set_value", [], {"src": value}, out=array)


loss_scale = _Scale()


def scaled_invocations() -> Mapping[int, Callable[[Invoke, Invocation], Any]]:
    """Return how to run imperative calls of operators that make their own gradient, by their handles."""
    return {handle_of(op): _make_run(op) for op in (*WITH_OWN_GRADIENT, CUSTOM)}


def _make_run(op: str) -> Callable[[Invoke, Invocation], Any]:
    def run(invoke: Invoke, call: Invocation) -> Any:
        count = inputs_with_own_gradient(call.attrs()) if op == CUSTOM else 1
        inputs = [_times_scale(invoke, array, call, op) if i < count else array for i, array in enumerate(call.inputs)]
        result = invoke(*call._replace(inputs=inputs))
        if op != ADDS_GRADIENT or call.out is not None:
            return result
        return _with_scale(invoke, "broadcast_div", result, call.is_np_op)
    return run


def _times_scale(invoke: Invoke, array: NDArray, call: Invocation, op: str) -> NDArray:
    if isinstance(array, BaseSparseNDArray):
        loss_scale.cannot_reach(op)
        return array
    if dtype_name(array.dtype) not in _FLOATS or not array.size:
        return array
    return _with_scale(invoke, "broadcast_mul", array, call.is_np_op)


def _with_scale(invoke: Invoke, op: str, array: NDArray, is_np_op: bool) -> NDArray:
    """Return an array whose gradient is multiplied or divided by the scale: see passes/gradients.py."""
    dtype = dtype_name(array.dtype)
    cast = CAST if dtype == BFLOAT16 else "Cast"
    wide = array if dtype == FLOAT32 else run_operator(invoke, cast, [array], {"dtype": FLOAT32}, is_np_op=is_np_op)
    with loss_scale.lock:
        scale = loss_scale.on(array.context)
        made = run_operator(invoke, op, [wide, scale if array.shape else scale.reshape(())], {}, is_np_op=is_np_op)
    return made if dtype == FLOAT32 else run_operator(invoke, cast, [made], {"dtype": dtype}, is_np_op=is_np_op)
