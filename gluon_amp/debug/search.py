"""``amp.search_exclusions``: which operators have to stay in FP32 for a network to be accurate."""
from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block

from ..base.metrics import allowed, fewest, measured, relative_error
from ..errors import PolicyError, StateError
from ..rules import Device, Policy
from ..session import hooks
from ..state.in_force import under
from ..state.state import EagerPolicy, State
from .compare import SEED, alone, mixed_state, run_both
from .recording import Recording, float_arrays, ready, unchanged
from .records import OpRecord

_logger = logging.getLogger("gluon_amp")
_SELF_AGREEMENT = 0.1  # the share of the budget that FP32 may differ from itself by


def search_exclusions(net: Block, data: Any, max_error: float | None = None, *,
                      metric: Callable[[Block], Any] | None = None, budget: float | None = None,
                      greater_is_better: bool = True, target_dtype: object = None, train_mode: bool = False) -> Policy:
    """Find a small set of operators to keep in FP32 so that a network is as accurate as wanted, cheaply.

    Operators are ranked by what their rounding does to the results for what they cost in FP32; bisection finds how many
    from the top have to stay.

    Parameters
    ----------
    net : Block
        Initialized and hybridized: operators have names in graphs only. These begin with the network's prefix: give it
        one (``prefix='net_'``) to use the policy in another process.
    data : NDArray or tuple
        The arguments of its call, for the ranking and for ``max_error``.
    max_error : float, optional
        The most that any output may differ from FP32, as the 2-norm of the difference over that of FP32.
    metric : callable, optional
        In place of ``max_error``: takes the network and returns a number, such as its accuracy on validation data.
    budget : float, optional
        How much worse than in FP32 the metric may be.
    greater_is_better : bool
        False for metrics that are to be small, such as a loss.
    target_dtype : {'float16', 'bfloat16'}, optional
        The type; without it that of :func:`~gluon_amp.init` where AMP is on, else the device's.
    train_mode : bool
        Whether the network runs as in training for ``max_error``.

    Returns
    -------
    Policy
        Its ``excluded`` names the operators. ``amp.init(policy=...)`` takes it, conversions take it as ``exclude``, and
        ``save`` and ``Policy.load`` keep it in a JSON file.
    """
    limit = allowed(max_error, metric, budget)
    if limit is None:
        raise PolicyError("expected either max_error, or metric and budget, received neither")
    arguments = ready(net, data)
    state = mixed_state(target_dtype)
    contexts = [array.context for array in float_arrays(arguments)] or [mx.cpu()]
    device = state.key(next((context for context in contexts if context.device_type == "gpu"), contexts[0]))
    base = state.policy(device)
    if base is None or not base.lowers:
        raise StateError(f"the low-precision type is not for arrays on the {device}, where the network runs")

    def outputs() -> list[np.ndarray]:
        with autograd.record() if train_mode else autograd.pause(train_mode=False):
            return [array.asnumpy().astype("float64") for array in float_arrays(net(*arguments))]

    with hooks.kept_in_place():
        trials = _Trials(net, outputs if metric is None else lambda: [measured(metric, net)],
                         _distance if metric is None else _lost if greater_is_better else lambda a, b: _lost(b, a),
                         limit, base, device, state.devices)
        if trials.hold(()):
            return base
        order = _ranked(net, arguments, state, train_mode)
        chosen = fewest(order, trials.hold, prune=True)
        if chosen is None:
            raise StateError(f"with all {len(order)} operators that can be excluded in FP32, {trials.told}. What is "
                             "left in low precision has no name in a graph: call net.hybridize() on the outermost "
                             "block first")
        trials.hold(chosen)
    _logger.info("AMP: %d of %d operators stay in float32; %s", len(chosen), len(order), trials.told)
    return trials.policy(chosen)


