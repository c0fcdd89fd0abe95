"""Deterministic contents for sample inputs, and rounding to low precision."""
from __future__ import annotations

import zlib
from typing import Callable

import numpy as np

from gluon_amp.dtypes import BFLOAT16, FLOAT16, FLOAT32, FORMATS

from .samples.sample import LOW, Input

# The largest relative error of rounding to nearest. FP32 runs are controls: a difference in the order of
# summation is of no interest there.
EPSILON = {**{dtype: form.roundoff for dtype, form in FORMATS.items()}, FLOAT32: 2.0 ** -16}

Random = np.random.RandomState
Shape = tuple


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """Round FP32 numbers to the nearest of ``dtype``, ties to even; the result is FP32."""
    array = np.asarray(array, np.float32)
    if dtype == FLOAT16:
        return array.astype(np.float16).astype(np.float32)
    if dtype == BFLOAT16:
        bits = np.ascontiguousarray(array).view(np.uint32).astype(np.int64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return rounded.astype(np.uint32).view(np.float32).reshape(array.shape)
    return array


def fill(item: Input, dtype: str, seed: str) -> np.ndarray:
    """Make an input's contents, rounded to ``dtype`` where it runs in that; the same seed gives the same numbers."""
    name, _, argument = item.values.partition(":")
    array = np.asarray(VALUES[name](Random(zlib.crc32(seed.encode())), item.shape, argument))
    if item.kind == LOW:
        return round_to(array, dtype).reshape(item.shape)
    return array.astype(item.kind).reshape(item.shape)


def _distinct(random: Random, shape: Shape, _: str) -> np.ndarray:
    """Draw numbers without repetition from those that bfloat16 and float16 both hold."""
    mantissas, exponents, signs = np.meshgrid(1 + np.arange(128) / 128, 2.0 ** np.arange(-3, 3), (-1, 1))
    return random.choice((mantissas * exponents * signs).ravel(), size=shape, replace=int(np.prod(shape)) > 1536)


def _positive_definite(random: Random, shape: Shape, _: str) -> np.ndarray:
    factor = random.normal(size=shape)
    return factor @ np.swapaxes(factor, -1, -2) / shape[-1] + np.eye(shape[-1])


def _boxes(random: Random, shape: Shape, side: str) -> np.ndarray:
    """Corner boxes (x0, y0, x1, y1) within a square of the given side."""
    start = random.uniform(0, 0.6, size=(*shape[:-1], 2))
    return np.concatenate([start, start + random.uniform(0.1, 0.4, size=start.shape)], axis=-1) * float(side or 1)


def _rois(random: Random, shape: Shape, argument: str) -> np.ndarray:
    """Regions of interest: image number and box."""
    batch = random.randint(0, 2, size=(shape[0], 1)).astype(np.float32)
    boxes = np.round(_boxes(random, (shape[0], 4), argument or "12"))
    return np.concatenate([batch, boxes] + ([np.full((shape[0], 1), 30.0)] if shape[1] == 6 else []), axis=1)


def _rotated_rois(random: Random, shape: Shape, _: str) -> np.ndarray:
    """Rotated regions: image number, centre, size, angle in degrees."""
    limits = [(4, 8), (4, 8), (3, 6), (3, 6), (0, 45)]
    return np.stack([random.randint(0, 2, shape[0]), *(random.uniform(*pair, shape[0]) for pair in limits)], axis=1)


def _labelled_boxes(random: Random, shape: Shape, with_scores: str) -> np.ndarray:
    """Rows of class, distinct scores where asked for, and box."""
    columns = [random.randint(0, 2, size=(*shape[:-1], 1)).astype(np.float64)]
    if with_scores:
        columns.append((random.permutation(int(np.prod(shape[:-1]))) + 1).reshape(*shape[:-1], 1) / 256.0)
    return np.concatenate([*columns, _boxes(random, (*shape[:-1], 4), "")], axis=-1)


VALUES: dict[str, Callable[[Random, Shape, str], np.ndarray]] = {
    "normal": lambda random, shape, _: random.normal(size=shape),
    "positive": lambda random, shape, _: random.uniform(0.25, 3.0, size=shape),
    "unit": lambda random, shape, _: random.uniform(-0.9, 0.9, size=shape),
    "zero_one": lambda random, shape, _: random.uniform(0.05, 0.95, size=shape),
    "above_one": lambda random, shape, _: random.uniform(1.25, 3.0, size=shape),
    "few": lambda random, shape, _: random.randint(-2, 3, size=shape),
    "distinct": _distinct,
    "zeros": lambda random, shape, _: np.zeros(shape),
    "ones": lambda random, shape, _: np.ones(shape),
    "constant": lambda random, shape, argument: np.full(shape, float(argument)),
    "small": lambda random, shape, _: random.normal(size=shape) * 0.1,
    # Indices, labels, lengths and masks: no gradient is asked for.
    "labels": lambda random, shape, argument: random.randint(0, int(argument), size=shape),
    "valid": lambda random, shape, _: random.permutation(np.arange(int(np.prod(shape))) % 2),
    "length": lambda random, shape, argument: random.randint(1, int(argument) + 1, size=shape),
    "grid_index": lambda random, shape, argument: np.arange(int(np.prod(shape))) % int(argument),
    "doubled": lambda random, shape, _: 2.0 * random.randint(0, 2, size=shape),  # what dropout by a half makes of ones
    # Linear algebra and detection.
    "positive_definite": _positive_definite,
    "lower": lambda random, shape, _: np.tril(random.normal(size=shape) * 0.5) + 2 * np.eye(shape[-1]),
    "softmax": lambda random, shape, _: random.dirichlet(np.ones(shape[-1]), size=shape[:-1]),
    "boxes": _boxes,
    "rois": _rois,
    "rotated_rois": _rotated_rois,
    "detections": lambda random, shape, _: _labelled_boxes(random, shape, "scores"),
    "box_labels": _labelled_boxes,
}
