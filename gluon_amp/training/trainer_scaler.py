"""The decision on a trainer's step: which scale its gradients carry, whether to skip, and what a skipped step undoes.

MXNet's trainer asks ``trainer._amp_loss_scaler.has_overflow(params)`` after the gradients are reduced, and leaves the
update out when the answer is true. A :class:`TrainerScaler` is that attribute.
"""
from __future__ import annotations

import gc
import logging
import math
import weakref
from contextlib import contextmanager
from enum import Enum
from typing import Any, Callable, Iterator, Sequence

from mxnet import gluon

from .. import checks, native
from .._mxnet import trainers, updaters
from ..eager.running_stats import running_stats
from ..errors import StateError, expected, some_of, warn
from ..parallel import Reduction, distribute
from ..state.in_force import in_force
from .loss_scaler import LossScaler, StaticLossScaler

_logger = logging.getLogger("gluon_amp")
_attached_scalers: list[weakref.ReferenceType[TrainerScaler]] = []


class StepState(str, Enum):
    """Where a trainer is between one step and the next."""

    READY = "READY"  # no gradient at hand is to be used for a step
    SCALED = "SCALED"  # gradients carry the scale of a loss
    UNSCALED = "UNSCALED"  # the scale was divided out before the step
    STEPPED = "STEPPED"  # the weights were updated
    SKIPPED = "SKIPPED"  # they were not, and what the step's forward passes wrote was put back


def _of_first_scaler(name: str) -> property:
    return property(lambda self: getattr(self.scaler, name), lambda self, value: setattr(self.scaler, name, value))


