"""Sums over processes, through one interface for every engine.

The calls are collective: every worker of a group makes the same calls in the same order, with arrays of the same shapes
and types, or all of them wait for ever.
"""
from __future__ import annotations

import itertools
from typing import Any, Sequence

from mxnet import nd
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from ..errors import StateError

__all__ = ["Group", "HorovodGroup", "LocalGroup", "StoreGroup"]

_FIRST_KEY = 1 << 20  # leaves the small numbers, which MXNet's own trainers use, alone
_BLOCK = 1 << 16  # elements in one part of an array whose length varies
_keys = itertools.count(_FIRST_KEY)  # for all stores, because they share their servers


class Group:
    """The processes that reduce together; this process is the number ``rank`` of ``size``.

    Attributes
    ----------
    engine : str
        ``'kvstore'``, ``'horovod'``, or ``'none'`` for a process of its own.
    rank, size : int
        From 0 on, and how many there are.
    """

    engine = "none"
    rank = 0
    size = 1

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """Replace each array by the sum of all arrays of all workers; returns before that is done.

        Parameters
        ----------
        name : str
            Tells the sums that are under way apart; for a name shape and type stay the same.
        arrays : sequence of NDArray
            One per context, dense, of a type that the engine can add (float32, float64 or float16).
        priority : int
            Greater ones go first.
        """
        if len(arrays) > 1:
            _spread(_total(arrays), arrays)

    def sum_varying(self, name: str, array: NDArray) -> NDArray:
        """Return the sum of arrays whose shape, the same on all workers, may be another one in the next call."""
        total = array.copy()
        self.sum(name, [total])
        return total

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        """Write worker 0's value into ``out`` on every worker, and wait until it is there."""
        _spread(value, out)


class LocalGroup(Group):
    """A process of its own: sums are over its contexts."""


class StoreGroup(Group):
    """Workers of a KVStore that sums: MXNet's ``dist_sync`` and ``dist_device_sync``, or a registered one.

    A key of MXNet's store keeps its shape and type, so every combination of name, shape and type has a key of its own.
    """

    engine = "kvstore"

    def __init__(self, store: KVStoreBase):
        self._store: KVStoreBase | None = store
        self._keys: dict[tuple[str, tuple[int, ...], Any], int] = {}
        self.rank, self.size = store.rank, store.num_workers

    @property
    def store(self) -> KVStoreBase:
        """The KVStore."""
        if self._store is None:
            raise StateError("the KVStore was released at the end of the process")
        return self._store

    def close(self) -> None:
        """Let go of the store, which then waits for the other workers and tells the servers to end."""
        self._store = None

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """See :meth:`Group.sum`."""
        first = arrays[0]
        identity = name, first.shape, first.dtype
        if identity not in self._keys:
            self._create(identity, nd.zeros(first.shape, first.context, dtype=first.dtype))
        self.store.pushpull(self._keys[identity], list(arrays), priority=priority)

    def sum_varying(self, name: str, array: NDArray) -> NDArray:
        """See :meth:`Group.sum_varying`."""
        flat = array.reshape((-1,))
        padded = nd.concat(flat, nd.zeros(-flat.size % _BLOCK, flat.context, dtype=flat.dtype), dim=0) \
            if flat.size % _BLOCK else flat
        blocks = [padded[start:start + _BLOCK].copy() for start in range(0, padded.size, _BLOCK)]
        for number, block in enumerate(blocks):
            self.sum(f"{name}.{number}", [block], -number)
        return nd.concat(*blocks, dim=0)[:flat.size].reshape(array.shape)

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        """See :meth:`Group.broadcast`.

        Waits: MXNet orders neither the pull of the first value and the first push under its key, nor the workers among
        each other, so that a sum might arrive in the place of the value.
        """
        result = self._create((name, value.shape, value.dtype), value.copy())
        _spread(result, out)

    def _create(self, identity: tuple[str, tuple[int, ...], Any], value: NDArray) -> NDArray:
        """Make a key; return the value of worker 0."""
        self._keys[identity] = next(_keys)
        self.store.broadcast(self._keys[identity], value, out=[value])
        value.wait_to_read()
        return value


class HorovodGroup(Group):
    """Workers of Horovod, all or those of a process set.

    Parameters
    ----------
    process_set : horovod.mxnet.ProcessSet, optional
        All processes when left out.
    """

    engine = "horovod"

    def __init__(self, process_set: Any = None):
        import horovod.mxnet as hvd
        self._hvd = hvd
        self._set = hvd.global_process_set if process_set is None else process_set
        self.rank, self.size = self._set.rank(), self._set.size()
        self._root = self._set.ranks[0] if self._set.ranks else 0

    def sum(self, name: str, arrays: Sequence[NDArray], priority: int = 0) -> None:
        """See :meth:`Group.sum`."""
        total = _total(arrays)
        self._hvd.allreduce_(total, op=self._hvd.Sum, name=_qualified(name), priority=priority, process_set=self._set)
        _spread(total, arrays)

    def broadcast(self, name: str, value: NDArray, out: Sequence[NDArray]) -> None:
        """See :meth:`Group.broadcast`."""
        result = value.copy()
        self._hvd.broadcast_(result, root_rank=self._root, name=_qualified(name), process_set=self._set)
        result.wait_to_read()
        _spread(result, out)


def _qualified(name: str) -> str:
    return f"gluon_amp.{name}"


def _total(arrays: Sequence[NDArray]) -> NDArray:
    """Add arrays of several contexts on the first one's; that array itself when it is alone."""
    first = arrays[0]
    return first if len(arrays) == 1 else nd.add_n(*(array.as_in_context(first.context) for array in arrays))


def _spread(value: NDArray, out: Sequence[NDArray]) -> None:
    for array in out:
        if array is not value:
            value.copyto(array)

