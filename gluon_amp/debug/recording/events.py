"""What a tape keeps of every operator that ran."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, NamedTuple

from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from ..._mxnet.symbols import dtype_name
from ...dtypes import FLOAT32, LOW_PRECISION
from ...graph import Role
from ...rules import KEEP, Decision, precision

_TRANSPARENT = (Role.CAST, Role.ROUNDING, Role.IDENTITY)  # what AMP inserts without changing values but for rounding
FLOATS = (FLOAT32, *LOW_PRECISION, "float64")


class Source(NamedTuple):
    """Where an operator's input comes from: an output of an earlier operator."""

    event: Event
    output: int


class Rerun(NamedTuple):
    """The results of an operator that ran alone: its outputs, and its part in the gradient of each input."""

    outputs: list[NDArray]
    input_gradients: list[NDArray | None]


@dataclass(eq=False)
class Event:
    """One operator that ran."""

    op: str
    name: str  # in the graph; in code that is not hybridized that of its block and the operator
    count: int  # how many operators of the same name came before
    block: str  # the innermost block that was called
    attrs: Mapping[str, str]
    role: Role
    decision: Decision | None  # None where AMP had no say
    arguments: list[NDArray]  # what the program handed over
    inputs: list[NDArray]  # the same values, cut off
    sources: list[Source | None]  # None for data and parameters
    outputs: list[NDArray] = field(default_factory=list)
    gradients: list[NDArray | None] = field(default_factory=list)  # of outputs, after Tape.backward
    input_gradients: list[NDArray | None] = field(default_factory=list)  # what this operator alone contributes
    marked: list[bool] = field(default_factory=list)  # the inputs that gradients are taken of
    training: bool = False
    repeatable: bool = True  # whether Tape.again can run it
    in_graph: bool = False
    recorded: list[NDArray] = field(default_factory=list)  # outputs in MXNet's own record, until differentiated

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the same operator in another run."""
        return self.name, self.count

    @property
    def inserted(self) -> bool:
        """Whether AMP put it there."""
        return self.role is not Role.OWN

    @property
    def is_inserted_cast(self) -> bool:
        """Whether it is a cast of AMP's."""
        return self.role in (Role.CAST, Role.ROUNDING)

    def original(self, position: int) -> tuple[NDArray, Source | None]:
        """Return an input as it was before AMP's casts, and its source."""
        array, source = self.arguments[position], self.sources[position]
        while source is not None and source.event.role in _TRANSPARENT:
            array, source = source.event.arguments[0], source.event.sources[0]
        return array, source

    @property
    def is_decided(self) -> bool:
        """Whether AMP decided on its precision."""
        return self.decision is not None and self.decision.rule != KEEP

    def runs_in(self, dtype: str) -> bool:
        """Tell whether it runs in a low-precision type, or on values rounded through it where it is imitated."""
        if self.decision is None or not self.is_decided:
            return any(dtype_name(array.dtype) == dtype for array in self.inputs)
        types = [dtype if _was_rounded(source, dtype) else dtype_name(array.dtype)
                 for array, source in zip(self.inputs, self.sources)]
        return precision(self.decision, types, FLOAT32, dtype) == dtype


def _was_rounded(source: Source | None, dtype: str) -> bool:
    event = source.event if source else None
    return event is not None and event.is_inserted_cast and dtype_name(event.inputs[0].dtype) == dtype


def is_float(array: Any) -> bool:
    """Tell whether a value is a dense array of floating-point numbers."""
    dense = isinstance(array, NDArray) and not isinstance(array, BaseSparseNDArray)
    return dense and dtype_name(array.dtype) in FLOATS
