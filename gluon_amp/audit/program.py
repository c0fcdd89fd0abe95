"""Build the graph around an operator: casts, convolutions for blocked layouts, variables and their gradients."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import mxnet as mx
import numpy as np

from .._mxnet.invoke import invoke
from .._mxnet.symbols import analyse, dtype_name
from ..dtypes import BFLOAT16, BFLOAT16_DTYPE, FLOAT32
from ..graph import Entry, Graph, Node
from .records import LOW, Input, Mode, Sample, can_be_blocked
from .values import fill

__all__ = ["Plan", "Program", "as_array", "build", "caller"]


@dataclass(frozen=True)
class Plan:
    """How to run a sample.

    Attributes
    ----------
    mode : Mode
        Way of running, layout and gradients.
    dtype : str
        Type that the operator runs in.
    rounding : str
        Type that the inputs are rounded to: the one under test, for the FP32 reference too.
    context : mxnet.Context
        Device.
    """

    mode: Mode
    dtype: str
    rounding: str
    context: mx.Context


@dataclass
class Program:
    """A graph around the operator, and what its variables hold.

    Attributes
    ----------
    graph : Graph
        Its heads are the operator's visible outputs, cast back to FP32.
    arrays : dict of str to NDArray
        Contents of the variables.
    gradients : dict of str to NDArray
        Gradient buffers, by variable.
    states : list of str
        Variables that the operator changes.
    """

    graph: Graph = field(default_factory=lambda: Graph([], {"mxnet_version": ["int", 10901]}))
    arrays: dict[str, mx.nd.NDArray] = field(default_factory=dict)
    gradients: dict[str, mx.nd.NDArray] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


def build(item: Sample, plan: Plan, types: list[str]) -> Program:
    """Build the program that runs a sample.

    Parameters
    ----------
    item : Sample
        Operator, attributes and inputs.
    plan : Plan
        How to run it.
    types : list of str
        Types of the operator's visible outputs in FP32.
    """
    program = Program()
    entries = [_input(program, item, number, plan) for number in range(len(item.inputs))]
    node = Node(item.op, "op", dict(item.attrs), entries, max(len(types), 1))
    program.graph.heads = [Entry(node, number) for number in range(len(types))]
    if plan.mode.layout in ("blocked", "blocked_out"):
        _block_output(program, types, plan)
    if plan.dtype != FLOAT32:
        program.graph.heads = [_raise(head, number, plan.mode) if kind == FLOAT32 else head
                               for number, (head, kind) in enumerate(zip(program.graph.heads, types))]
    return program


def _raise(head: Entry, number: int, mode: Mode) -> Entry:
    """Cast an output back to FP32."""
    if mode.grad == "addlow":  # where the operator passes gradients through, the cast itself would have to add
        head = Entry(Node("_copy", f"copy out {number}", {}, [head]))
    return Entry(Node("amp_cast", f"cast out {number}", {"dtype": FLOAT32}, [head]))


def _input(program: Program, item: Sample, number: int, plan: Plan) -> Entry:
    """Make a variable and whatever stands between it and the operator."""
    each, name, mode = item.inputs[number], f"input {number}", plan.mode
    lowered = each.kind == LOW
    direct = lowered and mode.grad == "addlow"  # the variable itself is in low precision

    def array(value: np.ndarray) -> mx.nd.NDArray:
        return low_array(as_array(value, plan.context), plan.dtype) if direct else as_array(value, plan.context)

    program.arrays[name] = array(fill(each, plan.rounding, f"{item.op} {number}"))
    if each.aux:
        program.states.append(name)
    if item.gradient and mode.grad != "infer" and each.differentiable:
        program.gradients[name] = array(np.zeros(each.shape, np.float32))
    entry = Entry(Node("null", name))
    if not lowered or direct:
        return entry
    if mode.grad == "add":  # straight behind amp_cast MXNet loses gradients that are added up
        entry = Entry(Node("_copy", f"copy {number}", {}, [entry]))
    entry = Entry(_cast(f"cast {number}", entry, plan.dtype))
    if can_be_blocked(each) and (mode.layout in ("blocked", "blocked_in") or (mode.layout == "mixed" and number == 0)):
        return _identity_convolution(program, f"convolution {number}", entry, each.shape, plan)
    return entry


def _cast(name: str, entry: Entry, dtype: str) -> Node:
    if dtype == FLOAT32:
        return Node("_copy", name, {}, [entry])
    return Node("amp_cast", name, {"dtype": dtype}, [entry])


def _identity_convolution(program: Program, name: str, entry: Entry, shape: tuple[int, ...], plan: Plan) -> Entry:
    """Pass a tensor through a 1x1 convolution that changes its layout and nothing else."""
    channels, rank = shape[1], len(shape) - 2
    identity = np.eye(channels, dtype=np.float32).reshape((channels, channels) + (1,) * rank)
    program.arrays[f"{name} weight"] = as_array(identity, plan.context)
    weight = Entry(_cast(f"{name} cast", Entry(Node("null", f"{name} weight")), plan.dtype))
    # Dilation means nothing to a pointwise filter, and keeps oneDNN from an AMX kernel that is not sound for all maps.
    attrs = {"kernel": str((1,) * rank), "dilate": str((2,) * rank), "num_filter": str(channels), "no_bias": "True"}
    return Entry(Node("Convolution", name, attrs, [entry, weight]))


def _block_output(program: Program, types: list[str], plan: Plan) -> None:
    """Let a convolution read the first output, so that the output's gradient arrives blocked as well."""
    output = program.graph.heads[0]
    analyse(mx.sym.load_json(program.graph.to_json()), program.graph,
            {name: dtype_name(array.dtype) or "" for name, array in program.arrays.items()},
            {name: array.shape for name, array in program.arrays.items()})
    shape = output.shape
    if types[0] == FLOAT32 and output.dtype == plan.dtype and shape and can_be_blocked(Input(shape)):
        program.graph.heads[0] = _identity_convolution(program, "convolution out", output, shape, plan)


