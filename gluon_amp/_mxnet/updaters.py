"""Updates on CPUs by faster operators than MXNet's optimizers call.

Operators in C++ (:mod:`gluon_amp.native`), where they are there, update all weights at once, with all threads. Without
them SGD is made faster: for dense weights MXNet calls only operators for several weights at once, four by default,
which take twice as long for large weights as the operator for one weight, which runs at the speed of memory; small ones
are faster together, and more than four of them.
"""
from __future__ import annotations

import math
import os
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from mxnet import gluon, nd
from mxnet.ndarray import NDArray
from mxnet.optimizer import LAMB, NAG, SGD, Adam, Optimizer, Updater

_LARGE = 4096  # elements from which a call for one weight is faster
_WEIGHTS_A_CALL = 45  # MXNet's operators for several weights have room for 60
_USERS_CHOICE = "MXNET_OPTIMIZER_AGGREGATION_SIZE"
ALONE, TOGETHER, AS_BEFORE = "alone", "together", "as before"

Update = Tuple[int, NDArray, NDArray]  # index, gradient, weight
Native = Optional[Callable[..., None]]


def speed_up(trainer: gluon.Trainer, native: Native = None) -> None:
    """Let a trainer on CPUs update in less time; the user's own aggregation size stays in force."""
    if _USERS_CHOICE in os.environ or any(context.device_type == "gpu" for context in trainer._contexts or ()):
        return
    trainer._updaters = [_successor(updater, native) if type(updater) is Updater else updater
                         for updater in trainer._updaters]


def _successor(updater: Updater, native: Native) -> _CpuUpdater:
    made = _CpuUpdater(updater.optimizer)
    made.__dict__.update(updater.__dict__)
    made.native = native
    return made


@contextmanager
def asking(trainer: gluon.Trainer, is_skipped: Callable[[], bool]) -> Iterator[bool]:
    """Let the trainer's updaters ask whether to skip, when the update is prepared; tell whether all of them do."""
    updaters = [updater for updater in trainer._updaters if isinstance(updater, _CpuUpdater)]
    do_ask = bool(updaters) and len(updaters) == len(trainer._updaters)
    for updater in updaters:
        updater.is_skipped = is_skipped if do_ask else None
    try:
        yield do_ask
    finally:
        for updater in updaters:
            updater.is_skipped = None


