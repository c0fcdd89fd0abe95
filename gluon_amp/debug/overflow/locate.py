"""Find the operator of a recorded run that gave the first value that is not finite."""
from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
from mxnet.ndarray import NDArray

from ..recording.events import Event, is_float
from ..recording.runs import Run, dtype_of
from .findings import Magnitude

_AROUND = 3  # operators on either side of the culprit
BACKWARD, DATA, FORWARD, LOSS, PARAMETER = "backward", "data", "forward", "loss", "parameter"
UNDERFLOW = "underflow"


class Culprit(NamedTuple):
    """Where a run went wrong."""

    phase: str
    event: Event | None = None  # the operator of the program; None where none is to blame
    rounding: Event | None = None  # the cast of AMP's in which the value overflowed
    tensor: str = ""  # the argument, parameter or output that is at fault by itself
    array: NDArray | None = None  # the argument, or the gradient of the output


class Locator:
    """Searches a recorded run, after its backward pass from the gradients that reached its outputs."""

    def __init__(self, run: Run, arguments: Sequence[NDArray], heads: Sequence[NDArray | None]):
        self.run = run
        self.arguments = list(arguments)
        self.heads = list(heads)
        self._finite: dict[int, bool] = {}
        self._readers: dict[tuple[int, int], list[tuple[Event, int]]] = {}
        for event in run.tape.events:
            for position, source in enumerate(event.sources):
                if source is not None:
                    self._readers.setdefault((id(source.event), source.output), []).append((event, position))

    def is_finite(self, array: NDArray | None) -> bool:
        """Tell whether all values of a floating-point array are finite; other arrays, and None, are."""
        if array is None or not is_float(array):
            return True
        if id(array) not in self._finite:
            self._finite[id(array)] = bool(np.isfinite(self.run.tape.values(array)).all())
        return self._finite[id(array)]

    def find(self) -> Culprit | None:
        """Return what gave the first value that is not finite, None when all are."""
        for position, array in enumerate(self.arguments):
            if not self.is_finite(array):
                return Culprit(DATA, tensor=f"argument {position}", array=array)
        for array in self.run.outputs:
            source = self.run.tape.source(array)
            if not self.is_finite(array) and source is not None:
                return self._forward(source.event)
        swallowed = self._swallowed()
        if swallowed is not None:
            return swallowed
        for position, gradient in enumerate(self.heads):
            if not self.is_finite(gradient):
                return Culprit(LOSS, tensor=f"output {position}", array=gradient)
        return self._backward()

    def _forward(self, event: Event) -> Culprit:
        """Follow values that are not finite up to where they begin."""
        while True:
            before = next((source.event for array, source in zip(event.arguments, event.sources)
                           if source is not None and not self.is_finite(array)), None)
            if before is None:
                break
            event = before
        for array in event.arguments:
            if id(array) in self.run.names and not self.is_finite(array):
                return Culprit(PARAMETER, self._reader(event), tensor=self.run.names[id(array)])
        return self._lost(event) or self._blamed(FORWARD, event)

    def _lost(self, event: Event) -> Culprit | None:
        """Return the operator before one that rounded to zero what is infinite there, as in ``log(x + 1e-8)``."""
        if not event.repeatable or all(map(self.is_finite, self.run.tape.again(event).outputs)):
            return None
        waiting, seen = [event], {id(event)}
        for reader in waiting:
            for array, source in zip(reader.inputs, reader.sources):
                if source is None or id(source.event) in seen or not self._has_zeros(array):
                    continue
                seen.add(id(source.event))
                waiting.append(source.event)
                if self._rounds_to_zero(source.event):
                    return self._blamed(FORWARD, source.event)._replace(phase=UNDERFLOW, tensor=event.name)
        return None

    def _has_zeros(self, array: NDArray) -> bool:
        return is_float(array) and not self.run.tape.values(array).all()

    def _rounds_to_zero(self, event: Event) -> bool:
        """Tell whether an operator gave zeros where it gives other values of the same inputs in FP32."""
        if event.is_inserted_cast:
            return self._differ(event.inputs, event.outputs)
        return event.repeatable and self._differ(self.run.tape.again(event, as_cast=True).outputs, event.outputs)

    def _differ(self, wide: Sequence[NDArray], outputs: Sequence[NDArray]) -> bool:
        values = self.run.tape.values
        return any(is_float(array) and bool(((values(array) == 0) & (values(own) != 0)).any())
                   for own, array in zip(wide, outputs))

    def _swallowed(self) -> Culprit | None:
        """Return the operator that overflowed without a trace in the outputs: oneDNN's relu turns NaN into 0."""
        # Values that are not finite in FP32 either, such as masks of -inf, are no fault.
        for event in self.run.tape.events:
            if all(map(self.is_finite, event.outputs)) or not all(map(self.is_finite, event.inputs)):
                continue
            if event.is_inserted_cast or (event.repeatable
                                          and all(map(self.is_finite, self.run.tape.again(event).outputs))):
                return self._blamed(FORWARD, event)
        return None

    def _blamed(self, phase: str, event: Event) -> Culprit:
        """Attribute a cast of AMP to the operator that gave the value, or to the one that reads it."""
        if not event.is_inserted_cast:
            return Culprit(phase, event)
        writer = self._written_by(event)
        if phase == FORWARD and not writer.inserted:
            return Culprit(phase, writer, event)
        reader = self._reader(event)
        output = self._output(reader) if reader.inserted else None
        if output is not None:  # the last cast of all, to what the network returns
            return Culprit(LOSS, rounding=event, tensor=f"output {output}", array=self.heads[output])
        return Culprit(phase, reader, event)

    def _written_by(self, event: Event) -> Event:
        while event.inserted and event.sources and event.sources[0] is not None:
            event = event.sources[0].event
        return event

    def _reader(self, event: Event) -> Event:
        """Return the operator that reads a cast and contributes most to its gradient."""
        while event.inserted:
            readers = self._readers.get((id(event), 0), [])
            if not readers:
                break
            event = max(readers, key=lambda reader: self._contribution(*reader))[0]
        return event

    def _output(self, event: Event) -> int | None:
        """Return which output of the network an operator gives, None when none."""
        sources = [self.run.tape.source(array) for array in self.run.outputs]
        return next((i for i, source in enumerate(sources) if source is not None and source.event is event), None)

    def _contribution(self, event: Event, position: int) -> float:
        gradients = event.input_gradients
        if not gradients or gradients[position] is None:
            return -1.0
        values = np.abs(self.run.tape.values(gradients[position]))
        return float(np.nan_to_num(values, nan=np.inf).max()) if values.size else -1.0

    def _backward(self) -> Culprit | None:
        for event in reversed(self.run.tape.events):
            arrived = all(map(self.is_finite, event.gradients))
            if arrived and not all(map(self.is_finite, event.input_gradients)):
                if not all(map(self.is_finite, [*event.inputs, *event.outputs])):
                    return self._forward(event)  # it only shows here
                return self._blamed(BACKWARD, event)
            if not arrived:  # finite parts whose sum is not
                readers = self._readers.get((id(event), 0), [])
                largest = max(readers, key=lambda reader: self._contribution(*reader), default=(event, 0))
                return self._blamed(BACKWARD, largest[0])
        return None

    def neighbours(self, culprit: Event, phase: str) -> list[Magnitude]:
        """Measure the operators before and after one, in the order of the pass."""
        events = [event for event in self.run.tape.events if not event.inserted and event.outputs]
        events = events[::-1] if phase == BACKWARD else events
        here = next((i for i, event in enumerate(events) if event is culprit), 0)
        measured = []
        for event in events[max(here - _AROUND, 0):here + _AROUND + 1]:
            array = (next((g for g in event.gradients if g is not None), None) if phase == BACKWARD
                     else event.outputs[0])
            if array is not None:
                measured.append(self.measure(event.name, array))
        return measured

    def measure(self, name: str, array: NDArray) -> Magnitude:
        """Return the magnitude of an array."""
        return Magnitude.of(name, dtype_of(array), self.run.tape.values(array))
