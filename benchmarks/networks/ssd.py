"""The SSD training workload of the MXNet AMP tutorial: synthetic data, SGD, SSDMultiBoxLoss.

MXNet must be importable: start a backend first.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any, Mapping

import mxnet as mx
from mxnet import autograd, gluon

from ..harness.errors import UsageError, unknown
from .tasks import side_of, ssd_batch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gluoncv
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.model_zoo import get_model_list

if TYPE_CHECKING:
    from ..harness.backends import Backend

LEARNING_RATE = 0.001
WEIGHT_DECAY = 0.0005
MOMENTUM = 0.9


def network_names() -> list[str]:
    """Return the SSD networks of GluonCV that can be trained from their name alone."""
    special = ("_custom", "_int8")
    return sorted(name for name in get_model_list() if name.startswith("ssd_") and not name.endswith(special))


def create_network(name: str, pretrained_base: bool = False) -> gluon.HybridBlock:
    """Create an SSD network as the tutorial does, not yet initialized.

    Parameters
    ----------
    name : str
        A name of GluonCV's model zoo.
    pretrained_base : bool
        Whether to load (and, the first time, download) the backbone's pretrained weights.

    Raises
    ------
    UsageError
        If there is no such SSD network, or its weights cannot be loaded.
    """
    if name not in network_names():
        raise unknown("network", name, network_names())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return get_model(name, pretrained_base=pretrained_base, norm_layer=gluon.nn.BatchNorm)
        except (OSError, RuntimeError) as error:
            if not pretrained_base:
                raise
            raise UsageError(f"--pretrained-base: the weights of {name} cannot be loaded: {error}") from error


def count_anchors(net: gluon.HybridBlock, data_shape: int) -> int:
    """Return how many boxes the network predicts for square images of this side length in pixels.

    Raises
    ------
    UsageError
        If the network cannot take images of this size.
    """
    try:
        # MXNet prints the arguments of a failed inference to standard output
        with contextlib.redirect_stdout(io.StringIO()), autograd.train_mode():
            anchors = net(mx.sym.var("data"))[2]
            _, shapes, _ = anchors.infer_shape(data=(1, 3, data_shape, data_shape))
    except mx.base.MXNetError as error:
        reason = str(error).splitlines()[0].split("Check failed:")[-1].strip()
        raise UsageError(f"data shape {data_shape} is not possible for this network: {reason}") from error
    return int(shapes[0][1])


class SyntheticDataLoader:
    """The tutorial's loader: one random batch, given again and again.

    Parameters
    ----------
    data_shape : int
        Side length of the square images in pixels.
    batch_size : int
        Images in the batch.
    anchors : int
        Boxes that the network predicts for an image.
    ctx : mx.Context
        Where the batch is kept until it is loaded to the device.
    seed : int
        Seed of a generator of its own, so that no implementation's use of random numbers changes the data.
    epoch_size : int
        Batches in an epoch.
    """

    def __init__(
        self,
        data_shape: int,
        batch_size: int,
        anchors: int,
        ctx: mx.Context,
        seed: int,
        epoch_size: int = 200,
    ):
        self.counter = 0
        self.epoch_size = epoch_size
        batch = ssd_batch(batch_size, data_shape, anchors, seed)
        self.batch = [mx.nd.array(each, ctx=ctx, dtype="float32") for each in (*batch.inputs, *batch.labels)]

    def __iter__(self) -> SyntheticDataLoader:
        return self

    def __next__(self) -> list[mx.nd.NDArray]:
        if self.counter >= self.epoch_size:
            self.counter = 0
            raise StopIteration
        self.counter += 1
        return self.batch


class SSDTraining:
    """The tutorial's training loop, one step at a time.

    Parameters
    ----------
    backend : Backend
        The implementation, already switched on.
    settings : mapping
        ``network``, ``batch_size``, ``data_shape`` (None for the network's own), ``seed`` and
        ``pretrained_base``.
    """

    def __init__(self, backend: Backend, settings: Mapping[str, Any]):
        self.backend = backend
        self.devices = [backend.context]
        self.samples_per_step = int(settings["batch_size"])
        data_shape = settings["data_shape"] or side_of(settings["network"], 512)
        self.net = create_network(settings["network"], settings["pretrained_base"])
        anchors = count_anchors(self.net, data_shape)
        host = mx.cpu_pinned() if backend.context.device_type == "gpu" else mx.cpu()
        self.loader = SyntheticDataLoader(data_shape, self.samples_per_step, anchors, host, settings["seed"])
        self.mbox_loss = gluoncv.loss.SSDMultiBoxLoss()
        self._prepare(settings["seed"])
        self.about = {
            "dtype": backend.dtype,
            "notes": backend.notes,
            "data_shape": data_shape,
            "anchors": anchors,
        }

    def _prepare(self, seed: int) -> None:
        mx.random.seed(seed)
        self.net.initialize()
        self.net.collect_params().reset_ctx(self.devices)
        self.net.hybridize(static_alloc=True, static_shape=True)
        options = {"learning_rate": LEARNING_RATE, "wd": WEIGHT_DECAY, "momentum": MOMENTUM}
        parameters, extra = self.net.collect_params(), self.backend.trainer_options
        self.trainer = gluon.Trainer(parameters, "sgd", options, **extra)
        self.backend.init_trainer(self.trainer)

    def _next_batch(self) -> list[mx.nd.NDArray]:
        try:
            return next(self.loader)
        except StopIteration:  # a new epoch begins
            return next(self.loader)

    def step(self) -> dict[str, float]:
        """Train on one batch, wait for its end, and return its losses.

        Returns
        -------
        dict
            ``CrossEntropy`` and ``SmoothL1``, as the tutorial's metrics give them for one batch.
        """
        batch = self._next_batch()
        data, cls_targets, box_targets = (
            gluon.utils.split_and_load(part, ctx_list=self.devices, batch_axis=0) for part in batch
        )
        with autograd.record():
            predictions = [self.net(images) for images in data]
            cls_preds = [prediction[0] for prediction in predictions]
            box_preds = [prediction[1] for prediction in predictions]
            sum_loss, cls_loss, box_loss = self.mbox_loss(cls_preds, box_preds, cls_targets, box_targets)
            with self.backend.scale_loss(sum_loss, self.trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        self.trainer.step(1)
        losses = {"CrossEntropy": _total(cls_loss), "SmoothL1": _total(box_loss)}
        mx.nd.waitall()
        return losses


def _total(losses: list[mx.nd.NDArray]) -> float:
    return float(sum(loss.asnumpy().sum() for loss in losses))
