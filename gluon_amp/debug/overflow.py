"""``amp.trace_overflow``: which operator of a skipped training step gave the first value that is not finite."""
from __future__ import annotations

import logging
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from .._mxnet import trainers
from .._mxnet.arrays import cast_arrays, map_arrays
from .._mxnet.symbols import dtype_name
from ..base import checks
from ..eager.applier import returns_fp32
from ..errors import StateError
from ..machine.dtypes import FLOAT32, FORMATS, LOW_PRECISION
from ..rules.tables.groups import IGNORE_GRADIENT
from ..session.autocast import custom_fwd
from ..state.in_force import in_force, under
from ..state.state import State
from ..training.trainer_scaler import attached_to
from .recorder import record
from .recording import Recording, float_arrays, is_float, unchanged
from .records import OpRecord

_logger = logging.getLogger("gluon_amp")
_MOST_GRADIENTS = 5
BACKWARD, DATA, FORWARD, LOSS, PARAMETER = "backward", "data", "forward", "loss", "parameter"
UNDERFLOW, UNKNOWN = "underflow", "unknown"

# For each phase the headline, and the remedy where it is the same for all operators.
_TEXTS = {
    DATA: ("{tensor} of the network's call is not finite",
           "Look at the data: mixed precision is not the cause"),
    PARAMETER: ("the parameter {tensor} is not finite; {operator} reads it first",
                "Look at how it was initialized, loaded or updated: an earlier step must have let it through"),
    FORWARD: ("{operator} gave the first value that is not finite, in the forward pass", ""),
    LOSS: ("the gradient that the loss gave for {tensor} of the network is not finite",
           "Compute the loss in FP32, in code outside of hybrid blocks; look at its labels and at divisions and "
           "logarithms in it; a lower loss scale helps when only the scaled loss overflows"),
    BACKWARD: ("{operator} gave the first gradient that is not finite, in the backward pass", ""),
    UNDERFLOW: ("{operator} rounded values to zero, which {tensor!r} made the first ones that are not finite", ""),
    UNKNOWN: ("all values were finite when the step ran again",
              "Random operators (Dropout, sampling) may have drawn other numbers, a gradient may have been accumulated "
              "from earlier steps, or the parameters are used outside of the network that is traced"),
}


@dataclass(frozen=True)
class Magnitude:
    """How large the values of a tensor are."""

    name: str  # of the tensor
    dtype: str
    largest: float  # the largest finite absolute value; 0 when there is none
    inf: int  # how many values are infinite
    nan: int
    size: int  # how many values there are

    @classmethod
    def of(cls, name: str, array: NDArray, values: np.ndarray) -> Magnitude:
        """Measure an array by its values."""
        finite = np.isfinite(values)
        nan = int(np.isnan(values).sum())
        largest = float(np.abs(values[finite]).max()) if finite.any() else 0.0
        inf = int(values.size - finite.sum()) - nan
        return cls(name, str(dtype_name(array.dtype)), largest, inf, nan, int(values.size))

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.inf or self.nan)

    def __str__(self) -> str:
        told = [f"{some} {word} of {self.size}" for some, word in ((self.inf, "infinite"), (self.nan, "NaN")) if some]
        if self.inf + self.nan < self.size:
            told.insert(0, f"largest {'finite ' if told else ''}{self.largest:.3g}")
        return f"{self.name} ({self.dtype}): {', '.join(told)}"


