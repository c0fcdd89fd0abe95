"""Training of the networks other than SSD: one random batch, again and again. Start a backend before importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping

import mxnet as mx
from mxnet import autograd, gluon

from . import tasks
from .gluon_networks import create

if TYPE_CHECKING:
    from ..harness.backends import Backend

# optimizer and its options, by network; SGD where nothing else is said
OPTIMIZERS: Mapping[str, tuple[str, dict[str, float]]] = {
    "encoder": ("adam", {"learning_rate": 2e-5}),
    "encoder_masked": ("adam", {"learning_rate": 2e-5}),
}
SGD = ("sgd", {"learning_rate": 0.001, "momentum": 0.9, "wd": 0.0005})


class Training:
    """A Gluon training loop, one step at a time.

    Parameters
    ----------
    backend : Backend
        The implementation, already switched on.
    settings : mapping
        ``network`` (a key of `tasks.SIZES`), ``batch_size``, ``seed``, and ``small`` for the size made for tests.
    """

    def __init__(self, backend: Backend, settings: Mapping[str, Any]):
        self.backend = backend
        self.samples_per_step = int(settings["batch_size"])
        network, seed = settings["network"], settings["seed"]
        numbers = tasks.size(network, settings["small"])
        batch = tasks.batch(numbers, self.samples_per_step, seed)
        with backend.context:
            self.inputs, self.labels = (
                [mx.nd.array(each, dtype=each.dtype) for each in part] for part in (batch.inputs, batch.labels)
            )
            self.net = create(network, numbers, seed)
        self.loss: Callable[..., mx.nd.NDArray] = gluon.loss.SoftmaxCrossEntropyLoss()
        name, options = OPTIMIZERS.get(network, SGD)
        self.trainer = gluon.Trainer(self.net.collect_params(), name, dict(options), **backend.trainer_options)
        backend.init_trainer(self.trainer)
        self.about = {"dtype": backend.dtype, "notes": backend.notes, **numbers}

    def step(self) -> dict[str, float]:
        """Train on the batch, wait for the end, and return the mean ``CrossEntropy``."""
        with autograd.record():
            loss = self.loss(self.net(*self.inputs), *self.labels)
            with self.backend.scale_loss(loss, self.trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        self.trainer.step(self.samples_per_step)
        result = {"CrossEntropy": float(loss.mean().asscalar())}
        mx.nd.waitall()
        return result
