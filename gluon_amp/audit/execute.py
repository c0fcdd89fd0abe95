"""Run samples in every mode and compare with FP32. This is what worker processes do."""
from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace

import mxnet as mx
import numpy as np

from .._mxnet.invoke import invoke
from .._mxnet.symbols import dtype_name
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from .compare import ERROR, OK, UNUSABLE, compare
from .program import Plan, as_array, build, caller
from .records import LOW, Input, Mode, Sample
from .values import EPSILON, fill

__all__ = ["Judge", "Result", "drain", "first_line"]

_PASSES = 2  # the second run of a CachedOp reuses its buffers
_NO_GRADIENT = "non-differentiable"  # from nnvm's message for operators without a gradient


@dataclass(frozen=True)
class Result:
    """What running one mode gave.

    Attributes
    ----------
    verdict : str
        ``'ok'``, ``'wrong'``, ``'error'``, or ``'not applicable'`` when FP32 does not run either.
    detail : str
        The engine's message, or the tensor that is wrong.
    error, bias : float
        See :class:`gluon_amp.audit.compare.Comparison`.
    """

    verdict: str
    detail: str = ""
    error: float = 0.0
    bias: float = 0.0


class Judge:
    """Runs one sample in several modes and judges each against FP32 on the same rounded inputs.

    Parameters
    ----------
    item : Sample
        Operator, attributes and inputs.
    dtype : str
        ``'bfloat16'``, ``'float16'``, or ``'float32'`` for the control.
    context : mxnet.Context
        Where everything runs, the reference included.
    rounding : str
        The type that inputs are rounded to.
    """

    def __init__(self, item: Sample, dtype: str, context: mx.Context, rounding: str):
        self.item, self.dtype, self.context, self.rounding = item, dtype, context, rounding
        self._references: dict[bool, dict[str, np.ndarray]] = {}
        self._types: list[str] = []

    def run(self, mode: Mode) -> Result:
        """Run the sample in one mode."""
        with mx.util.np_shape(self.item.numpy_shape):
            try:
                wanted = self._reference(mode)
            except Exception as error:
                drain()
                return Result(UNUSABLE, first_line(error))
            try:
                found = self._run(Plan(mode, self.dtype, self.rounding, self.context))
            except Exception as error:
                drain()
                return Result(ERROR, first_line(error))
        result = compare(found, wanted, self.item.tolerance * EPSILON[self.dtype])
        detail = f"{result.where} off by {result.error:.1g}" if result.verdict != OK else ""
        return Result(result.verdict, detail, result.error, result.bias)

    def _reference(self, mode: Mode) -> dict[str, np.ndarray]:
        training = mode.grad != "infer"
        if training not in self._references:
            self._types = self._types or self._output_types()
            plan = Plan(Mode("plain", "write" if training else "infer", "eager"), FLOAT32, self.rounding, self.context)
            try:
                self._references[training] = self._run(plan)
            except mx.MXNetError as error:
                if _NO_GRADIENT not in str(error):
                    raise
                self.item = replace(self.item, gradient=False)
                self._references[training] = self._run(plan)
        wanted = self._references[training]
        if mode.grad in ("add", "addlow"):
            return {name: value * _PASSES if name.startswith("gradient") else value for name, value in wanted.items()}
        return wanted

    def _output_types(self) -> list[str]:
        """Run the bare operator in FP32 to learn the types of its outputs."""
        arrays = [as_array(fill(each, self.rounding, f"{self.item.op} {number}"), self.context)
                  for number, each in enumerate(self.item.inputs)]
        outputs = invoke(self.item.op, arrays, dict(self.item.attrs))
        mx.nd.waitall()
        return [dtype_name(output.dtype) or "" for output in outputs]

    def _run(self, plan: Plan) -> dict[str, np.ndarray]:
        program = build(self.item, plan, self._types)
        heads = [number for number, kind in enumerate(self._types) if kind == FLOAT32]
        call = caller(program, plan.mode.run)
        if program.gradients:
            mx.autograd.mark_variables([program.arrays[name] for name in program.gradients],
                                       list(program.gradients.values()),
                                       "write" if plan.mode.grad == "write" else "add")
        for _ in range(_PASSES):
            mx.random.seed(7)
            with mx.autograd.record() if plan.mode.grad != "infer" else mx.autograd.pause():
                outputs = call()
            if program.gradients and heads:
                mx.autograd.backward([outputs[number] for number in heads],
                                     [self._head_gradient(outputs[number], number) for number in heads])
        tensors = {f"output {number}": output for number, output in enumerate(outputs)}
        if heads:
            tensors.update({f"gradient of {name}": value for name, value in program.gradients.items()})
        tensors.update({f"state {name}": program.arrays[name] for name in program.states})
        values = {name: _read(tensor) for name, tensor in tensors.items()}
        mx.nd.waitall()
        return values

    def _head_gradient(self, output: mx.nd.NDArray, number: int) -> mx.nd.NDArray:
        return as_array(fill(Input(output.shape, LOW), self.rounding, f"head {number}"), self.context)


def _read(array: mx.nd.NDArray) -> np.ndarray:
    low = dtype_name(array.dtype) in (BFLOAT16, FLOAT16)
    return (mx.nd.amp_cast(array, dtype=FLOAT32) if low else array).asnumpy()


def drain() -> None:
    """Finish all work; errors that are still on their way surface here, not in the next mode."""
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()


def first_line(error: Exception) -> str:
    r"""Return the line of an engine's message that says what is wrong, without paths.

    Examples
    --------
    >>> first_line(ValueError("Traceback (most recent call last):\n  File \"a/src/b.cc\", line 1\nMXNetError: no"))
    'MXNetError: no'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Traceback", "Stack trace", "File ", "[bt]"))]
    told = [line for line in lines if "Error in operator" in line or "Check failed" in line or "could not" in line]
    text = (told or lines or [repr(error)])[-1]
    text = text.split("src/")[-1] if "src/" in text else text
    return re.sub(r"0x[0-9a-f]+", "0x...", text)[:240]
