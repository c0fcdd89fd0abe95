"""Training in PyTorch, step by step as the Gluon workloads do it."""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from ..harness.errors import UsageError
from ..harness.torch_backends import Float32
from . import tasks
from .torch_networks import SSD, create

_ADAM = ("encoder", "encoder_masked")
_HARD_NEGATIVES = 3  # for each positive anchor

Losses = Mapping[str, torch.Tensor]


class Training:
    """A PyTorch training loop, one step at a time.

    Parameters
    ----------
    backend : Float32
        The implementation.
    net : Module
        The network.
    batch : Batch
        Inputs and labels.
    samples : int
        Samples in the batch.
    losses : callable
        Takes outputs and labels, returns the losses by name; their sum is differentiated.
    optimizer : Optimizer
        Of the network's parameters. The backend prepares both.
    """

    def __init__(self, backend: Float32, net: nn.Module, batch: tasks.Batch, samples: int,
                 losses: Callable[..., Losses], optimizer: torch.optim.Optimizer):
        self.backend, self.losses = backend, losses
        self.net, self.optimizer = backend.prepared(net, optimizer)
        self.samples_per_step = samples
        self.inputs = [backend.placed(torch.from_numpy(each)) for each in batch.inputs]
        self.labels = [torch.from_numpy(each) for each in batch.labels]
        self.about: dict[str, Any] = {"dtype": backend.dtype, "notes": backend.notes}

    def step(self) -> dict[str, float]:
        """Train on the batch and return its losses."""
        self.optimizer.zero_grad()
        with self.backend.precision():
            outputs = self.net(*self.inputs)
        losses = self.losses(outputs, *self.labels)
        sum(losses.values()).backward()  # type: ignore[union-attr]
        self.optimizer.step()
        return {name: loss.item() for name, loss in losses.items()}


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> Losses:
    """Return the mean cross entropy; classes are in the last dimension."""
    return {"CrossEntropy": functional.cross_entropy(scores.float().flatten(0, -2), labels.long().flatten())}


def multibox(predictions: tuple[torch.Tensor, torch.Tensor], classes: torch.Tensor, boxes: torch.Tensor) -> Losses:
    """Return GluonCV's SSDMultiBoxLoss: hard negatives are mined, box losses count for positive anchors only."""
    scores, offsets = (each.float() for each in predictions)
    positive = classes > 0
    count = max(1, int(positive.sum()))
    entropy = -functional.log_softmax(scores, -1).gather(-1, classes.long().unsqueeze(-1)).squeeze(-1)
    rank = (entropy * (positive.float() - 1)).argsort(1).argsort(1)
    hard = rank < (positive.sum(1, keepdim=True) * _HARD_NEGATIVES)
    entropy = torch.where(positive | hard, entropy, torch.zeros_like(entropy))
    distance = functional.smooth_l1_loss(offsets, boxes, reduction="none") * positive.unsqueeze(-1)
    return {"CrossEntropy": entropy.sum() / count, "SmoothL1": distance.sum() / count}


def _sgd(net: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9, weight_decay=0.0005, fused=fused)


def build(backend: Float32, settings: Mapping[str, Any]) -> Training:
    """Build a network that `tasks` knows and its training."""
    torch.manual_seed(settings["seed"])
    network = settings["network"]
    numbers = tasks.size(network, settings["small"])
    net = backend.placed(create(network, numbers))
    batch = tasks.batch(numbers, settings["batch_size"], settings["seed"])
    fused = backend.fused
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-5, fused=fused) if network in _ADAM else _sgd(net, fused)
    return Training(backend, net, batch, settings["batch_size"], cross_entropy, optimizer)


def build_ssd(backend: Float32, settings: Mapping[str, Any]) -> Training:
    """Build the tutorial's SSD and its training.

    Raises
    ------
    UsageError
        For another network than the tutorial's.
    """
    if settings["network"] != "ssd_512_resnet50_v1_coco":
        raise UsageError(f"the PyTorch peer of SSD is ssd_512_resnet50_v1_coco, received {settings['network']!r}")
    torch.manual_seed(settings["seed"])
    side = settings["data_shape"] or 512
    net = backend.placed(SSD())
    net.eval()
    with torch.no_grad():
        anchors = net(torch.zeros(1, 3, side, side))[1].shape[1]
    net.train()
    batch = tasks.ssd_batch(settings["batch_size"], side, anchors, settings["seed"])
    return Training(backend, net, batch, settings["batch_size"], multibox, _sgd(net, backend.fused))
