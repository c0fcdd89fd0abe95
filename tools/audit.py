#!/usr/bin/env python
"""Run operators forward and backward in low precision, each in a process of its own, and compare with FP32.

    python tools/audit.py relu dot                # names of operators; all of them where none is named
    python tools/audit.py --malloc-checks --jobs 2 --faults tests/rules/faulty_in_bfloat16.txt

Every sample of ``tests/helpers/operator_samples.py`` runs eager, as CachedOp and with static allocation; in prediction,
and with gradients that are written and added to FP32 variables behind a cast; on plain layouts, and next to oneDNN
convolutions, whose layouts are blocked. The verdict is that of the worst mode; errors that FP32 gives too do not count.
Some kernels corrupt memory: with ``--malloc-checks`` glibc looks.
"""
from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Callable, Dict, Mapping, NamedTuple, Sequence

from apart import NORMALLY, TIMED_OUT, Outcome, apart  # isort: skip  finds the package
import gluon_amp  # noqa: F401  isort: skip  before MXNet
import mxnet as mx
import numpy as np
from operator_samples import LOW, SAMPLES, Input, Sample, fill, reason_of

from gluon_amp import native
from gluon_amp._mxnet.arrays import cast_arrays
from gluon_amp._mxnet.invoke import invoke, parameters_of
from gluon_amp._mxnet.symbols import analyse, dtype_name
from gluon_amp.dtypes import BFLOAT16, FLOAT16, FLOAT32, FORMATS
from gluon_amp.graph import VARIABLE, Entry, Graph, Node
from gluon_amp.graph.edit import cast, operator

OK, WRONG, ERROR, CRASH, TIMEOUT = "ok", "wrong", "error", "crash", "timeout"
UNUSABLE = "not applicable"  # does not run in FP32 either
_WORST_FIRST = (CRASH, TIMEOUT, WRONG, ERROR, OK, UNUSABLE)
# Rounding to nearest is off by so much at most. FP32 runs are controls: the order of summation is of no interest there.
ROUNDOFF = {**{dtype: form.roundoff for dtype, form in FORMATS.items()}, FLOAT32: 2.0 ** -16}
_NO_GRADIENT = "non-differentiable"  # from nnvm's message for operators without a gradient
_COMPLAINTS = ("malloc", "free()", "double free", "corrupted", "munmap", "realloc", "terminate", "Fatal", "*** ")
_MALLOC_DEBUG = ("/usr/lib/x86_64-linux-gnu/libc_malloc_debug.so.0", "/usr/lib64/libc_malloc_debug.so.0",
                 "/lib/x86_64-linux-gnu/libc_malloc_debug.so.0")


class Mode(NamedTuple):
    """One way of running a sample."""

    layout: str  # 'plain'; what is blocked: 'blocked' (all), 'blocked_in', 'blocked_out', 'mixed' (the first input)
    grad: str  # 'infer' (outside recording), 'write', 'add'
    run: str  # 'eager', 'cached', 'static'

    def __str__(self) -> str:
        return f"{self.run}/{self.layout}/{self.grad}"


class Result(NamedTuple):
    """What one mode gave."""

    verdict: str
    detail: str = ""  # the engine's message, or the tensor that is wrong


Key = tuple  # the names of a condition and of a mode
Results = Dict[Key, Result]


def modes_for(item: Sample, dtype: str, device: str) -> list[Mode]:
    """List the modes that make sense for a sample: blocked layouts exist for bfloat16 on the CPU only."""
    if not item.in_graphs:
        return [Mode("plain", "infer", "eager")]
    layouts = {"plain": ("infer", "write", "add")}
    if device.startswith("cpu") and dtype == BFLOAT16:
        able = any(each.can_be_blocked for each in item.inputs)
        if able:
            layouts.update({"blocked": ("infer", "write", "add"), "blocked_in": ("infer", "write")})
        layouts["blocked_out"] = ("write",)
        if able and sum(each.kind == LOW for each in item.inputs) > 1:
            layouts["mixed"] = ("write",)
    return [Mode(layout, grad, run) for layout, grads in layouts.items()
            for grad, run in product(grads, ("eager", "cached", "static")) if item.gradient or grad != "add"]