class TrainerScaler:
    """Connects one trainer with its loss scalers, and decides on its steps."""

    def __init__(self, trainer: gluon.Trainer, scalers: LossScaler | Sequence[LossScaler], warn_after: int = 20,
                 max_skipped: int | None = None):
        self.trainer = trainer
        self.scalers = [scalers] if isinstance(scalers, LossScaler) else list(scalers)
        self.state = StepState.READY
        self.applied = self.scaler.loss_scale  # the scale of the losses whose gradients are at hand
        self.reduction: Reduction | None = None  # None for a trainer of this process alone
        self.session = in_force.session  # the last one of init to deinit that it was used in
        # Told at every step whether it will be skipped, while the gradients are still there.
        self.listeners: list[Callable[[bool], None]] = []
        self._warn_after, self._max_skipped = warn_after, max_skipped  # skipped steps in a row
        self._reports: dict[int, int] = {}  # by losses: the iteration of its scaler that was told of last
        self._scaled: set[int] = set()  # the losses scaled since the last step
        self._open: list[int] = []  # those whose backward is under way
        self._overflowed: set[int] = set()  # those whose backward gave the step's first gradients that are not finite
        self._awaited: Callable[[], bool] | None = None  # tells whether gradients are finite, until someone has asked
        self._is_asked_later = False  # by the updaters, during an update

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listeners": []}  # they listen to the original

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _remember(self)

    # Scripts read and set these on ``trainer._amp_loss_scaler``, which is MXNet's own scaler for them.
    _loss_scale, _next_loss_scale, _max_loss_scale, _scale_seq_len, _unskipped = map(
        _of_first_scaler, ("_loss_scale", "_next_loss_scale", "_max_loss_scale", "_scale_seq_len", "_unskipped"))

    @property
    def scaler(self) -> LossScaler:
        """The first loss's scaler."""
        return self.scalers[0]

    @property
    def loss_scale(self) -> float:
        """The first loss's scale for the next backward."""
        return self.scaler.loss_scale

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped so far; one that several losses overflowed in counts for each."""
        return sum(scaler.num_skipped for scaler in self.scalers)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the step just made was skipped."""
        return self.state is StepState.SKIPPED

    @property
    def is_scaled(self) -> bool:
        """Whether a loss was scaled for the next step."""
        return self.state in (StepState.SCALED, StepState.UNSCALED)

    @property
    def carried(self) -> float:
        """The scale that the gradients at hand carry, of the loss and of their reduction."""
        return ((self.applied if self.state is StepState.SCALED else 1.0)
                / (self.reduction.divided if self.reduction else 1.0))

    def scaler_of(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss; raise TypeError or ValueError for a number that no loss has."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(expected("an int", "loss_id", loss_id))
        if not 0 <= loss_id < len(self.scalers):
            raise ValueError(expected(f"a number below num_losses={len(self.scalers)}", "loss_id", loss_id))
        return self.scalers[loss_id]

    @contextmanager
    def scaling(self, loss_id: int = 0) -> Iterator[float]:
        """Give the scale for a loss whose backward runs in the body."""
        scale = self._begin(loss_id)
        try:
            yield scale
        finally:
            if len(self.scalers) > 1 and not self._overflowed and not self._begin_check()():
                self._overflowed = set(self._open)
            self._open.remove(loss_id)

    def _begin(self, loss_id: int) -> float:
        scale = self.scaler_of(loss_id).loss_scale
        running_stats.scaled([self.trainer])
        self.session = in_force.session
        if self.reduction is not None:
            self.reduction.forget()
        if self.state is StepState.UNSCALED:
            self._drop_batch()
        if not self.is_scaled:
            self.applied = scale
        elif not self._open and scale != self.applied:
            # Gradients of another loss, in the same buffers or beside them, must carry the scale of this one.
            self._multiply(scale / self.applied)
            self.applied = scale
        self.state = StepState.SCALED
        self._scaled.add(loss_id)
        self._open.append(loss_id)
        return self.applied

    def _drop_batch(self) -> None:
        """Forget a batch that was dropped after ``unscale``: its gradients are zero by now."""
        if trainers.gradient_norm(self.trainer) != 0.0:
            raise StateError("scale_loss was called after unscale and before step. Call unscale once, after the last "
                             "micro-batch; to drop a batch, call net.collect_params().zero_grad()")
        self._scaled, self._overflowed, self.state = set(), set(), StepState.READY

    def carry(self, scale: float) -> None:
        """Take note that a loss was scaled without :meth:`scaling`, and its gradients carry this scale."""
        self.applied, self.state = scale, StepState.SCALED

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry."""
        if self.state is not StepState.SCALED:
            cause = ("they are unscaled already: call unscale once per step" if self.state is StepState.UNSCALED else
                     "no loss was scaled since the last step: use amp.scale_loss first")
            raise StateError(f"unscale: the trainer's gradients are not scaled; {cause}")
        self._multiply(1.0 / self.carried)
        self.state = StepState.UNSCALED
        if self.reduction is not None:
            self.reduction.divided = 1.0

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a norm, in the scale that they carry; return the norm that they had without scale."""
        norm = trainers.gradient_norm(self.trainer) / self.carried
        if math.isfinite(norm) and norm > max_norm:
            self._multiply(max_norm / norm)
        return norm

    def _multiply(self, factor: float) -> None:
        if factor != 1.0:
            trainers.scale_gradients(self.trainer, factor)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Let the trainer's update in the body be prepared while gradients are computed and checked."""
        with updaters.asking(self.trainer, self._is_skipped) as do_ask:
            self._is_asked_later = do_ask and self.reduction is None
            try:
                yield
            except UserWarning:  # MXNet's, of old gradients; a skipped update does not look at them
                if self._awaited is None or not self._is_skipped():
                    raise
            finally:
                self._is_asked_later = False
                self._is_skipped()  # without any gradient to apply no updater asks

    def has_overflow(self, params: Any) -> bool:
        """Answer the trainer, which skips its update when this is true."""
        self._refuse_unscaled_losses()
        self._awaited = self._begin_check()
        return not self._is_asked_later and self._is_skipped()

    def _begin_check(self) -> Callable[[], bool]:
        """Begin to check whether every gradient is finite; return what waits, and answers."""
        has_check = native.is_available("_gluon_amp_all_finite")
        return trainers.check_gradients(self.trainer, native.all_finite if has_check else None)

    def _refuse_unscaled_losses(self) -> None:
        scale = self.scaler.loss_scale
        forgotten = not self.is_scaled and scale != 1.0 and trainers.has_gradients(self.trainer)
        if forgotten and not trainers.is_scaled_by_hand(self.trainer, scale):
            raise StateError("step: no loss was scaled since the last step, so the gradients lack the loss scale. Use "
                             "`with amp.scale_loss(loss, trainer) as scaled_loss:` for every backward pass")

    def _is_skipped(self) -> bool:
        """Decide on the step, once; tell whether it is skipped."""
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            self._decide(awaited())
        return self.state is StepState.SKIPPED

    def _decide(self, finite: bool) -> None:
        carried = self.carried
        if self.reduction is not None:
            scale = self.applied if self.state is StepState.SCALED else 1.0
            finite, self._overflowed = self.reduction.agree(finite, scale, self._overflowed, len(self.scalers))
        for listener in self.listeners:
            listener(not finite)
        if finite and carried != 1.0:
            trainers.divide_rescaling(self.trainer, carried)
        self._tell_scalers(not finite)
        self._end(StepState.STEPPED if finite else StepState.SKIPPED)
        if not finite:
            try:
                self._tell_of_many()
            finally:
                trainers.discard_gradients(self.trainer)

    def _end(self, state: StepState) -> None:
        running_stats.decided(self.trainer, skipped=state is StepState.SKIPPED)
        self.state = state

    def end_without_step(self) -> None:
        """Take note that the gradients at hand, which were unscaled, will not be used: they count for the scale."""
        finite = self._begin_check()()
        self._tell_scalers(not finite)
        self._end(StepState.READY if finite else StepState.SKIPPED)

    def _tell_scalers(self, found_inf: bool) -> None:
        """Tell the scalers of the step's losses how it went."""
        taken = self._scaled or set(range(len(self.scalers)))
        # Processes must keep the same scales: where they cannot agree which losses overflowed, all of them did.
        told = self._overflowed and (self.reduction or not trainers.reduces_over_processes(self.trainer))
        guilty = self._overflowed if told else taken
        for loss_id in sorted(taken):
            scaler = self.scaler_of(loss_id)
            before = scaler.loss_scale
            self._reports[loss_id] = scaler.take_report(found_inf and loss_id in guilty, self._reports.get(loss_id))
            if scaler.loss_scale != before:
                _logger.info("AMP: loss scale %g -> %g", before, scaler.loss_scale)
        self._scaled, self._overflowed = set(), set()

    def _tell_of_many(self) -> None:
        """Warn, or end the run, where many steps in a row were skipped."""
        scaler = max(self.scalers, key=lambda scaler: scaler.skipped_in_a_row)
        skipped = scaler.skipped_in_a_row
        is_last = self._max_skipped is not None and skipped >= self._max_skipped
        if not is_last and skipped != self._warn_after:
            return
        names = trainers.non_finite_parameters(self.trainer)
        advice = ("The loss scale is at its lowest: the loss or the data may be infinite or NaN themselves, or a layer "
                  "overflows; try a lower learning rate, or amp.exclude for the layers named"
                  if scaler.at_floor else "The loss scale keeps falling")
        text = (f"{skipped} steps in a row were skipped, at loss scale {scaler.loss_scale:g}: gradients of "
                f"{some_of(names)} are not finite. {advice}")
        if is_last:
            raise StateError(f"{text}. The run ends here, as max_skipped={self._max_skipped} asks for")
        warn(text)


class UnscaledTrainer(TrainerScaler):
    """Stands on a trainer that is to train in plain FP32: losses are not scaled, and no step is skipped."""

    def __init__(self, trainer: gluon.Trainer):
        super().__init__(trainer, StaticLossScaler(1.0))

    def scaler_of(self, loss_id: int) -> LossScaler:
        """Return the only scaler, whatever the loss."""
        return self.scaler

    def unscale(self) -> None:
        """Do nothing."""

    def _begin_check(self) -> Callable[[], bool]:
        return lambda: True


def attach(scaler: TrainerScaler, *, updates: bool = True, **reduction: Any) -> None:
    """Put a scaler on its trainer, which updates locally from then on; the rest is for :func:`.parallel.distribute`.

    With ``updates=False`` the trainer reduces and updates as without the scaler.
    """
    trainer = scaler.trainer
    if updates:
        trainers.update_locally(trainer)
        scaler.reduction = distribute(trainer, **reduction)
        updaters.speed_up(trainer, native.update if native.is_available("_gluon_amp_adam") else None)
    trainers.set_scaler(trainer, scaler)
    _attached_scalers[:] = [reference for reference in _attached_scalers if reference() is not None]
    if not isinstance(scaler, UnscaledTrainer):
        _remember(scaler)


def _remember(scaler: TrainerScaler) -> None:
    """Count a scaler among those of :func:`attached_scalers`, and have kept what it may put back."""
    _attached_scalers.append(weakref.ref(scaler))
    running_stats.watch(scaler.trainer)


def attached_to(trainer: gluon.Trainer, caller: str) -> TrainerScaler:
    """Return what connects a trainer with its scalers; raise StateError for one without."""
    checks.instance("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    scaler = trainers.attached(trainer)
    if not isinstance(scaler, TrainerScaler):
        raise StateError(f"{caller}: the trainer has no loss scaler; call amp.init_trainer(trainer) first")
    return scaler


def attached_scalers() -> list[TrainerScaler]:
    """Return what connects the living trainers in use with their scalers, in the order of ``init_trainer``."""
    # Those of an earlier init may live on in a notebook, or in a script that trains twice.
    gc.collect()  # a trainer and its parameters refer to each other: without this, dead ones would count by chance
    living = [reference() for reference in _attached_scalers]
    return [item for item in living if item is not None and item.session == in_force.session]
