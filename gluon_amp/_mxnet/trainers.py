"""``gluon.Trainer``: its gradients, how they are reduced, its optimizer's states; and batches of Estimator.

``Trainer._update`` asks ``trainer._amp_loss_scaler.has_overflow(params)`` after the gradients are reduced and
skips the update when the answer is true. That attribute is MXNet's own way in for loss scaling.
"""
from __future__ import annotations

import operator
import sys
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, Callable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from mxnet import Context, autograd, cpu, gluon, nd
from mxnet.gluon.contrib.estimator import Estimator
from mxnet.gluon.contrib.estimator.batch_processor import BatchProcessor
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray
from mxnet.optimizer import Optimizer

from ..errors import StateError, expected
from .arrays import Check, are_finite, begin_check, grouped, norm

_LOCAL = "Create it with gluon.Trainer(..., update_on_kvstore=False)"
# A trainer's dense gradients, and the groups that are checked together: asking MXNet for types and shapes takes longer
# than the check of a small network.
_grouped: WeakKeyDictionary[gluon.Trainer, tuple[Sequence[NDArray], Sequence[list[NDArray]]]] = WeakKeyDictionary()


def set_scaler(trainer: gluon.Trainer, scaler: Any, reduce: Callable[[], None] | None) -> None:
    """Make a trainer ask a scaler before each update, and call a function in place of its own reduction, if given."""
    trainer._amp_loss_scaler = scaler
    trainer._amp_original_scale = trainer._scale  # read by scripts written for MXNet's own amp
    if reduce is not None:
        trainer._allreduce_grads = reduce


def attached(trainer: gluon.Trainer) -> Any:
    """Return what :func:`set_scaler` left on the trainer, None without."""
    return getattr(trainer, "_amp_loss_scaler", None)


def trainer_trains(parameter: gluon.Parameter) -> bool | None:
    """Tell whether the trainer that a parameter was given to has any that gets a gradient; None without a trainer."""
    trainer = parameter._trainer
    return None if trainer is None else any(each.grad_req != "null" for each in trainer._params)


def contexts(trainer: gluon.Trainer) -> list[Context]:
    """Return the devices that the trainer's parameters are on: a CPU where it has none."""
    return list(trainer._contexts or [cpu()])


def update_locally(trainer: gluon.Trainer) -> None:
    """Make the trainer update parameters itself rather than on the KVStore, where no step can be skipped."""
    if trainer._kvstore_params["update_on_kvstore"]:
        raise StateError("the trainer was created with update_on_kvstore=True: updates on the KVStore cannot be "
                         f"skipped when a gradient overflows. {_LOCAL}")
    if trainer._contains_sparse_weight:
        raise StateError("the trainer has parameters with sparse weights, which MXNet updates on the KVStore only: "
                         "loss scaling cannot skip such updates. Use dense weights (sparse gradients are fine)")
    if trainer._compression_params:
        raise StateError("the trainer compresses gradients: that turns an infinite gradient into a finite one, which "
                         "no loss scaler can see. Create it without compression_params")
    begun = trainer._kvstore and trainer._update_on_kvstore
    if begun and trainer._distributed:
        raise StateError("the trainer has begun to update on a distributed KVStore, which cannot be changed any more. "
                         "Call amp.init_trainer(trainer) before its first step")
    # What an earlier step or load_states left there stays in force.
    states = trainer._kvstore._updater.get_states(dump_optimizer=False) if begun else None
    trainer._kvstore_params["update_on_kvstore"] = False
    if begun:
        trainer._reset_kvstore()
        for updater in trainer._updaters:
            updater.set_states(states)


def check_gradients(trainer: gluon.Trainer, check: Check | None = None) -> Callable[[], bool]:
    """Begin to check whether every gradient on every context is finite; return what waits, and gives one answer."""
    gradients = [gradient for parameter in trainer._params if has_gradient(parameter) for gradient in parameter._grad]
    known, groups = _grouped.get(trainer, ((), ()))
    if len(known) != len(gradients) or not all(map(operator.is_, known, gradients)):
        groups = tuple(grouped(gradient for _, gradient in named_gradients(trainer)))
        if all(gradient.stype == "default" for gradient in gradients):
            _grouped[trainer] = gradients, groups
    return begin_check(groups, check)


def gradient_norm(trainer: gluon.Trainer) -> float:
    """Return the 2-norm of all gradients of the first context, as they are."""
    first = contexts(trainer)[0]
    return norm(gradient for _, gradient in named_gradients(trainer) if gradient.context == first)


def non_finite_parameters(trainer: gluon.Trainer) -> list[str]:
    """Name the parameters with an infinite or NaN gradient on some context."""
    return list(dict.fromkeys(name for name, values in named_gradients(trainer) if not are_finite([values])))


def named_gradients(trainer: gluon.Trainer) -> Iterator[tuple[str, NDArray]]:
    """Yield every non-empty gradient on every context to read, with its parameter's name; of row-sparse ones a copy."""
    for parameter, of_contexts in zip(trainer._params, gradients(trainer)):
        for gradient in of_contexts:
            values = gradient if gradient.stype == "default" else gradient.data
            if values.size:
                yield parameter.name, values


