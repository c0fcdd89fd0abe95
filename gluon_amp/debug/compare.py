"""``amp.compare``: how far every operator of a network in mixed precision is from FP32."""
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from .._mxnet.invoke import original_invoke
from ..base import checks
from ..base.metrics import relative_error
from ..eager.applier import run_lowered
from ..errors import DTypeError, PolicyError, expected
from ..graph.attrs import parameters
from ..machine.dtypes import FLOAT32, normalize
from ..rules import Policy
from ..rules.decision import may_lower
from ..state.devices import choose, device_supports, verdict, warn_if_slow
from ..state.in_force import in_force, under
from ..state.state import EagerPolicy, State, device_policies, policies_of
from .recorder import record
from .recording import Recording, is_float, ready, unchanged
from .records import OpRecord
from .report import Shown, text_table

if TYPE_CHECKING:
    from rich.table import Table

SEED = 0  # of the random numbers that runs have in common
_NEGLIGIBLE = 1e-3  # gradients smaller than this, beside a typical one, are sums that cancel: all rounding
_rank = partial(np.nan_to_num, nan=-1.0)  # of errors
ORDERS = ("accumulated", "isolated", "gradient", "isolated_gradient")


@dataclass(frozen=True)
class OperatorError:
    """The errors of one operator against FP32, in the relative 2-norm; infinite where only FP32 is finite, or zero."""

    name: str  # in the graph; in code that is not hybridized that of its block and kind
    op: str
    block: str
    dtype: str  # the type it ran in
    isolated: float  # error of its output when it alone runs in low precision, on FP32 inputs; 0 for operators in FP32
    accumulated: float  # error of its output in the network, with everything that came before
    # Error of the gradients that it gives its inputs when it alone runs in low precision; 0 for operators in FP32, NaN
    # without gradients. Both isolated errors are NaN for operators that run in low precision in C++ only.
    isolated_gradient: float
    gradient: float  # error of the gradient of its output in the network, NaN without gradients


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """What :func:`compare` found."""

    dtype: str  # the low-precision type
    operators: tuple[OperatorError, ...]  # in the order in which they ran
    outputs: tuple[float, ...]  # errors of the network's floating-point outputs
    # Errors of the gradients of parameters, by name. Where a gradient is below a thousandth of a typical one, as that
    # of a bias before batch normalization, the error is relative to that thousandth.
    parameters: Mapping[str, float]

    def worst(self, count: int = 10, by: str = "accumulated") -> list[OperatorError]:
        """Return the operators with the largest errors, worst first.

        ``by`` names the error: ``'accumulated'``, ``'isolated'``, ``'gradient'`` or ``'isolated_gradient'``.
        """
        if by not in ORDERS:
            raise ValueError(expected(f"one of {', '.join(ORDERS)}", "by", by))
        return sorted(self.operators, key=lambda item: _rank(getattr(item, by)), reverse=True)[:count]

    @property
    def culprit(self) -> OperatorError | None:
        """The first operator whose output is infinitely far from FP32; None where there is none."""
        return next((item for item in self.operators if np.isinf(item.accumulated)), None)

    def table(self, by: str = "accumulated", count: int = 15, *, wide: bool = False) -> Table:
        """Return a table for rich, worst operators first; ``by`` and ``count`` are those of :meth:`worst`.

        ``wide``: with kinds and blocks.
        """
        worst = self.worst(count, by)
        lines = [{"operator": item.name, **({"kind": item.op, "block": item.block} if wide else {}), "type": item.dtype,
                  **{order.replace("_", " "): _number(getattr(item, order)) for order in ORDERS}} for item in worst]
        red = [number for number, item in enumerate(worst) if item is self.culprit]
        return text_table(lines, [order.replace("_", " ") for order in ORDERS], self.summary, red)

    @property
    def summary(self) -> str:  # type: ignore[override]
        """One line: how much runs in low precision, and how far the results are from FP32."""
        low = sum(item.dtype == self.dtype for item in self.operators)
        gradients = sorted(self.parameters.values(), key=_rank)
        told = (f"; gradients of parameters by {_number(gradients[len(gradients) // 2])} (median), at most "
                f"{_number(gradients[-1])}" if gradients else "")
        blamed = f". The first infinite error is that of {self.culprit.name}" if self.culprit is not None else ""
        return (f"{low} of {len(self.operators)} operators in {self.dtype}; outputs differ from float32 by "
                f"{', '.join(map(_number, self.outputs))}{told} (relative 2-norm){blamed}")


def _number(error: float) -> str:
    return "" if np.isnan(error) else f"{error:.2g}"


def compare(net: Block, data: Any, loss: Callable[[Any], NDArray] | None = None, *, target_dtype: object = None,
            policy: Policy | None = None, loss_scale: float = 1.0, train_mode: bool = True,
            gradients: bool = True) -> Comparison:
    """Run a network in FP32 and in mixed precision on the same data, and compare every operator.

    Random operators draw the same numbers. Parameters, their gradients and running statistics stay as they are.

    Parameters
    ----------
    net : Block
        Hybridized or not, with initialized parameters.
    data : NDArray or tuple
        The arguments of its call: a small batch, since all intermediate results are kept, twice.
    loss : callable, optional
        Takes what the network returns and gives the loss to differentiate; without it that is a random sum of outputs.
    target_dtype : {'float16', 'bfloat16'}, optional
        The type; without it and ``policy`` that of :func:`~gluon_amp.init` where AMP is on, else the device's.
    policy : Policy, optional
        The policy to compare, such as one of :func:`~gluon_amp.search_exclusions`.
    loss_scale : float
        Multiplies the gradient that the backward pass begins with, which float16 may need.
    train_mode : bool
        False for Dropout and BatchNorm to behave as in inference.
    gradients : bool
        Whether to compare gradients.

    Returns
    -------
    Comparison
        Print it.
    """
    if target_dtype is not None and policy is not None:
        raise PolicyError("expected target_dtype or policy, received both: a policy has its type")
    arguments = ready(net, data)
    state = mixed_state(target_dtype, policy)
    fp32, mixed = run_both(net, arguments, state, train_mode, loss_scale if gradients else None, loss)
    return _compared(fp32, mixed, state)


