"""A KVStore for ``gluon.Trainer`` that sums over a group, whatever its engine."""
from __future__ import annotations

import itertools
from typing import Any, Sequence

from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from .groups import Group
from .world import world

_stores = itertools.count()


class GroupStore(KVStoreBase):
    """Sums gradients over a group of processes, for ``gluon.Trainer(..., kvstore=store)``.

    It never updates weights itself. Gradients are added up, not averaged: pass the joint batch size to
    ``trainer.step``.

    Parameters
    ----------
    group : Group
        The processes.
    prefix : str
        Tells the keys of several trainers apart.
    """

    def __init__(self, group: Group, prefix: str):
        self.group = group
        self._prefix = prefix

    def broadcast(self, key: int | str, value: NDArray, out: NDArray | Sequence[NDArray], priority: int = 0) -> None:
        """Write the value that process 0 has into ``out`` everywhere."""
        self.group.broadcast(self._name(key), value, _listed(out))

    def pushpull(self, key: int | str, value: NDArray | Sequence[NDArray], out: Any = None, priority: int = 0) -> None:
        """Replace each array by the sum of all of them over all processes."""
        values = _listed(value)
        self.group.sum(self._name(key), values, priority)
        for array in _listed(out) if out is not None else ():
            values[0].copyto(array)

    def _name(self, key: int | str) -> str:
        return f"{self._prefix}.{key}"

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Tell whether the store can do what is asked; it has no optimizer."""
        return False

    @property
    def type(self) -> str:
        """The name of the engine."""
        return f"gluon_amp_{self.group.engine}"

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.group.rank

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        return self.group.size


def _listed(value: NDArray | Sequence[NDArray]) -> list[NDArray]:
    return [value] if isinstance(value, NDArray) else list(value)


def kvstore() -> GroupStore:
    """Return a store over all processes for ``gluon.Trainer``, which then is the same with either engine.

    Returns
    -------
    GroupStore
        Of its own for each trainer. It adds gradients up: pass the joint batch size to ``trainer.step``.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.Dense(1, in_units=2)
    >>> net.initialize()
    >>> trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore=amp.parallel.kvstore())
    """
    return GroupStore(world(), f"store{next(_stores)}")
