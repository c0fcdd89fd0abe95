"""Calls of operators whose gradient MXNet gets wrong: they run what :mod:`~gluon_amp.passes.gradient_fixes` says.

Gradients of gradients MXNet has of dense layers in FP32, but neither of casts nor in low precision. While a network
runs nobody knows that its gradients will be differentiated. A sign of it is that its data has a gradient buffer, as for
gradient penalties: dense layers that MXNet could differentiate twice keep FP32 then.
"""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Mapping, Sequence, Tuple

from mxnet import autograd
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import is_recorded
from .._mxnet.invoke import Invocation, Invoke, run_operator
from .._mxnet.operators import handle_of, registered_operators
from .._mxnet.symbols import dtype_name
from ..graph import VARIABLE, Graph, Node
from ..passes.gradient_fixes import calls_to_fix, fixed_call, is_call_concerned

NOT_TWICE = ("AMP is on, and MXNet differentiates neither casts nor operators in low precision twice. For gradients of "
             "gradients run the network and autograd.grad inside `with amp.autocast(enabled=False):`, and do not "
             "hybridize it: MXNet has none of hybridized networks")
TWICE_DIFFERENTIABLE = frozenset(("FullyConnected", "dot", "batch_dot"))
# Of an array: whether its gradient is asked for, whether it is a variable, its type and shape; no type of sparse ones.
_Operand = Tuple[bool, bool, "str | None", Tuple[int, ...]]


def make_fixing_invoke(original: Invoke, is_on: Callable[[], bool]) -> Invoke:
    """Make a function that runs operators as ``original`` does, where their gradients are right before AMP's casts."""
    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        op = served.get(handle)
        if op is None or out is not None or not autograd.is_recording() or not is_on():
            return original(handle, inputs, keys, values, out, is_np_op, output_is_list)
        return _run(original, op, Invocation(handle, inputs, keys, values, out, is_np_op, output_is_list),
                    behind_casts=False)

    served = {handle_of(op): op for op in calls_to_fix(behind_casts=False)}
    return invoke


def fixing_invocations() -> Mapping[int, Callable[[Invoke, Invocation], Any]]:
    """Return how to run imperative calls whose gradients are wrong behind AMP's casts, by the operators' handles."""
    def run_of(op: str) -> Callable[[Invoke, Invocation], Any]:
        return lambda invoke, call: _run(invoke, op, call, behind_casts=True)

    known = set(registered_operators().values())
    return {handle_of(op): run_of(op) for op in calls_to_fix(behind_casts=True) if op in known}


def _run(invoke: Invoke, op: str, call: Invocation, behind_casts: bool) -> Any:
    """Run a call, operator by operator where the table says that others have to stand around it."""
    graph = _fixed(op, call, behind_casts)
    if graph is None:
        return invoke(*call)
    made: dict[int, list[NDArray]] = {}
    (head,) = graph.heads
    for node in graph.nodes():
        if not node.inputs:
            made[id(node)] = [call.inputs[int(node.name)]]
        else:
            operands = [made[id(entry.node)][entry.output] for entry in node.inputs]
            out = call.out if node is head.node else None
            made[id(node)] = run_operator(invoke, node.op, operands, node.attrs, out, call.is_np_op,
                                          output_is_list=True)
    outputs = made[id(head.node)]
    return call.out if call.out is not None else outputs if call.output_is_list or len(outputs) > 1 else outputs[0]


def _fixed(op: str, call: Invocation, behind_casts: bool) -> Graph | None:
    """Return what is to run in place of a call; None where that is the operator."""
    def is_asked(position: int) -> bool:
        if position not in asked:
            asked[position] = is_recorded(call.inputs[position])
        return asked[position]

    asked: dict[int, bool] = {}
    evaluates = not autograd.is_training()
    if not is_call_concerned(op, len(call.inputs), is_asked, evaluates, behind_casts):
        return None
    return _graph(op, frozenset(call.attrs().items()), tuple(map(_operand, call.inputs)), evaluates, behind_casts)


def _operand(array: NDArray) -> _Operand:
    # A user's own array has a gradient where one is asked for.
    asked = is_recorded(array)
    dtype = None if isinstance(array, BaseSparseNDArray) else dtype_name(array.dtype)
    return asked, array.grad is not None or not asked, dtype, array.shape


@lru_cache(maxsize=256)
def _graph(op: str, attrs: frozenset[tuple[str, str]], operands: tuple[_Operand, ...], evaluates: bool,
           behind_casts: bool) -> Graph | None:
    nodes = [Node(VARIABLE if is_variable else "computed", str(position), dtypes=[dtype], shapes=[shape])
             for position, (_, is_variable, dtype, shape) in enumerate(operands)]
    return fixed_call(op, dict(attrs), nodes, lambda position: operands[position][0], evaluates, behind_casts)


def are_recorded(data: Sequence[Any]) -> bool:
    """Tell whether gradients are recorded for an array among the data, or in a list in it."""
    return autograd.is_recording() and any(
        array.grad is not None if isinstance(array, NDArray) else isinstance(array, (list, tuple)) and
        are_recorded(array) for array in data)
