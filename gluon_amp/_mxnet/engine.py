"""What MXNet's engine reports of what it runs: types, shapes and times of the operators in a graph."""
from __future__ import annotations

import json
import os
import tempfile
from typing import Any, NamedTuple, Sequence

import mxnet as mx
from mxnet import profiler
from mxnet.ndarray import NDArray

from .invoke import Callback, StockCachedOp, array_at
from .symbols import dtype_name

# What the engine itself does between operators.
_MACHINERY = {"WaitForVar", "DeleteVariable"}


class Output(NamedTuple):
    """One output of an operator, as the engine reported it."""

    name: str  # the node's and the output's, joined by an underscore
    op: str  # in a backward pass that of the backward operator
    dtype: str | None
    shape: tuple[int, ...]
    milliseconds: float  # of the operator, on its first output; 0.0 on others, and when no time is taken


class Stopwatch:
    """Reads the time of operators off MXNet's profiler, one at a time; a context manager."""

    # The profiler belongs to the process: nothing else may use it meanwhile.

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
        return sum(entry["Total"] for name, entry in times.items() if name not in _MACHINERY)


class Observed(NamedTuple):
    """What runs a symbol, and is told of its outputs; to be kept until the backward pass is over."""

    operation: StockCachedOp
    callback: Callback

    def check(self) -> None:
        """Raise what went wrong while it was told: behind each pass."""
        self.callback.check()


def run_observed(symbol: mx.sym.Symbol, args: Sequence[NDArray], heard: list[Output],
                 stopwatch: Stopwatch | None = None) -> tuple[Observed, Any]:
    """Run a symbol in a cached op of its own, and note every output that the engine reports, backward ones too."""
    def report(name: bytes, op: bytes, handle: int) -> None:
        array = array_at(handle)
        time = 0.0
        if stopwatch is not None:
            array.wait_to_read()
            time = stopwatch.lap()
        heard.append(Output(name.decode(), op.decode(), dtype_name(array.dtype), array.shape, time))

    observed = Observed(StockCachedOp(symbol), Callback(report))
    observed.operation._register_op_hook(observed.callback)
    result = observed.operation(*args)
    observed.check()
    return observed, result
