"""Loss scaling for ``gluon.Trainer``: ``init_trainer``, ``scale_loss`` and ``unscale``."""
from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import Any, Iterator, Sequence, Union

import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from ._mxnet import trainers
from .autocast import active_dtype, is_active
from .dtypes import FLOAT16
from .errors import StateError, expected
from .loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler

__all__ = ["init_trainer", "scale_loss", "unscale"]

_logger = logging.getLogger("gluon_amp")

READY, SCALED, UNSCALED = "READY", "SCALED", "UNSCALED"

Loss = Union[NDArray, Sequence[NDArray]]


class TrainerScaler:
    """Connects one trainer with its loss scaler; lives on the trainer as ``trainer._amp_loss_scaler``.

    Attributes
    ----------
    scaler : LossScaler
        Holds the scale; several trainers may share it.
    state : str
        What the trainer's gradients are: ``READY`` (none scaled yet), ``SCALED`` or ``UNSCALED``.
    """

    def __init__(self, trainer: gluon.Trainer, scaler: LossScaler):
        self.trainer = trainer
        self.scaler = scaler
        self.state = READY
        self._applied = scaler.loss_scale  # the scale that the gradients at hand carry

    @property
    def loss_scale(self) -> float:
        """The scale for the next backward."""
        return self.scaler.loss_scale

    def begin(self) -> float:
        """Take note that a loss is about to be scaled, and return the scale to use."""
        if self.state == UNSCALED:
            raise StateError("scale_loss was called after unscale and before step: gradients that are unscaled already "
                             "would be mixed with scaled ones. With gradient accumulation call unscale once, after "
                             "the last micro-batch")
        if self.state == READY:
            self._applied = self.scaler.loss_scale
        self.state = SCALED
        return self._applied

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry."""
        if self.state != SCALED:
            cause = {READY: "no loss was scaled since the last step: use amp.scale_loss first",
                     UNSCALED: "they are unscaled already: call unscale once per step"}[self.state]
            raise StateError(f"unscale: the trainer's gradients are not scaled; {cause}")
        if self._applied != 1.0:
            trainers.scale_gradients(self.trainer, 1.0 / self._applied)
        self.state = UNSCALED

    def has_overflow(self, params: Any) -> bool:
        """Answer the trainer, which skips its update when this is true."""
        finite = trainers.gradients_are_finite(self.trainer)
        if finite and self.state == SCALED:
            trainers.divide_rescaling(self.trainer, self._applied)
        if not finite:
            trainers.clear_accumulated(self.trainer)
        before = self.scaler.loss_scale
        self.scaler.update(found_inf=not finite)
        self.state = READY
        if self.scaler.loss_scale != before:
            _logger.info("AMP: loss scale %g -> %g", before, self.scaler.loss_scale)
        return not finite


def init_trainer(trainer: gluon.Trainer, loss_scaler: LossScaler | float | str | None = None) -> None:
    """Attach a loss scaler to a trainer, which from then on skips steps whose gradients are not finite.

    Parameters
    ----------
    trainer : gluon.Trainer
        Must update locally: ``update_on_kvstore`` left out (it is switched off here) or False.
    loss_scaler : LossScaler, float, 'dynamic' or None
        None scales dynamically for float16 and leaves the loss as it is (scale 1) for bfloat16 and FP32, whose
        range needs no scaling. A number is a scale that never changes.

    Raises
    ------
    StateError
        AMP is off, the trainer updates on the KVStore, or it has another scaler already.
    TypeError
        ``trainer`` is not a ``gluon.Trainer``, or ``loss_scaler`` is none of the above.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> amp.init()
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', update_on_kvstore=False)
    >>> amp.init_trainer(trainer)
    >>> amp.deinit()
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(expected("a gluon.Trainer", "trainer", trainer))
    if not is_active():
        raise StateError("AMP is off: call amp.init() before amp.init_trainer(trainer)")
    current = trainers.attached(trainer)
    if current is not None:
        if loss_scaler is None or loss_scaler is getattr(current, "scaler", None):
            return
        raise StateError("the trainer has a loss scaler already: init_trainer once per trainer")
    scaler = _make_scaler(loss_scaler, active_dtype(trainers.device_type(trainer)))
    trainers.update_locally(trainer)
    trainers.attach(trainer, TrainerScaler(trainer, scaler))


def _make_scaler(value: LossScaler | float | str | None, dtype: str | None) -> LossScaler:
    if value is None:
        return DynamicLossScaler() if dtype == FLOAT16 else StaticLossScaler(1.0)
    if isinstance(value, LossScaler):
        return value
    if value == "dynamic":
        return DynamicLossScaler()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return StaticLossScaler(value)
    raise TypeError(expected("a LossScaler, a number, 'dynamic' or None", "loss_scaler", value))


def _attached(trainer: gluon.Trainer, caller: str) -> TrainerScaler:
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(expected("a gluon.Trainer", "trainer", trainer))
    found = trainers.attached(trainer)
    if not isinstance(found, TrainerScaler):
        raise StateError(f"{caller}: the trainer has no loss scaler; call amp.init_trainer(trainer) first")
    return found


@contextmanager
def scale_loss(loss: Loss, trainer: gluon.Trainer) -> Iterator[NDArray | list[NDArray]]:
    """Scale a loss, or a list of them, for the backward pass inside the ``with`` block.

    The gradients then carry the scale; ``trainer.step`` divides it out, on top of the trainer's own rescaling.

    Parameters
    ----------
    loss : NDArray or sequence of NDArray
        Of any shape; float16 losses are scaled in FP32, where they cannot overflow.
    trainer : gluon.Trainer
        The trainer of the parameters, after :func:`init_trainer`.

    Yields
    ------
    NDArray or list of NDArray
        The scaled loss: a list for a list or tuple.

    Raises
    ------
    StateError
        The trainer has no loss scaler, or its gradients were unscaled since the last step.

    Examples
    --------
    ::

        with mx.autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                mx.autograd.backward(scaled_loss)
        trainer.step(batch_size)
    """
    scale = _attached(trainer, "scale_loss").begin()
    if isinstance(loss, (list, tuple)):
        yield [_scaled(item, scale) for item in loss]
    else:
        yield _scaled(loss, scale)


def _scaled(loss: NDArray, scale: float) -> NDArray:
    if scale == 1.0:
        return loss
    with autograd.record(autograd.is_training()):
        return (loss.astype("float32") if loss.dtype == np.float16 else loss) * scale


def unscale(trainer: gluon.Trainer) -> None:
    """Divide the scale out of the gradients now, to read or clip them before ``trainer.step``.

    Parameters
    ----------
    trainer : gluon.Trainer
        After the backward pass of :func:`scale_loss`; with several contexts after ``allreduce_grads`` or before.

    Raises
    ------
    StateError
        The gradients are not scaled: no :func:`scale_loss` since the last step, or unscaled already.

    Examples
    --------
    ::

        trainer.allreduce_grads()
        amp.unscale(trainer)
        gluon.utils.clip_global_norm(gradients, max_norm)
        trainer.update(batch_size)
    """
    _attached(trainer, "unscale").unscale()
