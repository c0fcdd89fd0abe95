"""``amp.DriftMonitor``: loss scale, skipped steps, gradients and their headroom over a long run."""
from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable

from mxnet import autograd, gluon, nd
from mxnet.ndarray import NDArray

from .. import checks
from .._mxnet import trainers
from .._mxnet.arrays import cast_arrays
from ..aliases import answers
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32, FORMATS
from ..errors import expected
from ..training.trainer_scaler import TrainerScaler, attached_to


@dataclass(frozen=True)
class DriftRow:
    """The numbers of one step; ``dataclasses.asdict`` makes a dict of them."""

    loss_scale: float  # the factor that the gradients at hand carry
    skipped: int  # 1 when the step was skipped, else 0
    num_skipped: int  # all steps skipped so far, this one included
    gradient_norm: float  # 2-norm of all gradients of the first context, without the loss scale; may be infinite or NaN
    gradient_max: float  # the largest absolute value of a gradient, without the loss scale
    # how many times the scaled gradients could double before the largest overflows in the type; negative: it does
    float16_headroom: float
    bfloat16_headroom: float
    float16_flushed: float  # the part of all gradients, scaled as they are, that become zero in float16: 0 to 1
    weight_max: float  # the largest absolute value of a parameter
    weight_float16_headroom: float  # how many times it could double before it overflows in float16


class DriftMonitor:
    """Takes numbers that show early when mixed precision goes wrong, every few steps of a trainer.

    It listens to the trainer: the training loop stays as it is. Steps in between cost nothing.

    Parameters
    ----------
    trainer : gluon.Trainer
        After :func:`gluon_amp.init_trainer`.
    callback : callable, optional
        Is called with the number of the step and its :class:`DriftRow`, to write or plot it.
    every : int
        Take each step whose number, counted from 1, is a multiple, and every skipped one.
    keep : int
        How many rows ``rows`` holds: a deque of step numbers and rows, the last ones.
    first_step : int
        The number of the first step, for runs that are continued.

    Examples
    --------
    ::

        def write(step, row):
            for name, value in dataclasses.asdict(row).items():
                summary_writer.add_scalar(f'amp/{name}', value, step)

        with amp.DriftMonitor(trainer, write, every=100):
            train(net, trainer)
    """

    @answers(csv="give callback=, a function of a step's number and its row, and write dataclasses.asdict(row) to a "
                 "csv.DictWriter in it",
             tensorboard="give callback=, a function of a step's number and its row, and call add_scalar of a "
                         "SummaryWriter for each item of dataclasses.asdict(row) in it")
    def __init__(self, trainer: gluon.Trainer, callback: Callable[[int, DriftRow], Any] | None = None, *,
                 every: int = 100, keep: int = 1000, first_step: int = 1):
        for name, value, least in (("every", every, 1), ("keep", keep, 1), ("first_step", first_step, 0)):
            checks.whole(name, value, least)
        if callback is not None and not callable(callback):
            raise TypeError(expected("a function of a step's number and its row", "callback", callback))
        scaler = attached_to(trainer, "DriftMonitor")
        # The scaler keeps the monitor: a cycle would keep both in use until Python looks for cycles.
        self._scaler = weakref.ref(scaler)
        self._callback = callback
        self._every = every
        self._step = first_step - 1
        self.rows: deque[tuple[int, DriftRow]] = deque(maxlen=keep)
        scaler.listeners.append(self._stepped)

    def _stepped(self, overflowed: bool) -> None:
        """Hear of a step, while its gradients are there."""
        self._step += 1
        scaler = self._scaler()
        if scaler is None or (self._step % self._every and not overflowed):
            return
        row = _measured(scaler, overflowed)
        self.rows.append((self._step, row))
        if self._callback is not None:
            self._callback(self._step, row)

    def close(self) -> None:
        """Stop listening; may be called again."""
        scaler = self._scaler()
        if scaler is not None and self._stepped in scaler.listeners:
            scaler.listeners.remove(self._stepped)

    def __enter__(self) -> DriftMonitor:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()


def _measured(scaler: TrainerScaler, overflowed: bool) -> DriftRow:
    trainer, carried = scaler.trainer, scaler.carried
    with autograd.pause():
        every = [gradient for _, gradient in trainers.named_gradients(trainer)]
        gradients = [gradient for gradient in every if gradient.context == every[0].context]
        weights = [parameter.list_data()[0] for parameter in trainers.parameters(trainer)
                   if trainers.is_initialized(parameter)]
        largest, weight = _largest(gradients), _largest(weights)
        sizes = (nd.abs(_plain(gradient)) for gradient in gradients)
        flushed = sum(int(((size <= FORMATS[FLOAT16].flush) * (size > 0)).sum().asscalar()) for size in sizes)
    size = sum(gradient.size for gradient in gradients)
    return DriftRow(carried, int(overflowed), scaler.num_skipped + int(overflowed),
                    trainers.gradient_norm(trainer) / carried, largest / carried,
                    FORMATS[FLOAT16].headroom(largest), FORMATS[BFLOAT16].headroom(largest),
                    flushed / size if size else 0.0, weight, FORMATS[FLOAT16].headroom(weight))


def _largest(arrays: Iterable[NDArray]) -> float:
    """Return the largest absolute value; NaN when there is one."""
    maxima = [float(nd.max(nd.abs(array)).asscalar()) for array in map(_plain, arrays)]
    return math.nan if any(map(math.isnan, maxima)) else max(maxima, default=0.0)


def _plain(array: NDArray) -> NDArray:
    return cast_arrays(array, FLOAT32).as_nd_ndarray()
