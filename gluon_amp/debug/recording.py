"""What one run of a network did: every operator, with its time, values and gradients on request."""
from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import map_arrays, wait_for_statistics
from .._mxnet.blocks import without_a_trace
from .._mxnet.engine import Program, Stopwatch
from .._mxnet.invoke import original_invoke, run_operator
from .._mxnet.symbols import NumpySymbol, dtype_name, from_graph
from ..base import checks
from ..eager.loss_scale import loss_scale
from ..errors import StateError, expected
from ..graph import CAST, VARIABLE, Entry, Graph, Node, Role
from ..graph.attrs import parameters
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..passes.gradients import is_scale
from ..plan.cached_op import RewritingCachedOp, prepared_operations
from ..rules import Decision, Policy
from ..state.in_force import in_force
from .records import FLOATS, OpRecord, Places, Read, count_casts, observe, observe_call, of_graph

Compute = Callable[[Sequence[NDArray]], Sequence[NDArray]]


class Recording:
    """Runs the operators of one call of a network, and keeps a record of each."""

    def __init__(self, net: Block, ranges: bool, keep: bool, differentiates: bool, stopwatch: Stopwatch | None):
        self.records: list[OpRecord] = []  # in the order in which they ran
        self.count = 0  # how many of them ran in the network: the others are of the loss
        self.outputs: list[NDArray] = []  # the floating-point ones, nested results flattened
        self.losses: list[NDArray] = []
        self.policies: list[Policy] = []
        self.device: mx.Context | None = None
        self.other_milliseconds = 0.0  # of what belongs to no operator, such as sums of gradients
        self.parameter_gradients: dict[str, NDArray] = {}
        self.differentiates, self._ranges, self._keep, self._stopwatch = differentiates, ranges, keep, stopwatch
        self._names = {id(array): name for name, parameter in net.collect_params().items()
                       for array in parameter.list_data()}
        self._places = Places(net)
        self._producers: dict[int, tuple[NDArray, OpRecord, int]] = {}  # by the id of an array, which is kept alive
        self._counts: Counter[str] = Counter()

    def operators(self) -> list[OpRecord]:
        """Return the network's own operators, without those that AMP inserted."""
        return [each for each in self.records[:self.count] if not each.inserted]

    def called(self, op: str, called: str, around: Block | None, inputs: Sequence[NDArray], compute: Compute,
               attrs: Mapping[str, str] | None = None, role: Role = Role.OWN, policy: Policy | None = None,
               decision: Decision | None = None, writes: bool = False, is_whole: bool = False) -> Sequence[NDArray]:
        """Run an operator that was called by itself, under a name in the program, or of what AMP inserted."""
        # ``writes``: into arrays that were made before; ``is_whole``: a method of arrays, or another call as a whole.
        self._note(inputs, policy)
        block, path = self._places.of("", around)
        role = Role.CAST if role is Role.OWN and op == CAST else role
        made = OpRecord(f"{block}/{called}", op, op, attrs or {}, role, list(map(self._read, inputs)),
                        None, None, block, path, decision=decision, repeatable=not is_whole)
        outputs = self._run(made, inputs, compute, writes)
        observe_call(made, dtype_name(outputs[0].dtype), outputs[0].shape, policy)
        if not (writes and self.differentiates):
            self._producers.update((id(array), (array, made, i)) for i, array in enumerate(outputs))
        return outputs

    def graph_called(self, block: Block | None, operation: RewritingCachedOp, args: Sequence[NDArray]) -> Any:
        """Run a hybridized block's graph."""
        eager = in_force.eager(args)
        self._note(args, None if eager is None else eager.policy)
        graph, arrays = operation.graph(args), dict(zip(operation.names, args))
        context = args[0].context if args else mx.current_context()
        arrays.update((node.name, loss_scale.on(context)) for node in graph.variables() if is_scale(node))
        made = of_graph(graph, operation.traced_graph(args), block, self._places,
                        lambda entry: self._read(arrays[entry.node.name], entry))
        outputs = self._interpret(graph, made, arrays, context)
        if isinstance(operation.symbol, NumpySymbol):
            outputs = [array.as_np_ndarray() for array in outputs]
        for array, head in zip(outputs, graph.heads):
            if not head.node.is_variable:
                self._producers[id(array)] = array, made[id(head.node)], head.output
        return outputs[0] if len(outputs) == 1 else outputs

    def _interpret(self, graph: Graph, made: Mapping[int, OpRecord], arrays: Mapping[str, NDArray],
                   context: mx.Context) -> list[NDArray]:
        """Run a graph operator by operator."""
        nodes = graph.nodes()
        uses = Counter(entry.key for node in nodes for entry in node.inputs) + Counter(head.key for head in graph.heads)
        values: dict[tuple[int, int], NDArray] = {}
        for node in nodes:
            if node.is_variable:
                values[Entry(node).key] = arrays[node.name]
                continue
            inputs = [values[entry.key] for entry in node.inputs]
            uses.subtract(entry.key for entry in node.inputs)
            for entry in node.inputs:
                if not uses[entry.key]:
                    values.pop(entry.key, None)  # memory of large networks
            outputs = self._run(made[id(node)], inputs, self._node(node, context, graph.attrs))
            observe(made[id(node)], dtype_name(outputs[0].dtype))
            values.update((Entry(node, i).key, array) for i, array in enumerate(outputs))
        return [values[head.key] for head in graph.heads]

    def _run(self, made: OpRecord, inputs: Sequence[NDArray], compute: Compute, writes: bool = False) -> list[NDArray]:
        made.training = autograd.is_training()
        number = self._counts[made.name]
        self._counts[made.name] += 1
        if made.in_graph:
            made.count = number
        elif number:
            made.name += str(number)
        self.records.append(made)
        if not self.differentiates or writes:
            outputs = list(compute(inputs))
        else:
            made.marked = [autograd.is_recording() and is_float(array) and (
                array.grad is not None if read.source is None else bool(read.source.recorded))
                for array, read in zip(inputs, made.reads)]
            # MXNet ties all operators that read an array into one graph, a constant too: each gets its own handle.
            leaves = [_leaf_of(array) if mark else array.detach() for array, mark in zip(inputs, made.marked)]
            outputs = list(compute(leaves))
            if any(made.marked):
                made.leaves, made.recorded = leaves, outputs
                outputs = [array.detach() for array in outputs]
        made.milliseconds = self._lap(outputs)
        if self._ranges:
            made.largest = self.largest(outputs)
        if self._keep and not writes:
            made.arguments, made.outputs = list(inputs), outputs
        return outputs

    def _read(self, array: NDArray, entry: Entry | None = None) -> Read:
        """Return an input of an operator outside of graphs, or of a graph."""
        dtype, shape = (dtype_name(array.dtype), array.shape) if entry is None else (entry.dtype, entry.shape)
        found = self.source(array)
        if found is not None:
            return Read(found[0].name, dtype, shape, False, *found)
        name = self._names.get(id(array), "data" if entry is None else entry.node.name)
        return Read(name, dtype, shape, id(array) in self._names)

    def source(self, array: NDArray) -> tuple[OpRecord, int] | None:
        """Return the operator that made an array, and which output it is; None for data and parameters."""
        found = self._producers.get(id(array))
        return None if found is None else found[1:]

    def _note(self, arrays: Sequence[NDArray], policy: Policy | None) -> None:
        if arrays and self.device is None:
            self.device = arrays[0].context
        if policy is not None and not any(policy is known for known in self.policies):
            self.policies.append(policy)

    def _lap(self, arrays: Sequence[NDArray | None]) -> float:
        if self._stopwatch is None:
            return 0.0
        for array in arrays:
            if array is not None:
                array.wait_to_read()
        return self._stopwatch.lap()

    def largest(self, arrays: Sequence[NDArray | None]) -> float | None:
        """Return the largest absolute value, infinite where there is an inf or NaN; None where there is no value."""
        sizes = [np.abs(self.values(array)) for array in arrays if array is not None and is_float(array) and array.size]
        return max((float(size.max()) if np.isfinite(size).all() else np.inf for size in sizes), default=None)

    def _node(self, node: Node, context: mx.Context, graph_attrs: dict[str, Any]) -> Compute:
        if node.extra:  # operators with graphs inside, such as loops
            return _cached(node, graph_attrs)
        attrs = parameters(node.attrs)
        if not node.inputs and context.device_type != "cpu":
            attrs["ctx"] = str(context)
        if not node.inputs and "shape" in attrs and node.shapes and node.shapes[0]:  # it may have been left open
            attrs["shape"] = str(node.shapes[0])
        return lambda inputs: self.call(node.op, inputs, attrs)

    def call(self, op: str, inputs: Sequence[NDArray], attrs: Mapping[str, Any]) -> list[NDArray]:
        """Run an operator past AMP, unrecorded."""
        return run_operator(original_invoke, op, inputs, attrs, output_is_list=True)

    def backward(self, seeds: Iterable[tuple[NDArray, NDArray]], scale: float = 1.0) -> None:
        """Compute the gradients of everything recorded, operator by operator, from arrays and their gradients."""
        totals: dict[tuple[int, int], NDArray] = {}
        with loss_scale.at(scale):
            for array, gradient in seeds:
                found = self.source(array)
                if found is not None:
                    self._add(totals, (id(found[0]), found[1]), gradient)
            for made in reversed(self.records):
                self._differentiated(made, totals)
        self.other_milliseconds += self._lap(())

    def _differentiated(self, made: OpRecord, totals: dict[tuple[int, int], NDArray]) -> None:
        """Take the gradients of an operator's outputs, and add what it contributes to those of its inputs."""
        gradients = [totals.pop((id(made), i), None) for i in range(max(len(made.outputs), len(made.recorded)))]
        heads = [(output, gradient) for output, gradient in zip(made.recorded, gradients) if gradient is not None]
        contributed = _per_input(heads, made.leaves, made)
        made.milliseconds += self._lap(contributed)
        made.leaves = made.recorded = ()  # MXNet frees what it keeps
        if self._keep:
            made.gradients, made.input_gradients = gradients, contributed
        elif self._ranges:
            made.largest_gradient = self.largest([*gradients, *contributed])
        for read, gradient in zip(made.reads, contributed):
            if gradient is not None and read.source is not None:
                self._add(totals, (id(read.source), read.output), gradient)
            elif gradient is not None and read.is_parameter:
                self._add(self.parameter_gradients, read.name, gradient)

    def _add(self, totals: dict[Any, NDArray], key: Any, gradient: NDArray) -> None:
        if key in totals:
            gradient = self.call("elemwise_add", [totals[key], gradient], {})[0]
            self.other_milliseconds += self._lap([gradient])
        totals[key] = gradient

    def again(self, made: OpRecord, run: Callable[..., Sequence[NDArray]] | None = None,
              as_cast: bool = False) -> OpRecord:
        """Run an operator once more, alone, in FP32 on its inputs before AMP's casts and its incoming gradients."""
        # ``run`` takes its name, inputs and parameters; MXNet's kernel without it. ``as_cast``: on inputs after casts.
        arrays = list(map(self.in_fp32, made.arguments if as_cast else made.originals))
        inputs = [_leaf_of(array) if mark else array.copy() for array, mark in zip(arrays, made.marked)]
        attrs = parameters(made.attrs)
        with autograd.record(train_mode=made.training) if any(made.marked) else autograd.pause(made.training):
            outputs = list((run or self.call)(made.kernel, inputs, attrs))
        heads = [(output, self.in_fp32(gradient)) for output, gradient in zip(outputs, made.gradients)
                 if gradient is not None]
        return replace(made, outputs=[array.detach() for array in outputs],
                       input_gradients=_per_input(heads, inputs, made))

    def in_fp32(self, array: NDArray) -> NDArray:
        """Return an array as it is, or cast up from low precision."""
        if dtype_name(array.dtype) not in (FLOAT16, BFLOAT16):
            return array
        with autograd.pause():
            return self.call(CAST, [array], {"dtype": FLOAT32})[0]

    def values(self, array: NDArray) -> np.ndarray:
        """Return the values of an array, low-precision ones in float32."""
        if isinstance(array, BaseSparseNDArray):
            array = array.tostype("default")
        return (self.in_fp32(array) if dtype_name(array.dtype) == BFLOAT16 else array).asnumpy()


