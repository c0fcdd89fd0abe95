"""One half of the digits benchmark, in a process of its own: it trains when it is told to.

Usage: ``python _voc_worker.py '{"data_dir": "...", "amp": true, "dtype": null, "batch_size": 16, "seed": 0}'``

It answers like ``_worker``, with one JSON object a line on standard output:

- ``{"event": "ready", "about": {"dtype": "bfloat16", "images": 600}}`` or ``{"event": "refused", "message": "..."}``;
- to ``{"command": "probe", "data_shape": 128, "steps": 4, "images": 32}``, which trains for so many steps and evaluates
  on so many images: ``{"event": "probed", "startup": s, "step": s, "image": s}``, seconds until the end of the first
  step, of a later one, and of an image's evaluation, before and after conversion together;
- to ``{"command": "begin", "data_shape": 128, "steps": 600}``: ``{"event": "begun"}``, from the first weights again;
- to ``{"command": "run", "steps": 20, "progress": [0.1, 0.2]}``, the shares of the whole run between which the learning
  rate goes: ``{"event": "ran", "seconds": [...]}``;
- to ``{"command": "finish", "images": 600}``: ``{"event": "finished", "result": {...}}``, see `voc.TrainingResult`;
- to ``{"command": "stop"}``, or when its input ends, it ends.

The process that starts this one sets the number of threads in the environment, before anything loads OpenMP.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any, Mapping, TextIO

import _machine
import voc


class Half:
    """One precision's training: a short one to measure, then the one that counts."""

    def __init__(self, arguments: Mapping[str, Any], directory: voc.VocDirectory, dtype: str):
        self.arguments, self.directory, self.dtype = arguments, directory, dtype

    def _training(self, steps: int, data_shape: int) -> voc.Training:
        given = self.arguments
        settings = voc.Settings(given["amp"], given["dtype"], voc.DIGITS, steps, given["batch_size"], data_shape,
                                given["seed"], voc.LEARNING_RATE, augment=False)
        settings.check()
        return voc.Training(settings, self.directory, voc.mx.cpu(), self.dtype, progress=False)

    def probe(self, data_shape: int, steps: int, images: int) -> dict[str, Any]:
        begin = time.perf_counter()
        training = self._training(steps, data_shape)
        training.run(1)
        startup = time.perf_counter() - begin
        step = statistics.median(training.run(steps - 1))
        training.evaluate(training.net, images)
        begin = time.perf_counter()
        training.evaluate(training.net, images)
        image = 2 * (time.perf_counter() - begin) / images  # before and after conversion
        return {"event": "probed", "startup": startup, "step": step, "image": image}

    def begin(self, steps: int, data_shape: int) -> dict[str, Any]:
        self.training = self._training(steps, data_shape)
        return {"event": "begun"}

    def run(self, steps: int, progress: tuple[float, float]) -> dict[str, Any]:
        return {"event": "ran", "seconds": self.training.run(steps, progress)}

    def finish(self, images: int) -> dict[str, Any]:
        about = {"versions": _machine.versions(), "peak_memory": _machine.peak_memory()}
        return {"event": "finished", "result": {**self.training.finish(images).as_dict(), **about}}


def serve(arguments: Mapping[str, Any], commands: TextIO, answers: TextIO) -> int:
    """Answer commands until told to stop; return the exit code, 2 for a request that cannot be met."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        directory = voc.check_directory(arguments["data_dir"])
        with voc.precision(arguments["amp"], arguments["dtype"], voc.mx.cpu()) as dtype:
            half = Half(arguments, directory, dtype)
            answer({"event": "ready", "about": {"dtype": dtype, "images": directory.images["val"]}})
            for line in commands:
                given = json.loads(line)
                name = given.pop("command")
                if name == "stop":
                    break
                answer(getattr(half, name)(**given))
    except (OSError, ValueError) as error:
        answer({"event": "refused", "message": str(error)})
        return 2
    return 0


def main() -> int:
    """Serve on standard input and output; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return serve(json.loads(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    sys.exit(main())
