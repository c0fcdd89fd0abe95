"""The loss scale and how it changes: a pure update rule and its state, without MXNet."""
from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Callable, Iterable, Mapping

import numpy as np

from ..base import checks
from ..errors import expected

LEAST_SCALE, MOST_SCALE = 2.0 ** -126, 2.0 ** 127  # losses are multiplied in FP32
SMALL_SCALE = 2.0 ** -24  # below it gradients of 1 are zero in float16


def scale_of(name: str, value: Any) -> float:
    """Return a loss scale; raise ValueError for what FP32 cannot multiply by."""
    if not checks.is_number(value) or not LEAST_SCALE <= value <= MOST_SCALE:
        raise ValueError(expected("a finite number above 0 that FP32 holds (2^-126 to 2^127)", name, value))
    return float(value)


def _count(name: str, value: float, least: int = 0) -> int:
    """Return a whole number, which may come as a float."""
    if not checks.is_number(value) or not (least <= value < 2 ** 63) or value % 1:
        raise ValueError(expected(f"a whole number, {least} or above", name, value))
    return int(value)


@dataclass(frozen=True)
class ScalerState:
    """Everything about a scaler that changes."""

    scale: float  # multiplies the loss
    good_steps: int = 0  # steps without overflow since the scale last changed
    bad_steps: int = 0  # steps skipped in a row
    num_skipped: int = 0  # all steps skipped so far

    @classmethod
    def of(cls, state: Mapping[str, float]) -> ScalerState:
        """Read what :meth:`LossScaler.state_dict` returned; raise ValueError for anything else."""
        names = [field.name for field in fields(cls)]
        # Earlier versions counted overflows for a hysteresis, too.
        if not isinstance(state, Mapping) or set(state) - {"overflows"} != set(names):
            raise ValueError(expected(f"a dict with {', '.join(names)}", "state", state))
        counts = [_count(name, state[name]) for name in names[1:]]
        return cls(scale_of("scale", state["scale"]), *counts)


@dataclass(frozen=True)
class ScalerRule:
    """How the scale reacts to overflow; the parameters are those of :class:`DynamicLossScaler`."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0 ** 24

    def __call__(self, state: ScalerState, found_inf: bool) -> ScalerState:
        """Return the state after a step whose gradients were non-finite, or were not."""
        if found_inf:
            scale = min(state.scale, max(state.scale * self.backoff_factor, self.min_scale))
            return ScalerState(scale, 0, state.bad_steps + 1, state.num_skipped + 1)
        good = state.good_steps + 1
        if good < self.growth_interval:
            return replace(state, good_steps=good, bad_steps=0)
        return replace(state, scale=max(state.scale, min(state.scale * self.growth_factor, self.max_scale)),
                       good_steps=0, bad_steps=0)


def _known_as(name: str, part: str, field: str, checked: Callable[[str, Any], Any]) -> property:
    """Return a property under which scripts read, and set, a value that MXNet's own scaler holds."""
    def put(self: LossScaler, value: Any) -> None:
        setattr(self, part, replace(getattr(self, part), **{field: checked(name, value)}))
        self._before = None
    return property(lambda self: getattr(getattr(self, part), field), put)


