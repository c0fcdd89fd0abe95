"""The graph around an operator: casts, convolutions for blocked layouts, variables and their gradients."""
from __future__ import annotations

from typing import Callable

import mxnet as mx
import numpy as np

from gluon_amp._mxnet.arrays import cast_arrays
from gluon_amp._mxnet.invoke import invoke
from gluon_amp._mxnet.symbols import analyse, dtype_name
from gluon_amp.dtypes import FLOAT32
from gluon_amp.graph import VARIABLE, Entry, Graph, Node
from gluon_amp.graph.edit import cast, operator

from .modes import Mode
from .samples.sample import LOW, Input, Sample
from .values import fill

_RUNS = 2  # the second run of a CachedOp reuses its buffers


class Program:
    """A graph around a sample's operator, and what its variables hold."""

    def __init__(self, item: Sample, mode: Mode, dtype: str, rounding: str, context: mx.Context, types: list[str]):
        self._item, self._mode, self._dtype, self._rounding, self._context = item, mode, dtype, rounding, context
        self._arrays: dict[str, mx.nd.NDArray] = {}
        self._gradients: dict[str, mx.nd.NDArray] = {}
        self._floats = [number for number, kind in enumerate(types) if kind == FLOAT32]
        inputs = list(map(self._input, range(len(item.inputs))))
        self._node = Node(item.op, "op", item.attrs_in(dtype), inputs, max(len(types), 1))
        self._graph = Graph([Entry(self._node, number) for number in range(len(types))],
                            {"mxnet_version": ["int", 10901]})
        heads = self._graph.heads
        if mode.layout in ("blocked", "blocked_out") and 0 in self._floats:
            self._block_output()
        for number in self._floats if dtype != FLOAT32 else ():
            if mode.grad == "addlow":  # where the operator passes gradients through, the cast itself would have to add
                heads[number] = _copy(heads[number], f"copy out {number}")
            heads[number] = cast(heads[number], FLOAT32, f"cast out {number}")

    def _array(self, value: np.ndarray) -> mx.nd.NDArray:
        return mx.nd.array(value, ctx=self._context, dtype=value.dtype)

    def _input(self, number: int) -> Entry:
        """Make a variable and whatever stands between it and the operator."""
        each, name, mode = self._item.inputs[number], f"input {number}", self._mode
        is_low_variable = each.kind == LOW and mode.grad == "addlow"

        def variable(value: np.ndarray) -> mx.nd.NDArray:
            return cast_arrays(self._array(value), self._dtype) if is_low_variable else self._array(value)

        self._arrays[name] = variable(fill(each, self._rounding, f"{self._item.seed} {number}"))
        if self._item.gradient and mode.grad != "infer" and each.differentiable:
            self._gradients[name] = variable(np.zeros(each.shape, np.float32))
        entry = Entry(Node(VARIABLE, name))
        if each.kind != LOW or is_low_variable:
            is_added = name in self._gradients and mode.grad != "write"
            return _copy(entry, f"copy {number}") if is_added and self._item.needs_identities else entry
        if mode.grad == "add":  # straight behind amp_cast MXNet loses gradients that are added up
            entry = _copy(entry, f"copy {number}")
        entry = self._cast(entry, f"cast {number}")
        blocked = ("blocked", "blocked_in", "mixed") if number == 0 else ("blocked", "blocked_in")
        if each.can_be_blocked and mode.layout in blocked:
            return self._identity_convolution(entry, f"convolution {number}", each.shape)
        return entry

    def _cast(self, entry: Entry, name: str) -> Entry:
        """Cast to the type under test; a control in FP32 has as many operators."""
        return _copy(entry, name) if self._dtype == FLOAT32 else cast(entry, self._dtype, name)

    def _identity_convolution(self, entry: Entry, name: str, shape: tuple[int, ...]) -> Entry:
        """Pass a tensor through a 1x1 convolution that changes its layout and nothing else."""
        channels, rank = shape[1], len(shape) - 2
        identity = np.eye(channels, dtype=np.float32).reshape((channels, channels) + (1,) * rank)
        self._arrays[f"{name} weight"] = self._array(identity)
        weight = self._cast(Entry(Node(VARIABLE, f"{name} weight")), f"{name} cast")
        # A pointwise filter ignores dilation, which keeps oneDNN from an AMX kernel that is not sound for all maps.
        return Entry(operator("Convolution", name, [entry, weight], entry, kernel=(1,) * rank, dilate=(2,) * rank,
                              num_filter=channels, no_bias=True))

    def _block_output(self) -> None:
        """Let a convolution read the first output, so that the output's gradient arrives blocked as well."""
        output = self._graph.heads[0]
        analyse(mx.sym.load_json(self._graph.to_json()), self._graph,
                {name: dtype_name(array.dtype) or "" for name, array in self._arrays.items()},
                {name: array.shape for name, array in self._arrays.items()})
        if output.dtype == self._dtype and output.shape and Input(output.shape).can_be_blocked:
            self._graph.heads[0] = self._identity_convolution(output, "convolution out", output.shape)

    def run(self) -> dict[str, np.ndarray]:
        """Run the program twice; return outputs, gradients and changed states by name."""
        call, is_training = self._caller(), self._mode.grad != "infer"
        if self._gradients:
            mx.autograd.mark_variables([self._arrays[name] for name in self._gradients],
                                       list(self._gradients.values()),
                                       "write" if self._mode.grad == "write" else "add")
        for _ in range(_RUNS):
            mx.random.seed(7)
            with mx.autograd.record() if is_training else mx.autograd.pause():
                outputs = call()
            if self._gradients and self._floats:
                gradients = [fill(Input(outputs[number].shape), self._rounding, f"head {number}")
                             for number in self._floats]
                mx.autograd.backward([outputs[number] for number in self._floats], list(map(self._array, gradients)))
        tensors = {f"output {number}": output for number, output in enumerate(outputs)}
        if self._floats:
            tensors.update({f"gradient of {name}": value for name, value in self._gradients.items()})
        tensors.update({f"state input {number}": self._arrays[f"input {number}"]
                        for number, each in enumerate(self._item.inputs) if each.aux})
        values = {name: cast_arrays(tensor, FLOAT32).asnumpy() for name, tensor in tensors.items()}
        mx.nd.waitall()
        return values

    def _caller(self) -> Callable[[], list[mx.nd.NDArray]]:
        """Return a function that runs the graph as the mode says."""
        if self._mode.run == "eager":
            return self._interpret
        symbol = mx.sym.load_json(self._graph.to_json())
        static = [("static_alloc", True), ("static_shape", True)]
        cached = mx.nd.CachedOp(symbol, static if self._mode.run == "static" else [])
        inputs = [self._arrays[name] for name in symbol.list_inputs()]

        def call() -> list[mx.nd.NDArray]:
            outputs = cached(*inputs)
            return outputs if isinstance(outputs, list) else [outputs]
        return call

    def _interpret(self) -> list[mx.nd.NDArray]:
        """Run the graph operator by operator, as non-hybridized code would."""
        values: dict[int, list[mx.nd.NDArray]] = {}
        for node in Graph([*self._graph.heads, Entry(self._node)], self._graph.attrs).nodes():
            inputs = [values[id(entry.node)][entry.output] for entry in node.inputs]
            values[id(node)] = [self._arrays[node.name]] if node.is_variable else invoke(node.op, inputs, node.attrs)
        return [values[id(head.node)][head.output] for head in self._graph.heads]


def _copy(entry: Entry, name: str) -> Entry:
    return Entry(operator("_copy", name, [entry], entry))
