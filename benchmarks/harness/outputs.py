"""Compare the outputs that implementations of a network wrote with those of FP32."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def load(folder: Path) -> list[np.ndarray]:
    """Return the outputs that a session saved into a folder."""
    with np.load(folder / "outputs.npz") as arrays:
        return [arrays[name] for name in arrays.files]


def difference(expected: list[np.ndarray], found: list[np.ndarray]) -> dict[str, float]:
    """Return how far outputs are from the expected ones.

    Parameters
    ----------
    expected, found : list of ndarray
        Outputs of equal shapes.

    Returns
    -------
    dict
        ``max_error`` and ``mean_error``, as shares of each expected output's largest value, the worst output counts;
        ``top1``, the share of rows whose largest value is at the same place.

    Raises
    ------
    ValueError
        If all values of an expected output are equal: the comparison would say nothing.

    Examples
    --------
    >>> difference([np.array([[1.0, 4.0]])], [np.array([[1.5, 4.0]])])
    {'max_error': 0.125, 'mean_error': 0.0625, 'top1': 1.0}
    """
    largest = mean = 0.0
    agreeing = []
    for right, given in zip(expected, found):
        right, given = right.astype(np.float64), given.astype(np.float64)
        if right.min() == right.max():
            raise ValueError(f"expected outputs that differ from each other, received {right.size} times {right.min()}")
        distance = np.abs(right - given) / max(float(np.abs(right).max()), 1e-30)
        largest, mean = max(largest, float(distance.max())), max(mean, float(distance.mean()))
        agreeing.append(float((right.argmax(-1) == given.argmax(-1)).mean()))
    return {"max_error": largest, "mean_error": mean, "top1": min(agreeing)}
