"""What the benchmarked networks are given: their sizes, random inputs and labels. No framework is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from ..harness.errors import unknown

_IMAGES = {"side": 224, "classes": 1000}
_BERT_BASE = {"layers": 12, "units": 768, "heads": 12, "hidden": 3072, "length": 128, "vocabulary": 30522, "classes": 2}

# "small" sizes are for tests
SIZES: Mapping[str, Mapping[str, Any]] = {
    "ssd512": {"side": 512, "small": {"side": 64}},
    "resnet50": {**_IMAGES, "small": {"side": 64}},
    "mobilenet_v2": {**_IMAGES, "small": {"side": 64}},
    "densenet121": {**_IMAGES, "small": {"classes": 10}},
    "vgg16": {**_IMAGES, "small": {"side": 64}},
    "lstm": {"layers": 2, "units": 650, "length": 35, "vocabulary": 10000,
             "small": {"units": 16, "length": 4, "vocabulary": 50}},
    **{name: {**_BERT_BASE, "masked": masked,
              "small": {"layers": 1, "units": 16, "heads": 2, "hidden": 32, "length": 6, "vocabulary": 50}}
       for name, masked in (("encoder", False), ("encoder_masked", True))},
}  # fmt: skip

@dataclass(frozen=True)
class Batch:
    """NumPy arrays: the network's inputs, and its labels or targets."""

    inputs: tuple[np.ndarray, ...]
    labels: tuple[np.ndarray, ...]


def side_of(network: str, default: int) -> int:
    """Return the side in pixels of the images of an SSD, which its name says.

    Examples
    --------
    >>> side_of("ssd_300_vgg16_atrous_coco", 512), side_of("digits", 128)
    (300, 128)
    """
    found = re.match(r"ssd_(\d+)_", network)
    return int(found.group(1)) if found else default


def size(network: str, small: bool = False) -> dict[str, Any]:
    """Return the numbers that a network is built from.

    Raises
    ------
    UsageError
        If there is no such network.
    """
    if network not in SIZES:
        raise unknown("network", network, SIZES)
    numbers = dict(SIZES[network])
    replaced = numbers.pop("small")
    return {**numbers, **replaced} if small else numbers


def batch(numbers: Mapping[str, Any], batch_size: int, seed: int) -> Batch:
    """Return random inputs and labels for a network of these numbers.

    Images are FP32 ``(batch, 3, side, side)`` from -1 to 1. Tokens are int32: ``(length, batch)`` for a language
    model, whose labels are the next tokens, ``(batch, length)`` for an encoder, which gets segments and, when it is
    masked, an FP32 mask with 1 for the tokens that count.
    """
    random = np.random.RandomState(seed)
    if "side" in numbers:
        data = random.uniform(-1, 1, (batch_size, 3, numbers["side"], numbers["side"])).astype(np.float32)
        return Batch((data,), (_integers(random, numbers.get("classes", 1), batch_size),))
    if "heads" not in numbers:
        tokens = _integers(random, numbers["vocabulary"], numbers["length"] + 1, batch_size)
        return Batch((tokens[:-1],), (tokens[1:],))
    return _sentences(random, numbers, batch_size)


def _sentences(random: np.random.RandomState, numbers: Mapping[str, Any], batch_size: int) -> Batch:
    length = numbers["length"]
    tokens = _integers(random, numbers["vocabulary"], batch_size, length)
    places = np.arange(length)[None]
    segments = (places >= _integers(random, length, batch_size, 1)).astype(np.int32)
    valid = random.randint(length // 2, length + 1, (batch_size, 1))
    mask = ((places < valid).astype(np.float32),) if numbers["masked"] else ()
    return Batch((tokens, segments, *mask), (_integers(random, numbers["classes"], batch_size),))


def ssd_batch(batch_size: int, side: int, anchors: int, seed: int) -> Batch:
    """Return the tutorial's random images, and targets of classes and boxes for each anchor."""
    random = np.random.RandomState(seed)

    def uniform(low: float, *shape: int) -> np.ndarray:
        return random.uniform(low, 1, shape).astype(np.float32)

    images = uniform(-1, batch_size, 3, side, side)
    return Batch((images,), (uniform(0, batch_size, anchors), uniform(0, batch_size, anchors, 4)))


def _integers(random: np.random.RandomState, end: int, *shape: int) -> np.ndarray:
    return random.randint(0, end, shape).astype(np.int32)
