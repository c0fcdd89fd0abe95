"""``GradScaler``: the loop of torch.amp around a ``gluon.Trainer``."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping
from weakref import WeakSet

from mxnet import gluon

from .._mxnet import trainers
from ..base import checks
from ..base.aliases import answers
from ..eager.running_stats import running_stats
from ..errors import StateError, expected
from ..session import hooks
from ..training.loss_scaler import MOST_SCALE, DynamicLossScaler, scale_of
from ..training.scaling import Loss, check_losses, scaled
from ..training.trainer_scaler import StepState, TrainerScaler, attach

# torch's scale falls to 0 for good. From here on gradients and their squares are normal numbers of FP32.
_FLOOR = 2.0 ** -32
_MADE = (StepState.STEPPED, StepState.SKIPPED)


class _UpdatedLater(DynamicLossScaler):
    """A loss scale that waits for :meth:`settle`, whatever its trainers' steps tell it."""

    found_inf: bool | None = None  # whether any step since the last time was skipped; None for no step

    def take_report(self, found_inf: bool, last: int | None) -> int:
        """Take note of a trainer's step: :meth:`settle` ends the iteration."""
        self.found_inf = found_inf or bool(self.found_inf)
        return 0

    @property
    def step_was_skipped(self) -> bool:
        """Whether a step was skipped since the last update, or at it where none was made since."""
        return super().step_was_skipped if self.found_inf is None else self.found_inf

    def settle(self, new_scale: float | None = None) -> None:
        """Change the scale for the steps since the last time, or to a given one."""
        if new_scale is None:
            self.update(bool(self.found_inf))
        else:
            self._state = replace(self._state, scale=scale_of("new_scale", new_scale))
        self.found_inf = None


