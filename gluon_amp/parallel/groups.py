"""Sums over processes, by one interface for every engine: all workers of a group must make the same calls in order."""
from __future__ import annotations

import atexit
import hashlib
import importlib
import itertools
import os
import sys
import threading
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd, nd
from mxnet.kvstore import KVStore, KVStoreBase
from mxnet.ndarray import NDArray

from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import dtype_name
from ..errors import StateError, expected
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..state.in_force import in_force

_FIRST_KEY = 1 << 20  # leaves the small numbers, which MXNet's own trainers use, alone
_LAST_KEY = (1 << 31) - 1
_BLOCK = 1 << 16  # elements in one part of an array whose length varies


class Group:
    """The processes that reduce together; this process is the number ``rank`` of ``size``."""

    engine = "none"  # or 'kvstore' or 'horovod'; 'none' is a process of its own
    rank = 0
    size = 1

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """Replace each array, one for each context, by the sum over contexts and workers; returns before that is done.

        Arrays are dense, in float32, float64 or float16. The name tells sums under way apart; high priorities go first.
        """
        if len(arrays) > 1:
            _spread(total_of(arrays), arrays)

    def prepare(self, name: str, array: NDArray) -> None:
        """Prepare sums of arrays of this shape and type under this name."""

    def sum_varying(self, name: str, array: NDArray) -> NDArray:
        """Return the sum of arrays whose shape is the same on all workers and often changes from call to call."""
        total = array.copy()
        self.sum(name, [total])
        return total

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        """Write worker 0's value into ``out`` on every worker, and wait until it is there."""
        _spread(value, out)


class _StoreGroup(Group):
    """Workers of a KVStore that sums: MXNet's ``dist_sync`` and ``dist_device_sync``, or a registered one."""

    # A key of MXNet's store keeps its shape and type: each name, shape and type has its own. First values go out behind
    # a barrier that does not look at keys: all workers must make the same keys in one order, from one thread at a time.

    engine = "kvstore"

    def __init__(self, store: KVStoreBase):
        self.store: Any = store  # None at the end of the process
        self._keys: dict[Any, int] = {}  # by name, shape and type
        self._lock = threading.RLock()  # of the store and the keys
        self.rank, self.size = store.rank, store.num_workers

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        with self._lock:
            self.prepare(name, arrays[0])
            key = self._keys[name, arrays[0].shape, arrays[0].dtype]
            self.store.pushpull(key, list(arrays), priority=priority)

    def prepare(self, name: str, array: NDArray) -> None:
        with self._lock:
            if (name, array.shape, array.dtype) not in self._keys:
                self._create(name, nd.zeros(array.shape, array.context, dtype=array.dtype))

    def sum_varying(self, name: str, array: NDArray) -> NDArray:
        # In parts of one length, the last one padded with zeros.
        flat = nd.concat(array.reshape((-1,)), nd.zeros(_BLOCK, array.context, dtype=array.dtype), dim=0)
        blocks = [flat[start:start + _BLOCK].copy() for start in range(0, array.size, _BLOCK)]
        for number, block in enumerate(blocks):
            self.sum(f"{name}.{number}", [block], -number)
        return nd.concat(*blocks, dim=0)[:array.size].reshape(array.shape)

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        # MXNet orders neither the pull of a first value and the first push under its key, nor the workers: a sum might
        # arrive in the place of the value. Operators may be making keys of their own in other threads, too.
        nd.waitall()
        result = value.copy()
        with self._lock:
            self._create(name, result)
        _spread(result, out)

    def _create(self, name: str, value: NDArray) -> None:
        """Make a key, a number that is the same in every process, and write worker 0's value."""
        identity = name, value.shape, value.dtype
        number = int.from_bytes(hashlib.blake2b(repr(identity).encode(), digest_size=8).digest(), "big")
        while (key := _FIRST_KEY + number % (_LAST_KEY - _FIRST_KEY)) in self._keys.values():
            number += 1
        self._keys[identity] = key
        self.store.broadcast(key, value, out=[value])
        value.wait_to_read()


class _HorovodGroup(Group):
    """Workers of Horovod, all or those of a process set."""

    engine = "horovod"

    def __init__(self, process_set: Any):
        import horovod.mxnet as hvd
        self._hvd, self._set = hvd, process_set
        self.rank, self.size = process_set.rank(), process_set.size()
        self._root = process_set.ranks[0] if process_set.ranks else 0

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        total = total_of(arrays)
        self._hvd.allreduce_(total, op=self._hvd.Sum, name=f"gluon_amp.{name}", priority=priority,
                             process_set=self._set)
        _spread(total, arrays)

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        result = value.copy()
        self._hvd.broadcast_(result, root_rank=self._root, name=f"gluon_amp.{name}", process_set=self._set)
        result.wait_to_read()
        _spread(result, out)


class GroupStore(KVStoreBase):
    """Adds gradients up over a group as :func:`kvstore` says; the prefix tells the keys of several trainers apart."""

    type, rank, num_workers = "", 0, 1  # in the place of properties of MXNet's base class

    def __init__(self, group: Group, prefix: str):
        self.group, self._prefix = group, prefix
        self.type, self.rank, self.num_workers = f"gluon_amp_{group.engine}", group.rank, group.size

    def broadcast(self, key: int | str, value: NDArray, out: NDArray | Sequence[NDArray], priority: int = 0) -> None:
        """Write the value that process 0 has into ``out`` everywhere."""
        self.group.broadcast(f"{self._prefix}.{key}", value, _listed(out))

    def pushpull(self, key: int | str, value: NDArray | Sequence[NDArray], out: Any = None, priority: int = 0) -> None:
        """Replace each array by the sum of all of them over all processes."""
        values = _listed(value)
        self.group.sum(f"{self._prefix}.{key}", values, priority)
        for array in _listed(out) if out is not None else ():
            values[0].copyto(array)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Tell whether the store can do what is asked; it has no optimizer."""
        return False


def _listed(value: NDArray | Sequence[NDArray]) -> list[NDArray]:
    return [value] if isinstance(value, NDArray) else list(value)


def total_of(arrays: Sequence[NDArray]) -> NDArray:
    """Add arrays of several contexts on the first one's; that array itself when it is alone."""
    first = arrays[0]
    return first if len(arrays) == 1 else nd.add_n(*(array.as_in_context(first.context) for array in arrays))


