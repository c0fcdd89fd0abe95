"""Loss scaling for ``gluon.Trainer``: ``init_trainer``, ``scale_loss`` and ``unscale``."""
from __future__ import annotations

import logging
import math
import warnings
import weakref
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

__all__ = ["TrainerScaler", "attached_scalers", "clip_global_norm", "init_trainer", "master_params", "scale_loss",
           "unscale"]

_logger = logging.getLogger("gluon_amp")

READY, SCALED, UNSCALED = "READY", "SCALED", "UNSCALED"
_attached_scalers: list[weakref.ReferenceType[TrainerScaler]] = []

Loss = Union[NDArray, Sequence[NDArray]]


class TrainerScaler:
    """Connects one trainer with its loss scaler; lives on the trainer as ``trainer._amp_loss_scaler``.

    Attributes
    ----------
    scaler : LossScaler
        Holds the scale; several trainers may share it.
    state : str
        What the trainer's gradients are: ``READY`` (none scaled yet), ``SCALED`` or ``UNSCALED``.
    warn_after : int
        Skipped steps in a row after which to warn.
    """

    def __init__(self, trainer: gluon.Trainer, scaler: LossScaler, warn_after: int = 20):
        self.trainer = trainer
        self.scaler = scaler
        self.state = READY
        self.warn_after = warn_after
        self.applied = scaler.loss_scale  # the scale that the gradients at hand carry

    @property
    def loss_scale(self) -> float:
        """The scale for the next backward."""
        return self.scaler.loss_scale

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped."""
        return self.scaler.step_was_skipped

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped so far."""
        return self.scaler.num_skipped

    def begin(self) -> float:
        """Take note that a loss is about to be scaled, and return the scale to use."""
        if self.state == UNSCALED:
            raise StateError("scale_loss was called after unscale and before step: gradients that are unscaled already "
                             "would be mixed with scaled ones. With gradient accumulation call unscale once, after "
                             "the last micro-batch")
        if self.state == READY:
            self.applied = self.scaler.loss_scale
        self.state = SCALED
        return self.applied

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry."""
        if self.state != SCALED:
            cause = {READY: "no loss was scaled since the last step: use amp.scale_loss first",
                     UNSCALED: "they are unscaled already: call unscale once per step"}[self.state]
            raise StateError(f"unscale: the trainer's gradients are not scaled; {cause}")
        self._multiply(1.0 / self.applied)
        self.state = UNSCALED

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a norm, in the scale that they carry; return the norm that they had without scale."""
        carried = self.applied if self.state == SCALED else 1.0
        norm = trainers.gradient_norm(self.trainer) / carried
        if math.isfinite(norm) and norm > max_norm:
            self._multiply(max_norm / norm)
        return norm

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            trainers.scale_gradients(self.trainer, factor)

    def has_overflow(self, params: Any) -> bool:
        """Answer the trainer, which skips its update when this is true."""
        self._refuse_unscaled_losses()
        finite = trainers.gradients_are_finite(self.trainer)
        if finite and self.state == SCALED:
            trainers.divide_rescaling(self.trainer, self.applied)
        before = self.scaler.loss_scale
        self.scaler.update(found_inf=not finite)
        self.state = READY
        if not finite:
            self._warn()
            trainers.clear_accumulated(self.trainer)
        if self.scaler.loss_scale != before:
            _logger.info("AMP: loss scale %g -> %g", before, self.scaler.loss_scale)
        return not finite

    def _refuse_unscaled_losses(self) -> None:
        scale = self.scaler.loss_scale
        forgotten = self.state == READY and scale != 1.0 and trainers.has_gradients(self.trainer)
        if forgotten and not trainers.is_scaled_by_hand(self.trainer, scale):
            raise StateError("step: no loss was scaled since the last step, so the gradients lack the loss scale. Use "
                             "`with amp.scale_loss(loss, trainer) as scaled_loss: autograd.backward(scaled_loss)` for "
                             "every backward pass")

    def _warn(self) -> None:
        if self.scaler.skipped_in_a_row != self.warn_after:
            return
        names = trainers.non_finite_parameters(self.trainer)
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        advice = ("The loss scale is at its lowest: the loss or the data may be infinite or NaN themselves, or a layer "
                  "overflows; try a lower learning rate, or amp.exclude for the layers named"
                  if self.scaler.at_floor else "The loss scale keeps falling")
        warnings.warn(f"{self.warn_after} steps in a row were skipped, at loss scale {self.scaler.loss_scale:g}: "
                      f"gradients of {shown} are not finite. {advice}", stacklevel=4)


