"""Optimizer updates of many weights in one call of a C++ operator."""
from __future__ import annotations

from typing import Mapping, Sequence

import mxnet as mx

from .._mxnet.invoke import invoke
from .._mxnet.libraries import bring_to_plain_layout

__all__ = ["UPDATES", "update"]

# Each with the number of states that a weight has.
UPDATES: Mapping[str, int] = {"sgd": 0, "sgd_momentum": 1, "nag": 1, "adam": 2, "adamw": 2, "lamb": 2}


def update(kind: str, weights: Sequence[mx.nd.NDArray], grads: Sequence[mx.nd.NDArray],
           states: Sequence[Sequence[mx.nd.NDArray]], lrs: Sequence[float], wds: Sequence[float],
           **options: object) -> None:
    """Update weights and states in place, as MXNet's operators for one weight do.

    MXNet runs the update like any operator, ordered by what it reads and writes. Weights are waited for: ask for the
    update when the gradients are known, as after the check of an overflow.

    Parameters
    ----------
    kind : str
        One of :data:`UPDATES`, after ``sgd_update``, ``sgd_mom_update``, ``nag_mom_update``, ``adam_update``,
        ``adamw_update`` and the two phases of ``lamb_update``.
    weights, grads : sequence of NDArray
        Dense arrays on one CPU context. Weights are float32; each gradient is float32 or bfloat16.
    states : sequence of sequence of NDArray
        Momentum, or means and variances: one sequence for each, in the order of the weights. float32.
    lrs, wds : sequence of float
        Learning rate and weight decay of every weight. Adam's correction of its bias is part of ``lrs``, as in MXNet.
    **options
        ``rescale_grad`` (1), ``clip_gradient`` (negative: none), ``momentum``, ``beta1``, ``beta2``, ``epsilon``,
        ``eta``; for ``'lamb'`` also ``steps`` (of each weight), ``bias_correction``, ``lower_bound`` and
        ``upper_bound``.

    Raises
    ------
    MXNetError
        The library is not loaded, or shapes, types or numbers of arrays do not fit.

    Examples
    --------
    >>> weight, grad = mx.nd.ones(3), mx.nd.ones(3)
    >>> update("sgd", [weight], [grad], [], lrs=[0.5], wds=[0.0])  # doctest: +SKIP
    """
    bring_to_plain_layout(weights)
    arrays = [array for group in zip(weights, grads, *states) for array in group]
    attrs = {"num_weights": len(weights), "lrs": list(map(float, lrs)), "wds": list(map(float, wds)), **options}
    invoke(f"_gluon_amp_{kind}", arrays, {name: str(value) for name, value in attrs.items()})
