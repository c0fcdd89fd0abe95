"""A tape: every operator that runs, with what it read and gave, and a backward pass that keeps every gradient.

Operators are recorded one at a time, each on arrays cut off from what made them, so that MXNet's own backward of each
runs alone, and what every operator adds to every gradient is known. Cached ops run node by node meanwhile.
"""
from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..._mxnet.blocks import Owners
from ..._mxnet.invoke import UpstreamCachedOp, original_invoke, run_operator
from ..._mxnet.symbols import NumpySymbol, dtype_name, from_graph
from ...dtypes import BFLOAT16, FLOAT16, FLOAT32
from ...eager.loss_scale import loss_scale
from ...graph import CAST, Entry, Graph, Node
from ...graph.attrs import parameters
from ...passes.gradients import is_scale
from ...plan.cached_op import RewritingCachedOp
from .events import Event, Rerun, Source, is_float
from .recorder import Call, Compute, recording


@contextmanager
def taped() -> Iterator[Tape]:
    """Record what the current thread runs in the body on a tape."""
    tape = Tape()
    with recording(tape, methods=True):
        yield tape


class Tape:
    """Records operators, and differentiates them one by one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.parameter_gradients: dict[int, NDArray] = {}  # by the id of a parameter's array
        self._producers: dict[int, Source] = {}
        self._counts: Counter[str] = Counter()
        self._aliases: list[NDArray] = []  # kept alive, so that no other array gets their id
        self._owners: dict[int, Owners] = {}

    def operator_called(self, call: Call) -> Sequence[NDArray]:
        """Run an operator that was called by itself."""
        if call.writes:
            return call.compute(call.inputs)
        block = call.block.name if call.block is not None else ""
        return self._run(call, f"{block}/{call.called or '+' + call.op}")

    def graph_called(self, block: Block | None, operation: RewritingCachedOp, args: Sequence[NDArray]) -> Any:
        """Run a hybridized block's graph node by node."""
        outputs = self._interpret(operation.graph(args), dict(zip(operation.names, args)), block)
        if isinstance(operation.symbol, NumpySymbol):
            outputs = [self._alias(array.as_np_ndarray(), array) for array in outputs]
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, call: Call, name: str, in_graph: bool = False) -> list[NDArray]:
        marked = [autograd.is_recording() and self._is_differentiable(array) for array in call.inputs]
        # MXNet ties all operators that read an array into one graph, a constant too: each gets its own handle.
        inputs = [_leaf_of(array) if mark else array.detach() for array, mark in zip(call.inputs, marked)]
        outputs = list(call.compute(inputs))
        event = Event(call.op, name, self._counts[name], call.block.name if call.block is not None else "", call.attrs,
                      call.role, call.decision, list(call.inputs), inputs,
                      [self.source(array) for array in call.inputs], marked=marked, training=autograd.is_training(),
                      repeatable=not call.is_method, in_graph=in_graph)
        self._counts[name] += 1
        event.outputs = [array.detach() for array in outputs] if any(marked) else outputs
        event.recorded = outputs if any(marked) else []
        self._producers.update((id(array), Source(event, i)) for i, array in enumerate(event.outputs))
        self.events.append(event)
        return event.outputs

    def source(self, array: NDArray) -> Source | None:
        """Return the operator that made an array; None for data and parameters."""
        return self._producers.get(id(array))

    def _is_differentiable(self, array: NDArray) -> bool:
        source = self._producers.get(id(array))
        return is_float(array) and (bool(source.event.recorded) if source else array.grad is not None)

    def _alias(self, array: NDArray, of: NDArray) -> NDArray:
        """Note that an array is another form of one that an operator made; return it."""
        source = self.source(of)
        if source is not None:
            self._producers[id(array)] = source
            self._aliases.append(array)
        return array

    def _interpret(self, graph: Graph, arrays: Mapping[str, NDArray], around: Block | None) -> list[NDArray]:
        """Run a graph node by node."""
        values: dict[tuple[int, int], NDArray] = {}
        context = next(iter(arrays.values())).context if arrays else mx.current_context()
        if id(around) not in self._owners:
            self._owners[id(around)] = Owners(around)
        owners = self._owners[id(around)]
        for node in graph.nodes():
            if node.is_variable:
                values[Entry(node).key] = loss_scale.on(context) if is_scale(node) else arrays[node.name]
                continue
            arguments = [values[entry.key] for entry in node.inputs]
            call = Call(node.op, node.op, owners.of(node.name) or around, arguments, self._node(node, context),
                        node.attrs, node.role, decision=node.decision, is_method=bool(node.extra))
            outputs = self._run(call, node.name, in_graph=True)
            values.update((Entry(node, i).key, array) for i, array in enumerate(outputs))
        return [values[head.key] for head in graph.heads]

    def _node(self, node: Node, context: mx.Context) -> Compute:
        if node.extra:  # operators with graphs inside, such as loops
            return _cached(node)
        attrs = parameters(node.attrs)
        if not node.inputs:
            attrs.update(_made_from_nothing(node, context))
        return lambda inputs: self.call(node.op, inputs, attrs)

    def call(self, op: str, inputs: Sequence[NDArray], attrs: Mapping[str, Any]) -> list[NDArray]:
        """Run an operator past AMP and past the tape."""
        return run_operator(original_invoke, op, inputs, attrs, output_is_list=True)

    def backward(self, seeds: Iterable[tuple[NDArray, NDArray]], scale: float = 1.0) -> None:
        """Compute the gradients of everything recorded, operator by operator, from arrays and their gradients."""
        with loss_scale.at(scale):
            self._backward(seeds)

    def _backward(self, seeds: Iterable[tuple[NDArray, NDArray]]) -> None:
        totals: dict[tuple[int, int], NDArray] = {}
        for array, gradient in seeds:
            source = self._producers.get(id(array))
            if source is not None:
                self._add(totals, (id(source.event), source.output), gradient)
        for event in reversed(self.events):
            event.gradients = [totals.pop((id(event), i), None) for i in range(len(event.outputs))]
            event.input_gradients = self._differentiated(event)
            for array, source, gradient in zip(event.arguments, event.sources, event.input_gradients):
                if gradient is not None and source is not None:
                    self._add(totals, (id(source.event), source.output), gradient)
                elif gradient is not None:
                    self._add(self.parameter_gradients, id(array), gradient)

    def _differentiated(self, event: Event) -> list[NDArray | None]:
        """Return what an operator contributes to the gradients of its inputs; None where nothing."""
        heads = [(output, gradient) for output, gradient in zip(event.recorded, event.gradients)
                 if gradient is not None]
        event.recorded = []  # MXNet frees what it keeps
        return _per_input(heads, event.inputs, event)

    def again(self, event: Event, run: Callable[..., Sequence[NDArray]] | None = None, as_cast: bool = False) -> Rerun:
        """Run an operator once more, alone, in FP32 on its inputs before AMP's casts and its incoming gradients."""
        # ``run`` takes its name, inputs and parameters; MXNet's kernel without it. ``as_cast``: on inputs after casts.
        given = event.inputs if as_cast else [event.original(position)[0] for position in range(len(event.inputs))]
        arrays = list(map(self.in_fp32, given))
        inputs = [_leaf_of(array) if mark else array.copy() for array, mark in zip(arrays, event.marked)]
        attrs = parameters(event.attrs)
        with autograd.record(train_mode=event.training) if any(event.marked) else autograd.pause(event.training):
            outputs = list((run or self.call)(event.op, inputs, attrs))
        heads = [(output, self.in_fp32(gradient)) for output, gradient in zip(outputs, event.gradients)
                 if gradient is not None]
        return Rerun([array.detach() for array in outputs], _per_input(heads, inputs, event))

    def in_fp32(self, array: NDArray) -> NDArray:
        """Return an array as it is, or cast up from low precision."""
        if dtype_name(array.dtype) not in (FLOAT16, BFLOAT16):
            return array
        with autograd.pause():
            return self.call(CAST, [array], {"dtype": FLOAT32})[0]

    def _add(self, totals: dict, key: Any, gradient: NDArray) -> None:
        totals[key] = self.call("elemwise_add", [totals[key], gradient], {})[0] if key in totals else gradient

    def values(self, array: NDArray) -> np.ndarray:
        """Return the values of an array, low-precision ones in float32."""
        if isinstance(array, BaseSparseNDArray):
            array = array.tostype("default")
        return (self.in_fp32(array) if dtype_name(array.dtype) == BFLOAT16 else array).asnumpy()