def init_trainer(trainer: gluon.Trainer, loss_scaler: LossScaler | float | str | None = None,
                 warn_after: int = 20) -> None:
    """Attach a loss scaler to a trainer, which from then on skips steps whose gradients are not finite.

    Parameters
    ----------
    trainer : gluon.Trainer
        Must update locally: ``update_on_kvstore`` left out (it is switched off here) or False.
    loss_scaler : LossScaler, float, 'dynamic' or None
        None scales dynamically for float16 and leaves the loss as it is (scale 1) for bfloat16 and FP32, whose
        range needs no scaling. A number is a scale that never changes. One scaler may serve several trainers.
    warn_after : int
        Warn when so many steps in a row were skipped.

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
    trainers.attach(trainer, TrainerScaler(trainer, scaler, warn_after))
    _attached_scalers[:] = [reference for reference in _attached_scalers if reference() is not None]
    _attached_scalers.append(weakref.ref(trainers.attached(trainer)))


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
def scale_loss(loss: Loss, trainer: gluon.Trainer | Sequence[gluon.Trainer],
               enabled: bool = True) -> Iterator[Loss]:
    """Scale a loss, or a list of them, for the backward pass inside the ``with`` block.

    The gradients then carry the scale; ``trainer.step`` divides it out, on top of the trainer's own rescaling.

    Parameters
    ----------
    loss : NDArray or sequence of NDArray
        Of any shape; float16 losses are scaled in FP32, where they cannot overflow.
    trainer : gluon.Trainer or sequence of them
        The trainer of the parameters, after :func:`init_trainer`. Several trainers whose parameters get gradients from
        the same loss must share one scaler, or have the same scale.
    enabled : bool
        False gives the loss back as it is.

    Yields
    ------
    NDArray or list of NDArray
        The scaled loss: a list for a list or tuple.

    Raises
    ------
    StateError
        The trainer has no loss scaler, its gradients were unscaled since the last step, or trainers disagree.

    Examples
    --------
    ::

        with mx.autograd.record():
            loss = loss_function(net(data), label)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                mx.autograd.backward(scaled_loss)
        trainer.step(batch_size)
    """
    if not enabled:
        yield loss
        return
    several = trainer if isinstance(trainer, (list, tuple)) else [trainer]
    scales = {item.begin() for item in [_attached(one, "scale_loss") for one in several]}
    if len(scales) != 1:
        raise StateError(f"scale_loss: the trainers have different scales ({sorted(scales)}). Give them one scaler: "
                         "amp.init_trainer(trainer, loss_scaler=scaler) for each")
    scale = scales.pop()
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


def clip_global_norm(trainer: gluon.Trainer, max_norm: float) -> float:
    """Scale all gradients down so that their joint 2-norm is at most ``max_norm``, whatever loss scale they carry.

    Parameters
    ----------
    trainer : gluon.Trainer
        After the backward pass; with several contexts after ``trainer.allreduce_grads()``.
    max_norm : float
        The largest norm, in units of the unscaled gradients, above 0.

    Returns
    -------
    float
        The norm before clipping, without the loss scale. Infinite or NaN when the gradients are: they are left as they
        are, and the step will be skipped.

    Raises
    ------
    StateError
        The trainer has no loss scaler.
    ValueError
        ``max_norm`` is not above 0.

    Examples
    --------
    ::

        trainer.allreduce_grads()
        norm = amp.clip_global_norm(trainer, 1.0)
        trainer.update(batch_size)
    """
    if not max_norm > 0:
        raise ValueError(expected("a number above 0", "max_norm", max_norm))
    return _attached(trainer, "clip_global_norm").clip(max_norm)


def master_params(trainer: gluon.Trainer) -> Iterator[NDArray]:
    """Yield the FP32 values that the trainer updates: masters of float16 parameters, other parameters themselves.

    Parameters
    ----------
    trainer : gluon.Trainer
        Masters exist from its first step on, with ``multi_precision=True``.

    Examples
    --------
    ::

        norm = sum((value ** 2).sum() for value in amp.master_params(trainer)).sqrt()
    """
    if not isinstance(trainer, gluon.Trainer):
        raise TypeError(expected("a gluon.Trainer", "trainer", trainer))
    return trainers.master_arrays(trainer)


def attached_scalers() -> list[TrainerScaler]:
    """Return what connects the living trainers with their scalers, in the order of ``init_trainer``."""
    found = [reference() for reference in _attached_scalers]
    return [item for item in found if item is not None]
