"""Images from folders, RecordIO files or nowhere, in an order and with an augmentation that depend on the epoch alone.

Every random decision about a sample follows from the seed, the epoch and the sample's number. So an epoch is the same
whether training came to it in one go or was resumed, and however many processes load the images.
"""
from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import gluon_amp as amp  # before mxnet

# isort: split
import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.data import DataLoader, Dataset, Sampler, vision

MEAN = np.array([0.485, 0.456, 0.406], "float32")
STD = np.array([0.229, 0.224, 0.225], "float32")
SYNTHETIC_STEPS = 20


class Data(NamedTuple):
    """What to train and to validate on; batches are (images, labels)."""

    train: Iterable
    val: Iterable
    steps: int
    classes: int

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass over ``train`` be that of an epoch."""
        if isinstance(self.train, DataLoader):
            self.train.epochs.epoch = epoch


def open_data(args: argparse.Namespace) -> Data:
    """Return the data that the command line names, this process's share of it."""
    if args.synthetic:
        return _synthetic(args)
    train, val = (_open(Path(args.data), name) for name in ("train", "val"))
    folders = getattr(train, "synsets", ())
    classes = args.classes or len(folders) or 1000
    if classes < len(folders):
        raise ValueError(f"{args.data}/train: expected at most --classes {classes} folders, found {len(folders)}")
    share = (amp.parallel.rank(), amp.parallel.size())
    if len(train) < args.batch_size * share[1]:
        raise ValueError(f"{args.data}: expected at least {args.batch_size * share[1]} images to train on, a batch for "
                         f"every process, found {len(train)}")
    order = EpochSampler(len(train), args.seed, *share)
    train_loader = _loader(Augmented(train, args), args, order, "discard")
    train_loader.epochs = order
    val_loader = _loader(Centered(val, args.image_size), args, range(share[0], len(val), share[1]), "keep")
    return Data(train_loader, val_loader, min(args.steps or len(train_loader), len(train_loader)), classes)


def _open(root: Path, name: str) -> Dataset:
    if (root / f"{name}.rec").exists():
        return vision.ImageRecordDataset(str(root / f"{name}.rec"))
    if (root / name).is_dir():
        return vision.ImageFolderDataset(str(root / name))
    raise FileNotFoundError(f"{root}: expected {name}.rec and {name}.idx, or a directory {name} with a folder for each "
                            "class")


def _loader(dataset: Dataset, args: argparse.Namespace, order: Sequence | Sampler, last: str) -> DataLoader:
    batches = gluon.data.BatchSampler(order, args.batch_size, last)
    return DataLoader(dataset, batch_sampler=batches, num_workers=args.workers)


def _synthetic(args: argparse.Namespace) -> Data:
    steps, classes = args.steps or SYNTHETIC_STEPS, args.classes or 1000
    random_state = np.random.RandomState([args.seed, amp.parallel.rank()])
    images = random_state.standard_normal((args.batch_size, 3, args.image_size, args.image_size))
    labels = random_state.randint(0, classes, args.batch_size)
    batch = tuple(mx.nd.array(part, dtype="float32") for part in (images, labels))
    return Data([batch] * steps, [batch] * steps, steps, classes)


class EpochSampler(Sampler):
    """This process's share of the samples, in an order drawn anew every epoch.

    Gives ``epoch * length + number``: the processes that load images were started before the first epoch, so the epoch
    has to travel with the sample's number.
    """

    def __init__(self, length: int, seed: int, rank: int, size: int):
        self.length, self.seed, self.rank, self.size = length, seed, rank, size
        self.epoch = 0

    def __len__(self) -> int:
        return self.length // self.size  # the same for all processes

    def __iter__(self) -> Iterator[int]:
        order = np.random.RandomState([self.seed, self.epoch]).permutation(self.length)
        share = order[self.rank::self.size][:len(self)]
        return iter((self.epoch * self.length + share).tolist())


class Augmented(Dataset):
    """Random crops, mirrored at random, of another dataset's images."""

    def __init__(self, source: Dataset, args: argparse.Namespace):
        self.source, self.args = source, args

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        epoch, number = divmod(index, len(self))
        image, label = _read(self.source, number)
        args = self.args
        random.seed(f"{args.seed} {epoch} {number}")  # MXNet crops by Python's generator
        size, areas = (args.image_size, args.image_size), (args.min_area, 1.0)
        pixels = mx.image.random_size_crop(image, size, areas, ratio=(3 / 4, 4 / 3))[0].asnumpy()
        flipped = random.random() < 0.5 and not args.no_flip
        return normalized(pixels[:, ::-1] if flipped else pixels), np.float32(label)


class Centered(Dataset):
    """The middle of another dataset's images."""

    def __init__(self, source: Dataset, size: int):
        self.source, self.size = source, size

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        image, label = _read(self.source, index)
        resized = mx.image.resize_short(image, self.size * 256 // 224)
        return normalized(mx.image.center_crop(resized, (self.size, self.size))[0].asnumpy()), np.float32(label)


class UnreadableImage(ValueError):
    """A file of the data that no image can be read from."""


def _read(source: Dataset, number: int) -> tuple[mx.nd.NDArray, Any]:
    try:
        return source[number]
    except mx.MXNetError as error:
        place = source.items[number][0] if hasattr(source, "items") else f"record {number}"
        raise UnreadableImage(f"{place}: expected an image, as JPEG or PNG") from error


def normalized(pixels: np.ndarray) -> np.ndarray:
    """Turn bytes, (height, width, 3), into what networks expect, (3, height, width)."""
    return ((pixels.astype("float32") / 255 - MEAN) / STD).transpose(2, 0, 1)