@dataclass(frozen=True)
class OverflowReport:
    """Where the first value that is not finite came from in a step that was skipped."""

    # 'data', 'parameter', 'forward', 'underflow' where an operator rounded to zero what one behind it divides by, or
    # takes the logarithm of, 'loss', 'backward', or 'unknown' when the step is finite when it runs again
    phase: str
    loss_scale: float  # the factor of the loss
    parameter_gradients: tuple[Magnitude, ...]  # those that are not finite
    operator: str = ""  # its name in the graph, outside of graphs of its block and kind; empty where none is to blame
    op: str = ""  # its kind
    block: str = ""  # the name of its block
    # the argument, parameter or output that is at fault by itself; for 'underflow' the operator that gave the first
    # value that is not finite; empty otherwise
    tensor: str = ""
    rounded_to: str = ""  # the type in which a value overflowed when it was cast; empty when the operator gave it
    inputs: tuple[Magnitude, ...] = ()  # of the operator, in the forward pass
    outputs: tuple[Magnitude, ...] = ()
    gradients: tuple[Magnitude, ...] = ()  # that reached the operator in the backward pass; empty for other phases
    input_gradients: tuple[Magnitude, ...] = ()  # that it gave there
    in_fp32: tuple[Magnitude, ...] = ()  # its results for the same inputs (and gradients) in FP32

    @property
    def culprit(self) -> tuple[str, str, str]:
        """The phase, operator and tensor to blame, to tell the same fault of a later step."""
        return self.phase, self.operator, self.tensor

    @property
    def overflows(self) -> bool:
        """Whether the operator's result is finite in FP32, so that low precision is the cause."""
        return bool(self.in_fp32) and all(item.is_finite for item in self.in_fp32)

    def __str__(self) -> str:
        operator = f"{self.op} {self.operator!r}" + (f" of block {self.block!r}" if self.block else "")
        lines = [f"Step skipped at loss scale {self.loss_scale:g}: "
                 + _TEXTS[self.phase][0].format(operator=operator, tensor=self.tensor)]
        if self.rounded_to and self.phase != UNDERFLOW:
            lines.append(f"  the value overflows {self.rounded_to}, whose largest number is "
                         f"{FORMATS[self.rounded_to].largest:g}, when it is rounded")
        for title, items in (("read", self.inputs), ("gave", self.outputs),
                             ("gradient that reached it", self.gradients), ("gradient it gave", self.input_gradients),
                             ("in FP32", self.in_fp32),
                             ("parameter gradient", self.parameter_gradients[:_MOST_GRADIENTS])):
            lines += [f"  {title + ':':26}{item}" for item in items]
        if len(self.parameter_gradients) > _MOST_GRADIENTS:
            lines.append(f"  {'':26}and {len(self.parameter_gradients) - _MOST_GRADIENTS} more that are not finite")
        return "\n".join([*lines, f"  {self.advice}"])

    @property
    def advice(self) -> str:
        """The remedy."""
        if self.rounded_to and self.phase == LOSS:
            return "Lower the loss scale, or take a mean rather than a sum in the loss"
        if _TEXTS[self.phase][1]:
            return _TEXTS[self.phase][1]
        if not self.overflows:
            return "It is not finite in FP32 either: look at its inputs, rather than at mixed precision"
        scale = " A lower loss scale makes gradients smaller." if self.phase == BACKWARD else ""
        result = "they are not zero" if self.phase == UNDERFLOW else "it is finite"
        return (f"In FP32 {result}: keep it there with amp.exclude({self.block!r}) or "
                f"amp.init(fp32_ops=[{self.op!r}]).{scale}")


class _Call(NamedTuple):
    """One call of the network in a training step, and the gradients that came back to its outputs."""

    arguments: tuple
    state: State | None
    train_mode: bool
    gradients: list[NDArray | None]  # of the floating-point outputs, None where none came back


class _Probe(autograd.Function):
    """Passes an array on, and records the gradient that comes back."""

    # One array each: MXNet hands uninitialized memory to a function for those of its outputs that get no gradient.

    def __init__(self, gradients: list[NDArray | None]):
        super().__init__()
        self._gradients, self._position = gradients, len(gradients)
        gradients.append(None)

    @custom_fwd
    def forward(self, array: NDArray) -> NDArray:
        """Hand the array on."""
        return array.detach()

    def backward(self, gradient: NDArray) -> NDArray:
        """Note the gradient and hand it on."""
        self._gradients[self._position] = gradient.copy()
        return gradient


