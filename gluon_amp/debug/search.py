"""``amp.search_exclusions``: which operators have to stay in FP32 for a network to be accurate."""
from __future__ import annotations

import logging
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, Callable, Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block

from .. import checks
from ..aliases import also
from ..errors import PolicyError, StateError, expected
from ..graph import Entry, Node
from ..judging import pruned, relative_error, shortest_prefix
from ..progress import progress_bar
from ..rules import Device, Policy
from ..session import hooks
from ..state.eager_policy import EagerPolicy
from ..state.in_force import under
from ..state.state import State
from .compare import run_both
from .differences import SEED, both_ways, lowers_alone
from .recording.events import Event
from .recording.runs import arguments_of, float_arrays, make_ready, mixed_state, unchanged
from .recording.tape import Tape
from .report.flops import flops

_logger = logging.getLogger("gluon_amp")
_SELF_AGREEMENT = 0.1  # the share of the budget that FP32 may differ from itself by


@also(dtype="target_dtype")
def search_exclusions(net: Block, data: Any, max_error: float | None = None, *,
                      metric: Callable[[Block], float] | None = None, budget: float | None = None,
                      greater_is_better: bool = True, target_dtype: object = None, train_mode: bool = False,
                      progress: bool = True) -> Policy:
    """Find a small set of operators to keep in FP32 so that a network is as accurate as wanted, cheaply.

    Operators are ranked by what their rounding does to the results, against what they cost in FP32. One FP32 run with
    gradients, and one run of each operator alone, tell that. Bisection finds how many from the top of this ranking have
    to stay in FP32; then those that were not needed are taken out again. The network runs about twice as often as the
    logarithm of the number of operators, and once or twice for each operator that stays.

    Parameters
    ----------
    net : Block
        With initialized parameters, hybridized: operators have names in graphs only. Their names begin with the
        network's prefix: give it one (``prefix='net_'``) to use the policy in another process.
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
        The low-precision type; without it the setting of :func:`~gluon_amp.init` holds where AMP is on, else the
        device's type.
    train_mode : bool
        Whether the network runs as in training for ``max_error``.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    Policy
        Its ``excluded`` names the operators. ``amp.init(policy=...)`` takes it, conversions take it as ``exclude``, and
        ``save`` and ``Policy.load`` keep it in a JSON file.

    Raises
    ------
    PolicyError
        Not exactly one of ``max_error`` and ``metric`` (with ``budget``) is given.
    StateError
        FP32 does not agree with itself, parameters are not initialized, nothing runs as a graph, or no exclusion helps.
    DTypeError
        This machine cannot run the type.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> net = mx.gluon.nn.HybridSequential(prefix='net_')
    >>> with net.name_scope():
    ...     net.add(mx.gluon.nn.Dense(4, in_units=4), mx.gluon.nn.Dense(4, in_units=4))
    >>> net.initialize()
    >>> net.hybridize()
    >>> net[1].weight.set_data(mx.nd.ones((4, 4)) * 1e5)  # float16 ends at 65504
    >>> policy = amp.search_exclusions(net, mx.nd.ones((2, 4)), max_error=0.01, target_dtype='float16',
    ...                                progress=False)
    >>> sorted(policy.excluded)
    ['net_dense1_fwd']
    """
    _check(max_error, metric, budget)
    arguments = arguments_of(data)
    make_ready(net, arguments)
    state = mixed_state(target_dtype)
    contexts = [array.context for array in float_arrays(arguments)] or [mx.cpu()]
    device = state.key(next((context for context in contexts if context.device_type == "gpu"), contexts[0]))
    base = state.policy(device)
    if base is None or not base.lowers:
        raise StateError(f"the low-precision type is not for arrays on the {device}, where the network runs")
    with hooks.kept_in_place(), progress_bar(desc="search", unit="run", shown=progress) as bar:
        judge = (_judge_of_outputs(net, arguments, train_mode, max_error) if max_error is not None
                 else _judge_of_metric(net, metric, budget, greater_is_better))
        trial = _Trial(judge, base, device, state.devices, bar)
        judge.check_reference()
        if trial.fits(()):
            return base
        order = _ranked(net, arguments, state, train_mode)
        if not trial.fits(order):
            raise StateError(f"with all {len(order)} operators that can be excluded in FP32, {trial.told}. What is "
                             "left in low precision has no name in a graph: call net.hybridize() on the outermost "
                             "block first")
        chosen = pruned(shortest_prefix(order, trial.fits), trial.fits)
        trial.fits(chosen)
    _logger.info("AMP: %d of %d operators stay in float32; %s", len(chosen), len(order), trial.told)
    return trial.policy(chosen)


def _check(max_error: float | None, metric: Any, budget: float | None) -> None:
    if (max_error is None) == (metric is None) or (metric is None) != (budget is None):
        raise PolicyError("expected either max_error, or metric and budget, received "
                          + (", ".join(name for name, value in (("max_error", max_error), ("metric", metric),
                                                                ("budget", budget)) if value is not None) or "neither"))
    value: Any
    name, value = ("budget", budget) if max_error is None else ("max_error", max_error)
    if not checks.is_number(value) or not 0 <= value < math.inf:
        raise PolicyError(expected("a number, 0 or above", name, value))


