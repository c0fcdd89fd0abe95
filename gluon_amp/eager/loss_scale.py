"""The loss scale in backward passes: which losses carry it, and gradients that operators make on their own.

A loss is scaled by an operator with the scale as its attribute: so MXNet's record of how an array was computed tells
whether a backward pass is of scaled losses, in whatever order and thread they come.

SoftmaxOutput and its kin ignore the gradient that comes back, and with it the scale. While gradients are recorded their
data is multiplied by an array of one value, which is 1 at that time. During a backward pass of scaled losses it is the
scale: MXNet reads and writes an array in the order in which it was asked to.
"""
from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator
from weakref import WeakKeyDictionary, WeakSet

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Trainer
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet import trainers
from .._mxnet.invoke import Invocation, Invoke, Runs, handle_of, invoke, original_invoke, run_operator
from .._mxnet.symbols import dtype_name
from ..errors import StateError, some_of, warn
from ..graph import CAST
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from ..rules.tables.groups import ADDS_GRADIENT, CUSTOM, WITH_OWN_GRADIENT
from .custom_operators import inputs_with_own_gradient

_FLOATS = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
_MARK = "__amp_loss_scale__"  # on the operators that scale losses


class _LossScale:
    """The scales of the backward passes since AMP was switched on, and of the one that is under way."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held while operators that read the scale are asked for: it is theirs alone
        self._arrays: dict[mx.Context, NDArray] = {}  # the scale, on every device that has such operators
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.passes = 0, 0  # backward passes of losses that all carry a scale other than 1, and others
        self._any = False  # whether a loss was scaled at all
        self._latest = 1.0  # the scale of the latest scaled loss whose gradients were computed
        self._at_update: WeakKeyDictionary[Trainer, tuple[int, int]] = WeakKeyDictionary()
        self._told: WeakSet[Trainer] = WeakSet()
        self._read = False  # whether the scale has been read since the last backward pass
        self.out_of_reach = ""  # an operator that ran since then, and whose gradient cannot carry the scale

    def scaled(self, loss: NDArray, scale: float) -> NDArray:
        """Multiply a loss by a scale; MXNet's record of the product tells so."""
        self._any = True
        is_numpy = isinstance(loss, mx.np.ndarray)
        return invoke("_npi_multiply_scalar" if is_numpy else "_mul_scalar", [loss], {"scalar": scale, _MARK: scale},
                      is_numpy)[0]

    def on(self, context: mx.Context) -> NDArray:
        """Return the array of a device; every use gets a handle of its own, as MXNet ties its readers together."""
        with self.lock:
            if context not in self._arrays:
                self._arrays[context] = run_operator(original_invoke, "_ones", [], {"shape": (1,), "ctx": str(context)})
            self._read = True
            return self._arrays[context].detach()

    @contextmanager
    def of(self, heads: Any, counts: bool = True) -> Iterator[None]:
        """Let gradients of the heads, which the body asks for, carry the scale of the losses; count the pass."""
        is_read = bool(self._arrays or self.out_of_reach)
        arrays = heads if isinstance(heads, (list, tuple)) else [heads]
        scales = [_scales_behind(head, is_read) for head in arrays if isinstance(head, NDArray)] if self._any else []
        if counts:
            scaled, others = self.passes
            if scales and all(scales):
                self.passes, self._latest = (scaled + 1, others), max(map(max, scales))
            else:
                self.passes = scaled, others + 1
        if not is_read:
            yield
            return
        with self.lock, self.at(self._checked(set().union(*scales))):
            yield

    def _checked(self, scales: set[float]) -> float:
        """Return the scale of a backward pass; raise StateError where an operator's own gradient cannot carry it."""
        read, out_of_reach, self._read, self.out_of_reach = self._read, self.out_of_reach, False, ""
        if scales and out_of_reach:
            raise StateError(f"the gradient of {out_of_reach} cannot carry the loss scale: the operator makes it "
                             "on its own, inside of a loop, a branch, a partition or of sparse data. Take the operator "
                             "out of there, or train with a scale of 1: amp.init_trainer(trainer, loss_scaler=1)")
        if len(scales) > 1 and read:
            raise StateError(f"one backward pass of losses with different scales ({sorted(scales)}) has operators that "
                             "make their own gradient, such as SoftmaxOutput, which can carry one only. Run a backward "
                             "pass for each scale, or give the trainers one scaler")
        return max(scales, default=1.0)

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

    def warn_of_others(self, trainer: Trainer) -> None:
        """Warn when an update is about to apply gradients with a scale that the trainer does not divide out."""
        # MXNet does not tell where a gradient comes from. It is certain where all backward passes since the trainer's
        # last update were of scaled losses; a trainer with losses of its own beside them is never warned of.
        scaled, others = (now - then for now, then in zip(self.passes, self._at_update.get(trainer, (0, 0))))
        self._at_update[trainer] = self.passes
        if others or not scaled or trainer in self._told:
            return
        scaler = trainers.attached(trainer)
        if getattr(scaler, "is_scaled", False) or getattr(scaler, "loss_scale", 1.0) != 1.0:
            return
        if scaler is not None and hasattr(scaler, "mark_fresh"):
            scaler.mark_fresh()
        names = trainers.fresh_parameters(trainer)
        if not names:
            return
        self._told.add(trainer)
        warn(f"the gradients of {some_of(names, 3)} carry the loss scale {self._latest:g} of another trainer: "
             "their own trainer updates them without dividing it out. Give it the same scaler, "
             "amp.init_trainer(trainer, loss_scaler=amp.get_loss_scaler(other)), and name both: "
             "amp.scale_loss(loss, [other, trainer])")


