"""Updates on CPUs by faster operators than those that MXNet's optimizers call.

Operators in C++ (:mod:`gluon_amp.native`), where they are there, update all weights at once, with all threads. Without
them SGD is made faster: for dense weights MXNet calls only operators for several weights at once, four by default,
which take twice as long for large weights as the operator for one weight, which runs at the speed of memory; small ones
are faster together, and more than four of them.
"""
from __future__ import annotations

import math
import os
from typing import Any, Callable, Optional, Sequence, Tuple

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


class _CpuUpdater(Updater):
    """MXNet's updater, with other operators; saves and loads the same states."""

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer)
        self.native: Native = None
        self._ways: dict[int, tuple[NDArray, NDArray, str]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ways": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.states_synced = dict.fromkeys(self.states, False)  # see `_state`

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights, given their indices and gradients."""
        natively = self.native is not None and _rule_of(self.optimizer) is not None
        if not (natively or type(self.optimizer) is SGD) or not isinstance(index, (list, tuple)):
            super().__call__(index, grad, weight)
            return
        if weight:
            self.optimizer._set_current_context(weight[0].context.device_id)
        groups: dict[str, list[Update]] = {ALONE: [], TOGETHER: [], AS_BEFORE: []}
        for update in zip(index, grad, weight):
            groups[self._way(update)].append(update)
        if natively:
            self._update_natively(groups[ALONE] + groups[TOGETHER])
        else:
            for update in groups[ALONE]:
                self._update_one(*update)
            for start in range(0, len(groups[TOGETHER]), _WEIGHTS_A_CALL):
                self._update_several(groups[TOGETHER][start:start + _WEIGHTS_A_CALL])
        if groups[AS_BEFORE]:
            super().__call__(*zip(*groups[AS_BEFORE]))

    def _update_natively(self, updates: Sequence[Update]) -> None:
        """Update in one call the weights that have states, and in one those that have none."""
        optimizer = self.optimizer
        rule = _rule_of(optimizer)
        calls: dict[str, list[tuple[Any, ...]]] = {}
        for index, grad, weight in updates:
            state = self._state(index, weight)
            states = state if isinstance(state, tuple) else () if state is None else (state,)
            optimizer._update_count(index)
            kind, lr = rule(optimizer, index, bool(states))  # type: ignore[misc]
            calls.setdefault(kind, []).append((weight.as_nd_ndarray(), grad.as_nd_ndarray(), lr,
                                               optimizer._get_wd(index), optimizer._index_update_count[index],
                                               *(states if kind != "sgd" else ())))
        for kind, rows in calls.items():
            weights, grads, lrs, wds, counts, *states_of_all = zip(*rows)
            options = {name: getattr(optimizer, name) for name in _OPTIONS[kind]}
            if kind == "nag":
                options["momentum"] = max(options["momentum"], 0.0)
            if kind == "adamw":
                lrs, options["etas"] = (1.0,) * len(lrs), list(lrs)
            if kind == "lamb":
                options["steps"] = list(counts)
                options.update((bound, getattr(optimizer, bound)) for bound in _BOUNDS if getattr(optimizer, bound))
            if optimizer.clip_gradient:
                options["clip_gradient"] = optimizer.clip_gradient
            self.native(kind, weights, grads, states_of_all, lrs, wds,  # type: ignore[misc]
                        rescale_grad=optimizer.rescale_grad, **options)

    def _way(self, update: Update) -> str:
        """Return how to update a weight; looked up again only for other arrays, because that is slow."""
        index, grad, weight = update
        known = self._ways.get(index)
        if known is None or known[0] is not grad or known[1] is not weight:
            known = self._ways[index] = grad, weight, _way(grad, weight)
        return known[2]

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


def _copied(state: Any) -> Any:
    return tuple(map(_copied, state)) if isinstance(state, tuple) else None if state is None else state.copy()


def _way(grad: NDArray, weight: NDArray) -> str:
    # Operators for several weights do not take NumPy's scalars, which have no axes.
    if not weight.shape or any(array.stype != "default" or array.dtype != np.float32 for array in (grad, weight)):
        return AS_BEFORE
    return ALONE if weight.size >= _LARGE else TOGETHER


def _sgd(optimizer: SGD, index: int, has_state: bool) -> tuple[str, float]:
    # As MXNet's SGD updates several weights: momentum that is switched off for a while leaves the states alone.
    return "sgd_momentum" if has_state and optimizer.momentum > 0 else "sgd", optimizer._get_lr(index)


def _nag(optimizer: NAG, index: int, has_state: bool) -> tuple[str, float]:
    return "nag" if has_state else "sgd", optimizer._get_lr(index)


def _adam(optimizer: Adam, index: int, has_state: bool) -> tuple[str, float]:
    """Return the rate with the correction of the means' bias, as MXNet's Adam hands it to its operator."""
    step = optimizer._index_update_count[index]
    return "adam", optimizer._get_lr(index) * (math.sqrt(1 - optimizer.beta2 ** step) / (1 - optimizer.beta1 ** step))


def _as_it_is(kind: str) -> Callable[[Optimizer, int, bool], tuple[str, float]]:
    return lambda optimizer, index, has_state: (kind, optimizer._get_lr(index))


Rule = Callable[[Any, int, bool], Tuple[str, float]]
# The operator that updates a weight, and its learning rate, after the optimizer has counted the update.
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
