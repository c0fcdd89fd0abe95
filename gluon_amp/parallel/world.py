"""Which processes this one works with, and sums over them."""
from __future__ import annotations

import atexit
import importlib
import itertools
import os
import sys
from typing import Any, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.kvstore import KVStore, KVStoreBase
from mxnet.ndarray import NDArray

from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import dtype_name
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..errors import StateError, expected
from ..state.in_force import in_force
from .groups import Group, GroupStore, HorovodGroup, StoreGroup

_TYPES = (FLOAT32, FLOAT16, BFLOAT16)
_store_groups: dict[int, StoreGroup] = {}  # by the id of the store, which they keep alive
_native: list[StoreGroup] = []  # that of MXNet's own distributed store: a second one in a process hangs
_horovod_groups: dict[Any, Group] = {}
_stores = itertools.count()  # tells the trainers of a process apart


def world() -> Group:
    """Return the group of all processes that train together: Horovod's, or the KVStore's.

    A process that was started alone is a group of its own. The first call connects to the other processes, and so waits
    for all of them to call it. A script that is started by ``mpirun`` calls ``horovod.mxnet.init()`` before; where
    ``horovodrun`` started it, that is done here.
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

    It belongs to one trainer, and adds gradients up: pass the joint batch size to ``trainer.step``.
    """
    return GroupStore(world(), f"store{next(_stores)}")


def allreduce(array: NDArray, average: bool = False, name: str | None = None) -> NDArray:
    """Add an array up over all processes, in FP32; made for small vectors such as a layer's statistics.

    Every process must make the same calls in the same order, with arrays of the same shape. No gradient flows
    through: an ``autograd.Function`` or a ``CustomOp`` that calls this forward, and on its gradients backward, makes it
    differentiable. Give each of their calls a name, and on the KVStore make it known with :func:`prepare`: operators
    run in threads of their own, in an order that MXNet chooses.

    Parameters
    ----------
    array : NDArray
        Dense, float16, bfloat16 or float32, on any context; not changed.
    average : bool
        Divide the sum by the number of processes.
    name : str, optional
        Tells the sums that are under way apart, needed where several threads reduce at once. The KVStore keeps memory
        for every combination of name and shape.

    Returns
    -------
    NDArray
        float32, of the same shape and context, with the same bits in every process. A process that was started alone
        gets its own values.
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

    The KVStore needs that, by all processes in the same order, before operators that MXNet runs in threads of their own
    call :func:`allreduce`. Horovod does not.
    """
    world().prepare(f"allreduce.{name}", mx.nd.zeros(shape))


def store_group(store: KVStoreBase | str) -> StoreGroup:
    """Return the group of a KVStore; MXNet's own distributed store is created once per process."""
    if isinstance(store, str):
        if _native:
            return _native[0]
        role = os.environ.get("DMLC_ROLE")
        if role != "worker":
            raise StateError(f"the KVStore {store!r} connects processes that were started together, and this one was "
                             f"not (expected DMLC_ROLE='worker', received {role!r}). docs/distributed.md shows the "
                             "commands")
        store = mx.kv.create(store)
    if "async" in store.type:
        raise StateError(f"the KVStore {store.type!r} updates weights whenever a worker's gradients arrive: there is "
                         "no common step that all workers could skip. Use 'dist_sync'")
    group = _store_groups.setdefault(id(store), StoreGroup(store))
    if isinstance(store, KVStore) and group not in _native:
        _native.append(group)
    return group


def horovod_group(process_set: Any) -> Group:
    """Return the group of a process set of Horovod; a process outside of it is a group of its own."""
    if process_set not in _horovod_groups:
        outside = process_set.included() is False
        _horovod_groups[process_set] = Group() if outside else HorovodGroup(process_set)
    return _horovod_groups[process_set]


@atexit.register
def _release() -> None:
    """Free the stores before MXNet shuts down, which waits for the other workers and ends the servers."""
    for group in _store_groups.values():
        group.close()
