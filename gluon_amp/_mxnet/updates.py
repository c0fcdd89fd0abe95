"""SGD on CPUs by MXNet's faster operators.

For dense weights MXNet's SGD calls only operators for several weights at once, four by default. On a CPU these take
twice as long for large weights as the operator for one weight, which runs at the speed of memory; small ones are faster
together, and more than four of them.
"""
from __future__ import annotations

import os
from typing import Any, Sequence, Tuple

import numpy as np
from mxnet import gluon, nd
from mxnet.ndarray import NDArray
from mxnet.optimizer import SGD, Optimizer, Updater

__all__ = ["speed_up"]

_LARGE = 4096  # elements from which a call for one weight pays
_WEIGHTS_A_CALL = 45  # MXNet's operators for several weights have room for 60
_USERS_CHOICE = "MXNET_OPTIMIZER_AGGREGATION_SIZE"
ALONE, TOGETHER, AS_BEFORE = "alone", "together", "as before"

Update = Tuple[int, NDArray, NDArray]  # index, gradient, weight


def speed_up(trainer: gluon.Trainer) -> None:
    """Let a trainer on CPUs update by SGD in less time; the user's own aggregation size stays in force."""
    if _USERS_CHOICE in os.environ or any(context.device_type == "gpu" for context in trainer._contexts or ()):
        return
    trainer._updaters = [_successor(updater) if type(updater) is Updater else updater
                         for updater in trainer._updaters]


def _successor(updater: Updater) -> _CpuUpdater:
    made = _CpuUpdater(updater.optimizer)
    made.__dict__.update(updater.__dict__)
    return made


class _CpuUpdater(Updater):
    """MXNet's updater, with the calls of SGD's operators chosen by size; saves and loads the same states."""

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer)
        self._ways: dict[int, tuple[NDArray, NDArray, str]] = {}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights, given their indices and gradients."""
        if type(self.optimizer) is not SGD or not isinstance(index, (list, tuple)):
            super().__call__(index, grad, weight)
            return
        if weight:
            self.optimizer._set_current_context(weight[0].context.device_id)
        groups: dict[str, list[Update]] = {ALONE: [], TOGETHER: [], AS_BEFORE: []}
        for update in zip(index, grad, weight):
            groups[self._way(update)].append(update)
        for update in groups[ALONE]:
            self._update_one(*update)
        for start in range(0, len(groups[TOGETHER]), _WEIGHTS_A_CALL):
            self._update_several(groups[TOGETHER][start:start + _WEIGHTS_A_CALL])
        if groups[AS_BEFORE]:
            super().__call__(*zip(*groups[AS_BEFORE]))

    def _way(self, update: Update) -> str:
        """Return how to update a weight; looked up again only for other arrays, as that takes a while."""
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
        if state is None:
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
            self.states[index] = self.sync_state_context(self.states[index], weight.context)
        self.states_synced[index] = True
        return self.states[index]


def _way(grad: NDArray, weight: NDArray) -> str:
    if any(array.stype != "default" or array.dtype != np.float32 for array in (grad, weight)):
        return AS_BEFORE
    return ALONE if weight.size >= _LARGE else TOGETHER
