"""Run samples in every mode and compare with FP32. This is what the audit's processes do."""
from __future__ import annotations

import contextlib
import gc
import re
from dataclasses import replace
from typing import Collection

import mxnet as mx
import numpy as np

from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke, parameters_of
from gluon_amp._mxnet.symbols import dtype_name
from gluon_amp.dtypes import FLOAT32

from .modes import Mode, modes_for
from .program import Program
from .samples import samples_of
from .samples.sample import Sample
from .values import EPSILON, fill
from .verdicts import ERROR, UNUSABLE, Result, judge

Key = tuple  # the names of a condition and of a mode
_NO_GRADIENT = "non-differentiable"  # from nnvm's message for operators without a gradient


def run_samples(op: str, dtype: str, rounding: str, device: str,
                only: Collection[Key] | None = None) -> dict[Key, Result]:
    """Run an operator's samples in all modes, or in those named, with inputs rounded to ``rounding``."""
    results = {}
    for item in samples_of(op):
        one = Judge(item, dtype, rounding, device)
        for mode in modes_for(item, rounding, device):
            key = item.condition, str(mode)
            if only is None or key in only:
                results[key] = one.run(mode)
    gc.collect()  # checks of the memory allocator act when memory is freed
    _drain()
    return results


def _context(device: str) -> mx.Context:
    kind, _, number = device.rstrip(")").partition("(")
    return mx.Context(kind, int(number or 0))


class Judge:
    """Runs one sample in several modes and judges each against FP32 on the same rounded inputs."""

    # FP32 runs on the same device and with copies instead of casts, so that only the type differs. It runs the sample's
    # reference operator, which is its own where there is no other.

    def __init__(self, item: Sample, dtype: str, rounding: str, device: str):
        self.item, self.dtype, self.rounding = item, dtype, rounding
        self.context = _context(device)
        self._references: dict[bool, dict[str, np.ndarray]] = {}
        self._types: dict[str, list[str]] = {}  # of the outputs of operators
        if item.op in native.OPERATORS:
            native.load()

    def run(self, mode: Mode) -> Result:
        """Run the sample in one mode."""
        with mx.util.np_shape(self.item.numpy_shape):
            failure = UNUSABLE
            try:
                desired = self._reference(mode)
                failure = ERROR
                actual = self._run(self.item, mode, self.dtype)
            except Exception as error:
                _drain()
                return Result(failure, message_of(error), gradient=self.item.gradient)
        resolution = EPSILON[self.dtype if self.item.runs_low else FLOAT32]
        result = judge(actual, desired, self.item.tolerance * resolution)
        return result._replace(gradient=self.item.gradient)

    def _reference(self, mode: Mode) -> dict[str, np.ndarray]:
        """Return what FP32 gives, computed once for training and once for prediction."""
        training = mode.grad != "infer"
        if training not in self._references:
            self._references[training] = self._in_fp32(Mode("plain", "write" if training else "infer", "eager"))
        runs = 2 if mode.grad in ("add", "addlow") else 1
        return {name: value * runs if name.startswith("gradient") else value
                for name, value in self._references[training].items()}

    def _in_fp32(self, mode: Mode) -> dict[str, np.ndarray]:
        """Run the sample in FP32; without a gradient from then on where the operator has none."""
        try:
            return self._run(_stock(self.item), mode, FLOAT32)
        except mx.MXNetError as error:
            if _NO_GRADIENT not in str(error) or not self.item.gradient:
                raise
            self.item = replace(self.item, gradient=False)
            return self._in_fp32(mode)

    def _output_types(self, item: Sample) -> list[str]:
        """Run the bare operator in FP32 to learn the types of its outputs."""
        arrays = [mx.nd.array(value, ctx=self.context, dtype=value.dtype)
                  for number, each in enumerate(item.inputs)
                  for value in [fill(each, self.rounding, f"{item.seed} {number}")]]
        outputs = invoke(item.op, arrays, item.attrs_in(FLOAT32))
        mx.nd.waitall()
        return [dtype_name(output.dtype) or "" for output in outputs]

    def _run(self, item: Sample, mode: Mode, dtype: str) -> dict[str, np.ndarray]:
        if item.op not in self._types:
            self._types[item.op] = self._output_types(item)
        return Program(item, mode, dtype, self.rounding, self.context, self._types[item.op]).run()


def _stock(item: Sample) -> Sample:
    """Return a sample whose FP32 says what is right."""
    if not item.reference:
        return item
    known = parameters_of(item.reference)
    return replace(item, op=item.reference, attrs={key: value for key, value in item.attrs.items() if key in known})


def _drain() -> None:
    """Finish all work, so that pending errors are raised here and not in the next mode."""
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()


def message_of(error: Exception) -> str:
    """Return the line of an engine's message that says what is wrong, without paths and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Traceback", "Stack trace", "File ", "[bt]"))]
    telling = [line for line in lines if "Error in operator" in line or "Check failed" in line or "could not" in line]
    text = (telling or lines or [repr(error)])[-1].split("src/")[-1]
    return re.sub(r"0x[0-9a-f]+", "0x...", text)[:240]
