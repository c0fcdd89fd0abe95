"""Hooks and monitors see the program's operators, under the program's names and in the program's types."""
from __future__ import annotations

import ctypes
from typing import Callable, NamedTuple

from mxnet import autograd
from mxnet.base import NDArrayHandle
from mxnet.ndarray import NDArray

from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import dtype_name
from ..dtypes import FLOAT32, LOW_PRECISION
from ..errors import StateError
from ..graph import BODIES, Entry, Graph, Node, Role, named_by
from .planner import Plan

_OUTPUT = "_output"
_FIRST_OUTPUT = ("output", "0")  # as executors and cached ops call it
# The inputs of convolutions, as executors call them, and the axes that have channels.
_INPUTS = {"data": 0, "weight": 1, "bias": 2}
_CHANNEL_AXES = ((1,), (0, 1), (0,))
ExecutorCallback = Callable[[bytes, int], None]
OperatorCallback = Callable[[bytes, bytes, int], None]


def refuse_inputs_of_loops(graph: Graph, monitor_all: bool) -> None:
    """Raise StateError where a hook or monitor asks for what loops or branches read, for which MXNet has no names."""
    names = [node.name for node in graph.operators() if monitor_all and node.op in BODIES]
    if names:
        raise StateError(f"expected monitor_all=False for a network with loops or branches ({', '.join(names[:3])}), "
                         "received True: MXNet cannot name their inputs, and fails")


class _Tensor(NamedTuple):
    """The arguments of a hook: the name, the operator, and the array's handle."""

    name: bytes
    op: bytes
    handle: int


class _Observer:
    """Translates the engine's reports on a rewritten graph."""

    def __init__(self, plan: Plan):
        nodes = plan.graph.nodes()
        self.nodes = {node.name: node for node in nodes}
        self.ops = {node.name: node.op for node in plan.traced.graph.operators()}
        # A node that a pass has changed gives its result through another.
        self.replaced = {node.stands_for for node in nodes if node.stands_for}
        self.own = _own_tensors(plan)
        self.waiting: dict[str, bytes] = {}  # names of results that another node will give

    def translate(self, name: bytes, handle: int) -> _Tensor | None:
        """Return a tensor as the program knows it; None for one that is not the program's."""
        array = NDArray(ctypes.cast(handle, NDArrayHandle), writable=False)  # frees the handle when it goes
        node = self._owner(name.decode(), array.shape)
        if node is None:
            return _handed_over(array, self._of_fused(name.decode()).encode(), "", is_own=False)
        if node.name in self.replaced:
            position = _INPUTS.get(name.decode()[len(node.name) + 1:])
            if position is not None and position < len(node.inputs):
                return self._input(array, name, node, position)
            self.waiting[node.name] = name
            return None
        if node.stands_for and name.decode()[len(node.name) + 1:] in _FIRST_OUTPUT:
            name = self.waiting.pop(node.stands_for, name)
        elif node.role is not Role.OWN:
            return None
        known = self.nodes[node.stands_for or node.name]
        is_own = any(dtype in LOW_PRECISION for dtype in known.dtypes)
        return _handed_over(array, name, self.ops.get(known.name, known.op), is_own)

    def _input(self, array: NDArray, name: bytes, node: Node, position: int) -> _Tensor:
        """Return the input of a node with padded channels, without the channels that were appended."""
        source = node.inputs[position]
        while source.node.role is not Role.OWN:
            source = source.node.inputs[0]
        is_own = any(dtype in LOW_PRECISION for dtype in source.node.dtypes)
        with autograd.pause():
            array = array if is_own else cast_arrays(array, FLOAT32)
            for axis, size in enumerate(source.shape or ()):
                if axis in _CHANNEL_AXES[position] and array.shape[axis] > size:
                    array = array.slice_axis(axis=axis, begin=0, end=size)
        return _handed_over(array, name, self.ops.get(node.name, node.op), is_own)

    def _of_fused(self, name: str) -> str:
        """Return the program's name of a fused operator's input: MXNet names it by the tensor, which may be a cast."""
        stem, _, number = name.rpartition(_OUTPUT)  # the number tells uses of one tensor apart
        for letter in range(len(stem)):
            if stem[letter] == "_" and stem[letter + 1:] in self.own:
                return stem[:letter + 1] + self.own[stem[letter + 1:]] + number
        return name

    def _owner(self, name: str, shape: tuple[int, ...]) -> Node | None:
        """Return the node that a tensor belongs to; a variable's tensor has its very name."""
        found = [self.nodes[each] for each in (name, *named_by(name)) if each in self.nodes]
        if len(found) > 1 and found[0].is_variable and found[0].shapes[0] != shape and found[1].name in self.replaced:
            return found[1]  # the input of a node with padded channels has the variable's name as well
        return found[0] if found else None


def _own_tensors(plan: Plan) -> dict[str, str]:
    """Map the nodes that passes put in to the names of the program's tensors that they are made of."""
    known = set(plan.traced.symbol.get_internals().list_outputs())
    made = {}
    for node in plan.graph.operators():
        source = Entry(node)
        while source.node.role is not Role.OWN and source.node.inputs:
            source = source.node.inputs[0]
        if node.role is not Role.OWN and source.node.role is Role.OWN:
            names = (source.node.name, source.node.name + _OUTPUT, f"{source.node.name}{_OUTPUT}{source.output}")
            made[node.name] = next((name for name in names if name in known), names[1])
    return made


def _handed_over(array: NDArray, name: bytes, op: str, is_own: bool) -> _Tensor:
    """Give an array to a hook, which frees it; in FP32 unless its low precision is the program's own."""
    if not is_own and dtype_name(array.dtype) in LOW_PRECISION:
        with autograd.pause():
            array = cast_arrays(array, FLOAT32)
    handle, array.handle = array.handle, NDArrayHandle()
    return _Tensor(name, op.encode(), handle.value)


def executor_callback(plan: Plan, callback: ExecutorCallback) -> ExecutorCallback:
    """Make the callback of an executor, of the user's callback."""
    observer = _Observer(plan)

    def report(name: bytes, handle: int) -> None:
        tensor = observer.translate(name, handle)
        if tensor is not None:
            callback(tensor.name, tensor.handle)
    return report


def operator_callback(plan: Plan, callback: OperatorCallback) -> OperatorCallback:
    """Make the callback of a cached op, of the user's callback."""
    observer = _Observer(plan)

    def report(name: bytes, op: bytes, handle: int) -> None:
        tensor = observer.translate(name, handle)
        if tensor is not None:
            callback(tensor.name, tensor.op or op, tensor.handle)
    return report
