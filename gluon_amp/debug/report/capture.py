"""Run a network once and note every operator: what was planned for it, and what the engine reports.

Blocks run as they would without: hybridized ones as graphs, in a cached op of their own; others operator by operator.
Parameters, running statistics and gradients are left as they were.
"""
from __future__ import annotations

from contextlib import nullcontext
from statistics import median
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ..._mxnet.arrays import cast_arrays, is_recorded
from ..._mxnet.engine import Stopwatch, run_observed
from ..._mxnet.symbols import dtype_name, input_dtypes, of_inputs
from ...convert import check_names, shapes_in
from ...dtypes import BFLOAT16, FLOAT32
from ...errors import GraphError, expected
from ...graph import Entry, Node, Role, unique_name
from ...plan.cached_op import RewritingCachedOp
from ...rules import Policy
from ...state.in_force import in_force
from ..recording.recorder import Call, recording
from ..recording.runs import arguments_of, float_arrays, make_ready, parameter_names, unchanged
from .flops import flops
from .match import Captured, GraphRan, Ran, judge_call, matched

_TIMED_RUNS = 3  # after one that makes kernels


def capture(target: Block | mx.sym.Symbol, data: Any, train: bool = False, time: bool = False) -> Captured:
    """Run a network or symbol once, and note what runs, with times if wanted."""
    call = _call(target, data, train)
    names = parameter_names(target) if isinstance(target, Block) else {}
    with unchanged(target, gradients=True) if train and isinstance(target, Block) else nullcontext():
        if not time:
            return _run(call, names, train, None)
        with Stopwatch() as stopwatch:
            runs = [_run(call, names, train, stopwatch) for _ in range(1 + _TIMED_RUNS)]
    return _with_medians(runs[1:])


def _run(call: Callable[[], Any], names: dict[int, str], train: bool, stopwatch: Stopwatch | None) -> Captured:
    listener = _Listener(names, stopwatch)
    with recording(listener):
        with autograd.record() if train else autograd.pause(train_mode=False):
            outputs = call()
        listener.end_of_forward()
        if train and stopwatch is not None:
            heads = [array for array in float_arrays(outputs) if is_recorded(array)]
            if heads:
                autograd.backward(heads)
    mx.nd.waitall()
    captured = listener.result()
    if stopwatch is not None:
        captured.other_milliseconds += stopwatch.lap()  # the backward pass of what is not in a graph
    return captured


def _with_medians(runs: Sequence[Captured]) -> Captured:
    """Return the last of several runs, with the median of each time where all ran the same operators."""
    last = runs[-1]
    if all(len(run.ran) == len(last.ran) for run in runs):
        for record, *others in zip(last.ran, *(run.ran for run in runs[:-1])):
            record.milliseconds = median([record.milliseconds, *(other.milliseconds for other in others)])
    last.other_milliseconds = median([run.other_milliseconds for run in runs])
    return last


def _call(target: Any, data: Any, train: bool) -> Any:
    if isinstance(target, mx.sym.Symbol):
        if not isinstance(data, Mapping):
            raise TypeError(expected("a dict of input names to arrays or shapes", "data", data))
        return _symbol_call(target, data, train)
    if not isinstance(target, Block):
        raise TypeError(expected("a Gluon block or a symbol", "net", target))
    arguments = arguments_of(data)
    make_ready(target, arguments)
    return lambda: target(*arguments)


def _symbol_call(symbol: mx.sym.Symbol, data: Mapping[str, Any], gradients: bool) -> Callable[[], Any]:
    """Make a function that runs a symbol on arrays or shapes; inputs that are not given are filled with ones."""
    names = symbol.list_inputs()
    check_names(data, names, "data")
    shapes, dtypes = _inferred(symbol, data)
    given = next((value for value in data.values() if isinstance(value, NDArray)), None)
    device = mx.context.current_context() if given is None else given.context
    with device:
        arrays = [data[name] if isinstance(data.get(name), NDArray) else _ones(shapes[name], dtypes[name])
                  for name in names]
    if gradients:
        arrays = [array.copy() for array in arrays]
        for array in arrays:
            if dtype_name(array.dtype) == FLOAT32:
                array.attach_grad()
    operation = RewritingCachedOp(symbol, ())
    return lambda: operation(*arrays)


def _ones(shape: tuple[int, ...], dtype: str) -> NDArray:
    if dtype == BFLOAT16:  # MXNet makes no such arrays
        return cast_arrays(mx.nd.ones(shape), BFLOAT16)
    return mx.nd.ones(shape, dtype=dtype)