class OverflowTracer(ExitStack):
    """Runs every skipped step of a trainer once more and finds what overflowed; made by :func:`trace_overflow`."""

    def __init__(self, net: Block, trainer: gluon.Trainer, limit: int):
        super().__init__()
        self.net, self.trainer, self.limit = net, trainer, limit
        self.reports: list[OverflowReport] = []  # one per skipped step, up to ``limit``
        self._calls: list[_Call] = []
        self._runs_again = False
        self._forward = net.forward
        net.forward = self._traced_forward
        self.callback(delattr, net, "forward")
        listeners = trainers.attached(trainer).listeners
        listeners.append(self._step)
        self.callback(listeners.remove, self._step)
        self.callback(self._calls.clear)

    def _traced_forward(self, *arguments: Any) -> Any:
        outputs = self._forward(*arguments)
        if self._runs_again or not (float_arrays(outputs) and autograd.is_recording()):
            return outputs
        if returns_fp32(arguments):
            outputs = cast_arrays(outputs, FLOAT32)
        call = _Call(arguments, in_force.current(), autograd.is_training(), [])
        self._calls.append(call)
        return map_arrays(lambda array: _Probe(call.gradients)(array) if is_float(array) else array, outputs)

    def _step(self, skipped: bool) -> None:
        """Hear of a step."""
        calls = self._calls[:]
        self._calls.clear()
        if skipped and len(self.reports) < self.limit:
            report = self._report(calls)
            is_known = any(item.culprit == report.culprit for item in self.reports)
            self.reports.append(report)
            _logger.warning("AMP: %s", report if not is_known else f"step skipped at loss scale {report.loss_scale:g}: "
                            f"the same fault again, in {report.operator or report.tensor or 'the step as a whole'}")

    def _report(self, calls: Sequence[_Call]) -> OverflowReport:
        mx.nd.waitall()  # probes note gradients in threads of their own
        gradients = tuple(item for item in (Magnitude.of(name, array, array.asnumpy()) for name, array
                                            in trainers.named_gradients(self.trainer)) if not item.is_finite)
        scale = trainers.attached(self.trainer).carried
        for call in calls:
            found = _Locator(self._run_again(call), call, scale, gradients).find()
            if found is not None:
                return found
        return OverflowReport(UNKNOWN, scale, gradients)

    def _run_again(self, call: _Call) -> Recording:
        self._runs_again = True
        try:
            with unchanged(self.net), under(call.state):
                run = record(partial(self.net, *call.arguments), self.net, train_mode=call.train_mode, keep=True)
            seeds = [(array, cast_arrays(gradient, str(dtype_name(array.dtype))))
                     for array, gradient in zip(run.outputs, call.gradients) if gradient is not None]
            for array, gradient in zip(run.outputs, call.gradients):
                source = run.source(array)
                if gradient is None and source is not None and source[0].kernel in IGNORE_GRADIENT:
                    seeds.append((array, mx.nd.ones_like(array)))  # MXNet computes none for it
            run.backward(seeds, trainers.attached(self.trainer).applied)
        finally:
            self._runs_again = False
        return run


def trace_overflow(net: Block, trainer: gluon.Trainer, limit: int = 10) -> OverflowTracer:
    """Report for every skipped step, from now on, which operator gave the first inf or NaN.

    The network's calls of the step run once more, operator by operator, before the trainer discards the step. Reports
    go to ``reports``, and to the ``gluon_amp`` log, in full for the first step of each fault. Parameters, gradients and
    running statistics stay as they are; random operators draw new numbers.

    Parameters
    ----------
    net : Block
        What the training loop calls, hybridized or not: the outermost block.
    trainer : gluon.Trainer
        After :func:`~gluon_amp.init_trainer`.
    limit : int
        How many skipped steps to look into; with dynamic loss scaling some are normal.

    Returns
    -------
    OverflowTracer
        A context manager, or to be closed by ``close()``. Until then every step keeps its inputs and copies the
        gradients of the network's outputs.
    """
    checks.instance("net", net, Block, "a Gluon block")
    attached_to(trainer, "trace_overflow")
    checks.whole("limit", limit, 1, "a number above 0")
    if "forward" in vars(net):
        raise StateError(f"trace_overflow: the block {net.name!r} is traced already; close() the other tracer first")
    return OverflowTracer(net, trainer, limit)


