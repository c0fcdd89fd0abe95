"""Trained parameters that passes change: a copy of the caller's dict that shares its arrays."""
from __future__ import annotations

from typing import Collection, Mapping, Sequence

import mxnet as mx
import numpy as np

from ..dtypes import FLOAT32
from . import finite
from .arrays import FLOATS, array_of, cast_arrays, values_of
from .invoke import invoke
from .symbols import dtype_name


class NDArrayWeights:
    """Parameters by name; see :class:`gluon_amp.passes.context.Weights`."""

    def __init__(self, arrays: Mapping[str, mx.nd.NDArray]):
        self.arrays = dict(arrays)

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def dtypes(self) -> dict[str, str | None]:
        """Name every parameter's data type."""
        return {name: dtype_name(array.dtype) for name, array in self.arrays.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape."""
        return {name: array.shape for name, array in self.arrays.items()}

    def not_finite(self) -> list[str]:
        """Name the parameters with infinite or NaN values."""
        wide = {name: cast_arrays(array.as_nd_ndarray(), FLOAT32) for name, array in self.arrays.items()
                if array.size and dtype_name(array.dtype) in FLOATS}
        if finite.are_finite(wide.values()):
            return []
        return [name for name, array in wide.items() if not finite.all_finite([array])]

    def read(self, name: str) -> np.ndarray:
        """Return a parameter's values, as FP32 where NumPy does not know their type."""
        return values_of(cast_arrays(self.arrays[name], FLOAT32))

    def write(self, name: str, values: np.ndarray) -> None:
        """Give a parameter other values, or add one."""
        self.arrays[name] = array_of(values, self._context())

    def compute(self, name: str, op: str, attrs: Mapping[str, str], inputs: Sequence[str]) -> None:
        """Add the result of an operator on parameters as a parameter."""
        with self._context():
            arrays = [self.arrays[source].as_nd_ndarray() for source in inputs]
            self.arrays[name] = invoke(op, arrays, {key: str(value) for key, value in attrs.items()})[0]

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""
        self.arrays[new] = self.arrays.pop(old)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other parameters."""
        self.arrays = {name: array for name, array in self.arrays.items() if name in names}

    def _context(self) -> mx.Context:
        return next((array.context for array in self.arrays.values()), mx.cpu())


class NamesOnly:
    """Parameters of a symbol whose values are not known: only their types can change."""

    def __init__(self, names: Collection[str]):
        self._dtypes: dict[str, str | None] = dict.fromkeys(names, FLOAT32)

    def __contains__(self, name: object) -> bool:
        return name in self._dtypes

    def dtypes(self) -> dict[str, str | None]:
        """Name every parameter's data type."""
        return dict(self._dtypes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return no shape: none is known."""
        return {}

    def not_finite(self) -> list[str]:
        """Name no parameter: no value is known."""
        return []

    def compute(self, name: str, op: str, attrs: Mapping[str, str], inputs: Sequence[str]) -> None:
        """Note the type that an inserted operator gives."""
        self._dtypes[name] = attrs.get("dtype") or self._dtypes[inputs[0]]

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""
        self._dtypes[new] = self._dtypes.pop(old)

    def keep(self, names: Collection[str]) -> None:
        """Forget all other parameters."""
        self._dtypes = {name: dtype for name, dtype in self._dtypes.items() if name in names}
