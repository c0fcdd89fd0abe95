"""The description of a skipped step, in words and as data."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...dtypes import FORMATS

_MOST_GRADIENTS = 5

_HEADLINES = {
    "data": "{tensor} of the network's call is not finite",
    "parameter": "the parameter {tensor} is not finite; {operator} reads it first",
    "forward": "{operator} gave the first value that is not finite, in the forward pass",
    "loss": "the gradient that the loss gave for {tensor} of the network is not finite",
    "backward": "{operator} gave the first gradient that is not finite, in the backward pass",
    "underflow": "{operator} rounded values to zero, which {tensor!r} turned into the first ones that are not finite",
    "unknown": "all values were finite when the step ran again",
}
_ADVICE = {
    "data": "Look at the data: mixed precision is not the cause",
    "parameter": "Look at how it was initialized, loaded or updated: an earlier step must have let it through",
    "loss": "Compute the loss in FP32, in code outside of hybrid blocks; look at its labels and at divisions and "
            "logarithms in it; a lower loss scale helps when only the scaled loss overflows",
    "unknown": "Random operators (Dropout, sampling) may have drawn other numbers, a gradient may have been "
               "accumulated from earlier steps, or the parameters are used outside of the network that is traced",
}


@dataclass(frozen=True)
class Magnitude:
    """How large the values of a tensor are.

    Attributes
    ----------
    name : str
        What the tensor is.
    dtype : str
        Its data type.
    largest : float
        The largest finite absolute value; 0 when there is none.
    inf, nan : int
        How many values are infinite and NaN.
    size : int
        How many values there are.
    """

    name: str
    dtype: str
    largest: float
    inf: int
    nan: int
    size: int

    @classmethod
    def of(cls, name: str, dtype: str, values: np.ndarray) -> Magnitude:
        """Measure an array."""
        finite = np.isfinite(values)
        nan = int(np.isnan(values).sum())
        largest = float(np.abs(values[finite]).max()) if finite.any() else 0.0
        return cls(name, dtype, largest, int(values.size - finite.sum()) - nan, nan, int(values.size))

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.inf or self.nan)

    def __str__(self) -> str:
        faults = [f"{count} {word}" for count, word in ((self.inf, "infinite"), (self.nan, "NaN")) if count]
        if not faults:
            return f"{self.name} ({self.dtype}): largest {self.largest:.3g}"
        finite = f", finite ones up to {self.largest:.3g}" if self.inf + self.nan < self.size else ""
        return (f"{self.name} ({self.dtype}): largest {'inf' if self.inf else 'nan'}, {' and '.join(faults)} of "
                f"{self.size}{finite}")


@dataclass(frozen=True)
class OverflowReport:
    """Where the first value that is not finite came from in a step that was skipped.

    Attributes
    ----------
    phase : str
        ``'data'``, ``'parameter'``, ``'forward'``, ``'underflow'`` where an operator rounded to zero what one behind it
        divides by, or takes the logarithm of, ``'loss'``, ``'backward'``, or ``'unknown'`` when the step is finite when
        it runs again.
    operator, op, block : str
        Name of the operator in the graph (in code that is not hybridized its block and kind), its kind, and the name of
        its block; empty where none is to blame.
    tensor : str
        The argument, parameter or output that is at fault by itself; for ``'underflow'`` the operator that gave the
        first value that is not finite; empty otherwise.
    rounded_to : str
        The type in which the value overflowed when it was cast; empty when the operator itself gave it.
    inputs, outputs : tuple of Magnitude
        What the operator read and gave in the forward pass.
    gradients, input_gradients : tuple of Magnitude
        What reached the operator and what it gave in the backward pass; empty for other phases.
    in_fp32 : tuple of Magnitude
        What the operator gives for the same inputs (and gradients) in FP32.
    around : tuple of Magnitude
        Outputs (or gradients) of the operators before and after it, in the order of the pass.
    parameter_gradients : tuple of Magnitude
        The parameters' gradients that are not finite.
    loss_scale : float
        What the loss was multiplied by.
    """

    phase: str
    loss_scale: float
    parameter_gradients: tuple[Magnitude, ...]
    operator: str = ""
    op: str = ""
    block: str = ""
    tensor: str = ""
    rounded_to: str = ""
    inputs: tuple[Magnitude, ...] = ()
    outputs: tuple[Magnitude, ...] = ()
    gradients: tuple[Magnitude, ...] = ()
    input_gradients: tuple[Magnitude, ...] = ()
    in_fp32: tuple[Magnitude, ...] = ()
    around: tuple[Magnitude, ...] = ()

    @property
    def culprit(self) -> tuple[str, str, str]:
        """What is to blame, to tell the same fault of a later step."""
        return self.phase, self.operator, self.tensor

    @property
    def overflows(self) -> bool:
        """Whether the operator's result is finite in FP32, so that low precision is the cause."""
        return bool(self.in_fp32) and all(item.is_finite for item in self.in_fp32)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        operator = f"{self.op} {self.operator!r}" + (f" of block {self.block!r}" if self.block else "")
        lines = [f"Step skipped at loss scale {self.loss_scale:g}: "
                 + _HEADLINES[self.phase].format(operator=operator, tensor=self.tensor)]
        if self.rounded_to and self.phase != "underflow":
            lines.append(f"  the value overflows {self.rounded_to}, whose largest number is "
                         f"{FORMATS[self.rounded_to].largest:g}, when it is rounded")
        for title, items in (("read", self.inputs), ("gave", self.outputs),
                             ("gradient that reached it", self.gradients), ("gradient it gave", self.input_gradients),
                             ("in FP32", self.in_fp32), ("around it", self.around)):
            lines += [f"  {title + ':':26}{item}" for item in items]
        shown = self.parameter_gradients[:_MOST_GRADIENTS]
        lines += [f"  {'parameter gradient:':26}{item}" for item in shown]
        if len(self.parameter_gradients) > len(shown):
            lines.append(f"  {'':26}and {len(self.parameter_gradients) - len(shown)} more that are not finite")
        return "\n".join([*lines, f"  {self.advice}"])

    @property
    def advice(self) -> str:
        """What to do about it."""
        if self.rounded_to and self.phase == "loss":
            return "Lower the loss scale, or take a mean rather than a sum in the loss"
        if self.phase in _ADVICE:
            return _ADVICE[self.phase]
        if not self.overflows:
            return "It is not finite in FP32 either: look at its inputs, rather than at mixed precision"
        scale = " A lower loss scale makes gradients smaller." if self.phase == "backward" else ""
        what = "they are not zero" if self.phase == "underflow" else "it is finite"
        return (f"In FP32 {what}: keep it there with amp.exclude({self.block!r}) or "
                f"amp.init(fp32_ops=[{self.op!r}]).{scale}")
