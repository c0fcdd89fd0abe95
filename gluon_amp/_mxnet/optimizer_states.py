"""Optimizers and their states as JSON and arrays, and older files by an unpickler with limits."""
from __future__ import annotations

import codecs
import collections
import copyreg
import io
import json
import pickle
from types import FunctionType, MethodType, ModuleType
from typing import Any, Iterable, Mapping

import mxnet as mx
import numpy as np
from mxnet.lr_scheduler import LRScheduler
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import CSRNDArray, RowSparseNDArray
from mxnet.optimizer import Optimizer

from ..errors import expected

STATES_BEGIN = b"gluon_amp trainer states "  # of a file, before the number of its form


def known_classes(*more: type) -> frozenset[type]:
    """Return the classes of objects that a file may hold: optimizers, schedulers, and others given."""
    registered = (each for each in Optimizer.opt_registry.values() if isinstance(each, type))
    schedulers = (each for each in vars(mx.lr_scheduler).values()
                  if isinstance(each, type) and issubclass(each, LRScheduler))
    return frozenset((*registered, *schedulers, *more))


def write(value: Any) -> bytes:
    """Return the bytes of a value: numbers, texts, arrays, containers, and objects that are made of these."""
    writer = _Writer()
    tree = json.dumps(writer.tree(value, "")).encode()
    arrays = b"".join(writer.arrays)
    sizes = json.dumps([len(array) for array in writer.arrays]).encode()
    return b"\n".join((tree, sizes, arrays))


def read(content: bytes, classes: Iterable[type]) -> Any:
    """Return the value that :func:`write` wrote."""
    tree, _, rest = content.partition(b"\n")
    sizes, _, arrays = rest.partition(b"\n")
    starts = np.cumsum([0, *json.loads(sizes)]).tolist()
    if starts[-1] != len(arrays):
        raise ValueError(f"expected {starts[-1]} bytes of arrays, found {len(arrays)}: the file is cut off or damaged")
    parts = [arrays[start:end] for start, end in zip(starts, starts[1:])]
    return _Reader(parts, {_name_of(one): one for one in classes}).value(json.loads(tree))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Writer:
    """Turns a value into JSON; equal objects stay one."""

    def __init__(self) -> None:
        self.arrays: list[bytes] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # numbers by ids; the objects, so that they keep their ids

    def tree(self, value: Any, place: str) -> Any:
        """Return a value in a form that JSON can hold."""
        if type(value) in (bool, int, float, str, type(None)):
            return value
        if id(value) in self._seen:
            return {"same": self._seen[id(value)][0]}
        self._seen[id(value)] = len(self._seen), value
        return self._kinds(value, place)

    def _kinds(self, value: Any, place: str) -> Any:
        if isinstance(value, NDArray):
            self.arrays.append(bytes(value.__getstate__()["handle"]))
            return {"array": len(self.arrays) - 1, "numpy_style": isinstance(value, mx.np.ndarray)}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
            self.arrays.append(np.asarray(value).tobytes())
            return {"numbers": len(self.arrays) - 1, "dtype": value.dtype.str, "shape": list(value.shape),
                    "scalar": isinstance(value, np.generic)}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.tree(item, f"{place}[{number}]") for number, item in enumerate(value)]}
        if type(value) is dict:
            return {"dict": [[self.tree(key, place), self.tree(item, f"{place}[{key!r}]")]
                             for key, item in value.items()]}
        if isinstance(value, type) and issubclass(value, (np.generic, float, int, bool)):
            return {"dtype": np.dtype(value).str}
        if not hasattr(value, "__dict__") or isinstance(value, (type, FunctionType, MethodType, ModuleType)):
            raise TypeError(expected("numbers, texts, arrays, or objects that hold such", place or "value", value))
        own = getattr(value, "__getstate__", None)  # every object has one from Python 3.11 on
        state = own() if own else value.__dict__
        return {"object": _name_of(type(value)), "state": self.tree(dict(state), f"{place}.{type(value).__name__}")}