class _Locator:
    """Searches a run, after its backward pass from the gradients that reached its outputs."""

    def __init__(self, run: Recording, call: _Call, scale: float, gradients: tuple[Magnitude, ...]):
        self.run, self.call, self.scale, self.gradients = run, call, scale, gradients
        self._finite: dict[int, tuple[bool, Any]] = {}  # by the id of an array, which is kept alive
        self._readers: dict[tuple[int, int], list[tuple[OpRecord, int]]] = defaultdict(list)
        for row in run.records:
            for position, read in enumerate(row.reads):
                self._readers[id(read.source), read.output].append((row, position))

    def find(self) -> OverflowReport | None:
        """Return what gave the first value that is not finite, None when all are."""
        for position, array in enumerate(float_arrays(self.call.arguments)):
            if not self._are_finite([array]):
                name = f"argument {position}"
                return self._at(DATA, tensor=name, inputs=self._measured([name], [array]))
        for array in self.run.outputs:
            source = self.run.source(array)
            if source is not None and not self._are_finite([array]):
                return self._forward(source[0])
        swallowed = next(filter(self._swallows, self.run.records), None)
        if swallowed is not None:
            return self._blamed(FORWARD, swallowed)
        for position, gradient in enumerate(self.call.gradients):
            if not self._are_finite([gradient]):
                return self._of_loss(position)
        return self._backward()

    def _are_finite(self, arrays: Sequence[NDArray | None]) -> bool:
        """Tell whether all values of floating-point arrays are finite."""
        for array in filter(is_float, arrays):
            if id(array) not in self._finite:
                self._finite[id(array)] = bool(np.isfinite(self.run.values(array)).all()), array
        return all(self._finite[id(array)][0] for array in filter(is_float, arrays))

    def _forward(self, row: OpRecord) -> OverflowReport:
        """Follow values that are not finite up to where they begin."""
        before: OpRecord | None = row
        while before is not None:
            row = before
            before = next((read.source for array, read in zip(row.arguments, row.reads)
                           if read.source is not None and not self._are_finite([array])), None)
        for array, read in zip(row.arguments, row.reads):
            if read.is_parameter and not self._are_finite([array]):
                return self._of_operator(PARAMETER, self._reader(row), tensor=read.name)
        return self._lost(row) or self._blamed(FORWARD, row)

    def _lost(self, row: OpRecord) -> OverflowReport | None:
        """Return the operator before one that rounded to zero what is infinite there, as in ``log(x + 1e-8)``."""
        if not row.repeatable or self._are_finite(self.run.again(row).outputs):
            return None
        waiting, seen = [row], {id(row)}
        for reader in waiting:
            for array, read in zip(reader.arguments, reader.reads):
                has_zeros = is_float(array) and not self.run.values(array).all()
                if read.source is None or id(read.source) in seen or not has_zeros:
                    continue
                seen.add(id(read.source))
                waiting.append(read.source)
                if self._rounds_to_zero(read.source):
                    return replace(self._blamed(FORWARD, read.source), phase=UNDERFLOW, tensor=row.name)
        return None

    def _rounds_to_zero(self, row: OpRecord) -> bool:
        """Tell whether an operator gave zeros where it gives other values of the same inputs in FP32."""
        wide = (row.arguments if row.rounds else self.run.again(row, as_cast=True).outputs if row.repeatable else ())
        values = self.run.values
        return any(is_float(array) and bool(((values(array) == 0) & (values(own) != 0)).any())
                   for own, array in zip(wide, row.outputs))

    def _swallows(self, row: OpRecord) -> bool:
        """Tell whether an operator overflowed, maybe without a trace in the outputs: oneDNN's relu turns NaN into 0."""
        # Values that are not finite in FP32 either, such as masks of -inf, are no fault.
        return (not self._are_finite(row.outputs) and self._are_finite(row.arguments)
                and (row.rounds or (row.repeatable and self._are_finite(self.run.again(row).outputs))))

    def _blamed(self, phase: str, row: OpRecord) -> OverflowReport:
        """Attribute a cast of AMP to the operator that gave the value, or to the one that reads it."""
        if not row.rounds:
            return self._of_operator(phase, row)
        if phase == FORWARD and row.own is not None:
            return self._of_operator(phase, row.own, row)
        reader = self._reader(row)
        for position, array in enumerate(self.run.outputs):
            if reader.inserted and self.run.source(array) == (reader, 0):  # the last cast of all
                return self._of_loss(position, row)
        return self._of_operator(phase, reader, row)

    def _reader(self, row: OpRecord) -> OpRecord:
        """Return the operator that reads a cast and contributes most to its gradient."""
        while row.inserted and self._readers[id(row), 0]:
            row = self._largest_reader(row)
        return row

    def _largest_reader(self, row: OpRecord) -> OpRecord:
        def contribution(reader: tuple[OpRecord, int]) -> float:
            gradient = reader[0].input_gradients[reader[1]] if reader[0].input_gradients else None
            return -1.0 if gradient is None else self.run.largest([gradient]) or 0.0
        return max(self._readers[id(row), 0], key=contribution, default=(row, 0))[0]

    def _backward(self) -> OverflowReport | None:
        for row in reversed(self.run.records):
            if not self._are_finite(row.gradients):  # finite parts whose sum is not
                return self._blamed(BACKWARD, self._largest_reader(row))
            if not self._are_finite(row.input_gradients):
                shows_here_only = not self._are_finite([*row.arguments, *row.outputs])
                return self._forward(row) if shows_here_only else self._blamed(BACKWARD, row)
        return None

    def _of_loss(self, position: int, rounding: OpRecord | None = None) -> OverflowReport:
        name = f"output {position}"
        return self._at(LOSS, rounding, tensor=name, gradients=self._measured([name], [self.call.gradients[position]]))

    def _of_operator(self, phase: str, row: OpRecord, rounding: OpRecord | None = None,
                     tensor: str = "") -> OverflowReport:
        """Measure the program's operator that is to blame, and what is around it."""
        is_backward = phase == BACKWARD
        reads = [f"input {position}, {read.name}" for position, read in enumerate(row.inputs)]
        gives = [f"output {number}" for number in range(len(row.outputs))] if len(row.outputs) > 1 else ["output"]
        # An operator that cannot run again gave FP32, where it was rounded afterwards.
        fp32 = (self.run.again(row) if row.repeatable else row if rounding is not None else
                replace(row, outputs=(), input_gradients=()))
        return self._at(phase, rounding, tensor=tensor, operator=row.name, op=row.op, block=row.block,
                        inputs=self._measured(reads, row.arguments), outputs=self._measured(gives, row.outputs),
                        gradients=self._measured(gives, row.gradients) if is_backward else (),
                        input_gradients=self._measured(reads, row.input_gradients) if is_backward else (),
                        in_fp32=self._measured(reads, fp32.input_gradients) if is_backward else
                        self._measured(gives, fp32.outputs))

    def _at(self, phase: str, rounding: OpRecord | None = None, **found: Any) -> OverflowReport:
        """Make a report; ``rounding`` is the cast of AMP's in which the value overflowed."""
        arrays = (*rounding.arguments, *rounding.outputs) if rounding is not None else ()
        types = (str(dtype_name(array.dtype)) for array in arrays)
        rounded_to = next((dtype for dtype in types if dtype in LOW_PRECISION), "")
        return OverflowReport(phase, self.scale, self.gradients, rounded_to=rounded_to, **found)

    def _measured(self, names: Sequence[str], arrays: Sequence[NDArray | None]) -> tuple[Magnitude, ...]:
        return tuple(Magnitude.of(name, array, self.run.values(array))
                     for name, array in zip(names, arrays) if array is not None and is_float(array))
