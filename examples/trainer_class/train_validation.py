"""A class that trains and validates, with the loss scaler it is given."""
from __future__ import annotations

from typing import Iterable

import gluon_amp as amp

# isort: split
import mxnet as mx
from mxnet import autograd, gluon


class TrainValidate:
    """Training and validation of one network.

    Parameters
    ----------
    net : gluon.Block
        The network.
    trainer : gluon.Trainer
        Its trainer.
    criterion : callable
        Gives the loss of each sample from outputs and labels.
    scaler : amp.LossScaler
        Made by the caller, who keeps one for the whole run.
    train_loader, validation_loader : iterable
        Batches of (data, label).
    use_amp : bool
        False trains in FP32; the loop is the same.
    """

    def __init__(self, net: gluon.Block, trainer: gluon.Trainer, criterion: gluon.loss.Loss, scaler: amp.LossScaler,
                 train_loader: Iterable, validation_loader: Iterable, use_amp: bool = True):
        self.net = net
        self.trainer = trainer
        self.criterion = criterion
        self.scaler = scaler
        self.train_loader = train_loader
        self.validation_loader = validation_loader
        self.use_amp = use_amp
        if use_amp:
            with amp.autocast():  # init_trainer wants to know the type; amp.init() before it would do as well
                amp.init_trainer(trainer, scaler)

    def train(self) -> float:
        """Train for one epoch; return the mean loss."""
        mean = mx.metric.Loss()
        for data, label in self.train_loader:
            mean.update(None, self._step(data, label))
        return mean.get()[1]

    def _step(self, data: mx.nd.NDArray, label: mx.nd.NDArray) -> mx.nd.NDArray:
        with autograd.record():
            with amp.autocast(enabled=self.use_amp):  # the forward pass and the loss, not the backward pass
                loss = self.criterion(self.net(data), label)
            with amp.scale_loss(loss, self.trainer, enabled=self.use_amp) as scaled_loss:
                autograd.backward(scaled_loss)
        self.trainer.step(len(data))  # unscales, skips the update if a gradient is not finite, adapts the scale
        return loss

    def validate(self) -> float:
        """Return the accuracy; only training runs in mixed precision."""
        accuracy = mx.metric.Accuracy()
        for data, label in self.validation_loader:
            accuracy.update(label, self.net(data))
        return accuracy.get()[1]