def fresh_parameters(trainer: gluon.Trainer) -> list[str]:
    """Name the parameters whose gradients a backward pass has written since the last update."""
    return [parameter.name for parameter, flags in zip(trainer._params, fresh(trainer)) if any(flags)]


def has_gradient(parameter: gluon.Parameter) -> bool:
    """Tell whether a parameter has a gradient."""
    return parameter.grad_req != "null" and parameter._grad is not None


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


def horovod_processes(trainer: gluon.Trainer) -> Any:
    """Return the processes among which a trainer of Horovod reduces; None of another trainer."""
    module = sys.modules.get("horovod.mxnet")
    is_horovod = module is not None and isinstance(trainer, module.DistributedTrainer)
    return trainer._process_set if is_horovod else None


def gradients(trainer: gluon.Trainer) -> list[list[NDArray]]:
    """Return for each parameter its gradient on each context; an empty list for parameters without gradient."""
    # Multi-tensor operators refuse NumPy-style arrays.
    return [[gradient.as_nd_ndarray() if gradient.stype == "default" else gradient
             for gradient in parameter.list_grad()] if has_gradient(parameter) else [] for parameter in trainer._params]


def accumulates(trainer: gluon.Trainer) -> list[bool]:
    """Return for each parameter whether backward passes add to its gradient."""
    return [parameter.grad_req == "add" for parameter in trainer._params]


def own_reduction(trainer: gluon.Trainer) -> Callable[[], None]:
    """Return the trainer's own way to reduce its gradients, whatever :func:`set_scaler` has put in its place."""
    replaced = vars(trainer).get("_allreduce_grads")  # by this package, or by a script
    own = getattr(getattr(replaced, "__self__", None), "own_reduction", replaced)
    return own or partial(type(trainer)._allreduce_grads, trainer)  # which is pickled as it is: a bound method is not


def is_of_mxnet(own: Callable[[], None]) -> bool:
    """Tell whether a way to reduce gradients is that of MXNet's own trainer."""
    return getattr(own, "func", None) is gluon.Trainer._allreduce_grads


def reduce_gradients(trainer: gluon.Trainer, caller: str) -> None:
    """Have the trainer reduce its gradients; raise StateError where that is a part of an update on the KVStore."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._kvstore and trainer._update_on_kvstore:
        raise StateError(f"{caller}: expected a trainer that updates locally, received one that updates on the "
                         f"KVStore, where gradients of several devices are added up behind this call. {_LOCAL}")
    trainer.allreduce_grads()


def reduce_arrays(trainer: gluon.Trainer, own: Callable[[], None], arrays: Sequence[Sequence[NDArray]]) -> None:
    """Have the trainer's own reduction reduce arrays instead of gradients."""
    parameters = trainer._params
    trainer._params = [SimpleNamespace(grad_req="write" if gradients else "null", list_grad=partial(list, gradients),
                                       _stype="default") for gradients in arrays]  # as far as it reads parameters
    try:
        own()
    finally:
        trainer._params = parameters


def fresh(trainer: gluon.Trainer) -> list[list[bool]]:
    """Return for each parameter and context whether a backward pass has written its gradient since the last step."""
    return [[bool(data._fresh_grad) for data in parameter.list_data()] if has_gradient(parameter) else []
            for parameter in trainer._params]


def mark_fresh(trainer: gluon.Trainer, flags: Sequence[Sequence[bool]], value: bool = True) -> None:
    """Mark the flagged gradients, by parameter and context, as written since the last step, or as not."""
    for parameter, of_contexts in zip(trainer._params, flags):
        for data, flag in zip(parameter.list_data() if of_contexts else (), of_contexts):
            if flag:
                data._fresh_grad = value


def scale_gradients(trainer: gluon.Trainer, factor: float) -> None:
    """Multiply every gradient in place."""
    with autograd.pause():
        for gradient in chain(*gradients(trainer)):
            gradient *= factor  # row-sparse ones too, whose rows can be read as a copy only


def discard_gradients(trainer: gluon.Trainer) -> None:
    """Zero gradients and mark them as used, so that an inf does not outlive its step."""
    # Otherwise it stays where gradients accumulate, and where the next step does not use the layer.
    for gradient in chain(*gradients(trainer)):
        zero(gradient)
    mark_fresh(trainer, fresh(trainer), value=False)


def zero(gradient: NDArray) -> None:
    """Set a gradient of any kind to zero."""
    values = gradient.as_nd_ndarray()
    nd.zeros_like(values, out=values)


def is_scaled_by_hand(trainer: gluon.Trainer, scale: float) -> bool:
    """Tell whether a script divides the scale out itself, through the attributes of MXNet's own AMP."""
    return bool(np.isclose(trainer._scale, trainer._amp_original_scale / scale, rtol=1e-6, atol=0))