class LossScaler:
    """A loss scale that counts skipped steps; without arguments a :class:`DynamicLossScaler` with its defaults.

    Parameters
    ----------
    init_scale : float
        The first scale.
    rule : ScalerRule or None
        How the scale changes; None for never.
    """

    def __init__(self, init_scale: float = 2.0 ** 16, rule: ScalerRule | None = ScalerRule()):
        self._state = ScalerState(scale_of("init_scale", init_scale))
        self._rule = rule or ScalerRule(growth_factor=1.0, backoff_factor=1.0)
        self._iteration = 0  # counts the iterations of the trainers that share it
        self._before: ScalerState | None = None  # the state at the beginning of the iteration, None for not to be taken

    _loss_scale = _next_loss_scale = _known_as("_loss_scale", "_state", "scale", scale_of)
    _unskipped = _known_as("_unskipped", "_state", "good_steps", _count)
    _scale_seq_len = _known_as("_scale_seq_len", "_rule", "growth_interval", lambda name, value: _count(name, value, 1))
    _max_loss_scale = _known_as("_max_loss_scale", "_rule", "max_scale", scale_of)

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next backward."""
        return self._state.scale

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because its gradients were not finite."""
        return self._state.bad_steps > 0

    @property
    def num_skipped(self) -> int:
        """How many steps were skipped so far."""
        return self._state.num_skipped

    @property
    def skipped_in_a_row(self) -> int:
        """How many steps up to the last one were skipped in a row."""
        return self._state.bad_steps

    @property
    def at_floor(self) -> bool:
        """Whether the scale cannot fall any more."""
        return self._rule.backoff_factor == 1 or self.loss_scale <= self._rule.min_scale

    def state_dict(self) -> dict[str, float]:
        """Return everything that changes, to be saved."""
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a state that :meth:`state_dict` returned; raise ValueError for a malformed one."""
        self._state, self._before = ScalerState.of(state), None

    def has_overflow(self, params: Iterable[Any]) -> bool:
        """Check the gradients of parameters and update, for scripts that use a scaler as ``mxnet.contrib.amp``'s."""
        gradients = (array for parameter in params if parameter.grad_req != "null" for array in parameter.list_grad())
        found_inf = not all(np.isfinite(array.asnumpy()).all() for array in gradients)
        self.update(found_inf)
        return found_inf

    def update(self, found_inf: bool) -> None:
        """Take note of a step, and whether a gradient was infinite or NaN, so that it was skipped."""
        self._state = self._rule(self._state, found_inf)

    def take_report(self, found_inf: bool, last: int | None) -> int:
        """Take note of a trainer's step: steps of one iteration, until a trainer reports again, count as one."""
        # Returns the number of the iteration; ``last`` is that of the trainer's step before.
        if self._before is None or last == self._iteration:
            self._iteration += 1
            self._before = self._state
            self.update(found_inf)
        elif found_inf and self._state.bad_steps == 0:
            self._state = self._before
            self.update(True)
        return self._iteration


class DynamicLossScaler(LossScaler):
    """A loss scale that falls at overflow and grows again after a while without.

    Parameters
    ----------
    init_scale : float
        The first scale.
    growth_factor : float
        Multiplies the scale after ``growth_interval`` good steps, at least 1.
    backoff_factor : float
        Multiplies the scale at overflow, between 0 and 1.
    growth_interval : int
        Good steps in a row before the scale grows.
    min_scale, max_scale : float
        The scale stays between them.
    """

    def __init__(self, init_scale: float = 2.0 ** 16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, min_scale: float = 1.0, max_scale: float = 2.0 ** 24):
        for name, value, low, high in (("growth_factor", growth_factor, 1.0, math.inf),
                                       ("backoff_factor", backoff_factor, 0.0, 1.0),
                                       ("max_scale", max_scale, scale_of("min_scale", min_scale), math.inf),
                                       ("init_scale", init_scale, min_scale, max_scale)):
            if not checks.is_number(value) or not low <= value <= high:
                raise ValueError(expected(f"a number between {low} and {high}", name, value))
        super().__init__(init_scale, ScalerRule(
            float(growth_factor), float(backoff_factor), _count("growth_interval", growth_interval, 1),
            float(min_scale), min(float(max_scale), MOST_SCALE)))


class StaticLossScaler(LossScaler):
    """A loss scale that never changes; steps with non-finite gradients are still skipped and counted.

    Parameters
    ----------
    value : float
        The scale. 1.0, bfloat16's default, leaves the loss as it is.
    """

    def __init__(self, value: float = 1.0):
        super().__init__(value, None)