class _Judge:
    """Measures how much worse a network's results are than in FP32."""

    def __init__(self, net: Block, run: Callable[[], Any], error: Callable[[Any, Any], float], limit: float | None,
                 words: tuple[str, str]):
        self._net, self._run, self._error, self._words = net, run, error, words
        self.limit = limit or 0.0
        with under(None):
            self.reference = self._results()

    def check_reference(self) -> None:
        """Refuse a network whose FP32 results are not finite, or depend on more than its data."""
        differ, not_finite = self._words
        if not all(np.isfinite(values).all() for values in self.reference):
            raise StateError(f"{not_finite.format(*self.reference)} in FP32: there is nothing to compare with")
        with under(None):
            difference = abs(self.measure())
        if difference > _SELF_AGREEMENT * self.limit:
            raise StateError(f"two runs in FP32 do not agree: their {differ} by {difference:.3g}, expected at most "
                             f"{_SELF_AGREEMENT:.0%} of {self.limit:g}. Look for random operators and for data that "
                             "changes")

    def measure(self) -> float:
        """Return the error under the setting in force."""
        return self._error(self.reference, self._results())

    def _results(self) -> Any:
        with unchanged(self._net):
            mx.random.seed(SEED)
            return self._run()


def _judge_of_outputs(net: Block, arguments: Sequence[Any], train_mode: bool, max_error: float) -> _Judge:
    """Make a judge of how far the outputs are from those of FP32."""
    def run() -> list[np.ndarray]:
        with autograd.record() if train_mode else autograd.pause(train_mode=False):
            return [array.asnumpy().astype("float64") for array in float_arrays(net(*arguments))]

    def error(reference: list[np.ndarray], outputs: list[np.ndarray]) -> float:
        return max((relative_error([pair]) for pair in zip(reference, outputs)), default=0.0)

    return _Judge(net, run, error, max_error, ("results differ", "the network's results are not finite"))


def _judge_of_metric(net: Block, metric: Any, budget: float | None, greater_is_better: bool) -> _Judge:
    """Make a judge of how much worse a metric is than in FP32."""
    def error(reference: list[float], values: list[float]) -> float:
        loss = reference[0] - values[0]
        return math.inf if math.isnan(values[0]) else loss if greater_is_better else -loss

    return _Judge(net, lambda: [float(metric(net))], error, budget, ("metrics differ", "the metric is {}"))


class _Trial:
    """Tries exclusions out, each once."""

    def __init__(self, judge: _Judge, base: Policy, device: str, devices: Mapping[str, Device], bar: Any):
        self.judge, self.base, self.device, self.devices, self.bar = judge, base, device, devices, bar
        self.found: dict[frozenset[str], float] = {}
        self.told = ""

    def policy(self, names: Iterable[str]) -> Policy:
        """Return the policy that excludes some operators more."""
        return replace(self.base, excluded=self.base.excluded.union(names))

    def fits(self, names: Iterable[str]) -> bool:
        """Tell whether the network is accurate enough with these operators in FP32."""
        key = frozenset(names)
        if key not in self.found:
            state = State({self.device: self.policy(key)}, self.devices)
            with under(state):
                self.found[key] = self.judge.measure()
            self.bar.update()
        self.told = f"the error is {self.found[key]:.3g}, {self.judge.limit:g} is allowed"
        self.bar.set_postfix_str(f"{len(key)} operators in float32: {self.told}")
        return self.found[key] <= self.judge.limit


def _ranked(net: Block, arguments: Sequence[Any], state: State, train_mode: bool) -> list[str]:
    """Name the operators that run in low precision, those whose exclusion gains most for its cost first."""
    fp32, mixed = run_both(net, arguments, state, train_mode)
    eager = state.eager(fp32.outputs)
    lowered = {event.key: event for event in mixed.operators()
               if eager is not None and event.in_graph and event.is_decided and event.runs_in(eager.target)}
    if not lowered:
        raise StateError("no operator runs in low precision as part of a graph, so none can be excluded by name: call "
                         "net.hybridize() first")
    # Operators of one name are excluded together.
    errors: dict[str, float] = defaultdict(float)
    costs: dict[str, float] = defaultdict(float)
    for event in fp32.operators():
        if event.key in lowered:
            costs[event.name] += _cost(event)
            if event.repeatable:
                errors[event.name] += _error_caused(event, lowered[event.key], fp32.tape, eager)
    return sorted(costs, key=lambda name: (-errors[name] / costs[name], -errors[name]))


def _error_caused(event: Event, mixed: Event, tape: Tape, policy: EagerPolicy | None) -> float:
    """Estimate the square of the error that an operator's rounding causes in the network's outputs."""
    # Gradients of the outputs times random numbers say how much each value of the operator's output matters; rounding
    # errors of different values are taken to be independent.
    if policy is not None and lowers_alone(event, policy):
        plain, low = (rerun.outputs for rerun in both_ways(event, tape, policy))
    else:  # it is in C++ there: what its inputs' errors add counts as its own
        plain, low = event.outputs, mixed.outputs
    total = 0.0
    for expected_, rounded, gradient in zip(plain, low, event.gradients):
        if gradient is not None:
            change = tape.values(rounded).astype("float64") - tape.values(expected_)
            total += float(((change * tape.values(gradient)) ** 2).sum())
    return total if math.isfinite(total) else math.inf


def _cost(event: Event) -> float:
    """Return the cost of an operator in FP32: its arithmetic."""
    inputs = [Entry(Node("null", "", shapes=[array.shape])) for array in event.inputs]
    node = Node(event.op, event.name, dict(event.attrs), inputs, shapes=[array.shape for array in event.outputs])
    return max(flops(node), 1)