def _distance(reference: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> float:
    """Return the relative error of the worst output."""
    return max((relative_error([pair]) for pair in zip(reference, outputs)), default=0.0)


def _lost(reference: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> float:
    """Return how much a metric has fallen."""
    loss = float(reference[0] - values[0])
    return math.inf if math.isnan(loss) else loss


class _Trials:
    """Tries exclusions out, each once, and tells how much worse a network's results are than in FP32."""

    def __init__(self, net: Block, run: Callable[[], Sequence[Any]], error: Callable[..., float], limit: float,
                 base: Policy, device: str, devices: Mapping[str, Device]):
        self.net, self.run, self.error, self.limit = net, run, error, limit
        self.base, self.device, self.devices = base, device, devices
        self.found: dict[frozenset[str], float] = {}
        self.told = ""
        self.reference = self._results(None)
        if not all(np.isfinite(values).all() for values in self.reference):
            shown = f"the metric is {self.reference[0]}" if error is not _distance else "the results are not finite"
            raise StateError(f"{shown} in FP32: there is nothing to compare with")
        difference = abs(error(self.reference, self._results(None)))
        if difference > _SELF_AGREEMENT * limit:
            raise StateError(f"two runs in FP32 do not agree: they differ by {difference:.3g}, expected at most "
                             f"{_SELF_AGREEMENT:.0%} of {limit:g}. Look for random operators and for data that changes")

    def _results(self, state: State | None) -> Sequence[Any]:
        with under(state), unchanged(self.net):
            mx.random.seed(SEED)
            return self.run()

    def policy(self, names: Sequence[str]) -> Policy:
        """Return the policy that excludes some operators more."""
        return replace(self.base, excluded=self.base.excluded.union(names))

    def hold(self, names: Sequence[str]) -> bool:
        """Tell whether the network is accurate enough with these operators in FP32."""
        key = frozenset(names)
        if key not in self.found:
            state = State({self.device: self.policy(names)}, self.devices)
            self.found[key] = self.error(self.reference, self._results(state))
        self.told = f"the error is {self.found[key]:.3g}, {self.limit:g} is allowed"
        return self.found[key] <= self.limit


def _ranked(net: Block, arguments: Sequence[Any], state: State, train_mode: bool) -> list[str]:
    """Name the operators that run in low precision, those whose exclusion gains most for its cost first."""
    fp32, mixed = run_both(net, arguments, state, train_mode)
    eager = state.eager(fp32.outputs)
    lowered = {each.key: each for each in mixed.operators()
               if eager is not None and each.in_graph and each.is_decided and each.precision == eager.target}
    if eager is None or not lowered:
        raise StateError("no operator runs in low precision as part of a graph, so none can be excluded by name: call "
                         "net.hybridize() first")
    # Operators of one name are excluded together.
    errors: dict[str, float] = defaultdict(float)
    costs: dict[str, float] = defaultdict(float)
    for each in fp32.operators():
        if each.key in lowered:
            costs[each.name] += max(each.flops, 1)
            if each.repeatable:
                errors[each.name] += _error_caused(each, lowered[each.key], fp32, eager)
    return sorted(costs, key=lambda name: (-errors[name] / costs[name], -errors[name]))


def _error_caused(wide: OpRecord, mixed: OpRecord, fp32: Recording, policy: EagerPolicy) -> float:
    """Estimate the square of the error that an operator's rounding causes in the network's outputs."""
    # Gradients of the outputs times random numbers say how much each value of the operator's output matters; rounding
    # errors of different values are taken to be independent.
    plain, low = alone(wide, fp32, policy) or (wide, mixed)  # in C++ what its inputs' errors add counts as its own
    total = 0.0
    for expected_, rounded, gradient in zip(plain.outputs, low.outputs, wide.gradients):
        if gradient is not None:
            change = fp32.values(rounded).astype("float64") - fp32.values(expected_)
            total += float(((change * fp32.values(gradient)) ** 2).sum())
    return total if math.isfinite(total) else math.inf