class _Reader:
    """Turns JSON into the value it was written of."""

    def __init__(self, arrays: list[bytes], classes: Mapping[str, type]):
        self.arrays, self.classes = arrays, classes
        self._seen: list[Any] = []

    def value(self, tree: Any) -> Any:
        """Return the value of a part of the tree."""
        if not isinstance(tree, dict):
            return tree
        kind, number = next(iter(tree)), len(self._seen)
        if kind == "same":
            return self._seen[tree[kind]]
        self._seen.append(None)
        made = self._seen[number] = self._made(kind, tree)  # what it holds may refer to it
        if kind == "list":
            made.extend(map(self.value, tree["list"]))
        elif kind == "tuple":
            made = self._seen[number] = tuple(map(self.value, tree["tuple"]))
        elif kind == "dict":
            made.update((self.value(key), self.value(item)) for key, item in tree["dict"])
        elif kind == "object":
            getattr(made, "__setstate__", vars(made).update)(self.value(tree["state"]))
        return made

    def _made(self, kind: str, tree: Mapping[str, Any]) -> Any:
        """Make a value, but for what it holds."""
        if kind == "array":
            made = mx.np.ndarray(None) if tree["numpy_style"] else mx.nd.NDArray(None)
            made.__setstate__({"handle": bytearray(self.arrays[tree["array"]])})
            return made
        if kind == "numbers":
            dtype = np.dtype(tree["dtype"])
            if dtype.kind not in "biuf":
                raise ValueError(f"a file may hold arrays of numbers, not of {dtype}")
            numbers = np.frombuffer(self.arrays[tree["numbers"]], dtype).reshape(tree["shape"]).copy()
            return numbers[()] if tree["scalar"] else numbers
        if kind == "object":
            if tree["object"] not in self.classes:
                raise ValueError(f"the file holds an object of the class {tree['object']}, which is not an "
                                 "optimizer or scheduler of MXNet: name your own classes in classes=[...]")
            return object.__new__(self.classes[tree["object"]])
        return np.dtype(tree["dtype"]).type if kind == "dtype" else {"list": [], "tuple": None, "dict": {}}[kind]


_ALLOWED: tuple[Any, ...] = (
    mx.nd.NDArray, mx.np.ndarray, CSRNDArray, RowSparseNDArray, mx.Context, np.ndarray, np.dtype,
    collections.OrderedDict, collections.defaultdict, set, frozenset, bytearray, complex, slice, object, dict, list,
    tuple, int, float, bool, str, bytes)
# Functions that pickles call to make arrays; they can only make objects of the classes above.
_MAKERS = {(f"numpy.{core}.{module}", name) for core in ("core", "_core") for module, name in (
    ("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))}


_FUNCTIONS = {("_codecs", "encode"): codecs.encode,  # of protocols 0 to 2
              ("copyreg", "_reconstructor"): copyreg._reconstructor}  # type: ignore[attr-defined]


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, classes: Iterable[type]):
        super().__init__(io.BytesIO(content))
        kinds = (*_ALLOWED, *classes, *np.sctypeDict.values())
        self._classes = {**_FUNCTIONS, **{("__builtin__", kind.__qualname__): kind for kind in _ALLOWED},
                         **{(kind.__module__, kind.__qualname__): kind for kind in kinds}}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a pickle names, if it is allowed."""
        if (module, name) in _MAKERS:
            return super().find_class(module.replace("numpy._core", "numpy.core"), name)
        if (module, name) not in self._classes:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which is not an optimizer, scheduler or array of MXNet or NumPy, and "
                "could run any code. If it is a class of your own and you trust the file, name it in classes=[...]")
        return self._classes[module, name]


def unpickle(content: bytes, classes: Iterable[type]) -> Any:
    """Read a pickle that holds MXNet's and NumPy's own objects."""
    return _Unpickler(content, classes).load()
