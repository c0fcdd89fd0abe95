"""Read pickles of MXNet's trainer states, and let no other code run."""
from __future__ import annotations

import codecs
import collections
import copyreg
import io
import pickle
from typing import Any, Iterable

import mxnet as mx
import numpy as np
from mxnet.ndarray.sparse import CSRNDArray, RowSparseNDArray

from .optimizer_states import known_classes

_ALLOWED: tuple[Any, ...] = (
    mx.nd.NDArray, mx.np.ndarray, CSRNDArray, RowSparseNDArray, mx.Context, np.ndarray, np.dtype,
    collections.OrderedDict, collections.defaultdict, set, frozenset, bytearray, complex, slice, object, dict, list,
    tuple, int, float, bool, str, bytes)
# Functions that pickles call to make arrays and objects; they can only make what is in the list above.
_MAKERS = {("numpy.core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "scalar"),
           ("numpy._core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "scalar"),
           ("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer")}
_FUNCTIONS = {("_codecs", "encode"): codecs.encode,
              ("copyreg", "_reconstructor"): copyreg._reconstructor}  # type: ignore[attr-defined]


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, classes: Iterable[type]):
        super().__init__(io.BytesIO(content))
        kinds = (*_ALLOWED, *known_classes(*classes), *np.sctypeDict.values())
        self._classes = {(kind.__module__, kind.__qualname__): kind for kind in kinds}
        self._classes.update({("__builtin__", kind.__qualname__): kind for kind in _ALLOWED
                              if kind.__module__ == "builtins"})

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a pickle names, if it is allowed."""
        module = module.replace("numpy._core", "numpy.core") if (module, name) in _MAKERS else module
        if (module, name) in _MAKERS:
            return super().find_class(module, name)
        allowed = self._classes.get((module, name), _FUNCTIONS.get((module, name)))
        if allowed is None:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which is not an optimizer, scheduler or array of MXNet or NumPy, and "
                "could run any code. If it is a class of your own and you trust the file, name it in classes=[...]")
        return allowed


def unpickle(content: bytes, classes: Iterable[type] = ()) -> Any:
    """Read a pickle that holds MXNet's and NumPy's own objects."""
    return _Unpickler(content, classes).load()
