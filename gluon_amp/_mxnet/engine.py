"""MXNet's engine: operators that run one after another, and how long they take."""
from __future__ import annotations

import ctypes
import json
import os
import tempfile
import threading
import time
from statistics import median
from typing import Any, Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd, profiler
from mxnet.base import _LIB, NDArrayHandle, check_call
from mxnet.executor import Executor
from mxnet.ndarray import NDArray

from ..graph import has_control_flow
from ..machine.dtypes import BFLOAT16, FLOAT32
from .arrays import cast_arrays
from .invoke import Callback, UpstreamCachedOp, array_at, zeros_for
from .symbols import dtype_name, to_graph

_NAME = b"WaitForVar"  # which the engine gives to its own waiting


class _Context(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int32))


def _without_interpreter(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of Python's C interface that runs in any thread, and does not wait for the interpreter."""
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.CFUNCTYPE(result, *arguments))


_CPU = _Context(1, 0)
_nothing = _without_interpreter("Py_IsInitialized", ctypes.c_int)
_allocate = _without_interpreter("PyThread_allocate_lock", ctypes.c_void_p)
_acquire = _without_interpreter("PyThread_acquire_lock", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_release = _without_interpreter("PyThread_release_lock", None, ctypes.c_void_p)


class _Lock(threading.local):
    """A lock for each thread that waits; it is taken until the engine releases it."""

    def __init__(self) -> None:
        self.address = _allocate()
        _acquire(self.address, 1)


_lock = _Lock()


def wait_for(handle: NDArrayHandle) -> None:
    """Wait until the operator that writes an array is done; an error of it stays for whoever reads the array."""
    # MXNet's own wait_to_read takes the error away from the array, and all that is computed of it seems right. Here the
    # engine gets a task that reads the array. It drops the task, run or not, and releases the lock that belongs to it.
    lock = ctypes.c_void_p(_lock.address)
    with mx.engine.bulk(0):  # the engine starts what it has gathered
        check_call(_LIB.MXEnginePushSyncND(_nothing, lock, _release, ctypes.byref(_CPU), ctypes.byref(handle), 1,
                                           None, 0, None, 0, _NAME))
    _acquire(lock, 1)


def _wait_and_free(*told: Any) -> None:
    array = array_at(told[-2])
    wait_for(array.handle)


# These belong to the module: a backward pass may run when the Python object that started it has gone.
_waiting = Callback(_wait_and_free)
_after_each = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(_waiting)
_after_each_bound = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p)(_waiting)
check_waiting = _waiting.check  # raises what ended the waiting, as Ctrl-C does


def serialize_execution(runner: UpstreamCachedOp | Executor) -> None:
    """Let a cached op or an executor, and its backward pass, run one operator after another."""
    # MXNet hands operators to threads of its engine, but runs loops and branches in the thread that hands them out.
    # There it copies what they read out of oneDNN's layouts, and forgets the layout of the memory that they will write
    # to, though the operators in front of them may not have run: results are wrong without a word, or the process ends.
    # Its hook for monitors is called in that thread, before the next operator.
    if isinstance(runner, Executor):
        check_call(_LIB.MXExecutorSetMonitorCallbackEX(runner.handle, _after_each_bound, None, 0))
    else:
        check_call(_LIB.MXCachedOpRegisterOpHook(runner.handle, _after_each, 0))


def as_callback(hook: Callable[..., None], waits: bool) -> Callback:
    """Make what C calls of a hook, which gets bfloat16 as FP32; wait for the output first if asked to."""
    def report(*told: Any) -> None:
        array = array_at(told[-1])  # frees the handle when it goes
        if waits:
            wait_for(array.handle)
        if dtype_name(array.dtype) == BFLOAT16:
            with autograd.pause():
                array = cast_arrays(array, FLOAT32)
        handle, array.handle = array.handle, NDArrayHandle()
        hook(*told[:-1], handle.value)
    return Callback(report)