def caller(program: Program, run: str) -> Callable[[], list[mx.nd.NDArray]]:
    """Return a function that runs the program: ``'eager'``, ``'cached'`` or ``'static'``."""
    if run == "eager":
        return lambda: _interpret(program)
    symbol = mx.sym.load_json(program.graph.to_json())
    cached = mx.nd.CachedOp(symbol, [("static_alloc", True), ("static_shape", True)] if run == "static" else [])
    inputs = [program.arrays[name] for name in symbol.list_inputs()]

    def call() -> list[mx.nd.NDArray]:
        outputs = cached(*inputs)
        return outputs if isinstance(outputs, list) else [outputs]
    return call


def _interpret(program: Program) -> list[mx.nd.NDArray]:
    """Run the graph operator by operator, as non-hybridized code would."""
    values: dict[int, list[mx.nd.NDArray]] = {}
    for node in program.graph.nodes():
        if node.is_variable:
            values[id(node)] = [program.arrays[node.name]]
        else:
            inputs = [values[id(entry.node)][entry.output] for entry in node.inputs]
            values[id(node)] = invoke(node.op, inputs, node.attrs)
    return [values[id(head.node)][head.output] for head in program.graph.heads]


def as_array(value: np.ndarray, context: mx.Context) -> mx.nd.NDArray:
    """Copy a NumPy array to the device."""
    return mx.nd.array(value, ctx=context, dtype=value.dtype)


def low_array(array: mx.nd.NDArray, dtype: str) -> mx.nd.NDArray:
    """Copy an array in another precision."""
    if dtype == FLOAT32:
        return array.copy()
    return mx.nd.amp_cast(array, dtype=BFLOAT16_DTYPE if dtype == BFLOAT16 else dtype)
