"""Train an SSD on a Pascal-VOC-format directory, in FP32 or with gluon_amp, and report its mAP.

Everything but the loop and the light network is GluonCV's: dataset, transforms, target generator, networks,
loss and metric. ``ssd_synthetic.py --data DIR`` and ``digits.py`` are the command lines for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any, Iterator, NamedTuple

# first: it lets MXNet 1.9.1 import under newer NumPy, and changes nothing else
import gluon_amp

# isort: split
import mxnet as mx
from mxnet import autograd, gluon
from tqdm import tqdm

from ..networks.tasks import side_of
from .directory import SETS, VocDirectory, check_directory
from .evaluate import evaluate
from .network import DIGITS, DIGITS_SHAPE, create_network, initialize, weights_digest
from .samples import PlainTrainTransform, batches, open_set, seed_everything

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gluoncv
    from gluoncv.data.transforms.presets.ssd import SSDDefaultTrainTransform

LEARNING_RATE = 0.05
_MOMENTUM = 0.9
_WEIGHT_DECAY = 0.0005
_FINAL_LEARNING_RATE = 0.01  # as a share of the highest one
_WARM_UP = 0.08  # of all steps


@dataclass(frozen=True)
class Settings:
    """How to train; see `train`."""

    amp: bool
    dtype: str | None
    network: str
    steps: int
    batch_size: int
    data_shape: int
    seed: int
    learning_rate: float
    augment: bool

    def check(self) -> None:
        """Raise ValueError for a value that cannot be used."""
        for name, lowest in (("steps", 1), ("batch_size", 1), ("data_shape", 32), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"expected {name} to be an integer of at least {lowest}, received {value!r}")
        if not self.learning_rate > 0:
            raise ValueError(f"expected learning_rate > 0, received {self.learning_rate!r}")


class Losses(NamedTuple):
    """Losses of one step, as sums over its batch divided by its number of matched anchors."""

    cls: float
    box: float
    total: float


@dataclass(frozen=True)
class TrainingResult:
    """What a training run gave.

    Parameters
    ----------
    settings : Settings
        As they were used.
    dtype : str
        ``'float32'``, or the low-precision type that AMP used.
    losses : tuple of Losses
        One for each step.
    average_precision : dict of str to float
        Area under the precision-recall curve at IoU 0.5, 0 to 1, of each class that the val set shows.
    mean_ap : float
        Their mean.
    converted_mean_ap : float
        That of the trained network after `amp.convert_hybrid_block`.
    converted_dtype : str
        The type that the conversion chose.
    step_seconds : tuple of float
        Forward, backward and update of each step, without loading its data.
    seconds : float
        All steps with the loading of data, without evaluation.
    initial_weights : str
        Digest of the weights before the first step: equal for runs that began alike.
    """

    settings: Settings
    dtype: str
    losses: tuple[Losses, ...]
    average_precision: dict[str, float]
    mean_ap: float
    converted_mean_ap: float
    converted_dtype: str
    step_seconds: tuple[float, ...]
    seconds: float
    initial_weights: str

    @property
    def samples_per_second(self) -> float:
        """Images per second of the median step, without loading."""
        return self.settings.batch_size / statistics.median(self.step_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        losses = {name: [getattr(step, name) for step in self.losses] for name in Losses._fields}
        return {**asdict(self), "losses": losses, "samples_per_second": self.samples_per_second}


def train(
    data_dir: str | os.PathLike[str],
    amp: bool = False,
    dtype: str | None = None,
    network: str = DIGITS,
    steps: int = 600,
    batch_size: int = 16,
    data_shape: int | None = None,
    seed: int = 0,
    device: mx.Context | None = None,
    progress: bool = True,
    learning_rate: float = LEARNING_RATE,
    augment: bool | None = None,
) -> TrainingResult:
    """Train on the ``train`` set of a directory and evaluate on its ``val`` set.

    Runs with the same seed get the same first weights, order of images and augmentation, with and without
    AMP. The learning rate warms up, then follows a cosine to nearly zero.

    Parameters
    ----------
    data_dir : path
        See `directory.check_directory`.
    amp : bool
        Train and evaluate in mixed precision.
    dtype : str, optional
        Low-precision type; None takes the one that suits the device.
    network : str
        ``'digits'`` for a light SSD that trains from scratch in minutes, or an SSD of GluonCV's model zoo,
        whose last layers are made for the directory's classes and whose weights are random.
    steps, batch_size : int
        Number of updates, and of images in each.
    data_shape : int, optional
        Side of the network's square input in pixels; None takes the one in the network's name (128 for
        ``'digits'``).
    seed : int
        Seed of weights, order and augmentation.
    device : mx.Context, optional
        Where to train, ``mx.cpu()`` by default.
    progress : bool
        Show progress bars on standard error.
    learning_rate : float
        The highest one.
    augment : bool, optional
        Use GluonCV's training transform (colour, expansion, crop, mirror) rather than resize and normalize
        only. None does so for GluonCV's networks, not for ``'digits'``: a mirror makes other signs of
        digits, and short runs learn less from harder images.

    Returns
    -------
    TrainingResult
        Losses, average precision and times.

    Raises
    ------
    FileNotFoundError, ValueError
        The directory or a setting cannot be used; nothing was trained.

    Examples
    --------
    >>> result = train("build/digits", amp=True, steps=600)
    >>> result.mean_ap > 0.6
    True
    """
    side = side_of(network, DIGITS_SHAPE) if data_shape is None else data_shape
    augment = network != DIGITS if augment is None else augment
    settings = Settings(amp, dtype, network, steps, batch_size, side, seed, learning_rate, augment)
    settings.check()
    directory = check_directory(data_dir)
    with precision(amp, dtype, device or mx.cpu()) as active:
        training = Training(settings, directory, device or mx.cpu(), active, progress)
        training.run(settings.steps)
        return training.finish()


def learning_rate_share(passed: float) -> float:
    """Return the learning rate as a share of the highest, after a share of all steps: it warms up, then falls.

    Examples
    --------
    >>> learning_rate_share(0.04), learning_rate_share(0.08), round(learning_rate_share(1.0), 3)
    (0.5, 1.0, 0.01)
    """
    if passed < _WARM_UP:
        return passed / _WARM_UP
    fallen = (1 + math.cos(math.pi * (passed - _WARM_UP) / (1 - _WARM_UP))) / 2
    return _FINAL_LEARNING_RATE + (1 - _FINAL_LEARNING_RATE) * fallen


@contextlib.contextmanager
def precision(amp: bool, dtype: str | None, device: mx.Context) -> Iterator[str]:
    """Switch AMP on where it is asked for, and off again; gives the name of the dtype in use."""
    if not amp:
        yield "float32"
        return
    with device:
        gluon_amp.init(target_dtype=dtype)
    try:
        yield gluon_amp.active_dtype(device.device_type) or "float32"
    finally:
        gluon_amp.deinit()


class Training:
    """One run: network, data and trainer. It begins where the precision is in force that it is told about.

    Parameters
    ----------
    settings : Settings
        How to train. The learning rate follows from its number of steps.
    directory : VocDirectory
        The data.
    device : mx.Context
        Where to train.
    dtype : str
        The type in force.
    progress : bool
        Show progress bars on standard error.
    """

    def __init__(self, settings: Settings, directory: VocDirectory, device: mx.Context, dtype: str, progress: bool):
        self._settings = settings
        self._device, self._dtype = device, dtype
        self._hidden = None if progress else True  # None: tqdm shows a bar on a terminal only
        self._train_set, self._val_set = (open_set(directory, name) for name in SETS)
        seed_everything(settings.seed)
        self.net = create_network(settings.network, directory.classes, settings.data_shape)
        initialize(self.net, device)
        self._anchors = self._probe()
        self._trainer = self._make_trainer()
        self._loss = gluoncv.loss.SSDMultiBoxLoss()
        self._digest = weights_digest(self.net)
        self.net.hybridize(static_alloc=True, static_shape=True)
        self._data = iter(self._batches())
        self._losses: list[Losses] = []
        self._step_seconds: list[float] = []
        self._seconds = 0.0

    def _probe(self) -> mx.nd.NDArray:
        """Complete the deferred initialization and return the anchors, on the CPU, where targets are made."""
        side = self._settings.data_shape
        try:
            with autograd.train_mode():
                return self.net(mx.nd.zeros((1, 3, side, side), ctx=self._device))[2].as_in_context(mx.cpu())
        except mx.base.MXNetError as error:
            reason = str(error).splitlines()[-1]
            raise ValueError(f"data_shape={side} is not possible for {self._settings.network}: {reason}") from error

    def _make_trainer(self) -> gluon.Trainer:
        options = {"learning_rate": self._settings.learning_rate, "momentum": _MOMENTUM, "wd": _WEIGHT_DECAY}
        # the same in FP32, so that nothing but the precision differs
        trainer = gluon.Trainer(self.net.collect_params(), "sgd", options, update_on_kvstore=False)
        if self._settings.amp:
            gluon_amp.init_trainer(trainer)
        return trainer

    def run(self, steps: int, progress: tuple[float, float] = (0.0, 1.0)) -> list[float]:
        """Train for so many steps and return the seconds of each, with the loading of its data.

        Parameters
        ----------
        steps : int
            At most as many as are left of the settings'.
        progress : tuple of float
            From where to where the learning rate goes meanwhile, as shares of the whole run.
        """
        begin, end = progress
        taken = []
        for number in tqdm(range(steps), desc=self._dtype, unit="step", disable=self._hidden):
            passed = begin + (end - begin) * (number + 0.5) / steps
            self._trainer.set_learning_rate(self._settings.learning_rate * learning_rate_share(passed))
            started = time.perf_counter()
            batch = [part.as_in_context(self._device) for part in next(self._data)]
            mx.nd.waitall()
            loaded = time.perf_counter()
            self._losses.append(self._step(*batch))
            now = time.perf_counter()
            self._step_seconds.append(now - loaded)
            taken.append(now - started)
        self._seconds += sum(taken)
        return taken

    def evaluate(self, net: gluon.HybridBlock, images: int | None = None) -> tuple[float, dict[str, float]]:
        """Return the mean average precision of a network on so many images, or on all, and that of each class."""
        data = self._val_set if images is None else self._val_set.take(images)
        side, classes = self._settings.data_shape, self._val_set.classes
        return evaluate(net, data, classes, side, self._device, self._hidden)

    def finish(self, images: int | None = None) -> TrainingResult:
        """Evaluate, on so many images or on all, and return what the training gave."""
        mean_ap, precision = self.evaluate(self.net, images)
        converted = gluon_amp.convert_hybrid_block(self.net)
        converted_ap, _ = self.evaluate(converted, images)
        settings = replace(self._settings, steps=len(self._losses))
        return TrainingResult(settings, self._dtype, tuple(self._losses), precision, mean_ap, converted_ap,
                              converted.conversion.target_dtype, tuple(self._step_seconds), self._seconds,
                              self._digest)

    def _batches(self) -> gluon.data.DataLoader:
        settings = self._settings
        side = settings.data_shape
        kind = SSDDefaultTrainTransform if settings.augment else PlainTrainTransform
        transform = kind(side, side, self._anchors)
        return batches(self._train_set, transform, settings.steps, settings.batch_size, settings.seed)

    def _step(self, images: mx.nd.NDArray, classes: mx.nd.NDArray, boxes: mx.nd.NDArray) -> Losses:
        with autograd.record():
            cls_pred, box_pred, _ = self.net(images)
            total, cls, box = self._loss(cls_pred, box_pred, classes, boxes)
            if self._settings.amp:
                with gluon_amp.scale_loss(total, self._trainer) as scaled:
                    autograd.backward(scaled)
            else:
                autograd.backward(total)
        self._trainer.step(1)  # the loss is divided by the number of matched anchors already
        mx.nd.waitall()
        return Losses(*(float(part[0].asnumpy().sum()) for part in (cls, box, total)))