def _inferred(symbol: mx.sym.Symbol, data: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    known = shapes_in(data, "data")
    shapes = {**of_inputs(symbol, symbol.infer_shape_partial(**known)), **known}
    missing = [name for name, shape in shapes.items() if not shape or 0 in shape]
    if missing or not shapes:
        raise GraphError(f"data leaves the shapes of {', '.join(missing) or 'all inputs'} unknown: give arrays or "
                         "shapes of more inputs")
    return shapes, input_dtypes(symbol, {name: value.dtype for name, value in data.items() if isinstance(value, NDArray)
                                         and dtype_name(value.dtype) != BFLOAT16})


class _Listener:
    """Collects what runs, and what the engine reports of it."""

    def __init__(self, parameters: dict[int, str], stopwatch: Stopwatch | None):
        self.stopwatch = stopwatch
        self._parameters = parameters
        self._recordings: list[GraphRan | Ran] = []
        self._by_node: dict[int, Ran] = {}  # by the ids of nodes, of what was called by itself
        # By handle; the array is kept, so that no other gets its handle.
        self._producers: dict[int, tuple[NDArray, Entry]] = {}
        self._names: set[str] = set()
        self._device: mx.Context | None = None

    def graph_called(self, block: Block | None, operation: RewritingCachedOp, args: Sequence[NDArray]) -> Any:
        """Run a hybridized block's graph."""
        self._note_device(args)
        plan = operation.plan(args)
        noted = GraphRan(block, operation.graph(args), operation.traced_graph(args), _policy(args))
        symbol, given = (operation.symbol, args) if plan is None else (plan.runs, plan.arguments(args))
        noted.operation, result = run_observed(symbol, given, noted.heard, self.stopwatch)
        self._recordings.append(noted)
        outputs = result if isinstance(result, (list, tuple)) else [result]
        for array, head in zip(outputs, noted.graph.heads):
            self._producers[array.handle.value] = (array, head)
        return result

    def operator_called(self, call: Call) -> Sequence[NDArray]:
        """Run an operator that was called by itself, and take note of it."""
        outputs = call.compute(call.inputs)
        self._note_device(call.inputs)
        time = self._time(outputs)
        prefix = call.block.prefix if call.block is not None else ""
        node = Node(call.op, unique_name(f"{prefix}{call.op.lower().strip('_')}", self._names), dict(call.attrs),
                    [self._entry(array) for array in call.inputs], len(outputs),
                    dtypes=[dtype_name(array.dtype) for array in outputs], shapes=[array.shape for array in outputs],
                    role=call.role, decision=call.decision)
        ran = Ran(node, call.block, False, call.policy, flops(node) if call.role is Role.OWN else 0, node.shapes[0],
                  milliseconds=time)
        judge_call(ran, self._by_node)
        self._recordings.append(ran)
        self._by_node[id(node)] = ran
        for position, array in enumerate(outputs):
            self._producers[array.handle.value] = (array, Entry(node, position))
        return outputs

    def _note_device(self, arrays: Sequence[NDArray]) -> None:
        if arrays and self._device is None:
            self._device = arrays[0].context

    def _time(self, outputs: Sequence[NDArray]) -> float:
        if self.stopwatch is None:
            return 0.0
        for array in outputs:
            array.wait_to_read()
        return self.stopwatch.lap()

    def _entry(self, array: NDArray) -> Entry:
        key = array.handle.value
        if key not in self._producers:
            name = self._parameters.get(id(array)) or unique_name("data", self._names)
            made = Node("null", name, dtypes=[dtype_name(array.dtype)], shapes=[array.shape])
            self._producers[key] = (array, Entry(made))
        return self._producers[key][1]

    def end_of_forward(self) -> None:
        """Take what graphs have reported so far for their forward pass, and the rest for their backward pass."""
        for noted in self._recordings:
            if isinstance(noted, GraphRan):
                noted.forward = len(noted.heard)

    def result(self) -> Captured:
        """Match what was heard with the graphs."""
        captured = Captured(device=self._device)
        for noted in self._recordings:
            if isinstance(noted, Ran):
                captured.ran.append(noted)
            else:
                captured.ran += matched(noted, captured)
        return captured


def _policy(inputs: Sequence[NDArray]) -> Policy | None:
    eager = in_force.eager(inputs)
    return None if eager is None else eager.policy