def _per_input(heads: Sequence[tuple[NDArray, NDArray]], inputs: Sequence[NDArray],
               event: Event) -> list[NDArray | None]:
    """Return the gradient of each input, None where there is none, from outputs and their gradients."""
    leaves = [array for array, mark in zip(inputs, event.marked) if mark]
    gradients = iter(_gradients_of(heads, leaves, event.training) if heads and leaves else [None] * len(leaves))
    return [next(gradients) if mark else None for mark in event.marked]


def _gradients_of(heads: Sequence[tuple[NDArray, NDArray]], leaves: Sequence[NDArray],
                 training: bool) -> list[NDArray | None]:
    """Return the gradients of marked arrays; None for all where the operator has no gradient."""
    outputs, gradients = zip(*heads)
    try:
        per_leaf = autograd.grad(list(outputs), list(leaves), head_grads=list(gradients), retain_graph=False,
                                 train_mode=training)
    except mx.MXNetError as error:
        if "non-differentiable" not in str(error):
            raise
        return [None] * len(leaves)
    return [array.tostype("default") if isinstance(array, BaseSparseNDArray) else array for array in per_leaf]


def _leaf_of(array: NDArray) -> NDArray:
    """Return the values of an array as one that gradients are taken of."""
    leaf = array.detach()
    autograd.mark_variables([leaf], [array.detach()])  # gradients are fetched: the buffer is never written
    return leaf


def _made_from_nothing(node: Node, context: mx.Context) -> dict[str, str]:
    """Return what an operator without inputs gets from the graph around it: its device, and its shape if open."""
    shape = node.shapes[0] if node.shapes else None
    attrs = {} if context.device_type == "cpu" else {"ctx": str(context)}
    return {**attrs, "shape": str(shape)} if "shape" in node.attrs and shape else attrs


def _cached(node: Node) -> Compute:
    """Make a cached op of one node."""
    inputs = [Entry(Node("null", f"input{i}")) for i in range(len(node.inputs))]
    alone = Node(node.op, node.name, node.attrs, inputs, node.num_outputs, node.extra)
    symbol = from_graph(Graph([Entry(alone, i) for i in range(node.num_outputs)]), mx.sym.Variable("like"))
    order = [int(name[len("input"):]) for name in symbol.list_inputs()]
    operation = UpstreamCachedOp(symbol)

    def compute(arrays: Sequence[NDArray]) -> Sequence[NDArray]:
        outputs = operation(*(arrays[i] for i in order))
        return outputs if isinstance(outputs, list) else [outputs]
    return compute
