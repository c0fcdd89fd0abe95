"""Mixed precision for ``gluon.contrib.estimator``: event handlers for ``Estimator.fit``."""
from __future__ import annotations

import json
import os
from typing import Any

from mxnet import autograd
from mxnet.gluon.contrib.estimator import CheckpointHandler, Estimator, GradientUpdateHandler, TrainBegin, TrainEnd
from mxnet.gluon.contrib.estimator.batch_processor import BatchProcessor

from .._mxnet.trainers import data_and_labels
from ..base import checks
from ..base.files import replacing
from ..session.autocast import autocast
from .checkpoint import fitting, load_scalers, scalers_of
from .loss_scaler import LossScaler
from .scaling import clip_global_norm, init_trainer, scale_loss

_SUFFIX = ".scaler"


class AmpHandler(TrainBegin, TrainEnd, GradientUpdateHandler):
    """Make ``Estimator.fit`` train in mixed precision, with loss scaling; needs no ``amp.init``.

    Takes the place of the estimator's ``GradientUpdateHandler``. Training, and validation in its course, run under
    :class:`autocast`. A ``fit_batch`` of your own has to scale the loss itself, with :func:`scale_loss`.

    Parameters
    ----------
    dtype : {'float16', 'bfloat16'}, numpy dtype or None
        As for :class:`autocast`.
    loss_scaler : LossScaler, float, 'dynamic' or None
        As for :func:`init_trainer`.
    max_norm : float, optional
        Clip gradients to this 2-norm, in units of the gradient averaged over the batch; above 0.
    priority : float
        The lower the earlier at the end of a batch; by default the one of ``GradientUpdateHandler``.
    """

    def __init__(self, dtype: object = None, loss_scaler: LossScaler | float | str | None = None,
                 max_norm: float | None = None, priority: float = -2000):
        super().__init__(priority)
        if max_norm is not None:
            checks.above_zero("max_norm", max_norm)
        autocast(dtype=dtype)  # refuses types that this machine cannot run, before training starts
        self.dtype = dtype
        self.loss_scaler = loss_scaler
        self.max_norm = max_norm
        self._initialized: Any = None

    def train_begin(self, estimator: Estimator, *args: Any, **kwargs: Any) -> None:
        """Attach the loss scaler, and have batches processed under autocast."""
        if self._initialized is not estimator.trainer:  # another `fit` of the same handler goes on with its scaler
            with autocast(dtype=self.dtype):
                init_trainer(estimator.trainer, self.loss_scaler)
            self._initialized = estimator.trainer
        estimator.batch_processor = _AmpBatchProcessor(_own(estimator.batch_processor), self.dtype)

    def batch_end(self, estimator: Estimator, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, unless a gradient is not finite."""
        if self.max_norm is not None:
            losses = kwargs["loss"] if isinstance(kwargs["loss"], list) else [kwargs["loss"]]
            clip_global_norm(estimator.trainer, self.max_norm * sum(loss.shape[0] for loss in losses))
        super().batch_end(estimator, *args, **kwargs)

    def train_end(self, estimator: Estimator, *args: Any, **kwargs: Any) -> None:
        """Give the estimator its batch processor back, and log the loss scale."""
        estimator.batch_processor = _own(estimator.batch_processor)
        for scaler in scalers_of(estimator.trainer):
            estimator.logger.info("AMP: loss scale %g, %d steps skipped", scaler.loss_scale, scaler.num_skipped)


class _AmpBatchProcessor(BatchProcessor):
    """Runs another batch processor under autocast, and scales the loss unless that one has its own ``fit_batch``."""

    def __init__(self, own: Any, dtype: object):
        super().__init__()
        self.own = own
        self.dtype = dtype

    def evaluate_batch(self, estimator: Estimator, val_batch: Any, batch_axis: int = 0) -> Any:
        with autocast(dtype=self.dtype):
            return self.own.evaluate_batch(estimator, val_batch, batch_axis)

    def fit_batch(self, estimator: Estimator, train_batch: Any, batch_axis: int = 0) -> Any:
        if getattr(type(self.own), "fit_batch", None) is not BatchProcessor.fit_batch:
            with autocast(dtype=self.dtype):
                return self.own.fit_batch(estimator, train_batch, batch_axis)
        data, label = data_and_labels(self.own, train_batch, estimator, batch_axis)
        with autograd.record():
            with autocast(dtype=self.dtype):
                pred = [estimator.net(x) for x in data]
                loss = [estimator.loss(y_hat, y) for y_hat, y in zip(pred, label)]
            with scale_loss(loss, estimator.trainer) as scaled:
                autograd.backward(scaled)
        return data, label, pred, loss


def _own(processor: Any) -> Any:
    """Return the estimator's own batch processor, also after a `fit` that ended in an error."""
    return processor.own if isinstance(processor, _AmpBatchProcessor) else processor


class AmpCheckpointHandler(CheckpointHandler):
    """MXNet's ``CheckpointHandler``, with the loss scaler's state in every checkpoint.

    Takes the same parameters, and goes to ``fit`` together with :class:`AmpHandler`. The scaler is written to
    ``<model_prefix>-epoch<n>batch<m>.scaler``, and read with ``resume_from_checkpoint=True`` where that file exists.
    """

    def _save_params_and_trainer(self, estimator: Estimator, file_prefix: str) -> None:
        super()._save_params_and_trainer(estimator, file_prefix)
        states = [scaler.state_dict() for scaler in scalers_of(estimator.trainer)]
        path = os.path.join(self.model_dir, file_prefix + _SUFFIX)
        if states:
            with replacing(path) as (temporary,), open(temporary, "w") as file:
                json.dump(states, file)

    def _resume_from_checkpoint(self, estimator: Estimator) -> None:
        super()._resume_from_checkpoint(estimator)
        name = f"{self.model_prefix}-epoch{self.trained_epoch}batch{self.trained_batch}{_SUFFIX}"
        scalers, path = scalers_of(estimator.trainer), os.path.join(self.model_dir, name)
        if scalers and os.path.exists(path):
            with open(path) as file:
                load_scalers(scalers, fitting(scalers, json.load(file), path))