class _CpuUpdater(Updater):
    """MXNet's updater, with other operators; saves and loads the same states."""

    is_skipped: Callable[[], bool] | None = None  # during an update

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer)
        self.native: Native = None
        self._known: tuple[Sequence[Any], dict[str, list[Update]]] = (), {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_skipped": None, "_known": ((), {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.states_synced = dict.fromkeys(self.states, False)  # see `_state`

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights, given their indices and gradients, unless the update is to be skipped."""
        natively = self.native is not None and _rule_of(self.optimizer) is not None
        if not (natively or type(self.optimizer) is SGD) or not isinstance(index, (list, tuple)):
            if not self._skips():
                super().__call__(index, grad, weight)
            return
        if weight:
            self.optimizer._set_current_context(weight[0].context.device_id)
        groups = self._grouped(index, grad, weight)
        rows = self._rows(groups[ALONE] + groups[TOGETHER]) if natively else {}
        if self._skips():
            return
        if natively:
            for has_states, updates in rows.items():
                self._update_natively(has_states, *zip(*updates))
        else:
            for update in groups[ALONE]:
                self._update_one(*update)
            for start in range(0, len(groups[TOGETHER]), _WEIGHTS_A_CALL):
                self._update_several(groups[TOGETHER][start:start + _WEIGHTS_A_CALL])
        if groups[AS_BEFORE]:
            super().__call__(*zip(*groups[AS_BEFORE]))

    def _skips(self) -> bool:
        return self.is_skipped is not None and self.is_skipped()

    def _grouped(self, *update: Sequence[Any]) -> dict[str, list[Update]]:
        """Sort weights by how they are updated; again only for other arrays, because that is slow."""
        given = [item for items in update for item in items]
        known, groups = self._known
        if len(known) != len(given) or not all(map(_same, known, given)):
            groups = {ALONE: [], TOGETHER: [], AS_BEFORE: []}
            for index, grad, weight in zip(*update):
                groups[_way(grad, weight)].append((index, grad, weight))
            self._known = given, groups
        return groups

    def _rows(self, updates: Sequence[Update]) -> dict[bool, list[tuple[Any, ...]]]:
        """Return index, weight, gradient and states of each update, weights with states apart from weights without."""
        rows: dict[bool, list[tuple[Any, ...]]] = {}
        for index, grad, weight in updates:
            state = self._state(index, weight)
            states = state if isinstance(state, tuple) else () if state is None else (state,)
            rows.setdefault(bool(states), []).append((index, weight.as_nd_ndarray(), grad.as_nd_ndarray(), *states))
        return rows

    def _update_natively(self, has_states: bool, indices: Sequence[int], weights: Sequence[NDArray],
                         grads: Sequence[NDArray], *states: Sequence[NDArray]) -> None:
        """Update in one call weights that all have states, or all have none."""
        optimizer = self.optimizer
        optimizer._update_count(indices)
        kind, lrs = _rule_of(optimizer)(optimizer, indices, has_states)  # type: ignore[misc]
        options = {name: getattr(optimizer, name) for name in _OPTIONS[kind]}
        if kind == "nag":
            options["momentum"] = max(options["momentum"], 0.0)
        if kind == "adamw":
            lrs, options["etas"] = [1.0] * len(lrs), lrs
        if kind == "lamb":
            options["steps"] = [optimizer._index_update_count[index] for index in indices]
            options.update((bound, getattr(optimizer, bound)) for bound in _BOUNDS if getattr(optimizer, bound))
        if optimizer.clip_gradient:
            options["clip_gradient"] = optimizer.clip_gradient
        self.native(kind, weights, grads, states if kind != "sgd" else (), lrs,  # type: ignore[misc]
                    optimizer._get_wds(indices), rescale_grad=optimizer.rescale_grad, **options)

    def _update_one(self, index: int, grad: NDArray, weight: NDArray) -> None:
        optimizer, state = self.optimizer, self._state(index, weight)
        optimizer._update_count([index])
        rates = {"lr": optimizer._get_lrs([index])[0], "wd": optimizer._get_wds([index])[0],
                 "rescale_grad": optimizer.rescale_grad}
        if optimizer.clip_gradient:
            rates["clip_gradient"] = optimizer.clip_gradient
        grad, weight = grad.as_nd_ndarray(), weight.as_nd_ndarray()
        if state is None or optimizer.momentum <= 0:
            nd.sgd_update(weight, grad, out=weight, **rates)
        else:
            nd.sgd_mom_update(weight, grad, state, out=weight, momentum=optimizer.momentum, **rates)

    def _update_several(self, updates: Sequence[Update]) -> None:
        states = [self._state(index, weight) for index, _, weight in updates]
        indices, grads, weights = zip(*updates)
        self.optimizer.update_multi_precision(indices, [weight.as_nd_ndarray() for weight in weights],
                                              [grad.as_nd_ndarray() for grad in grads], states)

    def _state(self, index: int, weight: NDArray) -> Any:
        """Return a weight's momentum, made or brought to its context as MXNet's updater does it."""
        if index not in self.states:
            self.states[index] = self.optimizer.create_state_multi_precision(index, weight.as_nd_ndarray())
        elif not self.states_synced[index]:
            # Copied: a C++ operator cannot write into arrays as they come from a file.
            self.states[index] = _copied(self.sync_state_context(self.states[index], weight.context))
        self.states_synced[index] = True
        return self.states[index]


def _same(known: Any, given: Any) -> bool:
    return known is given or (isinstance(given, int) and known == given)


def _copied(state: Any) -> Any:
    return tuple(map(_copied, state)) if isinstance(state, tuple) else None if state is None else state.copy()


def _way(grad: NDArray, weight: NDArray) -> str:
    # Operators for several weights do not take NumPy's scalars, which have no axes.
    if not weight.shape or any(array.stype != "default" or array.dtype != np.float32 for array in (grad, weight)):
        return AS_BEFORE
    return ALONE if weight.size >= _LARGE else TOGETHER


def _sgd(optimizer: SGD, indices: Sequence[int], has_states: bool) -> tuple[str, list[float]]:
    # As MXNet's SGD updates several weights: momentum that is switched off for a while leaves the states alone.
    return "sgd_momentum" if has_states and optimizer.momentum > 0 else "sgd", optimizer._get_lrs(indices)


def _nag(optimizer: NAG, indices: Sequence[int], has_states: bool) -> tuple[str, list[float]]:
    return "nag" if has_states else "sgd", optimizer._get_lrs(indices)


def _adam(optimizer: Adam, indices: Sequence[int], has_states: bool) -> tuple[str, list[float]]:
    """Return the rates with the correction of the means' bias, as MXNet's Adam hands them to its operator."""
    steps = [optimizer._index_update_count[index] for index in indices]
    return "adam", [lr * (math.sqrt(1 - optimizer.beta2 ** step) / (1 - optimizer.beta1 ** step))
                    for lr, step in zip(optimizer._get_lrs(indices), steps)]


def _as_it_is(kind: str) -> Callable[[Optimizer, Sequence[int], bool], tuple[str, list[float]]]:
    return lambda optimizer, indices, has_states: (kind, optimizer._get_lrs(indices))


Rule = Callable[[Any, Sequence[int], bool], Tuple[str, List[float]]]
# The operator that updates weights, and their learning rates, after the optimizer has counted the update.
_RULES: dict[type, Rule] = {SGD: _sgd, NAG: _nag, Adam: _adam, LAMB: _as_it_is("lamb")}
# GluonNLP's Adam with decoupled weight decay, known by name: it need not be installed.
_BERT_ADAM, _bert_adam = ("gluonnlp.optimizer.bert_adam", "BERTAdam"), _as_it_is("adamw")
_BETAS = ("beta1", "beta2", "epsilon")
_OPTIONS = {"sgd": (), "sgd_momentum": ("momentum",), "nag": ("momentum",), "adam": _BETAS, "adamw": _BETAS,
            "lamb": (*_BETAS, "bias_correction")}
_BOUNDS = ("lower_bound", "upper_bound")  # 0 means none, as to MXNet


def _rule_of(optimizer: Optimizer) -> Rule | None:
    kind = type(optimizer)
    if (kind.__module__, kind.__name__) != _BERT_ADAM:
        return _RULES.get(kind)
    rescale = optimizer.rescale_grad  # an array once GluonNLP has updated some weights of the step
    return _bert_adam if isinstance(rescale, float) and math.isfinite(rescale) and rescale else None