loss_scale = _LossScale()


def _scales_behind(head: NDArray, is_asked_for_all: bool) -> set[float]:
    """Return the scale of the loss that an array is, or the scales of the losses behind it, if asked for."""
    try:
        symbol = autograd.get_symbol(head)
    except mx.MXNetError:  # nothing was recorded of it: the backward pass is about to raise as well
        return set()
    own = symbol.attr(_MARK)
    if own or not is_asked_for_all:
        return {float(own)} if own else set()
    return {float(attrs[_MARK]) for attrs in symbol.attr_dict().values() if _MARK in attrs}


def scaled_invocations() -> Runs:
    """Return how to run imperative calls of operators that make their own gradient, by their handles."""
    return {handle_of(op): partial(_run, op) for op in (*WITH_OWN_GRADIENT, CUSTOM)}


def _run(op: str, invoke: Invoke, call: Invocation) -> Any:
    count, inputs = inputs_with_own_gradient(call.attrs()) if op == CUSTOM else 1, list(call.inputs)
    for i, array in enumerate(inputs[:count]):
        if isinstance(array, BaseSparseNDArray):
            loss_scale.out_of_reach = op
        elif dtype_name(array.dtype) in _FLOATS and array.size:
            inputs[i] = _with_scale(invoke, "broadcast_mul", array, call.is_np_op)
    result = invoke(*call._replace(inputs=inputs))
    if op != ADDS_GRADIENT or call.out is not None:
        return result
    return _with_scale(invoke, "broadcast_div", result, call.is_np_op)


def _with_scale(invoke: Invoke, op: str, array: NDArray, is_np_op: bool) -> NDArray:
    """Return an array whose gradient is multiplied or divided by the scale: see passes/gradients.py."""
    dtype = dtype_name(array.dtype)
    cast = CAST if dtype == BFLOAT16 else "Cast"
    wide = array if dtype == FLOAT32 else run_operator(invoke, cast, [array], {"dtype": FLOAT32}, is_np_op=is_np_op)
    with loss_scale.lock:
        scale = loss_scale.on(array.context)
        made = run_operator(invoke, op, [wide, scale if array.shape else scale.reshape(())], {}, is_np_op=is_np_op)
    return made if dtype == FLOAT32 else run_operator(invoke, cast, [made], {"dtype": dtype}, is_np_op=is_np_op)