def _per_input(heads: Sequence[tuple[NDArray, NDArray]], inputs: Sequence[NDArray],
               made: OpRecord) -> list[NDArray | None]:
    """Return the gradient of each input, None where there is none, from outputs and their gradients."""
    leaves = [array for array, mark in zip(inputs, made.marked) if mark]
    gradients = [None] * len(leaves)
    if heads and leaves:
        outputs, given = map(list, zip(*heads))
        try:
            gradients = autograd.grad(outputs, leaves, head_grads=given, retain_graph=False, train_mode=made.training)
        except mx.MXNetError as error:  # the operator has no gradient
            if "non-differentiable" not in str(error):
                raise
    dense = (array.tostype("default") if isinstance(array, BaseSparseNDArray) else array for array in gradients)
    return [next(dense) if mark else None for mark in made.marked]


def _leaf_of(array: NDArray) -> NDArray:
    """Return the values of an array as one that gradients are taken of."""
    leaf = array.detach()
    autograd.mark_variables([leaf], [array.detach()])  # gradients are fetched: the buffer is never written
    return leaf


def _cached(node: Node, graph_attrs: dict[str, Any]) -> Compute:
    """Make a program of one node; without MXNet's version among the attributes of its graph MXNet adds inputs."""
    names = [f"input{i}" for i in range(len(node.inputs))]
    alone = replace(node, inputs=[Entry(Node(VARIABLE, name)) for name in names], after=[])
    program = Program(from_graph(Graph([Entry(alone, i) for i in range(node.num_outputs)], graph_attrs),
                                 mx.sym.Variable("like")), {})

    def compute(arrays: Sequence[NDArray]) -> Sequence[NDArray]:
        mx.nd.waitall()  # as well for the layouts of what it reads
        return program(dict(zip(names, arrays)))
    return compute