class GradScaler:
    """Scale losses and skip steps that overflowed, in the calls of torch's ``GradScaler``.

    :func:`init_trainer` and :func:`scale_loss` do the same in fewer calls. bfloat16 trains as well with
    ``enabled=False``.

    Parameters
    ----------
    device : str
        Accepted for torch's signature. The device of the arrays decides.
    init_scale : float
        The first scale, above 0. Overflows lower it to 2^-32 at the least.
    growth_factor : float
        Multiplies the scale after ``growth_interval`` steps without overflow, above 1.
    backoff_factor : float
        Multiplies the scale at an overflow, between 0 and 1.
    growth_interval : int
        Steps without overflow before the scale grows.
    enabled : bool
        False leaves losses and gradients as they are; ``step`` is then the trainer's own.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), 'sgd')
    >>> scaler = amp.GradScaler()
    >>> with mx.autograd.record(), amp.autocast():
    ...     loss = net(mx.nd.ones((4, 2))).sum()
    >>> scaler.scale(loss).backward()
    >>> scaler.step(trainer, batch_size=4)
    True
    >>> scaler.update()
    >>> scaler.get_scale()
    65536.0
    """

    def __init__(self, device: str = "cuda", init_scale: float = 2.0 ** 16, growth_factor: float = 2.0,
                 backoff_factor: float = 0.5, growth_interval: int = 2000, enabled: bool = True):
        if not isinstance(device, str):
            raise TypeError(expected("the name of a device, as in torch.amp", "device", device)
                            + f". A scale goes by name: init_scale={device!r}")
        self._enabled = checks.true_or_false("enabled", enabled)
        self._settings: dict[str, Any] = {"growth_factor": growth_factor, "backoff_factor": backoff_factor,
                                          "growth_interval": growth_interval}
        self._scaler = _made(init_scale, **self._settings)
        if self._enabled:
            hooks.install()  # with AMP or without: for operators that make their own gradient, and for statistics
            running_stats.deciders.add(self)
        self._is_scaled = False  # whether a loss was, since the last update
        self._items: WeakSet[TrainerScaler] = WeakSet()  # of the trainers that were unscaled or made a step

    def scale(self, outputs: Loss) -> Loss:
        """Multiply a loss, or a list of them, by the scale; float16 ones in FP32, where they cannot overflow."""
        check_losses("outputs", outputs)
        if not self._enabled:
            return outputs
        self._is_scaled = True
        running_stats.waiting.update(item.trainer for item in self._items)
        return scaled(outputs, self._scaler.loss_scale)

    def unscale_(self, trainer: gluon.Trainer) -> None:
        """Divide the scale out of a trainer's gradients, those of several devices added up, before :meth:`step`."""
        if not self._enabled:
            return
        item = self._item(trainer, "unscale_")
        if item.state is StepState.UNSCALED:
            raise StateError("unscale_() was called for this trainer already since the last update(): call it once, "
                             "before step()")
        if item.state in _MADE:
            raise StateError("unscale_() is called after step(): call it before, to clip gradients")
        item.carry(self._scaler.loss_scale)
        item.unscale()

    @answers(closure="a gluon.Trainer takes none: run forward and backward before step")
    def step(self, trainer: gluon.Trainer, batch_size: int | None = None, ignore_stale_grad: bool = False) -> bool:
        """Unscale a trainer's gradients unless :meth:`unscale_` did, and update, or skip where one is not finite.

        Parameters
        ----------
        trainer : gluon.Trainer
            After ``backward``; must update locally, as for :func:`init_trainer`.
        batch_size : int
            As for ``trainer.step``: gradients are divided by it. 1 where the loss is a mean over the batch already.
        ignore_stale_grad : bool
            As for ``trainer.step``.

        Returns
        -------
        bool
            Whether the weights were updated; False where the step was skipped. Schedules that count updates ask this.
        """
        if batch_size is None:
            raise TypeError("a gluon.Trainer divides gradients by the batch size, which torch's optimizers do not: "
                            "expected scaler.step(trainer, batch_size), 1 where the loss is a mean over the batch")
        if not self._enabled:
            trainer.step(batch_size, ignore_stale_grad)
            return True
        item = self._item(trainer, "step")
        if item.state in _MADE:
            raise StateError("step() was called for this trainer already since the last update(): call scaler.update() "
                             "after the steps of all trainers")
        if item.state is not StepState.UNSCALED:
            item.carry(self._scaler.loss_scale)
        trainer.step(batch_size, ignore_stale_grad)
        return not item.step_was_skipped

    def _item(self, trainer: gluon.Trainer, caller: str) -> TrainerScaler:
        """Return the trainer scaler of a trainer with this scale, made at its first step."""
        checks.instance("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
        if not self._is_scaled:
            raise StateError(f"{caller}: no loss was scaled since the last update(), so the gradients lack the loss "
                             "scale. Call scaler.scale(loss).backward() first")
        item = trainers.attached(trainer)
        if item is None:
            item = TrainerScaler(trainer, self._scaler)
            attach(item)
            self._items.add(item)
        if getattr(item, "scaler", None) is not self._scaler:
            raise StateError(f"{caller}: the trainer has another loss scaler. Leave out amp.init_trainer(trainer), or "
                             "use amp.scale_loss and trainer.step in place of a GradScaler")
        return item

    def update(self, new_scale: float | None = None) -> None:
        """Change the scale: down after an overflow, up after ``growth_interval`` updates without, or to a new one."""
        if not self._enabled:
            return
        items = [item for item in self._items if item.state is not StepState.READY]
        if new_scale is None and not items:
            raise StateError("update: no trainer made a step since the last update(). Call "
                             "scaler.step(trainer, batch_size) first")
        for item in items:
            if new_scale is None and item.state is StepState.UNSCALED:
                item.end_without_step()
            item.forget()
        self._scaler.settle(new_scale)
        self._is_scaled = False
        running_stats.waiting.difference_update(item.trainer for item in self._items)

    def get_scale(self) -> float:
        """Return the factor of the next loss; 1 when not enabled."""
        return self._scaler.loss_scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        """Tell whether losses are scaled at all."""
        return self._enabled

    def state_dict(self) -> dict[str, float]:
        """Return the scale, its settings and its count of good steps under torch's names; nothing when not enabled."""
        if not self._enabled:
            return {}
        state = self._scaler.state_dict()
        return {"scale": state["scale"], **self._settings, "_growth_tracker": state["good_steps"]}

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Continue from a result of :meth:`state_dict`, here or of torch; a malformed state changes nothing."""
        if not self._enabled:
            return
        wanted = ("scale", *self._settings, "_growth_tracker")
        if not isinstance(state_dict, Mapping) or not set(wanted) <= set(state_dict):
            raise ValueError(expected(f"a dict with {', '.join(wanted)}", "state_dict", state_dict)
                             + ". That of a scaler with enabled=False is empty")
        settings: dict[str, Any] = {name: state_dict[name] for name in self._settings}
        made = _made(state_dict["scale"], **settings)
        made.load_state_dict({**made.state_dict(), "good_steps": state_dict["_growth_tracker"]})
        self._settings = settings
        vars(self._scaler).update({**vars(made), "found_inf": None})


def _made(scale: float, growth_factor: float, backoff_factor: float, growth_interval: int) -> _UpdatedLater:
    if not checks.is_number(growth_factor) or not growth_factor > 1:
        raise ValueError(expected("a number above 1", "growth_factor", growth_factor))
    if not checks.is_number(backoff_factor) or not 0 < backoff_factor < 1:
        raise ValueError(expected("a number between 0 and 1", "backoff_factor", backoff_factor))
    return _UpdatedLater(scale, growth_factor, backoff_factor, checks.whole("growth_interval", growth_interval, 1),
                         min(_FLOOR, scale_of("init_scale", scale)), MOST_SCALE)
