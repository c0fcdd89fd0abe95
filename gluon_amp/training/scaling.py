"""Loss scaling for ``gluon.Trainer``: ``init_trainer``, ``scale_loss`` and ``unscale``."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Collection, Iterator, Sequence, Union

import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from .._mxnet import trainers
from ..base import checks
from ..base.aliases import answers
from ..eager.loss_scale import loss_scale
from ..errors import StateError, expected, warn
from ..machine.dtypes import FLOAT16
from ..session.init import active_dtype, is_active
from ..state.blocks import block_settings
from ..state.in_force import in_force
from .loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler, scale_of
from .trainer_scaler import TrainerScaler, attach, attached_to

Loss = Union[NDArray, Sequence[NDArray]]


@answers(**{name: f"pass loss_scaler=amp.DynamicLossScaler({name}=...)" for name in
            ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "max_scale")},
         loss_scale="it is called loss_scaler: a number, 'dynamic' or a LossScaler",
         optimizer="the trainer stands in its place: amp.init_trainer(trainer)")
def init_trainer(trainer: gluon.Trainer, loss_scaler: LossScaler | float | str | None = None,
                 warn_after: int = 20, *, max_skipped: int | None = None, allreduce_always_fp32: bool = False,
                 gradient_predivide_factor: float = 1.0) -> None:
    """Attach a loss scaler to a trainer, which from then on skips steps whose gradients are not finite.

    With several processes, on the KVStore ``dist_sync`` or Horovod's ``DistributedTrainer``, a step is skipped when the
    gradients of any of them are not finite. All processes must call this, with the same parameters.

    Parameters
    ----------
    trainer : gluon.Trainer
        Must update locally: ``update_on_kvstore`` left out (it is switched off here) or False.
    loss_scaler : LossScaler, float, 'dynamic' or None
        None scales dynamically for float16, and by 1 for bfloat16 and FP32, whose range needs no more; after
        :func:`initialize` it takes the level's. A number never changes. One scaler may serve several trainers.
    warn_after : int
        Warn when so many steps in a row were skipped.
    max_skipped : int, optional
        Raise StateError from ``trainer.step`` when so many steps in a row were skipped.
    allreduce_always_fp32 : bool
        Add float16 gradients of several processes up in FP32; bfloat16 ones always are.
    gradient_predivide_factor : float
        Divide gradients by it before those of several processes are added up, so that float16 sums do not overflow.
        The update makes up for it, and so do ``unscale`` and ``clip_global_norm``.

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
    checks.instance("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    if not is_active() and block_settings.level is None:
        raise StateError("AMP is off: call amp.init() before amp.init_trainer(trainer)")
    checks.whole("warn_after", warn_after, 1)
    if max_skipped is not None:
        checks.whole("max_skipped", max_skipped, 1)
    current = trainers.attached(trainer)
    if current is not None and getattr(current, "session", in_force.session) == in_force.session:
        if loss_scaler is None or loss_scaler is getattr(current, "scaler", None):
            return
        raise StateError("the trainer has a loss scaler already: init_trainer once per trainer")
    reduction: dict[str, Any] = {"allreduce_always_fp32": allreduce_always_fp32,
                                 "gradient_predivide_factor": gradient_predivide_factor}
    if block_settings.level is not None and loss_scaler is None:
        block_settings.level(trainer, warn_after, max_skipped, **reduction)
        return
    scaler = make_scaler(loss_scaler, {active_dtype(context) for context in trainers.contexts(trainer)})
    attach(TrainerScaler(trainer, scaler, warn_after, max_skipped), **reduction)


def make_scaler(value: LossScaler | float | str | None, dtypes: Collection[str | None] = ()) -> LossScaler:
    """Return a loss scaler as an argument names it; None takes it by the types that devices run."""
    if isinstance(value, LossScaler):
        return value
    if value == "dynamic" or (value is None and FLOAT16 in dtypes):
        return DynamicLossScaler()
    if value is None or checks.is_number(value):
        return StaticLossScaler(1.0 if value is None else scale_of("loss_scaler", value))
    raise TypeError(expected("a LossScaler, a number, 'dynamic' or None", "loss_scaler", value))


def get_loss_scaler(trainer: gluon.Trainer, loss_id: int = 0) -> LossScaler:
    """Return the loss scaler of a trainer, or of a loss where ``amp.initialize(num_losses=...)`` made one for each.

    Its ``loss_scale``, ``step_was_skipped``, ``num_skipped`` and ``skipped_in_a_row`` change from step to step.
    """
    return attached_to(trainer, "get_loss_scaler").scaler_of(loss_id)


@answers(optimizer="the trainer stands in its place: amp.scale_loss(loss, trainer)",
         optimizers="the trainer stands in their place: amp.scale_loss(loss, trainer)",
         model="leave it out",
         delay_unscale="leave it out: gradients are unscaled by trainer.step, or by amp.unscale",
         delay_overflow_check="leave it out: overflow is looked for once, by trainer.step")
@contextmanager
def scale_loss(loss: Loss, trainer: gluon.Trainer | Sequence[gluon.Trainer], loss_id: int = 0,
               enabled: bool = True) -> Iterator[Loss]:
    """Scale a loss, or a list of them, for the backward pass inside the ``with`` block.

    The gradients then carry the scale; ``trainer.step`` divides it out, on top of the trainer's own rescaling.

    Parameters
    ----------
    loss : NDArray or sequence of NDArray
        Of any shape; float16 losses are scaled in FP32, where they cannot overflow.
    trainer : gluon.Trainer or sequence of them
        After :func:`init_trainer`. Several trainers that get gradients from the same loss must have the same scale.
    loss_id : int
        Which of the trainer's scalers to use, where ``amp.initialize(num_losses=...)`` made one per loss. Losses of
        different scales may add up in one gradient.
    enabled : bool
        False gives the loss back as it is.

    Yields
    ------
    NDArray or list of NDArray
        The scaled loss: a list for a list or tuple.

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
    several = checks.one_or_several("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    items = [attached_to(one, "scale_loss") for one in several]
    check_losses("loss", loss)
    with ExitStack() as stack:
        scales = {stack.enter_context(item.scaling(loss_id)) for item in items}
        if len(scales) != 1:
            raise StateError(f"scale_loss: the trainers have different scales ({sorted(scales)}). Give them one "
                             "scaler: amp.init_trainer(trainer, loss_scaler=scaler) for each")
        scale, before = scales.pop(), loss_scale.passes
        yield scaled(loss, scale)
        of_scaled, others = (now - then for now, then in zip(loss_scale.passes, before))
        if scale != 1.0 and others > 0 and not of_scaled:
            warn("inside scale_loss a loss was differentiated that is not scaled: its gradients will be divided by the "
                 f"scale {scale:g} all the same, so that weights hardly change. Call backward() on what scale_loss "
                 "gives: with amp.scale_loss(loss, trainer) as scaled_loss: scaled_loss.backward()")


def check_losses(name: str, value: Loss) -> None:
    """Raise TypeError for what is no loss, or cannot have a gradient."""
    for loss in checks.one_or_several(name, value, NDArray, "an NDArray"):
        if np.dtype(loss.dtype).kind in "iub":
            raise TypeError(f"expected a floating-point loss, received {name} of type {np.dtype(loss.dtype)}: integers "
                            "have no gradient")


def scaled(loss: Any, scale: float) -> Any:
    """Multiply a loss, or several in a list, by a scale, on the tape of their gradients."""
    if isinstance(loss, (list, tuple)):
        return [scaled(each, scale) for each in loss]
    if scale == 1.0:
        return loss
    with autograd.record(autograd.is_training()):
        return loss_scale.scaled(loss.astype("float32") if loss.dtype == np.float16 else loss, scale)


def unscale(trainer: gluon.Trainer) -> None:
    """Divide the scale out of the gradients now, once a step, to read or change them before ``trainer.step``.

    Gradients of several devices or processes are added up first, and ``trainer.step`` does not do so again.
    """
    attached_to(trainer, "unscale").unscale()


def clip_global_norm(trainer: gluon.Trainer, max_norm: float) -> float:
    """Scale all gradients down so that their joint 2-norm is at most ``max_norm``, whatever loss scale they carry.

    Gradients of several devices or processes are added up first. ``max_norm`` is in units of the unscaled gradients;
    ``float('inf')`` reads the norm alone. Returns the norm before clipping, without the loss scale: not finite where
    the gradients are not, which are then left as they are, and the step will be skipped.
    """
    checks.above_zero("max_norm", max_norm)
    return attached_to(trainer, "clip_global_norm").clip(max_norm)


def master_params(trainer: gluon.Trainer) -> Iterator[NDArray]:
    """Yield the FP32 values that the trainer updates: masters of float16 parameters, other parameters themselves.

    Masters exist from the first step on, with ``multi_precision=True``. To clip gradients use :func:`clip_global_norm`.
    """
    checks.instance("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    scaler = trainers.attached(trainer)
    if isinstance(scaler, TrainerScaler) and scaler.is_scaled and (scaler.carried != 1.0 or scaler.adds_up):
        raise StateError("master_params was called between scale_loss and step: the gradients of these arrays carry "
                         f"the loss scale {scaler.applied:g}, and are those of one device. To clip, call "
                         "amp.clip_global_norm(trainer, max_norm); to read weights, call it after trainer.step")
    return trainers.master_arrays(trainer)
