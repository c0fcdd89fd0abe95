"""What connects one ``gluon.Trainer`` with its loss scalers: which gradients carry which scale, and whether to step."""
from __future__ import annotations

import gc
import logging
import math
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

from mxnet import gluon

from .. import checks, native
from .._mxnet import trainers, updaters
from ..eager.written import written
from ..errors import StateError, expected, some_of, warn
from ..parallel import Reduction, distribute
from ..state.in_force import in_force
from .loss_scaler import LossScaler, StaticLossScaler

_logger = logging.getLogger("gluon_amp")

READY, SCALED, UNSCALED = "READY", "SCALED", "UNSCALED"
_attached_scalers: list[weakref.ReferenceType[TrainerScaler]] = []


def _of_first_scaler(name: str) -> property:
    return property(lambda self: getattr(self.scaler, name), lambda self, value: setattr(self.scaler, name, value))


class TrainerScaler:
    """Connects one trainer with its loss scalers; lives on the trainer as ``trainer._amp_loss_scaler``."""

    def __init__(self, trainer: gluon.Trainer, scalers: LossScaler | Sequence[LossScaler], warn_after: int = 20,
                 max_skipped: int | None = None):
        self.trainer = trainer
        self.scalers = [scalers] if isinstance(scalers, LossScaler) else list(scalers)
        self.state = READY  # READY while no gradient at hand carries a scale, SCALED or UNSCALED
        self.reduction: Reduction | None = None  # None for a trainer of this process alone
        self.warn_after, self.max_skipped = warn_after, max_skipped  # skipped steps in a row
        self.step_was_skipped = False  # whether the last step was
        self._reports: dict[int, int] = {}  # by losses: the iteration of its scaler that was told of last
        # told at every step whether it will be skipped, while the gradients are still there
        self.listeners: list[Callable[[bool], None]] = []
        self.applied = self.scaler.loss_scale  # the scale of the losses whose gradients are at hand
        self.session = in_force.session  # the last one of init to deinit that it was used in
        self._scaled: set[int] = set()  # the losses scaled since the last step
        self._open: list[int] = []  # those whose backward is under way
        self._overflowed: set[int] = set()  # those whose backward gave the step's first gradients that are not finite

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

    @contextmanager
    def scaling(self, loss_id: int = 0) -> Iterator[float]:
        """Give the scale for a loss whose backward runs in the body."""
        scale = self._begin(loss_id)
        try:
            yield scale
        finally:
            if len(self.scalers) > 1 and not self._overflowed and not check_gradients(self.trainer)():
                self._overflowed = set(self._open)
            self._open.remove(loss_id)

    def carry(self, scale: float) -> None:
        """Take note that a loss was scaled without :meth:`scaling`, and its gradients carry this scale."""
        self.applied, self.state = scale, SCALED

    def forget(self) -> None:
        """Take note that the gradients at hand will not be used for a step."""
        self.state = READY

    @property
    def carried(self) -> float:
        """The scale that the gradients at hand carry, of the loss and of their reduction."""
        return (self.applied if self.state == SCALED else 1.0) / (self.reduction.divided if self.reduction else 1.0)

    def _begin(self, loss_id: int) -> float:
        scale = self.scaler_of(loss_id).loss_scale
        written.scaled([self.trainer])
        self.session = in_force.session
        if self.reduction is not None:
            self.reduction.forget()
        if self.state == UNSCALED:
            self._begin_again()
        if self.state == READY:
            self.applied = scale
        elif not self._open and scale != self.applied:
            # Gradients of another loss, in the same buffers or beside them, must carry the scale of this one.
            self._multiply(scale / self.applied)
            self.applied = scale
        self.state = SCALED
        self._scaled.add(loss_id)
        self._open.append(loss_id)
        return self.applied

    def _begin_again(self) -> None:
        """Forget a batch that was dropped after ``unscale``: its gradients are zero by now."""
        if trainers.gradient_norm(self.trainer) != 0.0:
            raise StateError("scale_loss was called after unscale and before step. Call unscale once, after the last "
                             "micro-batch; to drop a batch, call net.collect_params().zero_grad()")
        self.state = READY
        self._scaled, self._overflowed = set(), set()

    def scaler_of(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss; raise TypeError or ValueError for a number that no loss has."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(expected("an int", "loss_id", loss_id))
        if not 0 <= loss_id < len(self.scalers):
            raise ValueError(expected(f"a number below num_losses={len(self.scalers)}", "loss_id", loss_id))
        return self.scalers[loss_id]

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry."""
        if self.state != SCALED:
            cause = {READY: "no loss was scaled since the last step: use amp.scale_loss first",
                     UNSCALED: "they are unscaled already: call unscale once per step"}[self.state]
            raise StateError(f"unscale: the trainer's gradients are not scaled; {cause}")
        self._multiply(1.0 / self.carried)
        self.state = UNSCALED
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

    def has_overflow(self, params: Any) -> bool:
        """Answer the trainer, which skips its update when this is true."""
        self._refuse_unscaled_losses()
        check = check_gradients(self.trainer)
        if self.reduction is None and updaters.will_ask(self.trainer, lambda: self._decide(check())):
            return False
        return self._decide(check())

    def _decide(self, finite: bool) -> bool:
        """Take note of whether all gradients are finite; tell whether to skip the update."""
        carried = self.carried
        if self.reduction is not None:
            finite = self._agreed(finite, self.reduction)
        self._tell_listeners(skipped=not finite)
        if finite and carried != 1.0:
            trainers.divide_rescaling(self.trainer, carried)
        self._update(not finite)
        written.decided(self.trainer, skipped=not finite)
        self.state, self.step_was_skipped = READY, not finite
        if not finite:
            self._tell_of_many()
            trainers.discard_gradients(self.trainer)
        return not finite

    def _tell_listeners(self, skipped: bool) -> None:
        for listener in self.listeners:
            listener(skipped)

    def _agreed(self, finite: bool, reduction: Reduction) -> bool:
        scale = self.applied if self.state == SCALED else 1.0
        finite, self._overflowed = reduction.agree(finite, scale, self._overflowed, len(self.scalers))
        return finite

    def _update(self, found_inf: bool) -> None:
        """Tell the scalers of the step's losses how it went."""
        taken = self._scaled or set(range(len(self.scalers)))
        # Processes must keep the same scales: where they cannot agree which losses overflowed, all of them did.
        told = self._overflowed and (self.reduction or not trainers.reduces_over_processes(self.trainer))
        guilty = self._overflowed if told else taken
        for loss_id in sorted(taken):
            scaler = self.scalers[loss_id]
            before = scaler.loss_scale
            is_bad = found_inf and loss_id in guilty
            self._reports[loss_id] = scaler.take_report(is_bad, self._reports.get(loss_id))
            if scaler.loss_scale != before:
                _logger.info("AMP: loss scale %g -> %g", before, scaler.loss_scale)
        self._scaled, self._overflowed = set(), set()

    def _refuse_unscaled_losses(self) -> None:
        scale = self.scaler.loss_scale
        forgotten = self.state == READY and scale != 1.0 and trainers.has_gradients(self.trainer)
        if forgotten and not trainers.is_scaled_by_hand(self.trainer, scale):
            raise StateError("step: no loss was scaled since the last step, so the gradients lack the loss scale. Use "
                             "`with amp.scale_loss(loss, trainer) as scaled_loss:` for every backward pass")

    def _tell_of_many(self) -> None:
        """Warn, or end the run, where many steps in a row were skipped."""
        scaler = max(self.scalers, key=lambda scaler: scaler.skipped_in_a_row)
        skipped = scaler.skipped_in_a_row
        is_last = self.max_skipped is not None and skipped >= self.max_skipped
        if not is_last and skipped != self.warn_after:
            return
        names = trainers.non_finite_parameters(self.trainer)
        advice = ("The loss scale is at its lowest: the loss or the data may be infinite or NaN themselves, or a layer "
                  "overflows; try a lower learning rate, or amp.exclude for the layers named"
                  if scaler.at_floor else "The loss scale keeps falling")
        text = (f"{skipped} steps in a row were skipped, at loss scale {scaler.loss_scale:g}: gradients of "
                f"{some_of(names)} are not finite. {advice}")
        if is_last:
            trainers.discard_gradients(self.trainer)
            raise StateError(f"{text}. The run ends here, as max_skipped={self.max_skipped} asks for")
        warn(text)


class UnscaledTrainer(TrainerScaler):
    """Stands on a trainer that is to train in plain FP32: losses are not scaled, and no step is skipped."""

    def __init__(self, trainer: gluon.Trainer):
        super().__init__(trainer, StaticLossScaler(1.0))

    @contextmanager
    def scaling(self, loss_id: int = 0) -> Iterator[float]:
        """Give 1."""
        yield 1.0

    def unscale(self) -> None:
        """Do nothing."""

    def has_overflow(self, params: Any) -> bool:
        """Let every step be taken."""
        written.decided(self.trainer, skipped=False)
        self._tell_listeners(skipped=False)
        if self.reduction is not None:
            trainers.divide_rescaling(self.trainer, self.carried)
            self.reduction.agree(True, 1.0, (), 1)
        return False


def scale_steps_of(trainer: gluon.Trainer, scaler: TrainerScaler, allreduce_always_fp32: bool = False,
           gradient_predivide_factor: float = 1.0) -> None:
    """Put a scaler on its trainer, which updates locally, and remember it for :func:`attached_scalers`."""
    # The other parameters are those of :func:`gluon_amp.parallel.distribute`.
    scaler.reduction = distribute(trainer, allreduce_always_fp32, gradient_predivide_factor)
    updaters.speed_up(trainer, native.update if native.is_available("_gluon_amp_adam") else None)
    stand_by(trainer, scaler)


def stand_by(trainer: gluon.Trainer, scaler: TrainerScaler) -> None:
    """Put a scaler on its trainer, whose gradients are reduced as without it."""
    trainers.set_scaler(trainer, scaler)
    _attached_scalers[:] = [reference for reference in _attached_scalers if reference() is not None]
    if not isinstance(scaler, UnscaledTrainer):
        _remember(scaler)


def _remember(scaler: TrainerScaler) -> None:
    """Count a scaler among those of :func:`attached_scalers`, and have kept what it may put back."""
    _attached_scalers.append(weakref.ref(scaler))
    written.watch(scaler.trainer)


def check_gradients(trainer: gluon.Trainer) -> Callable[[], bool]:
    """Begin to check whether every gradient of a trainer is finite; return what waits, and answers."""
    has_check = native.is_available("_gluon_amp_all_finite")
    return trainers.check_gradients(trainer, native.all_finite if has_check else None)


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
