"""``amp.DriftMonitor``: log loss scale, skipped steps, gradients and their headroom over a long run."""
from __future__ import annotations

import csv
import math
import os
import weakref
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

from mxnet import autograd, gluon, nd
from mxnet.ndarray import NDArray

from .. import checks
from .._mxnet import trainers
from .._mxnet.arrays import cast_arrays
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32, FORMATS
from ..errors import StateError
from ..training.trainer_scaler import TrainerScaler, attached_to


@dataclass(frozen=True)
class DriftRow:
    """The numbers of one step.

    Attributes
    ----------
    loss_scale : float
        What the gradients at hand carry.
    skipped : int
        1 when the step was skipped, else 0.
    num_skipped : int
        All steps skipped so far, this one included.
    gradient_norm : float
        The 2-norm of all gradients of the first context, without the loss scale. Infinite or NaN when they are.
    gradient_max : float
        The largest absolute value of a gradient, without the loss scale.
    float16_headroom, bfloat16_headroom : float
        How many times the scaled gradients could double before the largest overflows in the type. Negative: it does.
    float16_flushed : float
        The part of all gradients that become zero in float16, scaled as they are: 0 to 1.
    weight_max : float
        The largest absolute value of a parameter.
    weight_float16_headroom : float
        How many times it could double before it overflows in float16.
    """

    loss_scale: float
    skipped: int
    num_skipped: int
    gradient_norm: float
    gradient_max: float
    float16_headroom: float
    bfloat16_headroom: float
    float16_flushed: float
    weight_max: float
    weight_float16_headroom: float


class DriftMonitor:
    """Logs numbers that show early when mixed precision goes wrong, every few steps of a trainer.

    It listens to the trainer: the training loop stays as it is. Steps in between cost nothing.

    Parameters
    ----------
    trainer : gluon.Trainer
        After :func:`gluon_amp.init_trainer`.
    csv : path, optional
        A CSV file to write to; one that a monitor wrote before is continued.
    tensorboard : path, optional
        A directory for TensorBoard's event files.
    every : int
        Log each step whose number, counted from 1, is a multiple, and every skipped one.
    keep : int
        How many rows :attr:`rows` holds.
    first_step : int
        The number of the first step, for runs that are continued.

    Attributes
    ----------
    rows : deque of (int, DriftRow)
        The last rows, with the numbers of their steps.

    Raises
    ------
    StateError
        The trainer has no loss scaler, tensorboardX is missing, or the CSV file has other columns.
    TypeError, ValueError
        An argument has a wrong type or value.

    Examples
    --------
    ::

        with amp.DriftMonitor(trainer, csv='drift.csv', tensorboard='runs/amp', every=100):
            train(net, trainer)
    """

    def __init__(self, trainer: gluon.Trainer, *, csv: str | os.PathLike | None = None,
                 tensorboard: str | os.PathLike | None = None, every: int = 100, keep: int = 1000,
                 first_step: int = 1):
        for name, value, least in (("every", every, 1), ("keep", keep, 1), ("first_step", first_step, 0)):
            checks.whole(name, value, least)
        scaler = attached_to(trainer, "DriftMonitor")
        # The scaler keeps the monitor: a cycle would keep both in use until Python looks for cycles.
        self._scaler = weakref.ref(scaler)
        self._every = every
        self._step = first_step - 1
        self.rows: deque[tuple[int, DriftRow]] = deque(maxlen=keep)
        self._files = ExitStack()
        self._writers: list[Writer] = []
        if csv is not None:
            self._writers.append(_to_csv(csv, self._files))
        if tensorboard is not None:
            self._writers.append(_to_tensorboard(tensorboard, self._files))
        scaler.listeners.append(self._stepped)

    @property
    def gradient_norms(self) -> list[float]:
        """The norms in :attr:`rows`, for :func:`gluon_amp.suggest_scale`."""
        return [row.gradient_norm for _, row in self.rows]

    def _stepped(self, overflowed: bool) -> None:
        """Hear of a step, while its gradients are there."""
        self._step += 1
        scaler = self._scaler()
        if scaler is None or (self._step % self._every and not overflowed):
            return
        row = _measured(scaler, overflowed)
        self.rows.append((self._step, row))
        for write in self._writers:
            write(self._step, asdict(row))

    def close(self) -> None:
        """Stop listening, and close the files; may be called again."""
        scaler = self._scaler()
        if scaler is not None and self._stepped in scaler.listeners:
            scaler.listeners.remove(self._stepped)
        self._writers = []
        self._files.close()

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


Writer = Callable[[int, Mapping[str, float]], None]  # takes the number of a step, and its row


def _to_csv(path: str | os.PathLike, files: ExitStack) -> Writer:
    """Write a line per row to a CSV file, at once. One that exists is continued when it has the same columns."""
    header = ["step", *(field.name for field in fields(DriftRow))]
    target = Path(path)
    continued = target.exists() and target.stat().st_size > 0
    if continued:
        with target.open(newline="", encoding="utf-8") as file:
            before = next(csv.reader(file))
        if before != header:
            raise StateError(f"{target} exists with the columns {before}, expected {header}: give another path, or "
                             "remove it")
    file = files.enter_context(target.open("a", newline="", encoding="utf-8"))
    writer = csv.DictWriter(file, header)
    if not continued:
        writer.writeheader()

    def write(step: int, row: Mapping[str, float]) -> None:
        writer.writerow({"step": step, **row})
        file.flush()
    return write


def _to_tensorboard(logdir: str | os.PathLike, files: ExitStack) -> Writer:
    """Write scalars for TensorBoard, by tensorboardX."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise StateError("logging for TensorBoard needs tensorboardX: pip install 'gluon_amp[debug]', or log to CSV"
                         ) from error
    writer: Any = SummaryWriter(os.fspath(logdir))
    files.callback(writer.close)

    def write(step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            writer.add_scalar(f"amp/{name}", value, step)
        writer.flush()
    return write
