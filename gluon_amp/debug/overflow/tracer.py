"""Find what made a training step overflow: ``trace_overflow``."""
from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import Any, Iterator, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ... import checks
from ..._mxnet import trainers
from ..._mxnet.arrays import cast_arrays, map_arrays
from ...dtypes import FLOAT32, LOW_PRECISION
from ...eager.casts import returns_fp32
from ...errors import StateError
from ...rules.tables.groups import IGNORE_GRADIENT
from ...session.functions import custom_fwd
from ...state.in_force import in_force
from ...state.state import State
from ...training.trainer_scaler import attached_to
from ..recording.events import Event, Rerun, is_float
from ..recording.runs import Run, dtype_of, float_arrays, recorded_run, unchanged
from .findings import Magnitude, OverflowReport
from .locate import BACKWARD, DATA, Culprit, Locator

_logger = logging.getLogger("gluon_amp")


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


class OverflowTracer:
    """Runs every skipped step of a trainer once more and finds what overflowed; made by :func:`trace_overflow`.

    Attributes
    ----------
    reports : list of OverflowReport
        One per skipped step, up to ``limit``.
    """

    def __init__(self, net: Block, trainer: gluon.Trainer, limit: int):
        self.net = net
        self.trainer = trainer
        self.limit = limit
        self.reports: list[OverflowReport] = []
        self._calls: list[_Call] = []
        self._runs_again = False
        self._stack = ExitStack()
        self._forward = net.forward
        net.forward = self._traced_forward
        self._stack.callback(delattr, net, "forward")
        scaler = trainers.attached(trainer)
        scaler.listeners.append(self._step)
        self._stack.callback(scaler.listeners.remove, self._step)

    def close(self) -> None:
        """Stop tracing; the network and the trainer are then as before."""
        self._stack.close()
        self._calls = []

    def __enter__(self) -> OverflowTracer:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()

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
        calls, self._calls = self._calls, []
        if skipped and len(self.reports) < self.limit:
            report = self._report(calls)
            known = next((item for item in self.reports if item.culprit == report.culprit), None)
            self.reports.append(report)
            if known is None:
                _logger.warning("AMP: %s", report)
            else:
                _logger.warning("AMP: step skipped at loss scale %g: the same fault again, in %s", report.loss_scale,
                                report.operator or report.tensor or "the step as a whole")

    def _report(self, calls: Sequence[_Call]) -> OverflowReport:
        mx.nd.waitall()  # probes note gradients in threads of their own
        gradients = tuple(item for item in (Magnitude.of(name, dtype_of(array), array.asnumpy()) for name, array
                                            in trainers.named_gradients(self.trainer)) if not item.is_finite)
        scale = trainers.attached(self.trainer).carried
        for call in calls:
            run = self._run_again(call)
            locator = Locator(run, float_arrays(call.arguments), call.gradients)
            culprit = locator.find()
            if culprit is not None:
                return _described(culprit, locator, scale, gradients)
        return OverflowReport("unknown", scale, gradients)

    def _run_again(self, call: _Call) -> Run:
        self._runs_again = True
        try:
            with unchanged(self.net):
                run = recorded_run(self.net, call.arguments, call.state, call.train_mode)
                run.tape.backward(_seeds(run, call), trainers.attached(self.trainer).applied)
        finally:
            self._runs_again = False
        return run


