"""Calls of operators whose gradient MXNet gets wrong: they run what :mod:`~gluon_amp.passes.gradient_fixes` says.

Gradients of gradients MXNet has of dense layers in FP32, but neither of casts nor in low precision. While a network
runs nobody knows that its gradients will be differentiated. A sign of it is that its data has a gradient buffer, as for
gradient penalties: layers that MXNet could differentiate twice stay as they are then, dense ones in FP32.
"""
from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Optional, Sequence, Tuple

from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import is_recorded
from .._mxnet.invoke import Invocation, Invoke, Runs, handle_of, registered_operators
from .._mxnet.symbols import dtype_name
from ..graph import VARIABLE, Node
from ..passes.activations import FP32_ACTIVATIONS
from ..passes.gradient_fixes import IN_CALLS, fixed_call, is_call_concerned

NOT_TWICE = ("AMP is on, and MXNet differentiates neither casts nor operators in low precision twice. For gradients of "
             "gradients run the network and autograd.grad inside `with amp.autocast(enabled=False):`, and do not "
             "hybridize it: MXNet has none of hybridized networks")
TWICE_DIFFERENTIABLE = frozenset(("FullyConnected", "dot", "batch_dot", *FP32_ACTIVATIONS))


# An array, as far as steps depend on it: whether its gradient is asked for, and has a buffer; its type, None of sparse
# ones, and its shape.
_Operand = Tuple[bool, bool, Optional[str], Tuple[int, ...]]
# One of the operators that run in place of a call: its handle; inputs of the call and steps, in one count, and which of
# their outputs; the names and values of its attributes.
_Step = Tuple[int, Sequence[Tuple[int, int]], Sequence[str], Sequence[str]]


def fixing_invocations(behind_casts: bool = True, is_on: Callable[[], bool] = lambda: True) -> Runs:
    """Return how to run imperative calls whose gradients are wrong, behind AMP's casts or before them."""
    known = set(registered_operators().values())
    return {handle_of(op): partial(_run, op, behind_casts, is_on) for op in IN_CALLS[behind_casts] if op in known}


def _run(op: str, behind_casts: bool, is_on: Callable[[], bool], invoke: Invoke, call: Invocation) -> Any:
    """Run a call, operator by operator where the table says that others have to stand around it."""
    steps = _fixed(op, call, behind_casts) if (behind_casts or call.out is None) and is_on() else ()
    if not steps:
        return invoke(*call)
    made: list[Any] = [[array] for array in call.inputs]
    for step in steps:
        handle, operands, keys, values = step
        out, is_list = (call.out, call.output_is_list) if step is steps[-1] else (None, True)
        arrays = [made[number][output] for number, output in operands]
        made.append(invoke(handle, arrays, keys, values, out, call.is_np_op, is_list))
    return made[-1]


def _fixed(op: str, call: Invocation, behind_casts: bool) -> Sequence[_Step]:
    """Return the steps to run in place of a call; none where it runs as it is."""
    def is_asked(position: int) -> bool:
        if position not in asked:
            asked[position] = is_recorded(call.inputs[position])
        return asked[position]

    asked: dict[int, bool] = {}
    evaluates = not autograd.is_training()
    if not is_call_concerned(op, len(call.inputs), is_asked, evaluates, behind_casts):
        return ()
    operands = tuple((is_asked(i), array.grad is not None, None if isinstance(array, BaseSparseNDArray) else
                      dtype_name(array.dtype), array.shape) for i, array in enumerate(call.inputs))
    return _steps(op, tuple(call.attrs().items()), operands, evaluates, behind_casts)


@lru_cache(maxsize=256)
def _steps(op: str, attrs: tuple[tuple[str, str], ...], operands: tuple[_Operand, ...], evaluates: bool,
           behind_casts: bool) -> Sequence[_Step]:
    # A user's own array is a variable, and has a gradient where one is asked for.
    inputs = [Node(VARIABLE if has_gradient or not asked else "computed", str(position), dtypes=[dtype], shapes=[shape])
              for position, (asked, has_gradient, dtype, shape) in enumerate(operands)]
    graph = fixed_call(op, dict(attrs), inputs, lambda position: operands[position][0], evaluates, behind_casts)
    if graph is None:
        return ()
    made = [node for node in graph.nodes() if node.inputs]
    number = {id(node): position for position, node in enumerate([*inputs, *made])}
    return [(handle_of(node.op), [(number[id(entry.node)], entry.output) for entry in node.inputs],
             list(node.attrs), list(node.attrs.values())) for node in made]


def are_recorded(data: Sequence[Any]) -> bool:
    """Tell whether gradients are recorded for an array among the data, or in a list in it."""
    return autograd.is_recording() and any(
        array.grad is not None if isinstance(array, NDArray) else isinstance(array, (list, tuple)) and
        are_recorded(array) for array in data)