def mixed_state(dtype: object = None, policy: Policy | None = None) -> State:
    """Return the setting of mixed precision that the user asks for; by default the one in force."""
    current = in_force.current()
    if policy is not None:
        checks.instance("policy", policy, Policy, "a Policy")
        chosen = choose(policy.target_dtype, device_supports())
        return State.on(chosen, policies_of(policy, chosen))
    if dtype is None and current is not None and current.enabled and current.lowers:
        return current
    chosen = choose(None if dtype is None else normalize(dtype), device_supports())
    warn_if_slow(chosen)
    made = State.on(chosen, device_policies(chosen))
    if not made.lowers:
        raise DTypeError(f"nothing runs in low precision: this machine runs {verdict(chosen)}. "
                         "Give target_dtype='float16', which is imitated, or 'bfloat16' on CPUs with AVX512")
    return made


def run_both(net: Block, arguments: Sequence[Any], state: State, train_mode: bool, scale: float | None = 1.0,
             loss: Callable[[Any], NDArray] | None = None) -> tuple[Recording, Recording]:
    """Run a network in FP32 and in a state with the same random numbers; without a scale there is no backward pass."""
    def run(state: State | None) -> Recording:
        random = np.random.RandomState(SEED)
        with unchanged(net), under(state):
            mx.random.seed(SEED)
            made = record(partial(net, *arguments), net, train_mode=train_mode, loss=None if scale is None else loss,
                          keep=True)
            if scale is not None:
                values = [(array, np.ones(array.shape) if made.losses else random.normal(size=array.shape))
                          for array in made.losses or made.outputs]
                made.backward(((array, mx.nd.array(value * scale, ctx=array.context, dtype=array.dtype))
                               for array, value in values), scale)
        return made
    return run(None), run(state)


def _compared(fp32: Recording, mixed: Recording, state: State) -> Comparison:
    eager = state.eager(fp32.outputs)
    if eager is None:
        raise PolicyError("the policy is not for the device that the network is on")
    rounded: dict[int, list[NDArray]] = {}  # outputs of operators in an imitated type, which compute in FP32
    for each in mixed.records:
        source = each.imitates
        if source is not None and each.dtype == source.observed:
            rounded.setdefault(id(source), list(source.outputs))[each.reads[0].output] = each.outputs[0]
    rows, counterparts = [], {each.key: each for each in mixed.operators()}
    for wide in fp32.operators():
        low = counterparts.get(wide.key)
        if low is None or not any(map(is_float, wide.outputs)):
            continue
        is_low = low.precision == eager.target
        isolated = 0.0, 0.0
        if is_low and low.is_decided and wide.repeatable:
            both = alone(wide, fp32, eager)
            isolated = (float("nan"), float("nan")) if both is None else (
                _difference(fp32, both[0].outputs, fp32, both[1].outputs),
                _difference(fp32, both[0].input_gradients, fp32, both[1].input_gradients))
        rows.append(OperatorError(
            wide.name, wide.op, wide.block, eager.target if is_low else FLOAT32, isolated[0],
            _difference(fp32, wide.outputs, mixed, rounded.get(id(low), low.outputs)),
            isolated[1] if any(wide.marked) else float("nan"),
            _difference(fp32, wide.gradients, mixed, low.gradients)))
    return Comparison(eager.target, tuple(rows), tuple(_difference(fp32, [a], mixed, [b])
                                                       for a, b in zip(fp32.outputs, mixed.outputs)),
                      dict(_parameter_errors(fp32, mixed)))


def _parameter_errors(fp32: Recording, mixed: Recording) -> Iterator[tuple[str, float]]:
    both = {name: (fp32.values(gradient).astype("float64"), mixed.values(mixed.parameter_gradients[name]))
            for name, gradient in fp32.parameter_gradients.items() if name in mixed.parameter_gradients}
    squares = [wide.ravel() ** 2 for wide, _ in both.values()]
    typical = np.sqrt(np.concatenate(squares).mean()) if squares else 0.0
    for name, pair in both.items():
        yield name, relative_error([pair], _NEGLIGIBLE * typical * np.sqrt(pair[0].size))


def alone(wide: OpRecord, fp32: Recording, policy: EagerPolicy) -> tuple[OpRecord, OpRecord] | None:
    """Run an operator of an FP32 run alone, in FP32 and in low precision, with the same random numbers."""
    # None for operators that run in low precision in C++ only, which is in graphs.
    if not may_lower(policy.rule_of(wide.op, parameters(wide.attrs), wide.arguments[0].shape)):
        return None
    mx.random.seed(SEED)
    plain = fp32.again(wide)
    mx.random.seed(SEED)
    return plain, fp32.again(wide, lambda op, inputs, attrs: run_lowered(op, inputs, attrs, policy, original_invoke))


def _difference(fp32: Recording, wide: Sequence[NDArray | None], other: Recording,
                low: Sequence[NDArray | None]) -> float:
    """Return the relative error of several arrays together; NaN when there is none to compare."""
    both = []
    for a, b in zip(wide, low):
        if a is not None and b is not None and is_float(a) and is_float(b):
            values = other.values(b)  # AMP may have appended channels
            both.append((fp32.values(a).astype("float64"), values[tuple(map(slice, a.shape))] if a.shape else values))
    return relative_error(both) if both else float("nan")
