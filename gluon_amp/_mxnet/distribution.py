"""The parts of ``gluon.Trainer`` that training on several processes needs: KVStore, reduction, fresh gradients."""
from __future__ import annotations

import sys
from functools import partial
from typing import Any, Callable, Sequence

from mxnet import gluon
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

from ..errors import StateError
from .trainers import has_gradient


def known_stores() -> list[str]:
    """Return the names of KVStores that Python code has registered."""
    return sorted(KVStoreBase.kv_registry)


def store_of(trainer: gluon.Trainer) -> str | KVStoreBase | None:
    """Return the KVStore that the trainer uses already, or else the one that it was told to use."""
    return trainer._kvstore if trainer._kv_initialized else trainer._kvstore_params["kvstore"]


def use_store(trainer: gluon.Trainer, store: KVStoreBase) -> None:
    """Make the trainer use a KVStore instead of the one that it has."""
    # MXNet refuses row-sparse gradients on other stores than its own; whoever calls this reduces them by other means.
    trainer._kvstore_params["kvstore"] = store
    trainer._contains_sparse_grad = False
    if trainer._kv_initialized:
        trainer._kvstore = store
        trainer._params_to_init = list(trainer._params)


def horovod_trainer(trainer: gluon.Trainer) -> Any:
    """Return the trainer when it is Horovod's, None otherwise."""
    module = sys.modules.get("horovod.mxnet")
    return trainer if module is not None and isinstance(trainer, module.DistributedTrainer) else None


def process_set(trainer: gluon.Trainer) -> Any:
    """Return the processes among which a trainer of Horovod reduces."""
    return trainer._process_set


def gradients(trainer: gluon.Trainer) -> list[list[NDArray]]:
    """Return for each parameter its gradient on each context; an empty list for parameters without gradient."""
    return [[_plain(gradient) for gradient in parameter.list_grad()] if has_gradient(parameter) else []
            for parameter in trainer._params]


def accumulates(trainer: gluon.Trainer) -> list[bool]:
    """Return for each parameter whether backward passes add to its gradient."""
    return [parameter.grad_req == "add" for parameter in trainer._params]


def own_reduction(trainer: gluon.Trainer) -> Callable[[], None]:
    """Return the trainer's own way to reduce its gradients, whatever :func:`replace_reduction` has put in its place."""
    replaced = vars(trainer).get("_allreduce_grads")  # by this package, or by a script
    own = getattr(getattr(replaced, "__self__", None), "own_reduction", replaced)
    return own or partial(type(trainer)._allreduce_grads, trainer)  # which is pickled as it is: a bound method is not


def is_of_mxnet(own: Callable[[], None]) -> bool:
    """Tell whether a way to reduce gradients is that of MXNet's own trainer."""
    return getattr(own, "func", None) is gluon.Trainer._allreduce_grads


def replace_reduction(trainer: gluon.Trainer, function: Callable[[], None]) -> None:
    """Make ``trainer.step`` and ``trainer.allreduce_grads`` call a function instead of the trainer's own reduction."""
    trainer._allreduce_grads = function


def reduce_gradients(trainer: gluon.Trainer, caller: str) -> None:
    """Have the trainer reduce its gradients; raise StateError where that is a part of an update on the KVStore."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._kvstore and trainer._update_on_kvstore:
        raise StateError(f"{caller}: expected a trainer that updates locally, received one that updates on the "
                         "KVStore, where gradients of several devices are added up behind this call. Create it with "
                         "gluon.Trainer(..., update_on_kvstore=False)")
    trainer.allreduce_grads()


class _StandIn:
    """What ``_allreduce_grads`` reads of a parameter, with other gradients."""

    def __init__(self, gradients: Sequence[NDArray]):
        self.grad_req = "write" if gradients else "null"
        self.list_grad = lambda: gradients
        self._stype = "default"


def reduce_arrays(trainer: gluon.Trainer, own: Callable[[], None], arrays: Sequence[Sequence[NDArray]]) -> None:
    """Have the trainer's own reduction reduce arrays instead of gradients."""
    parameters = trainer._params
    trainer._params = [_StandIn(gradients) for gradients in arrays]
    try:
        own()
    finally:
        trainer._params = parameters


def fresh(trainer: gluon.Trainer) -> list[list[bool]]:
    """Return for each parameter and context whether a backward pass has written its gradient since the last step."""
    return [[bool(data._fresh_grad) for data in _data(parameter)] for parameter in trainer._params]


def mark_fresh(trainer: gluon.Trainer, flags: Sequence[Sequence[bool]], value: bool = True) -> None:
    """Mark the flagged gradients, by parameter and context, as written since the last step, or as not."""
    for parameter, of_contexts in zip(trainer._params, flags):
        for data, flag in zip(_data(parameter), of_contexts):
            if flag:
                data._fresh_grad = value


def _data(parameter: gluon.Parameter) -> list[NDArray]:
    return parameter.list_data() if has_gradient(parameter) else []


def _plain(array: NDArray) -> NDArray:
    return array.as_nd_ndarray() if array.stype == "default" else array
