"""Images of handwritten digits with maps that are 1 at the digits' centres: a small dense regression."""

from __future__ import annotations

import helpers  # noqa: F401  finds benchmarks/

# isort: split
import numpy as np

from benchmarks.voc.digits import Box, compose, scan_order


def digit_centres(count: int, side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw images and the maps to learn.

    Parameters
    ----------
    count : int
        Number of images.
    side : int
        Width and height in pixels.
    seed : int
        Seed of everything random.

    Returns
    -------
    images : numpy.ndarray
        float32, shape (count, 3, side, side), from -1 to 1.
    maps : numpy.ndarray
        float32, shape (count, 1, side, side): a bell of height 1 at the centre of each digit, 0 elsewhere.
    """
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(seed)
    scans = scan_order(digits, np.arange(len(digits.images)), rng)
    drawn = [compose(side, scans, rng) for _ in range(count)]
    images = np.stack([canvas.transpose(2, 0, 1) / 127.5 - 1.0 for canvas, _ in drawn])
    maps = np.stack([_bells(side, [digit.box for digit in placed]) for _, placed in drawn])
    return images.astype(np.float32), maps[:, None].astype(np.float32)


def _bells(side: int, boxes: list[Box]) -> np.ndarray:
    rows, columns = np.mgrid[:side, :side] + 0.5
    result = np.zeros((side, side))
    for box in boxes:
        row, column = (box.top + box.bottom) / 2, (box.left + box.right) / 2
        distance = (rows - row) ** 2 + (columns - column) ** 2
        result = np.maximum(result, np.exp(-distance / (2 * (0.05 * side) ** 2)))
    return result
