"""Listen to what MXNet runs: types, shapes and times of the operators, in graphs and in code that is not hybridized.

While a listener is in place these names are replaced, beside those of ``hooks``; not one is otherwise:

- MXNet's own invoke function, beneath AMP's: what runs in the end, casts included,
- ``RewritingCachedOp.__call__``: what a hybridized block's graph is called with,
- ``Block.__call__``: which block an operator belongs to.
"""
from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Protocol, Sequence

import mxnet as mx
from mxnet import profiler
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from ..._mxnet.invoke import StockCachedOp
from ..._mxnet.operators import handle_of, registered_operators
from ..._mxnet.symbols import dtype_name
from ...runtime import hooks
from ...runtime.eager_applier import twins
from ...runtime.graph_applier import RewritingCachedOp

__all__ = ["Listener", "Output", "Stopwatch", "observing", "prepared_operations", "run_observed"]


# What the engine itself does between operators.
_MACHINERY = {"WaitForVar", "DeleteVariable"}


class Output(NamedTuple):
    """One output of an operator, as the engine reported it.

    Attributes
    ----------
    name : str
        The node's name and the output's, joined by an underscore.
    op : str
        Registered operator name; in a backward pass that of the backward operator.
    dtype : str
        Its data type.
    shape : tuple of int
        Its shape.
    milliseconds : float
        How long the operator ran, on its first output; 0.0 on others, and when no time is taken.
    """

    name: str
    op: str
    dtype: str | None
    shape: tuple[int, ...]
    milliseconds: float


class Stopwatch:
    """Reads the time of operators off MXNet's profiler, one at a time; a context manager.

    The profiler belongs to the process: nothing else may use it meanwhile.
    """

    def __enter__(self) -> Stopwatch:
        mx.nd.waitall()
        profiler.set_config(profile_symbolic=True, profile_imperative=True, aggregate_stats=True, filename=os.devnull)
        profiler.set_state("run")
        self.lap()
        return self

    def __exit__(self, *details: Any) -> None:
        mx.nd.waitall()
        profiler.set_state("stop")
        profiler.dumps(reset=True)

    def lap(self) -> float:
        """Return the milliseconds that operators took since the last call."""
        found = json.loads(profiler.dumps(reset=True, format="json"))["Time"].get("operator", {})
        return sum(entry["Total"] for name, entry in found.items() if name not in _MACHINERY)


class Listener(Protocol):
    """What is told about calls."""

    def graph_called(self, block: Block | None, operation: RewritingCachedOp, args: Sequence[NDArray]) -> Any:
        """Run a hybridized block's graph and return its outputs."""

    def operator_called(self, block: Block | None, op: str, inputs: Sequence[NDArray], attrs: Mapping[str, str],
                        outputs: Sequence[NDArray], call: int, inserted: bool) -> None:
        """Take note of an operator that was called by itself: by the program, or inserted by AMP.

        All operators that run for one call of the program have its number; 0 for those between calls.
        """


@contextmanager
def observing(listener: Listener) -> Iterator[None]:
    """Tell a listener about every call of the current thread in the body.

    Parameters
    ----------
    listener : Listener
        Runs graphs, and is told about operators that were called by themselves.
    """
    with ExitStack() as stack:
        stack.enter_context(hooks.kept_in_place())
        original, put = stack.enter_context(hooks.invoke_replaced())
        ear = _Ear(listener)
        put(ear.invoke(original), ear.called)
        stack.enter_context(_replaced(RewritingCachedOp, ear.cached_op))
        stack.enter_context(_replaced(Block, ear.block))
        yield


@contextmanager
def _replaced(owner: type, make: Callable[[Callable], Callable]) -> Iterator[None]:
    original = owner.__call__
    owner.__call__ = make(original)  # type: ignore[assignment]
    try:
        yield
    finally:
        owner.__call__ = original  # type: ignore[assignment]


