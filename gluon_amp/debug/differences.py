"""The distance of results from FP32, and the part of it that one operator causes."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from .._mxnet.invoke import original_invoke
from ..eager.applier import run_lowered
from ..graph.attrs import parameters
from ..judging import relative_error
from ..rules.decision import may_lower
from ..state.eager_policy import EagerPolicy
from .recording.events import Event, Rerun, is_float
from .recording.tape import Tape

SEED = 0  # of the random numbers that runs have in common


@dataclass(frozen=True)
class OperatorError:
    """The errors of one operator against FP32.

    Errors are relative: the 2-norm of the difference over that of FP32. They are infinite where FP32 is finite and low
    precision is not, and where FP32 gives only zeros and low precision something else.

    Attributes
    ----------
    name, op, block : str
        The operator's name in the graph (in code that is not hybridized its block and kind), its kind, and the name of
        its block.
    dtype : str
        What it ran in.
    isolated : float
        Error of its output when it alone runs in low precision, on FP32 inputs; 0 for operators in FP32.
    accumulated : float
        Error of its output in the network, with everything that came before.
    isolated_gradient : float
        Error of the gradients that it gives its inputs when it alone runs in low precision; 0 for operators in FP32,
        NaN without gradients. Both are NaN for operators that run in low precision in C++ only, as part of a graph.
    gradient : float
        Error of the gradient of its output in the network, NaN without gradients.
    """

    name: str
    op: str
    block: str
    dtype: str
    isolated: float
    accumulated: float
    isolated_gradient: float
    gradient: float


def first_infinite(rows: Sequence[OperatorError], by: str) -> int | None:
    """Return the position of the infinite error that came first; the backward pass runs from the end."""
    infinite = [position for position, row in enumerate(rows) if np.isinf(getattr(row, by))]
    if not infinite:
        return None
    return infinite[0] if by == "accumulated" else infinite[-1]


def lowers_alone(event: Event, policy: EagerPolicy) -> bool:
    """Tell whether an operator runs in low precision outside of graphs, where those in C++ do not."""
    return may_lower(policy.rule_of(event.op, parameters(event.attrs), event.inputs[0].shape))


def isolated_errors(event: Event, tape: Tape, policy: EagerPolicy) -> tuple[float, float]:
    """Return the errors of an operator's outputs and input gradients when it alone runs in low precision."""
    if not lowers_alone(event, policy):
        return float("nan"), float("nan")
    plain, low = both_ways(event, tape, policy)
    return (difference(tape, plain.outputs, tape, low.outputs),
            difference(tape, plain.input_gradients, tape, low.input_gradients))


def both_ways(event: Event, tape: Tape, policy: EagerPolicy) -> tuple[Rerun, Rerun]:
    """Run an operator of an FP32 run alone, in FP32 and in low precision, with the same random numbers."""
    mx.random.seed(SEED)
    plain = tape.again(event)
    mx.random.seed(SEED)
    return plain, tape.again(event, lambda op, inputs, attrs: run_lowered(op, inputs, attrs, policy, original_invoke))


def difference(tape: Tape, expected_: Sequence[NDArray | None], other: Tape, actual: Sequence[NDArray | None]) -> float:
    """Return the relative error of several arrays together; NaN when there is none to compare."""
    pairs = [(tape.values(a).astype("float64"), _cut(other.values(b), a.shape)) for a, b in zip(expected_, actual)
             if a is not None and b is not None and is_float(a) and is_float(b)]
    return relative_error(pairs) if pairs else float("nan")


def _cut(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Leave out the channels that AMP appended."""
    return values if values.shape == shape else values[tuple(slice(size) for size in shape)]