class Program:
    """A symbol to be run as it is: nothing is fused, and no types are changed."""

    def __init__(self, symbol: mx.sym.Symbol, arrays: Mapping[str, NDArray]):
        self._symbol, self._names, self._arrays = symbol, symbol.list_inputs(), arrays
        self._op = UpstreamCachedOp(symbol)
        self._callback = _waiting
        if has_control_flow(to_graph(symbol)):
            serialize_execution(self._op)

    def __call__(self, batch: Mapping[str, NDArray]) -> list[NDArray]:
        """Run it on arrays by the names of inputs; return its outputs."""
        given = {**self._arrays, **batch}
        given.update(zeros_for(self._symbol, [name for name in self._names if name not in given], given))
        try:
            outputs = self._op(*(given[name].as_nd_ndarray() for name in self._names))
        finally:
            self._callback.check()
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    def watch(self, seen: Callable[[str, NDArray], None]) -> None:
        """Let a function see the name and the array of every tensor that an operator gives, which is computed then."""
        self._callback = as_callback(lambda name, _, handle: seen(name.decode(), array_at(handle)), waits=True)
        self._op._register_op_hook(self._callback)


class Stopwatch:
    """Reads the time of operators off MXNet's profiler, which nothing else may use meanwhile; one at a time."""

    def __enter__(self) -> Stopwatch:
        mx.nd.waitall()
        # MXNet removes the file of this name first, be it /dev/null; a thread of its own writes it every second.
        self._directory = tempfile.TemporaryDirectory()
        profiler.set_config(profile_symbolic=True, profile_imperative=True, aggregate_stats=True,
                            filename=os.path.join(self._directory.name, "profile.json"))
        profiler.set_state("run")
        self.lap()
        return self

    def __exit__(self, *details: Any) -> None:
        mx.nd.waitall()
        profiler.set_state("stop")
        profiler.dumps(reset=True)
        profiler.set_config(filename="")  # nothing is written while the directory is removed
        self._directory.cleanup()

    def lap(self) -> float:
        """Return the milliseconds that operators took since the last call."""
        times = json.loads(profiler.dumps(reset=True, format="json"))["Time"].get("operator", {})
        return sum(entry["Total"] for name, entry in times.items() if name not in (_NAME.decode(), "DeleteVariable"))


def interleaved(runs: Sequence[Callable[[], object]], rounds: int, warm_up: int = 1,
                of: Callable[[Sequence[float]], float] = median) -> list[float]:
    """Run functions in turns; return the median milliseconds of each, or their least, without those of the warm-up."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(warm_up + rounds):
        for run, kept in zip(runs, times):
            begin = time.perf_counter()
            run()
            if number >= warm_up:
                kept.append((time.perf_counter() - begin) * 1e3)
    return list(map(of, times))


def time_in_both(shape: tuple[int, int, int, int], rounds: int) -> list[float]:
    """Return the least time in which a 3x3 convolution of images trains in FP32 and in bfloat16, measured in turns."""
    return interleaved([_step(shape, dtype) for dtype in (FLOAT32, BFLOAT16)], rounds, of=min)


def _step(shape: tuple[int, int, int, int], dtype: str) -> Callable[[], None]:
    """Return a step of training of a convolution, whose weight is FP32, and is cast for it."""
    random, channels = np.random.RandomState(0), shape[1]  # MXNet's own numbers are the program's
    data, weight = (mx.nd.array(random.normal(scale=0.1, size=size), ctx=mx.cpu(), dtype=FLOAT32)
                    for size in (shape, (channels, channels, 3, 3)))
    inputs, given = [cast_arrays(data, dtype), weight], mx.sym.Variable("weight")
    result = mx.sym.Convolution(mx.sym.Variable("data"), given if dtype == FLOAT32 else mx.sym.amp_cast(
        given, dtype=dtype), kernel=(3, 3), pad=(1, 1), num_filter=channels, no_bias=True)
    operation = UpstreamCachedOp(result, [("static_alloc", True), ("static_shape", True)])
    for array in inputs:
        array.attach_grad()

    def run() -> None:
        with autograd.record():
            made = operation(*inputs)
        made.backward()
        mx.nd.waitall()
    return run
