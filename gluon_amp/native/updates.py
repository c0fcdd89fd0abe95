"""Optimizer updates of many weights, and the check of their gradients, in one call of a C++ operator."""
from __future__ import annotations

from typing import Mapping, Sequence

import mxnet as mx

from .._mxnet.arrays import bring_to_plain_layout
from .._mxnet.invoke import invoke, original_invoke, run_operator

# Each with the number of states that a weight has.
UPDATES: Mapping[str, int] = {"sgd": 0, "sgd_momentum": 1, "nag": 1, "adam": 2, "adamw": 2, "lamb": 2}


def update(kind: str, weights: Sequence[mx.nd.NDArray], grads: Sequence[mx.nd.NDArray],
           states: Sequence[Sequence[mx.nd.NDArray]], lrs: Sequence[float], wds: Sequence[float],
           **options: object) -> None:
    """Update weights and states in place, as MXNet's operators for one weight do."""
    # Weights are waited for: ask for the update when the gradients are known, as after the check of an overflow.
    bring_to_plain_layout(weights)
    arrays = [array for group in zip(weights, grads, *states) for array in group]
    attrs = {"num_weights": len(weights), "lrs": list(map(float, lrs)), "wds": list(map(float, wds)), **options}
    invoke(f"_gluon_amp_{kind}", arrays, {name: str(value) for name, value in attrs.items()})


def all_finite(arrays: Sequence[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Compute 1 where all values of float32 arrays are finite, 0 otherwise."""
    return run_operator(original_invoke, "_gluon_amp_all_finite", arrays, {"num_arrays": str(len(arrays))})
