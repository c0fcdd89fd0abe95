"""Training samples of an SSD from a GluonCV detection dataset, the same ones for the same seed."""

from __future__ import annotations

import random
import warnings
from typing import Any, Callable

import gluon_amp  # noqa: F401  first: it lets MXNet 1.9.1 import under newer NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import gluon

from .directory import VocDirectory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gluoncv.data import VOCDetection
    from gluoncv.data.batchify import Stack, Tuple
    from gluoncv.data.transforms.presets.ssd import SSDDefaultValTransform
    from gluoncv.model_zoo.ssd.target import SSDTargetGenerator


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and MXNet."""
    random.seed(seed)
    np.random.seed(seed)
    mx.random.seed(seed)


def open_set(directory: VocDirectory, name: str) -> gluon.data.Dataset:
    """Return a set of a directory as GluonCV's dataset: (image, label), with the directory's classes.

    Parameters
    ----------
    directory : VocDirectory
        As `directory.check_directory` returns it.
    name : str
        One of `directory.SETS`.
    """
    dataset = type("VOCDirectoryDetection", (VOCDetection,), {"CLASSES": directory.classes})
    return dataset(root=str(directory.root), splits=(("", name),))


class PlainTrainTransform:
    """Resize, normalize and make targets as GluonCV's training transform does, without augmentation.

    Parameters
    ----------
    width, height : int
        Size of the network's input in pixels.
    anchors : mx.nd.NDArray
        The network's anchors, shape (1, N, 4), on the CPU.
    """

    def __init__(self, width: int, height: int, anchors: mx.nd.NDArray):
        self._resize = SSDDefaultValTransform(width, height)
        self._anchors = anchors
        # -1: the loss mines hard negatives itself
        self._targets = SSDTargetGenerator(negative_mining_ratio=-1)

    def __call__(self, image: mx.nd.NDArray, label: np.ndarray) -> tuple[mx.nd.NDArray, ...]:
        """Return the image, shape (3, height, width), its class targets (N,) and box targets (N, 4)."""
        image, boxes = self._resize(image, label)
        corners, ids = mx.nd.array(boxes[None, :, :4]), mx.nd.array(boxes[None, :, 4:5])
        cls_targets, box_targets, _ = self._targets(self._anchors, None, corners, ids)
        return image, cls_targets[0], box_targets[0]


class TrainingSamples(gluon.data.Dataset):
    """A fixed number of samples: epochs in shuffled order, each sample transformed with a seed of its own.

    So a sample depends on the seed and on its number alone, not on what else used random numbers.

    Parameters
    ----------
    dataset : gluon.data.Dataset
        Gives (image, label).
    transform : callable
        Takes (image, label) and gives the sample; may use the generators of Python and NumPy.
    count : int
        Number of samples, of all epochs together.
    seed : int
        Seed of order and transforms.
    """

    def __init__(self, dataset: Any, transform: Callable[..., Any], count: int, seed: int):
        self._dataset = dataset
        self._transform = transform
        self._seed = seed
        order = np.random.default_rng(seed)
        epochs = -(-count // len(dataset))
        self._order = np.concatenate([order.permutation(len(dataset)) for _ in range(epochs)])[:count]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Any:
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        return self._transform(*self._dataset[int(self._order[number])])


def batches(
    dataset: gluon.data.Dataset, transform: Callable[..., Any], steps: int, batch_size: int, seed: int
) -> gluon.data.DataLoader:
    """Load the batches of a training run: images (B, 3, side, side), class targets (B, N), box targets (B, N, 4).

    Parameters
    ----------
    dataset : gluon.data.Dataset
        Gives (image, label).
    transform : callable
        As for `TrainingSamples`.
    steps, batch_size : int
        Number of batches, and of images in each.
    seed : int
        Seed of order and transform.
    """
    samples = TrainingSamples(dataset, transform, steps * batch_size, seed)
    return gluon.data.DataLoader(samples, batch_size, batchify_fn=Tuple(Stack(), Stack(), Stack()))
