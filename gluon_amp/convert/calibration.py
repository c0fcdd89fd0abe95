"""The ranges of a network's tensors, which INT8 needs: collected on data once, and kept in a file."""
from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np

from .._mxnet import quantizer
from .._mxnet.arrays import values_of
from .._mxnet.engine import Program
from .._mxnet.symbols import first_line, to_graph
from ..base import checks
from ..base.files import replacing
from ..errors import GraphError, PolicyError, StateError, expected
from ..state.in_force import under
from .parameters import flat

_FORMAT = "gluon_amp calibration 1"
_ROWS = 32  # of a file's arrays that make a batch
Batch = Mapping[str, mx.nd.NDArray]


@dataclass(frozen=True)
class Calibration:
    """The ranges of a network's tensors; :func:`gluon_amp.calibrate` makes it, for ``calib_data`` of conversions."""

    # The least and the largest value that INT8 is to hold, by the names of the operators that give them, and of data.
    ranges: Mapping[str, tuple[float, float]]
    mode: str  # how ranges were chosen: 'naive' for all values, 'entropy' for those that lose least information
    batches: int  # on how many batches

    @staticmethod
    def key(name: str, output: int) -> str:
        """Return the name of a tensor among the ranges, by that of its operator."""
        return f"{name}:{output}" if output else name

    def range_of(self, tensor: str) -> tuple[float, float] | None:
        """Return the range of a tensor; None where it is not known, or INT8 cannot hold it."""
        found = self.ranges.get(tensor)
        return found if found and all(map(math.isfinite, found)) and any(found) else None

    def save(self, path: str | os.PathLike) -> None:
        """Write the ranges to a JSON file."""
        with replacing(path) as (temporary,), open(temporary, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **asdict(self)}, file, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Calibration:
        """Read a file of :meth:`save`; raise PolicyError where it holds no ranges."""
        try:
            with open(path, encoding="utf-8") as file:
                raw = json.load(file)
            if raw["format"] != _FORMAT:
                raise ValueError(f"its format is {raw['format']!r}, not {_FORMAT!r}")
            ranges = {name: (float(least), float(most)) for name, (least, most) in raw["ranges"].items()}
            return cls(ranges, str(raw["mode"]), int(raw["batches"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"{os.fspath(path)!r} is not a file of ranges, as Calibration.save writes it: {error}"
                              ) from error


def collect(symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray], batches: Iterable[Batch], mode: str
            ) -> Calibration:
    """Run a prepared FP32 network, and note the ranges of its tensors."""
    tensors = {f"{node.name}_{told}": Calibration.key(node.name, output) for node in to_graph(symbol).operators()
               for output in range(node.num_outputs)
               for told in (f"output{output}", output, *["output"] * (output == 0))}  # as MXNet may report it
    collector, program, count = quantizer.Collector(mode == "entropy"), Program(symbol, arrays), 0
    program.watch(lambda told, array: collector.see(tensors[told], array) if told in tensors else None)
    with under(None):
        for batch in batches:
            unknown = [name for name, array in batch.items()
                       if np.dtype(array.dtype).kind == "f" and np.isnan(values_of(array)).any()]
            if unknown:
                raise GraphError("calib_data: expected numbers, of which INT8 can learn a range, received NaN in batch "
                                 f"{count} ({', '.join(unknown)}): leave such samples out")
            for name, array in batch.items():
                collector.see(name, array.as_nd_ndarray())
            try:
                program(batch)
                mx.nd.waitall()
            except mx.MXNetError as error:
                told = ", ".join(f"{name} of {array.shape}" for name, array in batch.items())
                raise GraphError(f"calib_data: the network does not run on batch {count} ({told}): {first_line(error)}"
                                 ) from error
            count += 1
    return Calibration(collector.ranges(), mode, count)


def batches_of(data: Any, inputs: Sequence[str], limit: int | None = None) -> Iterator[Batch]:
    """Return the network's inputs by name for every batch of a loader, an iterator, arrays or a file."""
    if limit is not None:
        checks.whole("calib_batches", limit, 1)
    return (_named(item, inputs) for item in islice(_items(data), limit))


def _items(data: Any) -> Iterable[Any]:
    if data is None:
        raise PolicyError("calib_data: INT8 needs data to learn the ranges of values from: expected a DataLoader, a "
                          "DataIter, arrays, a file of arrays (.npz), or what amp.calibrate() returned")
    if isinstance(data, (str, os.PathLike)):
        return _from_file(os.fspath(data))
    if isinstance(data, mx.io.DataIter):
        data.reset()
        return data
    if isinstance(data, (mx.nd.NDArray, np.ndarray, Mapping)):
        return [data]
    if not isinstance(data, Iterable):
        raise TypeError(expected("a DataLoader, a DataIter, arrays or a file of arrays", "calib_data", data))
    return data


def _from_file(path: str) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield batches of the arrays in a file, or in the files of a directory."""
    files = ([path] if not os.path.isdir(path) else
             sorted(os.path.join(path, name) for name in os.listdir(path) if name.endswith(".npz")))
    for name in files:
        try:
            arrays = dict(np.load(name))
        except ValueError as error:
            raise StateError(f"calib_data: {name!r} is not a file of arrays, as np.savez writes it") from error
        for start in range(0, max((len(array) for array in arrays.values()), default=0), _ROWS):
            yield {key: array[start:start + _ROWS] for key, array in arrays.items()}


def _named(item: Any, inputs: Sequence[str]) -> Batch:
    if isinstance(item, mx.io.DataBatch):
        item = item.data
    if isinstance(item, Mapping):
        missing = [name for name in inputs if name not in item]
        if missing and not (len(inputs) == 1 and len(item) == 1):
            raise GraphError(f"calib_data: expected arrays for {', '.join(inputs)}, received {', '.join(item)}")
        item = list(item.values()) if missing else [item[name] for name in inputs]
    given = flat(item)
    if len(given) < len(inputs):
        raise GraphError(f"calib_data: the network takes {len(inputs)} arrays ({', '.join(inputs)}), a batch has "
                         f"{len(given)}")
    batch = {}
    for name, value in zip(inputs, given):  # labels come behind
        checks.instance("calib_data", value, (mx.nd.NDArray, np.ndarray), "arrays")
        array = value if isinstance(value, mx.nd.NDArray) else mx.nd.array(value, dtype=value.dtype)
        array = array.astype("float32") if np.dtype(array.dtype) == np.float64 else array
        batch[name] = array.as_in_context(mx.cpu())
    return batch
