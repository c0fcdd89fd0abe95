"""The decision on a trainer's step: which scale its gradients carry, and whether to skip it."""
from __future__ import annotations

import gc
import logging
import math
from collections import deque
from contextlib import contextmanager
from enum import Enum
from typing import Any, Callable, Iterator, Sequence
from weakref import WeakValueDictionary

from mxnet import gluon

from .. import native
from .._mxnet import trainers, updaters
from ..base import checks
from ..eager.running_stats import running_stats
from ..errors import StateError, expected, some_of, warn
from ..parallel import Reduction, distribute
from ..state.in_force import in_force
from .loss_scaler import SMALL_SCALE, LossScaler, StaticLossScaler

_RECENT = 50  # steps: where half of them were skipped a warning says so
_logger = logging.getLogger("gluon_amp")
_attached: WeakValueDictionary[int, TrainerScaler] = WeakValueDictionary()  # by their ids, in the order of init_trainer


class StepState(str, Enum):
    """Where a trainer is between one step and the next."""

    READY = "READY"  # no gradient at hand is to be used for a step
    SCALED = "SCALED"  # gradients carry the scale of a loss
    UNSCALED = "UNSCALED"  # the scale was divided out before the step
    STEPPED = "STEPPED"  # the weights were updated
    SKIPPED = "SKIPPED"  # they were not, and arrays that the step's forward passes wrote were put back


def _of_first_scaler(name: str) -> property:
    return property(lambda self: getattr(self.scaler, name), lambda self, value: setattr(self.scaler, name, value))