def _seeds(run: Run, call: _Call) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield outputs and their gradients, which the backward pass begins with."""
    for array, gradient in zip(run.outputs, call.gradients):
        source = run.tape.source(array)
        if gradient is not None:
            yield array, cast_arrays(gradient, dtype_of(array))
        elif source is not None and source.event.op in IGNORE_GRADIENT:  # MXNet computes none for it
            yield array, mx.nd.ones_like(array)


def trace_overflow(net: Block, trainer: gluon.Trainer, limit: int = 10) -> OverflowTracer:
    """Report for every skipped step, from now on, which operator gave the first inf or NaN.

    The network's calls of the step run once more, operator by operator, with the gradients that came back to their
    outputs, just before the trainer discards the step. The report goes to the ``gluon_amp`` log as a warning, in full
    for the first step of each fault and in a line for the others, and to ``reports``. Parameters, gradients and running
    statistics stay as they are; random operators such as Dropout draw new numbers.

    Parameters
    ----------
    net : Block
        What the training loop calls, hybridized or not: the outermost block.
    trainer : gluon.Trainer
        After :func:`~gluon_amp.init_trainer`.
    limit : int
        How many skipped steps to look into. With dynamic loss scaling some are normal: the scaler
        looks for the largest scale that fits.

    Returns
    -------
    OverflowTracer
        Holds the reports; a context manager, or to be closed by ``close()``. Until then every training step keeps its
        inputs and copies the gradients of the network's outputs.

    Raises
    ------
    StateError
        The trainer has no loss scaler.
    TypeError
        ``net`` is not a block, or ``trainer`` is not a trainer.
    ValueError
        ``limit`` is below 1.

    Examples
    --------
    ::

        tracer = amp.trace_overflow(net, trainer)
        for data, label in batches:
            ...
            trainer.step(batch_size)
        for report in tracer.reports:
            print(report.block, report.phase)
        tracer.close()
    """
    checks.instance("net", net, Block, "a Gluon block")
    attached_to(trainer, "trace_overflow")
    checks.whole("limit", limit, 1, "a number above 0")
    if "forward" in vars(net):
        raise StateError(f"trace_overflow: the block {net.name!r} is traced already; close() the other tracer first")
    return OverflowTracer(net, trainer, limit)


def _described(culprit: Culprit, locator: Locator, scale: float, gradients: tuple[Magnitude, ...]) -> OverflowReport:
    make = partial(OverflowReport, culprit.phase, scale, gradients, tensor=culprit.tensor,
                   rounded_to=_rounded_to(culprit))
    event, backward = culprit.event, culprit.phase == BACKWARD
    if event is None:
        at_fault = _measured(locator, [culprit.tensor], [culprit.array])
        return make(inputs=at_fault) if culprit.phase == DATA else make(gradients=at_fault)
    of_inputs = partial(_measured, locator, _input_names(event, locator))
    of_outputs = partial(_measured, locator, [f"output {number}" for number in range(len(event.outputs))]
                         if len(event.outputs) > 1 else ["output"])
    fp32 = _in_fp32(culprit, event, locator)
    return make(operator=event.name, op=event.op, block=event.block, inputs=of_inputs(event.inputs),
                outputs=of_outputs(event.outputs), gradients=of_outputs(event.gradients) if backward else (),
                input_gradients=of_inputs(event.input_gradients) if backward else (),
                in_fp32=of_inputs(fp32.input_gradients) if backward else of_outputs(fp32.outputs),
                around=tuple(locator.neighbours(event, culprit.phase)))


def _rounded_to(culprit: Culprit) -> str:
    if culprit.rounding is None:
        return ""
    arrays = (*culprit.rounding.inputs, *culprit.rounding.outputs)
    return next((dtype for dtype in map(dtype_of, arrays) if dtype in LOW_PRECISION), "")


def _in_fp32(culprit: Culprit, event: Event, locator: Locator) -> Rerun:
    """Return what the operator gives in FP32, nothing where that cannot be told."""
    if event.repeatable:
        return locator.run.tape.again(event)
    # What was rounded is FP32.
    return Rerun([], []) if culprit.rounding is None else Rerun(event.outputs, event.input_gradients)


def _measured(locator: Locator, names: Sequence[str], arrays: Sequence[NDArray | None]) -> tuple[Magnitude, ...]:
    return tuple(locator.measure(name, array) for name, array in zip(names, arrays)
                 if array is not None and is_float(array))


def _input_names(event: Event, locator: Locator) -> list[str]:
    names = []
    for position in range(len(event.inputs)):
        array, source = event.original(position)
        made_by = source.event.name if source is not None else locator.run.names.get(id(array), "data")
        names.append(f"input {position}, {made_by}")
    return names