def master_arrays(trainer: gluon.Trainer) -> Iterator[NDArray]:
    """Yield the FP32 values that the optimizer of the first context updates, in the order of the parameters."""
    states = trainer._updaters[0].states if trainer._updaters else {}
    # The base class keeps (master, state); optimizers that override the method keep (state, master).
    last = type(trainer._optimizer).create_state_multi_precision is not Optimizer.create_state_multi_precision
    for index, parameter in enumerate(trainer._params):
        if parameter.grad_req == "null":
            continue
        low = np.dtype(parameter.dtype) == np.float16
        state = states.get(index) if low and trainer._optimizer.multi_precision else None
        yield parameter.list_data()[0] if state is None else state[-1 if last else 0]


def ids_of_arrays(trainer: gluon.Trainer) -> frozenset[int]:
    """Return the ids of the parameters' arrays on all devices."""
    return frozenset(id(array) for parameter in trainer._params for array in parameter._data or ())


def optimizer_states(trainer: gluon.Trainer) -> tuple[dict[int, Any], Optimizer]:
    """Return the content of ``Trainer.save_states``: the optimizer's state for every parameter, and the optimizer."""
    updater = _ready_updaters(trainer)[0]
    return updater.states, updater.optimizer


def load_optimizer_states(trainer: gluon.Trainer, read: Callable[[], Any]) -> Callable[[], None]:
    """Read what :func:`optimizer_states` returned, once per context; return a function that gives it to the trainer."""
    updaters = _ready_updaters(trainer)
    contents = [_states_and_optimizer(read(), trainer) for _ in updaters]

    def hand_over() -> None:
        optimizer = contents[0][1] or updaters[0].optimizer
        for updater, (states, _) in zip(updaters, contents):
            updater.states, updater.optimizer = states, optimizer
            updater.states_synced = dict.fromkeys(states, False)
        trainer._optimizer = optimizer
        _count_alike(optimizer, contexts(trainer))
        optimizer.param_dict = dict(enumerate(trainer._params))
    return hand_over


def _count_alike(optimizer: Optimizer, devices: Iterable[Context]) -> None:
    """Let an optimizer count on as before on devices that it was not saved with."""
    # MXNet begins at 0 there, and the copies of a weight drift apart: Adam's steps depend on the count.
    counts = optimizer._all_index_update_counts
    most: dict[Any, int] = {}
    for of_device in counts.values():
        most.update((index, max(count, most.get(index, 0))) for index, count in of_device.items())
    for device in devices:
        counts[device.device_id] = {**most, **counts.get(device.device_id, {})}
    optimizer._index_update_count = counts[next(iter(counts))]


def _ready_updaters(trainer: gluon.Trainer) -> list[Any]:
    """Return the objects that update weights, made if there are none yet."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._params_to_init:
        trainer._init_params()
    if not trainer._update_on_kvstore:
        return list(trainer._updaters)
    if trainer._kvstore._updater is None:
        raise StateError("the trainer updates on the servers of a distributed KVStore, which keep the optimizer's "
                         f"states to themselves. {_LOCAL}")
    return [trainer._kvstore._updater]


def _states_and_optimizer(value: Any, trainer: gluon.Trainer) -> tuple[dict[int, Any], Optimizer | None]:
    states, optimizer = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(states, dict) or not isinstance(optimizer, (Optimizer, type(None))):
        raise ValueError(expected("a dict of states and an optimizer", "content", value))
    strangers = [index for index in states if index not in range(len(trainer._params))]
    if strangers:
        raise ValueError(f"it holds states of a parameter {strangers[0]!r}, the trainer has {len(trainer._params)}")
    for index, state in states.items():
        parameter = trainer._params[index]
        if parameter._data is not None:
            _refuse_strange_state(state, index, parameter, optimizer or trainer._optimizer)
    return states, optimizer


def _refuse_strange_state(state: Any, index: int, parameter: gluon.Parameter, optimizer: Optimizer) -> None:
    """Raise ValueError for a state that the optimizer cannot have made for a parameter."""
    weight = parameter.list_data()[0]
    strange = _kinds_and_shapes(state) - {"NoneType", weight.shape}  # None of SGD as long as its momentum is 0
    if strange:
        strange -= _kinds_and_shapes(optimizer.create_state_multi_precision(index, weight.as_nd_ndarray()))
    if strange:
        raise StateError(f"expected the states of this trainer's network and optimizer, received, for the parameter "
                         f"{parameter.name!r} of shape {weight.shape}, a state of {', '.join(map(str, strange))}: "
                         "they are of another network or another optimizer")


def _kinds_and_shapes(state: Any) -> set[Any]:
    """Return the shapes of the arrays in a state, and the names of the types of what else is in it."""
    if isinstance(state, (list, tuple)):
        return {each for item in state for each in _kinds_and_shapes(item)}
    return {state.shape} if isinstance(state, NDArray) else {type(state).__name__}


def data_and_labels(processor: BatchProcessor, batch: Any, estimator: Estimator,
                    batch_axis: int) -> tuple[list[NDArray], list[NDArray]]:
    """Split a batch over the estimator's contexts, as its batch processor does."""
    return processor._get_data_and_label(batch, estimator.context, batch_axis)