class TrainerScaler:
    """Connects one trainer with its loss scalers, and decides on its steps: what MXNet asks ``has_overflow``."""

    def __init__(self, trainer: gluon.Trainer, scalers: LossScaler | Sequence[LossScaler], warn_after: int = 20,
                 max_skipped: int | None = None):
        # Without scalers the trainer trains as in plain FP32.
        self.trainer = trainer
        self.skips = isinstance(scalers, LossScaler) or bool(scalers)
        self.scalers = [scalers] if isinstance(scalers, LossScaler) else list(scalers) or [StaticLossScaler(1.0)]
        self.state = StepState.READY
        self.applied = self.scaler.loss_scale  # the scale of the losses whose gradients are at hand
        self.reduction: Reduction | None = None  # None for a trainer of this process alone
        self.own_reduction = trainers.own_reduction(trainer)
        self.session = in_force.session  # the last one of init to deinit that it was used in
        # Told at every step whether it will be skipped, while the gradients are still there.
        self.listeners: list[Callable[[bool], None]] = []
        self._reports: dict[int, int] = {}  # by losses: the iteration of its scaler that was told of last
        self._scaled: set[int] = set()  # the losses scaled since the last step
        self._open: list[int] = []  # losses whose backward is under way
        self._overflowed: set[int] = set()  # losses whose backward gave the first gradients that are not finite
        # By parameter and device: which gradients were written when they were reduced, as MXNet's marks go then.
        self._fresh: list[list[bool]] | None = None
        self._is_ahead = False  # whether gradients were reduced before the trainer was told to
        self._awaited: Callable[[], bool] | None = None  # tells whether gradients are finite, until someone has asked
        self._is_asked_later = False  # by the updaters, during an update
        self._warn_after, self._max_skipped = warn_after, max_skipped  # skipped steps in a row
        self._recent: deque[bool] = deque(maxlen=_RECENT)  # whether each of the last steps was skipped
        self._told = {"skips": False, "scale": False}  # by a warning

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listeners": []}  # they listen to the original

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.remember()

    def remember(self) -> None:
        """Count among :func:`scalers_in_use`, and have running statistics kept for the trainer."""
        if self.skips:
            _attached[id(self)] = self
            running_stats.deciders.add(self.trainer)

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
        is_divided = self._fresh is not None and self.state is not StepState.UNSCALED
        of_losses = self.applied if self.state is StepState.SCALED else 1.0
        return of_losses / (self.reduction.factor if self.reduction and is_divided else 1.0)

    def scaler_of(self, loss_id: int) -> LossScaler:
        """Return the scaler of a loss; raise TypeError or ValueError for a number that no loss has."""
        if not self.skips:
            return self.scaler
        if isinstance(loss_id, bool) or not isinstance(loss_id, int):
            raise TypeError(expected("an int", "loss_id", loss_id))
        if not 0 <= loss_id < len(self.scalers):
            raise ValueError(expected(f"a number below num_losses={len(self.scalers)}", "loss_id", loss_id))
        return self.scalers[loss_id]

    # Before the step

    @contextmanager
    def scaling(self, loss_id: int = 0) -> Iterator[float]:
        """Give the scale for a loss whose backward runs in the body."""
        scale = self.scaler_of(loss_id).loss_scale
        running_stats.waiting.add(self.trainer)
        self.session = in_force.session
        if self.state is StepState.UNSCALED:
            if trainers.gradient_norm(self.trainer) != 0.0:
                raise StateError("scale_loss was called after unscale and before step. Call unscale once, after the "
                                 "last micro-batch; to drop a batch, call net.collect_params().zero_grad()")
            self.forget()
        self._refuse_to_add_to_sums()
        self._fresh = None
        if not self.is_scaled:
            self.applied = scale
        elif not self._open and scale != self.applied:
            # Gradients of another loss, in the same buffers or beside them, must carry the scale of this one.
            trainers.scale_gradients(self.trainer, scale / self.applied)
            self.applied = scale
        self.state = StepState.SCALED
        self._scaled.add(loss_id)
        self._open.append(loss_id)
        try:
            yield self.applied
        finally:
            if len(self.scalers) > 1 and not self._overflowed and not self._begin_check()():
                self._overflowed = set(self._open)
            self._open.remove(loss_id)

    def carry(self, scale: float) -> None:
        """Take note that a loss was scaled without :meth:`scaling`, and its gradients carry this scale."""
        self.applied, self.state = scale, StepState.SCALED

    def forget(self, state: StepState = StepState.READY) -> None:
        """Take note that no gradient at hand is to be used any more."""
        self._scaled, self._overflowed, self._fresh, self._is_ahead = set(), set(), None, False
        self.state = state

    def unscale(self) -> None:
        """Divide the gradients by the scale they carry."""
        if not self.skips:
            return
        if self.state is not StepState.SCALED:
            cause = ("they are unscaled already: call unscale once per step" if self.state is StepState.UNSCALED else
                     "no loss was scaled since the last step: use amp.scale_loss first")
            raise StateError(f"unscale: the trainer's gradients are not scaled; {cause}")
        self._reduce_ahead("unscale")
        if self.carried != 1.0:
            trainers.scale_gradients(self.trainer, 1.0 / self.carried)
        self.state = StepState.UNSCALED

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to a norm, in the scale that they carry; return the norm that they had without scale."""
        self._reduce_ahead("clip_global_norm")
        norm = trainers.gradient_norm(self.trainer) / self.carried
        if math.isfinite(norm) and norm > max_norm:
            trainers.scale_gradients(self.trainer, max_norm / norm)
        return norm

    # The sums over devices and processes

    @property
    def adds_up(self) -> bool:
        """Whether a reduction changes the gradients: over devices, over processes, or in a way of the trainer's own."""
        return (self.reduction is not None or len(trainers.contexts(self.trainer)) > 1
                or not trainers.is_of_mxnet(self.own_reduction))

    def _is_reduced(self) -> bool:
        return self._fresh is not None and not any(map(any, trainers.fresh(self.trainer)))

    def _reduce_ahead(self, caller: str) -> None:
        """Add the gradients up now: in a later sum changes of one device's gradients would be lost."""
        if self.adds_up and not self._is_reduced():
            trainers.reduce_gradients(self.trainer, caller)
            self._is_ahead = True

    def reduce(self) -> None:
        """Take the place of the trainer's own reduction: gradients are added up once after a backward pass."""
        if self._is_reduced():
            if not self._is_ahead:
                raise StateError("the gradients are reduced already, and would be added up once more. After "
                                 "trainer.allreduce_grads() call trainer.update(), not trainer.step()")
            self._is_ahead = False
            return
        self._refuse_to_add_to_sums()
        fresh = trainers.fresh(self.trainer)
        (self.reduction.reduce if self.reduction else self.own_reduction)()
        trainers.mark_fresh(self.trainer, fresh, value=False)
        self._fresh = fresh

    def _refuse_to_add_to_sums(self) -> None:
        if (self._fresh is not None and any(trainers.accumulates(self.trainer))
                and trainers.gradient_norm(self.trainer) != 0.0):
            raise StateError("a backward pass after trainer.allreduce_grads() would add the gradients of one process "
                             "to those of all. With gradient accumulation reduce once, after the last micro-batch")

    # The step

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
        self.mark_fresh()
        scale = self.scaler.loss_scale
        is_forgotten = not self.is_scaled and scale != 1.0 and any(trainers.named_gradients(self.trainer))
        if is_forgotten and not trainers.is_scaled_by_hand(self.trainer, scale):
            raise StateError("step: no loss was scaled since the last step, so the gradients lack the loss scale. Use "
                             "`with amp.scale_loss(loss, trainer) as scaled_loss:` for every backward pass")
        self._awaited = self._begin_check()
        return not self._is_asked_later and self._is_skipped()

    def mark_fresh(self) -> None:
        """Let MXNet know again which gradients were written."""
        if self._fresh is not None:
            trainers.mark_fresh(self.trainer, self._fresh)

    def _begin_check(self) -> Callable[[], bool]:
        """Begin to check whether every gradient is finite; return a function that waits, and answers."""
        if not self.skips:
            return lambda: True
        has_check = native.is_available("_gluon_amp_all_finite")
        return trainers.check_gradients(self.trainer, native.all_finite if has_check else None)

    def _is_skipped(self) -> bool:
        """Decide on the step, once; tell whether it is skipped."""
        if self._awaited is not None:
            awaited, self._awaited = self._awaited, None
            self._decide(awaited())
        return self.state is StepState.SKIPPED

    def _decide(self, finite: bool) -> None:
        carried = self.carried
        if self.reduction is not None:
            if self._fresh is None:
                raise StateError("update: the gradients were not reduced over the processes. Call "
                                 "trainer.allreduce_grads() before trainer.update(), or trainer.step()")
            finite, self._overflowed, written = self.reduction.agree(
                finite, self.applied if self.state is StepState.SCALED else 1.0, self._overflowed, len(self.scalers),
                list(map(any, self._fresh)))
            trainers.mark_fresh(self.trainer, [[flag] * len(flags) for flag, flags in zip(written, self._fresh)])
        for listener in self.listeners:
            listener(not finite)
        if finite and carried != 1.0:
            self.trainer.optimizer.rescale_grad /= carried  # which the next step sets again
        self._end(StepState.STEPPED if finite else StepState.SKIPPED)
        try:
            self._warn_of_skips()
        finally:
            if not finite:
                trainers.discard_gradients(self.trainer)

    def end_without_step(self) -> None:
        """Take note that the gradients at hand, which were unscaled, will not be used: they count for the scale."""
        self._end(StepState.READY if self._begin_check()() else StepState.SKIPPED)

    def _end(self, state: StepState) -> None:
        """Tell the scalers of the step's losses how it went, and have arrays put back that a skipped step wrote."""
        is_skipped = state is StepState.SKIPPED
        taken = self._scaled or set(range(len(self.scalers)))
        # Processes must keep the same scales: where they cannot agree which losses overflowed, all of them did.
        told = self._overflowed and (self.reduction or trainers.is_of_mxnet(self.own_reduction))
        guilty = self._overflowed if told else taken
        for loss_id in sorted(taken):
            scaler = self.scaler_of(loss_id)
            before = scaler.loss_scale
            self._reports[loss_id] = scaler.take_report(is_skipped and loss_id in guilty, self._reports.get(loss_id))
            if scaler.loss_scale != before:
                _logger.info("AMP: loss scale %g -> %g", before, scaler.loss_scale)
        running_stats.decided(self.trainer, skipped=is_skipped)
        self._recent.append(is_skipped)
        self.forget(state)

    def _warn_of_skips(self) -> None:
        """Warn, or end the run, where many steps were skipped, and where gradients vanish at the scale of now."""
        smallest = min(scaler.loss_scale for scaler in self.scalers)
        if smallest < SMALL_SCALE and not self._told["scale"]:
            self._told["scale"] = True
            warn(f"the loss scale is {smallest:g}. Below 2^-24 float16 rounds gradients of 1 to zero, so that good "
                 f"batches hardly move weights any more. {self.num_skipped} steps were skipped so far: look for "
                 "infinite or NaN values in the data and in the loss, then set the scale again: "
                 "scaler.update(new_scale=65536.0) of a GradScaler, else amp.load_state_dict")
        scaler = max(self.scalers, key=lambda scaler: scaler.skipped_in_a_row)
        in_a_row, of_late = scaler.skipped_in_a_row, sum(self._recent)
        is_last = self._max_skipped is not None and in_a_row >= self._max_skipped
        is_often = of_late >= _RECENT // 2 and not self._told["skips"]
        if not self.step_was_skipped or not (is_last or is_often or in_a_row == self._warn_after):
            return
        count = (f"{in_a_row} steps in a row" if is_last or in_a_row == self._warn_after else
                 f"{of_late} of the last {len(self._recent)} steps")
        self._told["skips"] = True
        advice = ("The loss scale is at its lowest: the loss or the data may be infinite or NaN themselves, or a layer "
                  "overflows; try a lower learning rate, or amp.exclude for the layers named"
                  if scaler.at_floor else "The loss scale keeps falling")
        text = (f"{count} were skipped, at loss scale {scaler.loss_scale:g}: gradients of "
                f"{some_of(trainers.non_finite_parameters(self.trainer))} are not finite. {advice}")
        if is_last:
            raise StateError(f"{text}. The run ends here, as max_skipped={self._max_skipped} asks for")
        warn(text)


