"""How a trainer's gradients become those of all processes, and how the processes agree on a step."""
from __future__ import annotations

import itertools
import math
from typing import Collection, Sequence

import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from .._mxnet import trainers
from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import dtype_name
from ..base import checks
from ..errors import StateError, closest
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..state.in_force import in_force
from .groups import Group, GroupStore, horovod_group, store_group, total_of

_NATIVE_STORES = ("local", "device", "nccl", "dist")  # MXNet looks for these in a name, and takes others for local
_SAME_EXPONENT = 1e-9
_numbers = itertools.count()  # tells their names apart, alike in every process


def distribute(trainer: gluon.Trainer, allreduce_always_fp32: bool = False,
               gradient_predivide_factor: float = 1.0) -> Reduction | None:
    """Take over the reduction of a trainer that works with other processes."""
    factor = checks.above_zero("gradient_predivide_factor", gradient_predivide_factor, finite=True)
    name = f"trainer{next(_numbers)}"
    group = _group_of(trainer, name)
    return None if group is None else Reduction(trainer, group, name, allreduce_always_fp32, factor)


def _group_of(trainer: gluon.Trainer, name: str) -> Group | None:
    processes = trainers.horovod_processes(trainer)
    if processes is not None:
        return horovod_group(processes)
    store = trainers.store_of(trainer)
    if isinstance(store, GroupStore):
        return store.group
    kind, registered = store if isinstance(store, str) else getattr(store, "type", ""), sorted(KVStoreBase.kv_registry)
    if isinstance(store, str) and kind.lower() not in registered and not any(
            part in kind.lower() for part in _NATIVE_STORES):
        hint = (" Horovod's trainer is horovod.mxnet.DistributedTrainer" if kind.lower() == "horovod"
                else closest(kind, [*_NATIVE_STORES, "dist_sync", "dist_device_sync", *registered]))
        raise ValueError(f"MXNet has no KVStore {kind!r}: it would silently train without any.{hint}")
    has_workers = isinstance(store, KVStoreBase) and store.num_workers > 1
    if store is None or ("dist" not in kind and not has_workers):
        return None
    group = store_group(store)
    trainers.use_store(trainer, GroupStore(group, name))
    return group


class Reduction:
    """Reduces a trainer's gradients by its own reduction, called with arrays that the engine can add."""

    # Gradients that no backward pass wrote since the last step count as zero, and as written when another process wrote
    # them: so a step updates the same parameters in every process, as one process would on the joint batch. Row-sparse
    # gradients are added up over the rows that occur in any process.

    def __init__(self, trainer: gluon.Trainer, group: Group, name: str, always_fp32: bool, factor: float):
        self.group = group
        self.factor = factor  # divides the gradients before they are added up
        self.num_bytes = 0  # that this process handed to the engine in the last reduction
        self._trainer = trainer
        self._name = name  # the same in every process
        self._lifted = (FLOAT16, BFLOAT16) if always_fp32 else (BFLOAT16,)  # types that are added up in FP32
        self._own = trainers.own_reduction(trainer)

    def reduce(self) -> None:
        """Reduce the gradients of all parameters."""
        self.num_bytes = 0
        fresh = trainers.fresh(self._trainer)
        gradients = trainers.gradients(self._trainer)
        with in_force.off(), autograd.pause():
            for arrays, flags, adds in zip(gradients, fresh, trainers.accumulates(self._trainer)):
                for array, flag in zip(arrays, flags):
                    if not flag and not adds:
                        trainers.zero(array)
            packed = [self._packed(arrays) if arrays and arrays[0].stype == "default" else None for arrays in gradients]
            trainers.reduce_arrays(self._trainer, self._own, [[] if wire is None else [wire] for wire in packed])
            for index, (arrays, wire) in enumerate(zip(gradients, packed)):
                if wire is None and arrays:
                    self._reduce_rows(f"{self._name}.{index}", arrays)
                for array in arrays if wire is not None else ():
                    if array is not wire:
                        cast_arrays(wire, dtype_name(array.dtype) or FLOAT32).copyto(array)

    def _packed(self, arrays: Sequence[NDArray]) -> NDArray:
        """Return the sum over the contexts, divided, in a type that the engine can add."""
        arrays = [cast_arrays(array, FLOAT32) if dtype_name(array.dtype) in self._lifted else array for array in arrays]
        wire = total_of(arrays)
        if self.factor != 1.0:
            wire *= 1.0 / self.factor
        self.num_bytes += wire.size * np.dtype(wire.dtype).itemsize
        return wire

    def _reduce_rows(self, name: str, arrays: Sequence[NDArray]) -> None:
        """Reduce a row-sparse gradient: first which rows occur anywhere, then those rows."""
        first = arrays[0]
        occurs = np.zeros(first.shape[0], "float32")
        for array in arrays:
            occurs[array.indices.asnumpy()] = 1
        occurring = nd.array(occurs, ctx=first.context)
        self.num_bytes += occurs.nbytes
        self.group.sum(f"{name}.rows", [occurring])
        rows = np.flatnonzero(occurring.asnumpy())
        if not rows.size:
            return
        index = nd.array(rows, ctx=first.context, dtype="int64")
        wire = self._packed([nd.sparse.retain(array.as_in_context(first.context), index).data for array in arrays])
        wire = self.group.sum_varying(f"{name}.values", wire)
        for array in arrays:
            values = cast_arrays(wire, dtype_name(array.dtype) or FLOAT32)
            nd.sparse.row_sparse_array((values, index), shape=array.shape, ctx=array.context).copyto(array)

    def agree(self, finite: bool, scale: float, overflowed: Collection[int], losses: int,
              written: Sequence[bool]) -> tuple[bool, set[int], list[bool]]:
        """Combine the decisions of all processes into one: also which losses overflowed, and which gradients exist."""
        exponent = math.log2(scale)
        flags = [loss in overflowed for loss in range(losses)] + list(written)
        with in_force.off(), autograd.pause():
            vector = nd.array([not finite, exponent, exponent ** 2, *flags], dtype="float64")
            self.group.sum(f"{self._name}.decision", [vector])
            infinite, total, squares, *counts = vector.asnumpy()
        mean, mean_square = total / self.group.size, squares / self.group.size
        if mean_square - mean ** 2 > _SAME_EXPONENT * max(1.0, mean_square):
            raise StateError(f"the processes scaled their losses differently (by {scale:g} in process "
                             f"{self.group.rank}): give all the same scaler, and the same checkpoint to resume from")
        anywhere = [count > 0 for count in counts]
        return infinite == 0, {loss for loss in range(losses) if anywhere[loss]}, anywhere[losses:]