def error_of(actual: np.ndarray, desired: np.ndarray) -> float:
    """Return the largest error of an element, relative to the element plus the tensor's root mean square.

    NaN and infinities must agree; where they or the shapes do not, the error is infinite.
    """
    if actual.shape != desired.shape:
        return np.inf
    actual, desired = actual.astype(np.float64), desired.astype(np.float64)
    finite = np.isfinite(desired)
    if not np.array_equal(actual[~finite], desired[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    actual, desired = actual[finite], desired[finite]
    scale = np.abs(desired) + np.sqrt(np.mean(desired ** 2))
    return float(np.max(np.abs(actual - desired) / np.where(scale > 0, scale, 1.0)))


def judge(actual: Mapping[str, np.ndarray], desired: Mapping[str, np.ndarray], limit: float) -> Result:
    """Judge a run: every tensor that the FP32 run gave must be there, with an error of at most ``limit``."""
    errors = {name: error_of(actual[name], value) if name in actual else np.inf for name, value in desired.items()}
    worst = max(errors, key=errors.__getitem__, default="")
    error = errors.get(worst, 0.0)
    return Result(OK) if error <= limit else Result(WRONG, f"{worst} off by {error:.1g}")


# What runs in the child processes


class Program:
    """A graph around a sample's operator, with casts and convolutions before and behind it, and its variables."""

    def __init__(self, item: Sample, mode: Mode, dtype: str, rounding: str, context: mx.Context, types: list[str]):
        self._item, self._mode, self._dtype, self._rounding, self._context = item, mode, dtype, rounding, context
        self._arrays: dict[str, mx.nd.NDArray] = {}
        self._gradients: dict[str, mx.nd.NDArray] = {}
        self._floats = [number for number, kind in enumerate(types) if kind == FLOAT32]
        self._node = Node(item.op, "op", item.attrs_in(dtype), list(map(self._input, range(len(item.inputs)))),
                          max(len(types), 1))
        self._graph = Graph([Entry(self._node, number) for number in range(len(types))],
                            {"mxnet_version": ["int", 10901]})
        heads = self._graph.heads
        if mode.layout in ("blocked", "blocked_out") and 0 in self._floats:
            self._block_output()
        for number in self._floats if dtype != FLOAT32 else ():
            heads[number] = cast(heads[number], FLOAT32, f"cast out {number}")

    def _array(self, value: np.ndarray) -> mx.nd.NDArray:
        return mx.nd.array(value, ctx=self._context, dtype=value.dtype)

    def _input(self, number: int) -> Entry:
        """Make a variable and whatever stands between it and the operator."""
        each, name, mode = self._item.inputs[number], f"input {number}", self._mode
        self._arrays[name] = self._array(fill(each, self._rounding, f"{self._item.seed} {number}"))
        if self._item.gradient and mode.grad != "infer" and each.differentiable:
            self._gradients[name] = self._array(np.zeros(each.shape, np.float32))
        entry = Entry(Node(VARIABLE, name))
        # Straight behind amp_cast, and behind operators of libraries, MXNet loses gradients that are added up.
        if mode.grad == "add" and (each.kind == LOW or (self._item.needs_identities and name in self._gradients)):
            entry = _copy(entry, f"copy {number}")
        if each.kind != LOW:
            return entry
        entry = self._cast(entry, f"cast {number}")
        if each.can_be_blocked and mode.layout in ("blocked", "blocked_in", *["mixed"] * (number == 0)):
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
        """Run twice, as the second run of a CachedOp reuses its buffers; return outputs, gradients, changed states."""
        call, names = self._caller(), list(self._gradients)
        if names:
            mx.autograd.mark_variables([self._arrays[name] for name in names], list(self._gradients.values()),
                                       "add" if self._mode.grad == "add" else "write")
        for _ in range(2):
            mx.random.seed(7)
            with mx.autograd.pause() if self._mode.grad == "infer" else mx.autograd.record():
                outputs = call()
            if names and self._floats:
                heads = [outputs[number] for number in self._floats]
                mx.autograd.backward(heads, [self._array(fill(Input(head.shape), self._rounding, f"head {number}"))
                                             for number, head in zip(self._floats, heads)])
        tensors = {f"output {number}": output for number, output in enumerate(outputs)}
        tensors.update({f"gradient of {name}": self._gradients[name] for name in names if self._floats})
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
        static = [("static_alloc", True), ("static_shape", True)] if self._mode.run == "static" else []
        cached, inputs = mx.nd.CachedOp(symbol, static), [self._arrays[name] for name in symbol.list_inputs()]

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


class Judge:
    """Runs one sample in several modes and judges each against FP32 on the same rounded inputs.

    FP32 runs on the same device and with copies instead of casts, so that only the type differs. It runs the sample's
    reference operator, which is its own where there is no other.
    """

    def __init__(self, item: Sample, dtype: str, rounding: str, device: str = "cpu(0)"):
        self.item, self.dtype, self.rounding = item, dtype, rounding
        kind, _, number = device.rstrip(")").partition("(")
        self.context = mx.Context(kind, int(number or 0))
        self._references: dict[bool, dict[str, np.ndarray]] = {}
        if item.op in native.OPERATORS:
            native.load()

    def run(self, mode: Mode) -> Result:
        """Run the sample in one mode."""
        failure = UNUSABLE
        with mx.util.np_shape(self.item.numpy_shape):
            try:
                desired = self._reference(mode)
                failure = ERROR
                actual = self._run(self.item, mode, self.dtype)
            except Exception as error:
                with contextlib.suppress(mx.MXNetError):  # pending errors are raised here and not in the next mode
                    mx.nd.waitall()
                return Result(failure, message_of(error))
        resolution = ROUNDOFF[self.dtype if self.item.runs_low else FLOAT32]
        return judge(actual, desired, self.item.tolerance * resolution)

    def _reference(self, mode: Mode) -> dict[str, np.ndarray]:
        """Return what FP32 gives, computed once for training and once for prediction."""
        training = mode.grad != "infer"
        if training not in self._references:
            self._references[training] = self._in_fp32(Mode("plain", "write" if training else "infer", "eager"))
        return {name: value * 2 if mode.grad == "add" and name.startswith("gradient") else value
                for name, value in self._references[training].items()}

    def _in_fp32(self, mode: Mode) -> dict[str, np.ndarray]:
        """Run the sample in FP32; without a gradient from then on where the operator has none."""
        item = self.item
        if item.reference:
            known = parameters_of(item.reference)
            item = replace(item, op=item.reference, attrs={key: one for key, one in item.attrs.items() if key in known})
        try:
            return self._run(item, mode, FLOAT32)
        except mx.MXNetError as error:
            if _NO_GRADIENT not in str(error) or not item.gradient:
                raise
            self.item = replace(self.item, gradient=False)
            return self._in_fp32(mode)

    def _run(self, item: Sample, mode: Mode, dtype: str) -> dict[str, np.ndarray]:
        arrays = [mx.nd.array(value, ctx=self.context, dtype=value.dtype) for number, each in enumerate(item.inputs)
                  for value in [fill(each, self.rounding, f"{item.seed} {number}")]]
        types = [dtype_name(output.dtype) or "" for output in invoke(item.op, arrays, item.attrs_in(FLOAT32))]
        mx.nd.waitall()
        return Program(item, mode, dtype, self.rounding, self.context, types).run()


def message_of(error: Exception) -> str:
    """Return the line of an engine's message that says what is wrong, without paths and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("Traceback", "Stack trace", "File ", "[bt]"))]
    telling = [line for line in lines if re.search("Error in operator|Check failed|could not", line)]
    return re.sub(r"0x[0-9a-f]+", "0x...", (telling or lines or [repr(error)])[-1].split("src/")[-1])[:240]


def run_samples(op: str, dtype: str, rounding: str, device: str, only: Sequence[Key] | None = None) -> Results:
    """Run an operator's samples in all modes, or in those named, with inputs rounded to ``rounding``."""
    results = {}
    for item in SAMPLES[op]:
        one = Judge(item, dtype, rounding, device)
        for mode in modes_for(item, rounding, device):
            if only is None or (item.condition, str(mode)) in only:
                results[item.condition, str(mode)] = one.run(mode)
    gc.collect()  # checks of the memory allocator act when memory is freed
    mx.nd.waitall()
    return results


# What starts them


def faults_of(op: str, dtype: str = BFLOAT16, device: str = "cpu(0)", seconds: float = 120.0
              ) -> dict[str, dict[str, Result]]:
    """Return, for each sample of an operator, the modes in which low precision fails and FP32 does not."""
    results = {key: one for key, one in run_modes(op, dtype, dtype, device, seconds).items() if one.verdict != OK}
    doubtful = [key for key, result in results.items() if result.verdict not in (CRASH, UNUSABLE)]
    control = run_modes(op, FLOAT32, dtype, device, seconds, doubtful) if doubtful else {}
    found = {key: one for key, one in results.items() if control.get(key, Result(OK)).verdict == OK}
    return {item.condition: {mode: one for (condition, mode), one in found.items() if condition == item.condition}
            for item in SAMPLES[op]}


def run_modes(op: str, dtype: str, rounding: str, device: str, seconds: float, only: Sequence[Key] | None = None
              ) -> Results:
    """Run an operator; where its process crashes, run each mode in a process of its own."""
    outcome = apart(run_samples, op, dtype, rounding, device, only, seconds=seconds)
    if outcome.ended == NORMALLY:
        return outcome.value
    keys = only or [(item.condition, str(mode)) for item in SAMPLES[op] for mode in modes_for(item, rounding, device)]
    if len(keys) == 1:
        return {keys[0]: _failure(outcome)}
    return {key: result for each in keys
            for key, result in run_modes(op, dtype, rounding, device, seconds, [each]).items()}


def _failure(outcome: Outcome) -> Result:
    """Make the result of a mode whose process did not end normally."""
    if outcome.ended == TIMED_OUT or outcome.failed:
        return Result(ERROR if outcome.failed else TIMEOUT, outcome.ended)
    complaints = [line.strip() for line in outcome.said.splitlines() if line.strip().startswith(_COMPLAINTS)]
    return Result(CRASH, ": ".join([outcome.ended, *complaints[:1]]))


def malloc_checks() -> dict[str, str]:
    """Return variables with which glibc overwrites freed memory and checks every block when it is freed."""
    # Since glibc 2.34 the checks live in a library of their own, which may not be installed.
    library = next((path for path in _MALLOC_DEBUG if Path(path).exists()), None)
    preloaded = " ".join(filter(None, (library, os.environ.get("LD_PRELOAD"))))
    return {"MALLOC_PERTURB_": "165", "MALLOC_CHECK_": "3", "GLIBC_TUNABLES": "glibc.malloc.check=3",
            "LD_PRELOAD": preloaded}


def told(op: str, found: Mapping[str, Mapping[str, Result]]) -> str:
    """Return a line for each sample of an operator."""
    lines = []
    for item in SAMPLES[op]:
        bad = found[item.condition]
        worst = min(bad.values(), key=lambda result: _WORST_FIRST.index(result.verdict), default=Result(OK))
        lines.append(f"{op}, {item.condition}: {worst.verdict}" + f" in {len(bad)} modes: {worst.detail}" * bool(bad))
    return "\n".join(lines)


def listed(op: str, found: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Name the samples that are faulty; the operator alone where all of its samples are."""
    faulty = [condition for condition, bad in found.items() if bad]
    return [op] if len(faulty) == len(found) else [f"{op}: {condition}" for condition in faulty]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the audit; return 2 where an operator cannot be audited here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="registered names (default: every operator that has samples)")
    parser.add_argument("--dtype", choices=(BFLOAT16, FLOAT16), default=BFLOAT16)
    parser.add_argument("--device", default="cpu(0)", help="cpu(0), gpu(0)")
    parser.add_argument("--jobs", type=int, default=1, help="operators that run at a time")
    parser.add_argument("--seconds", type=float, default=120.0, help="of processor time for a process")
    parser.add_argument("--malloc-checks", action="store_true", help="run with glibc's malloc checks")
    parser.add_argument("--faults", type=Path, help="file for the names of the samples that are faulty")
    options = parser.parse_args(argv)
    if options.malloc_checks and "MALLOC_CHECK_" not in os.environ:  # they are in place before a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **malloc_checks()})
    names = options.operators or list(SAMPLES)
    obstacles = {name: obstacle for name in names for obstacle in [
        native.obstacle_to(name) if name in SAMPLES else reason_of(name) or "no such operator"] if obstacle}
    for name, obstacle in obstacles.items():
        print(f"{name}: {obstacle}", file=sys.stderr)
    if obstacles and options.operators:
        return 2
    names, lines = [name for name in names if name not in obstacles], []
    with ThreadPoolExecutor(options.jobs) as threads:
        for name, found in zip(names, threads.map(
                lambda op: faults_of(op, options.dtype, options.device, options.seconds), names)):
            print(told(name, found), flush=True)
            lines += listed(name, found)
    if options.faults:
        options.faults.write_text("".join(f"{line}\n" for line in sorted(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
