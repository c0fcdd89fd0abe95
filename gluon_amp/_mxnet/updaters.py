"""Updates on CPUs by operators in C++ (:mod:`gluon_amp.native`), which take all weights at once, on all threads.

MXNet's SGD calls operators for four weights at once, which take twice the time of the operator for one weight where
weights are large; its Adam and NAG call one operator for each weight.
"""
from __future__ import annotations

import math
import os
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence, Tuple

import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray
from mxnet.optimizer import LAMB, NAG, SGD, Adam, Optimizer, Updater

from .arrays import map_arrays

Update = Tuple[int, NDArray, NDArray]  # index, gradient, weight


def speed_up(trainer: gluon.Trainer, native: Callable[..., None] | None = None) -> None:
    """Let a trainer on CPUs update in less time; the user's own aggregation size stays in force."""
    if "MXNET_OPTIMIZER_AGGREGATION_SIZE" in os.environ or any(
            context.device_type == "gpu" for context in trainer._contexts or ()):
        return
    for number, updater in enumerate(trainer._updaters):
        if type(updater) is Updater:
            trainer._updaters[number] = made = _CpuUpdater(updater.optimizer)
            made.__dict__.update(vars(updater), native=native)


@contextmanager
def asking(trainer: gluon.Trainer, is_skipped: Callable[[], bool]) -> Iterator[bool]:
    """Let the trainer's updaters ask whether to skip, when the update is prepared; tell whether all of them do."""
    asked = trainer._updaters if all(isinstance(updater, _CpuUpdater) for updater in trainer._updaters) else ()
    for updater in asked:
        updater.is_skipped = is_skipped
    try:
        yield bool(asked)
    finally:
        for updater in asked:
            updater.is_skipped = bool


class _CpuUpdater(Updater):
    """MXNet's updater, with other operators; saves and loads the same states."""

    native: Callable[..., None] | None = None
    is_skipped: Callable[[], bool] = bool  # which gives False; asked at an update
    # the arrays of the latest call, the updates for one call in C++, and the updates for MXNet
    _known: tuple[Sequence[Any], Sequence[Update], Sequence[Update]] = (), (), ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_skipped": bool, "_known": ((), (), ())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, is_skipped=bool)
        self.states_synced = dict.fromkeys(self.states, False)  # see `_state`

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Update weights, given their indices and gradients, unless the update is to be skipped."""
        if self.native is None or _kind_of(self.optimizer) is None or not isinstance(index, (list, tuple)):
            if not self.is_skipped():
                super().__call__(index, grad, weight)
            return
        if weight:
            self.optimizer._set_current_context(weight[0].context.device_id)
        in_one_call, others = self._sorted(index, grad, weight)
        rows = self._rows(in_one_call)
        if self.is_skipped():
            return
        for has_states, updates in rows.items():
            self._update_natively(has_states, *zip(*updates))
        if others:
            super().__call__(*zip(*others))

    def _sorted(self, *update: Sequence[Any]) -> tuple[Sequence[Update], Sequence[Update]]:
        """Return the updates for one call in C++, and the others; sorted again only for other arrays: that is slow."""
        given = [item for items in update for item in items]
        known, in_one_call, others = self._known
        if len(known) != len(given) or not all(one is other or (isinstance(other, int) and one == other)
                                               for one, other in zip(known, given)):
            in_one_call, others = [], []
            for index, grad, weight in zip(*update):
                is_plain = weight.shape and all(  # operators in C++ update dense arrays in FP32 that have axes
                    array.stype == "default" and array.dtype == np.float32 for array in (grad, weight))
                (in_one_call if is_plain else others).append((index, grad, weight))
            self._known = given, in_one_call, others
        return in_one_call, others

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
        kind, lrs = _kind_of(optimizer, has_states) or "", optimizer._get_lrs(indices)
        options = {name: getattr(optimizer, name) for name in _OPTIONS[kind]}
        steps = [optimizer._index_update_count[index] for index in indices] if kind in ("adam", "lamb") else []
        if kind == "adam":  # the correction of the means' bias, as MXNet's Adam hands it to its operator
            lrs = [lr * (math.sqrt(1 - optimizer.beta2 ** step) / (1 - optimizer.beta1 ** step))
                   for lr, step in zip(lrs, steps)]
        if kind == "nag":
            options["momentum"] = max(options["momentum"], 0.0)
        if kind == "adamw":
            lrs, options["etas"] = [1.0] * len(lrs), lrs
        if kind == "lamb":
            options["steps"] = steps
            options.update((bound, getattr(optimizer, bound)) for bound in _BOUNDS if getattr(optimizer, bound))
        if optimizer.clip_gradient:
            options["clip_gradient"] = optimizer.clip_gradient
        self.native(kind, weights, grads, states if kind != "sgd" else (), lrs,  # type: ignore[misc]
                    optimizer._get_wds(indices), rescale_grad=optimizer.rescale_grad, **options)

    def _state(self, index: int, weight: NDArray) -> Any:
        """Return a weight's momentum, made or brought to its context as MXNet's updater does it."""
        if index not in self.states:
            self.states[index] = self.optimizer.create_state_multi_precision(index, weight.as_nd_ndarray())
        elif not self.states_synced[index]:
            # Copied: a C++ operator cannot write into arrays as they come from a file.
            state = self.sync_state_context(self.states[index], weight.context)
            self.states[index] = map_arrays(NDArray.copy, state)
        self.states_synced[index] = True
        return self.states[index]


_BETAS = ("beta1", "beta2", "epsilon")
_OPTIONS = {"sgd": (), "sgd_momentum": ("momentum",), "nag": ("momentum",), "adam": _BETAS, "adamw": _BETAS,
            "lamb": (*_BETAS, "bias_correction")}
_BOUNDS = ("lower_bound", "upper_bound")  # 0 means none, as to MXNet


def _kind_of(optimizer: Optimizer, has_states: bool = True) -> str | None:
    """Name the update in C++ of weights with states or without; None where MXNet's own updates them."""
    kind = type(optimizer)
    if kind is SGD:  # as MXNet's updates several weights: momentum that is off for a while leaves the states alone
        return "sgd_momentum" if has_states and optimizer.momentum > 0 else "sgd"
    if kind is NAG and not has_states:
        return "sgd"
    if (kind.__module__, kind.__name__) == ("gluonnlp.optimizer.bert_adam", "BERTAdam"):  # it need not be installed
        rescale = optimizer.rescale_grad  # an array once GluonNLP has updated some weights of the step
        return "adamw" if isinstance(rescale, float) and math.isfinite(rescale) and rescale else None
    return {NAG: "nag", Adam: "adam", LAMB: "lamb"}.get(kind)