def _spread(value: NDArray, out: Sequence[NDArray]) -> None:
    for array in out:
        if array is not value:
            value.copyto(array)


_TYPES = (FLOAT32, FLOAT16, BFLOAT16)
_store_groups: dict[int, _StoreGroup] = {}  # by the id of the store, which they keep alive
_horovod_groups: dict[Any, Group] = {}
_stores = itertools.count()  # tells the trainers of a process apart


def world() -> Group:
    """Return the group of all processes that train together: Horovod's, the KVStore's, or this process alone.

    The first call waits for all of them to call it. A script that is started by ``mpirun`` calls
    ``horovod.mxnet.init()`` before; where ``horovodrun`` started it, that is done here.
    """
    hvd = sys.modules.get("horovod.mxnet")
    if "HOROVOD_SIZE" in os.environ and not (hvd and hvd.is_initialized()):
        hvd = importlib.import_module("horovod.mxnet")
        hvd.init()
    if hvd is not None and hvd.is_initialized():
        return horovod_group(hvd.global_process_set)
    if os.environ.get("DMLC_ROLE") == "worker":
        return store_group("dist_sync")
    return Group()


def engine() -> str:
    """Return ``'kvstore'``, ``'horovod'``, or ``'none'`` for a process that was started alone."""
    return world().engine


def rank() -> int:
    """Return the number of this process, from 0 on."""
    return world().rank


def size() -> int:
    """Return the number of processes."""
    return world().size


def kvstore() -> GroupStore:
    """Return a store over all processes for ``gluon.Trainer(..., kvstore=store)``, the same with either engine.

    It belongs to one trainer, and adds gradients up, no more: pass the joint batch size to ``trainer.step``.
    """
    return GroupStore(world(), f"store{next(_stores)}")


def allreduce(array: NDArray, average: bool = False, name: str | None = None) -> NDArray:
    """Add an array up over all processes, in FP32; made for small vectors such as a layer's statistics.

    Every process must make the same calls in the same order, with arrays of the same shape. No gradient flows through,
    but a ``CustomOp`` may call this forward, and on its gradients backward: under names that :func:`prepare` knows, as
    MXNet runs it in threads of its own.

    Parameters
    ----------
    array : NDArray
        Dense, float16, bfloat16 or float32, on any context; not changed.
    average : bool
        Divide the sum by the number of processes.
    name : str, optional
        Tells sums apart where several threads reduce at once. The KVStore keeps memory for each name and shape.

    Returns
    -------
    NDArray
        float32, of the same shape and context, with the same bits in every process.
    """
    if not isinstance(array, NDArray) or array.stype != "default" or dtype_name(array.dtype) not in _TYPES:
        raise TypeError(expected(f"a dense NDArray of {', '.join(_TYPES)}", "array", array))
    group = world()
    with in_force.off(), autograd.pause():
        plain = array.as_nd_ndarray()
        total = plain.copy() if dtype_name(array.dtype) == FLOAT32 else cast_arrays(plain, FLOAT32)
        group.sum(f"allreduce.{name or ''}", [total])
        total = total / group.size if average else total
    total.wait_to_read()
    return total


def prepare(name: str, shape: Sequence[int]) -> None:
    """Announce that arrays of a shape will be added up under a name, as :func:`allreduce` takes it.

    The KVStore needs that, by all processes in the same order, before operators in threads of their own call it.
    """
    world().prepare(f"allreduce.{name}", mx.nd.zeros(shape))


def store_group(store: KVStoreBase | str) -> Group:
    """Return the group of a KVStore; MXNet's own distributed store is created once per process."""
    if isinstance(store, str):
        # A second distributed store of MXNet's in a process hangs.
        native = next((group for group in _store_groups.values() if isinstance(group.store, KVStore)), None)
        if native is not None:
            return native
        role = os.environ.get("DMLC_ROLE")
        if role != "worker":
            raise StateError(f"the KVStore {store!r} connects processes that were started together, and this one was "
                             f"not (expected DMLC_ROLE='worker', received {role!r}). docs/distributed.md shows the "
                             "commands")
        store = mx.kv.create(store)
    if "async" in store.type:
        raise StateError(f"the KVStore {store.type!r} updates weights whenever a worker's gradients arrive: there is "
                         "no common step that all workers could skip. Use 'dist_sync'")
    return _store_groups.setdefault(id(store), _StoreGroup(store))


def horovod_group(process_set: Any) -> Group:
    """Return the group of a process set of Horovod; a process outside of it is a group of its own."""
    if process_set not in _horovod_groups:
        outside = process_set.included() is False
        _horovod_groups[process_set] = Group() if outside else _HorovodGroup(process_set)
    return _horovod_groups[process_set]


@atexit.register
def _release() -> None:
    """Free the stores before MXNet shuts down, which waits for the other workers and ends the servers."""
    for group in _store_groups.values():
        group.store = None
