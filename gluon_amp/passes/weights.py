"""What passes that change trained parameters need of them."""
from __future__ import annotations

from typing import Collection, Mapping, Protocol, Sequence

import numpy as np

__all__ = ["Weights"]


class Weights(Protocol):
    """The trained parameters of a graph, by the names of its variables."""

    def __contains__(self, name: str) -> bool:
        """Whether the variable is a trained parameter."""

    def read(self, name: str) -> np.ndarray:
        """Return a parameter's values."""

    def write(self, name: str, values: np.ndarray) -> None:
        """Give a parameter other values (FP32), or add one."""

    def compute(self, name: str, op: str, attrs: Mapping[str, str], inputs: Sequence[str]) -> None:
        """Add the result of an operator on parameters as a parameter."""

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""

    def keep(self, names: Collection[str]) -> None:
        """Forget all other parameters."""