def planned(net: Block) -> tuple[list[OpRecord], str]:
    """Return the operators that a network's last hybridized call under AMP ran, as planned, and the kind of device."""
    operations = prepared_operations(net) if in_force.is_on() else []
    plans = [(block, operation.latest) for block, operation in operations if operation.latest is not None]
    places, names = Places(net), set(net.collect_params().keys())
    made = [each for block, plan in plans for each in of_graph(
        plan.graph, plan.traced.analysed(plan.dtypes, plan.shapes), block, places,
        lambda entry: Read(entry.node.name, entry.dtype, entry.shape, entry.node.name in names)).values()]
    count_casts(made)
    return made, plans[0][1].facts.device if plans else ""


def is_float(array: Any) -> bool:
    """Tell whether a value is a dense array of floating-point numbers."""
    dense = isinstance(array, NDArray) and not isinstance(array, BaseSparseNDArray)
    return dense and dtype_name(array.dtype) in FLOATS


def float_arrays(value: Any) -> list[NDArray]:
    """Return the floating-point arrays of nested lists, tuples and dicts."""
    arrays: list[NDArray] = []
    map_arrays(arrays.append, value)
    return [array for array in arrays if is_float(array)]


def ready(net: Block, data: Any) -> tuple:
    """Return the arguments of a network's call; give a shape to parameters that wait for their first data."""
    arguments = tuple(data) if isinstance(data, (list, tuple)) else (data,)
    arrays: list[NDArray] = []
    map_arrays(arrays.append, arguments)
    if not arrays:
        raise TypeError(expected("an array, or a tuple with the arguments of the network's call", "data", data))
    checks.instance("net", net, Block, "a Gluon block")
    try:
        for parameter in net.collect_params().values():
            parameter.list_data()
    except DeferredInitializationError:
        with without_a_trace(net), autograd.pause():
            net(*arguments)
    except RuntimeError as error:
        raise StateError(f"the network's parameters are not initialized ({error}). Call net.initialize() or load "
                         "them first") from error
    return arguments


@contextmanager
def unchanged(net: Block) -> Iterator[None]:
    """Restore the arrays that a run changes: gradients, and those that are not trained, such as running statistics."""
    arrays = [array for parameter in net.collect_params().values()
              for array in (parameter.list_data() if parameter.grad_req == "null" else parameter.list_grad())]
    wait_for_statistics()
    saved = [array.copy() for array in arrays]
    try:
        yield
    finally:
        wait_for_statistics()
        for array, before in zip(arrays, saved):
            before.copyto(array)