class _Ear:
    """Follows the current thread's calls."""

    def __init__(self, listener: Listener):
        self.listener = listener
        self.thread = threading.get_ident()
        self.blocks: list[Block] = []
        self.calls: list[int] = []  # the program's calls under way: handles of operators
        self.number = 0  # of the last call
        self.inside = 0  # graphs under way: what is called while one is traced or runs is part of it
        self.names = {handle_of(name): name for name in set(registered_operators().values())}

    def _hears(self) -> bool:
        return not self.inside and threading.get_ident() == self.thread

    def called(self, original: Callable) -> Callable:
        """Make the function that the program calls."""
        def invoke(handle: int, *args: Any) -> Any:
            if threading.get_ident() != self.thread:
                return original(handle, *args)
            self.calls.append(handle)
            self.number += 1
            try:
                return original(handle, *args)
            finally:
                self.calls.pop()
        return invoke

    def invoke(self, original: Callable) -> Callable:
        """Make the function that runs operators in the end."""
        def invoke(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any],
                   *rest: Any) -> Any:
            result = original(handle, inputs, keys, values, *rest)
            if self._hears():
                called = self.calls[-1] if self.calls else None
                self.listener.operator_called(self.blocks[-1] if self.blocks else None, self.names.get(handle, "?"),
                                              inputs, dict(zip(keys, map(str, values))),
                                              result if isinstance(result, (list, tuple)) else [result],
                                              self.number if self.calls else 0,
                                              inserted=called is None or handle not in (called, twins().get(called)))
            return result
        return invoke

    def cached_op(self, original: Callable) -> Callable:
        """Make the method that runs graphs."""
        def call(operation: RewritingCachedOp, *args: NDArray, **kwargs: Any) -> Any:
            if kwargs or not self._hears():
                return original(operation, *args, **kwargs)
            self.inside += 1
            try:
                return self.listener.graph_called(self.blocks[-1] if self.blocks else None, operation, args)
            finally:
                self.inside -= 1
        return call

    def block(self, original: Callable) -> Callable:
        """Make the method that calls blocks."""
        @functools.wraps(original)
        def call(block: Block, *args: Any) -> Any:
            if threading.get_ident() != self.thread:
                return original(block, *args)
            self.blocks.append(block)
            try:
                return original(block, *args)
            finally:
                self.blocks.pop()
        return call


def run_observed(symbol: mx.sym.Symbol, args: Sequence[NDArray], heard: list[Output],
                 stopwatch: Stopwatch | None = None) -> tuple[Any, Any]:
    """Run a symbol in a cached op of its own, and note every output that the engine reports.

    Parameters
    ----------
    symbol : Symbol
        What runs.
    args : sequence of NDArray
        Its inputs, in order.
    heard : list of Output
        Receives the outputs: of the forward pass now, of the backward pass when it runs.
    stopwatch : Stopwatch, optional
        Takes times, for which operators run one after the other.

    Returns
    -------
    (CachedOp, NDArray or list of NDArray)
        The cached op, which is to be kept until the backward pass is over, and its result.
    """
    def report(name: bytes, op: bytes, handle: int) -> None:
        array = NDArray(ctypes.cast(handle, mx.base.NDArrayHandle), writable=False)
        time = 0.0
        if stopwatch is not None:
            array.wait_to_read()
            time = stopwatch.lap()
        heard.append(Output(name.decode(), op.decode(), dtype_name(array.dtype), array.shape, time))

    operation = StockCachedOp(symbol)
    operation._register_op_hook(report)
    return operation, operation(*args)


def prepared_operations(block: Block) -> list[tuple[Block, RewritingCachedOp]]:
    """Return the hybridized blocks inside a block that have been called under AMP, and what they run."""
    operation = getattr(block, "_cached_op", None)
    if isinstance(operation, RewritingCachedOp) and operation.latest is not None:
        return [(block, operation)]
    return [found for child in block._children.values() for found in prepared_operations(child)]
