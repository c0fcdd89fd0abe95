"""One half of the digits benchmark, in a process of its own."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

from ..harness import machine
from . import training as voc


class Half:
    """One precision's training: a short one to measure, then the one that counts. Its methods are `worker`'s commands.

    Parameters
    ----------
    data_dir : str
        A directory in Pascal VOC's format.
    amp, dtype, batch_size, seed
        As `voc.train` takes them.
    """

    refuses = (OSError, ValueError)

    def __init__(self, data_dir: str, amp: bool, dtype: str | None, batch_size: int, seed: int):
        self.directory = voc.check_directory(data_dir)
        self.given = {"amp": amp, "dtype": dtype, "batch_size": batch_size, "seed": seed}
        self.active = contextlib.ExitStack()  # as long as this process
        self.dtype = self.active.enter_context(voc.precision(amp, dtype, voc.mx.cpu()))

    def ready(self) -> dict[str, Any]:
        return {"about": {"dtype": self.dtype, "images": self.directory.images["val"]}}

    def _training(self, steps: int, data_shape: int) -> voc.Training:
        settings = voc.Settings(**self.given, network=voc.DIGITS, steps=steps, data_shape=data_shape,
                                learning_rate=voc.LEARNING_RATE, augment=False)
        settings.check()
        return voc.Training(settings, self.directory, voc.mx.cpu(), self.dtype, progress=False)

    def probe(self, data_shape: int, steps: int, images: int) -> dict[str, Any]:
        """Return the seconds until the end of the first of so many steps, of a later one, and of an image's evaluation.

        The evaluation before and that after conversion count together.
        """
        begin = time.perf_counter()
        training = self._training(steps, data_shape)
        training.run(1)
        startup = time.perf_counter() - begin
        step = statistics.median(training.run(steps - 1))
        training.evaluate(training.net, images)
        begin = time.perf_counter()
        training.evaluate(training.net, images)
        return {"startup": startup, "step": step, "image": 2 * (time.perf_counter() - begin) / images}

    def begin(self, steps: int, data_shape: int) -> dict[str, Any]:
        """Begin a training of so many steps from the first weights."""
        self.training = self._training(steps, data_shape)
        return {}

    def run(self, steps: int, progress: tuple[float, float]) -> dict[str, Any]:
        """Train for some of the steps, while the learning rate goes between these shares of the whole run."""
        return {"seconds": self.training.run(steps, progress)}

    def finish(self, images: int) -> dict[str, Any]:
        """Evaluate and return a `voc.TrainingResult`."""
        about = {"versions": machine.versions(), "peak_memory": machine.peak_memory()}
        return {"result": {**self.training.finish(images).as_dict(), **about}}
