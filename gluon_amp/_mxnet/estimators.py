"""The private methods through which ``gluon.contrib.estimator`` splits batches and saves checkpoints."""
from __future__ import annotations

import os
from typing import Any

from mxnet.gluon.contrib.estimator import CheckpointHandler, Estimator
from mxnet.gluon.contrib.estimator.batch_processor import BatchProcessor
from mxnet.ndarray import NDArray


def data_and_labels(processor: BatchProcessor, batch: Any, estimator: Estimator,
                    batch_axis: int) -> tuple[list[NDArray], list[NDArray]]:
    """Split a batch over the estimator's contexts, as its batch processor does."""
    return processor._get_data_and_label(batch, estimator.context, batch_axis)


class CheckpointEvents(CheckpointHandler):
    """A ``CheckpointHandler`` with hooks for checkpoints written and read; ``stem`` is their path without suffix."""

    def saved(self, estimator: Estimator, stem: str) -> None:
        """Act on a checkpoint that was written."""

    def resumed(self, estimator: Estimator, stem: str) -> None:
        """Act on a checkpoint that was read."""

    def _save_params_and_trainer(self, estimator: Estimator, file_prefix: str) -> None:
        super()._save_params_and_trainer(estimator, file_prefix)
        self.saved(estimator, os.path.join(self.model_dir, file_prefix))

    def _resume_from_checkpoint(self, estimator: Estimator) -> None:
        super()._resume_from_checkpoint(estimator)
        if self.trained_epoch >= 0:
            name = f"{self.model_prefix}-epoch{self.trained_epoch}batch{self.trained_batch}"
            self.resumed(estimator, os.path.join(self.model_dir, name))
