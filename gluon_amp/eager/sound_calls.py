"""Calls of single operators whose gradient MXNet gets wrong: they run what :mod:`~gluon_amp.passes.defects` says."""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Mapping, Sequence

from mxnet import autograd
from mxnet.ndarray import NDArray

from .._mxnet.arrays import is_recorded
from .._mxnet.invoke import Invocation, Invoke, handle_of, run_operator
from .._mxnet.numpy_2 import attribute_text
from .._mxnet.symbols import dtype_name
from ..graph import VARIABLE, Graph, Node
from ..passes.defects import IN_CALLS, cured_call, may_concern


def make_sound_invoke(original: Invoke, is_on: Callable[[], bool]) -> Invoke:
    """Make a function that runs operators as ``original`` does, where their gradients are right."""
    def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
               is_np_op: bool, output_is_list: bool) -> Any:
        op = served.get(handle)
        if op is not None and out is None and autograd.is_recording() and is_on():
            graph = _graph(op, inputs, dict(zip(keys, map(attribute_text, values))))
            if graph is not None:
                return _run(original, graph, inputs, is_np_op, output_is_list)
        return original(handle, inputs, keys, values, out, is_np_op, output_is_list)

    served = _served()
    return invoke


@lru_cache(maxsize=1)
def _served() -> Mapping[int, str]:
    return {handle_of(op): op for op in IN_CALLS}


def _graph(op: str, inputs: Sequence[NDArray], attrs: Mapping[str, str]) -> Graph | None:
    """Return what is to run in place of a call; None where that is the operator."""
    def is_asked(position: int) -> bool:
        if position not in asked:
            asked[position] = is_recorded(inputs[position])
        return asked[position]

    asked: dict[int, bool] = {}
    evaluates = not autograd.is_training()
    if not may_concern(op, len(inputs), is_asked, evaluates):
        return None
    return cured_call(op, attrs, [_stand_in(position, array) for position, array in enumerate(inputs)], is_asked,
                      evaluates)


def run_with_cast_weight(invoke: Invoke, call: Invocation) -> Any:
    """Run a Deconvolution whose weight was cast, as the table says of those that are computed."""
    inputs = [Node("computed", str(position), dtypes=[dtype_name(array.dtype)], shapes=[array.shape])
              for position, array in enumerate(call.inputs)]
    graph = cured_call("Deconvolution", call.attrs(), inputs, lambda position: position == 1, evaluates=False)
    return invoke(*call) if graph is None else _run(invoke, graph, call.inputs, call.is_np_op, call.output_is_list)


def _stand_in(position: int, array: NDArray) -> Node:
    """Make what stands for an array: a variable unless it was computed."""
    # That of a user's own has a gradient where one is asked for.
    op = VARIABLE if array.grad is not None or not is_recorded(array) else "computed"
    return Node(op, str(position), dtypes=[dtype_name(array.dtype)], shapes=[array.shape])


def _run(invoke: Invoke, graph: Graph, inputs: Sequence[NDArray], is_np_op: bool, output_is_list: bool) -> Any:
    """Run a graph operator by operator."""
    made: dict[int, list[NDArray]] = {}
    for node in graph.nodes():
        if not node.inputs:
            made[id(node)] = [inputs[int(node.name)]]
        else:
            operands = [made[id(entry.node)][entry.output] for entry in node.inputs]
            made[id(node)] = run_operator(invoke, node.op, operands, node.attrs, is_np_op=is_np_op,
                                          output_is_list=True)
    (head,) = graph.heads
    outputs = made[id(head.node)]
    return outputs if output_is_list or len(outputs) > 1 else outputs[0]