def attach(scaler: TrainerScaler, *, updates: bool = True, **reduction: Any) -> None:
    """Put a scaler on its trainer, which updates locally where ``updates`` says so; the rest is for ``distribute``."""
    trainer = scaler.trainer
    if updates:
        trainers.update_locally(trainer)
        scaler.reduction = distribute(trainer, **reduction)
        updaters.speed_up(trainer, native.update if native.is_available("_gluon_amp_adam") else None)
    trainers.set_scaler(trainer, scaler, scaler.reduce if scaler.adds_up else None)
    scaler.remember()


def attached_to(trainer: gluon.Trainer, caller: str) -> TrainerScaler:
    """Return the trainer scaler of a trainer; raise StateError for one without."""
    checks.instance("trainer", trainer, gluon.Trainer, "a gluon.Trainer")
    scaler = trainers.attached(trainer)
    if not isinstance(scaler, TrainerScaler):
        raise StateError(f"{caller}: the trainer has no loss scaler; call amp.init_trainer(trainer) first")
    return scaler


def scalers_in_use() -> list[LossScaler]:
    """Return the loss scalers of the living trainers in use, in the order of ``init_trainer`` and their losses."""
    # Trainers of an earlier init may live on in a notebook, or in a script that trains twice.
    gc.collect()  # a trainer and its parameters refer to each other: without this, dead ones would count by chance
    return list(dict.fromkeys(scaler for item in _attached.values() if item.session == in_force.session
                              for scaler in item.scalers))
