"""Sums over processes, through one interface for every engine, and as a KVStore for ``gluon.Trainer``.

The calls are collective: every worker of a group makes the same calls in the same order, with arrays of the same shapes
and types, or all of them wait for ever.
"""
from __future__ import annotations

import hashlib
import threading
from typing import Any, Collection, Sequence, Tuple

from mxnet import nd
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from ..errors import StateError

_FIRST_KEY = 1 << 20  # leaves the small numbers, which MXNet's own trainers use, alone
_LAST_KEY = (1 << 31) - 1
_BLOCK = 1 << 16  # elements in one part of an array whose length varies

_Identity = Tuple[str, Tuple[int, ...], Any]  # what stays the same about a sum: name, shape, type


class Group:
    """The processes that reduce together; this process is the number ``rank`` of ``size``."""

    engine = "none"  # or 'kvstore' or 'horovod'; 'none' is a process of its own
    rank = 0
    size = 1

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """Replace each array by the sum of all arrays of all workers; returns before that is done.

        There is one array for each context, dense, of a type that the engine can add: float32, float64 or float16. The
        name tells the sums that are under way apart; greater priorities go first.
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


class StoreGroup(Group):
    """Workers of a KVStore that sums: MXNet's ``dist_sync`` and ``dist_device_sync``, or a registered one."""

    # A key of MXNet's store keeps its shape and type, so every combination of name, shape and type has a key of its
    # own. The store hands first values out behind a barrier that does not look at keys: all workers must make the same
    # keys in the same order, from one thread at a time.

    engine = "kvstore"

    def __init__(self, store: KVStoreBase):
        self._store: KVStoreBase | None = store
        self._keys: dict[_Identity, int] = {}
        self._lock = threading.RLock()  # of the store and the keys
        self.rank, self.size = store.rank, store.num_workers

    @property
    def store(self) -> KVStoreBase:
        """Return the KVStore."""
        if self._store is None:
            raise StateError("the KVStore was released at the end of the process: add arrays up before that")
        return self._store

    def close(self) -> None:
        """Release the store, which then waits for the other workers and tells the servers to end."""
        self._store = None

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """See :meth:`Group.sum`."""
        with self._lock:
            self.prepare(name, arrays[0])
            self.store.pushpull(self._keys[_identity(name, arrays[0])], list(arrays), priority=priority)

    def prepare(self, name: str, array: NDArray) -> None:
        """See :meth:`Group.prepare`."""
        with self._lock:
            if _identity(name, array) not in self._keys:
                self._create(name, nd.zeros(array.shape, array.context, dtype=array.dtype))

    def sum_varying(self, name: str, array: NDArray) -> NDArray:
        """See :meth:`Group.sum_varying`."""
        blocks = _blocks(array)
        for number, block in enumerate(blocks):
            self.sum(f"{name}.{number}", [block], -number)
        return nd.concat(*blocks, dim=0)[:array.size].reshape(array.shape)

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        """See :meth:`Group.broadcast`."""
        # Waits: MXNet orders neither the pull of a first value and the first push under its key, nor the workers among
        # each other, so that a sum might arrive in the place of the value. It also waits for operators that may be
        # making keys of their own in other threads.
        nd.waitall()
        result = value.copy()
        with self._lock:
            self._create(name, result)
        _spread(result, out)

    def _create(self, name: str, value: NDArray) -> None:
        """Make a key, and write worker 0's value."""
        identity = _identity(name, value)
        self._keys[identity] = key = _key(identity, self._keys.values())
        self.store.broadcast(key, value, out=[value])
        value.wait_to_read()


def _identity(name: str, array: NDArray) -> _Identity:
    return name, array.shape, array.dtype


def _key(identity: _Identity, taken: Collection[int]) -> int:
    """Return a number that is the same in every process, independent of earlier ones."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big")
    while True:
        key = _FIRST_KEY + key % (_LAST_KEY - _FIRST_KEY)
        if key not in taken:
            return key
        key += 1


def _blocks(array: NDArray) -> list[NDArray]:
    """Copy an array into parts of the same length, the last one padded with zeros."""
    flat = array.reshape((-1,))
    padding = -flat.size % _BLOCK
    if padding:
        flat = nd.concat(flat, nd.zeros(padding, flat.context, dtype=flat.dtype), dim=0)
    return [flat[start:start + _BLOCK].copy() for start in range(0, flat.size, _BLOCK)]


class HorovodGroup(Group):
    """Workers of Horovod, all or those of a process set."""

    engine = "horovod"

    def __init__(self, process_set: Any = None):
        import horovod.mxnet as hvd
        self._hvd = hvd
        self._set = hvd.global_process_set if process_set is None else process_set
        self.rank, self.size = self._set.rank(), self._set.size()
        self._root = self._set.ranks[0] if self._set.ranks else 0

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """See :meth:`Group.sum`."""
        total = total_of(arrays)
        self._hvd.allreduce_(total, op=self._hvd.Sum, name=f"gluon_amp.{name}", priority=priority,
                             process_set=self._set)
        _spread(total, arrays)

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        """See :meth:`Group.broadcast`."""
        result = value.copy()
        self._hvd.broadcast_(result, root_rank=self._root, name=f"gluon_amp.{name}", process_set=self._set)
        result.wait_to_read()
        _spread(result, out)


class GroupStore(KVStoreBase):
    """Adds gradients up over a group of processes, for ``gluon.Trainer(..., kvstore=store)``; never updates weights.

    Gradients are added up, not averaged: pass the joint batch size to ``trainer.step``. The prefix tells the keys of
    several trainers apart.
    """

    def __init__(self, group: Group, prefix: str):
        self.group = group
        self._prefix = prefix

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

    @property
    def type(self) -> str:
        """Return the name of the engine."""
        return f"gluon_amp_{self.group.engine}"

    @property
    def rank(self) -> int:
        """Return the number of this process."""
        return self.group.rank

    @property
    def num_workers(self) -> int:
        """Return the number of processes."""
        return self.group.size


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

