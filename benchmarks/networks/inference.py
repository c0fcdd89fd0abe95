"""Inference: a network with random weights, prepared by one implementation. Start a backend before importing it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from ..harness import machine
from . import tasks
from .gluon_networks import create

if TYPE_CHECKING:
    from ..harness.backends import Converter


class Inference:
    """A request at a time: from inputs in memory to outputs in NumPy.

    Parameters
    ----------
    backend : Converter
        The implementation.
    settings : mapping
        ``network`` (a key of `tasks.SIZES`), ``batch_size``, ``seed``, and ``small`` for the size made for tests.
    """

    def __init__(self, backend: Converter, settings: Mapping[str, Any]):
        self.memory_before = machine.memory()
        self.samples_per_step = int(settings["batch_size"])
        self.network = settings["network"]
        numbers = tasks.size(self.network, settings["small"])
        batch = tasks.batch(numbers, self.samples_per_step, settings["seed"])
        with backend.context:
            self.inputs = [mx.nd.array(each, dtype=each.dtype) for each in batch.inputs]
            self.net = self._converted(backend, create(self.network, numbers, settings["seed"]))
        self.about = {"dtype": backend.dtype, "notes": backend.notes, **numbers}

    def _converted(self, backend: Converter, net: HybridBlock) -> HybridBlock:
        net(*self.inputs)  # parameters get their shapes
        mx.nd.waitall()
        converted = backend.convert(net, self.inputs)
        converted.hybridize(static_alloc=True, static_shape=True)
        return converted

    def _run(self) -> list[np.ndarray]:
        outputs = self.net(*self.inputs)
        return [each.asnumpy() for each in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]

    def step(self) -> dict[str, float]:
        """Run the network once and return the mean absolute ``output``."""
        outputs = self._run()
        return {"output": float(np.abs(outputs[-1]).mean())}

    def save(self, folder: str) -> dict[str, Any]:
        """Write the outputs into a folder; return the bytes that the network holds and of its parameter file."""
        gc.collect()  # the network that was converted
        machine.return_free_memory()
        memory = machine.memory() - self.memory_before
        outputs = self._run()
        if self.network == "ssd512":  # with random weights rounding decides which boxes win: compare their scores
            outputs = outputs[1:2]
        np.savez(Path(folder) / "outputs.npz", *outputs)
        self.net.export(str(Path(folder) / "network"))
        return {"memory": memory, "parameter_file": next(Path(folder).glob("*.params")).stat().st_size}
