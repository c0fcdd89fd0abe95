"""Run a network and record everything that the current thread runs meanwhile: operators, graphs, and their blocks."""
from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray

from .._mxnet.engine import Stopwatch
from .._mxnet.invoke import PAST_INVOKE, Invocation, Invoke, handle_of, registered_operators, run_operator
from ..base.context import Replaced
from ..eager.applier import make_invoke
from ..graph import CAST, Role
from ..plan.cached_op import RewritingCachedOp
from ..session import hooks
from ..state.in_force import frame, in_force
from ..state.state import twins
from .recording import Recording, float_arrays
from .records import count_casts

_ROLES = {CAST: Role.CAST, "_mul_scalar": Role.IDENTITY}  # of what the eager applier inserts


def record(call: Callable[[], Any], net: Block, *, records: bool = True, train_mode: bool = True,
           loss: Callable[[Any], NDArray] | None = None, differentiates: bool = True, ranges: bool = False,
           keep: bool = False, stopwatch: Stopwatch | None = None) -> Recording:
    """Call a network, and then a loss of its result, and record every operator."""
    # ``records``: autograd does; ``differentiates``: ``backward`` may be called; ``ranges``: the largest values are
    # noted; ``keep``: all values are kept.
    made = Recording(net, ranges, keep, differentiates, stopwatch)
    with _heard(made), (autograd.record if records else autograd.pause)(train_mode=train_mode):
        result = call()
        made.outputs, made.count = float_arrays(result), len(made.records)
        if loss is not None:
            made.losses = float_arrays(loss(result))
    mx.nd.waitall()
    count_casts(made.records)
    return made


@contextmanager
def _heard(made: Recording) -> Iterator[None]:
    """Let a recording run the current thread's operators and graphs in the body, and methods of arrays."""
    # Invoke is replaced on both sides of AMP's: what the program calls, and what runs in the end, casts included.
    # Methods that make no operator call, or that write into arrays made before, matter to gradients alone.
    replaced = Replaced()
    with hooks.kept_in_place():
        try:
            recorder = _Recorder(made, in_force.invoke)
            replaced.put(in_force, "invoke", recorder.inner)
            replaced.put(*hooks.INVOKE, recorder.noting(
                recorder.called, make_invoke(recorder.inner, in_force.eager, in_force.is_on)))
            replaced.put(RewritingCachedOp, "__call__", recorder.cached_op(RewritingCachedOp.__call__))
            replaced.put(Block, "__call__", recorder.noting(recorder.blocks, Block.__call__))
            for owner, name in PAST_INVOKE if made.differentiates else ():
                replaced.put(owner, name, recorder.method(name, getattr(owner, name)))
            yield
        finally:
            replaced.restore()


@dataclass
class _Recorder:
    """Follows the current thread's calls."""

    made: Recording
    original: Invoke
    thread: int = field(default_factory=threading.get_ident)
    whole: list[Any] = field(default_factory=list)  # the calls that are recorded as a whole and that are under way
    blocks: list[Block | None] = field(default_factory=lambda: [None])
    called: list[int] = field(default_factory=list)  # the operators that the program called and that are under way
    names: Mapping[int, str] = field(default_factory=lambda: {  # by handles
        handle_of(name): name for name in set(registered_operators().values())})

    def _listens(self) -> bool:
        return not self.whole and threading.get_ident() == self.thread

    def noting(self, stack: list[Any], original: Callable) -> Callable:
        """Make a function that keeps its first argument, an operator or a block, in a stack while it runs."""
        @functools.wraps(original)
        def call(first: Any, *args: Any) -> Any:
            if threading.get_ident() != self.thread:
                return original(first, *args)
            with _pushed(stack, first):
                return original(first, *args)
        return call

    def inner(self, *arguments: Any) -> Any:
        """Take the place of MXNet's own invoke, which every call ends in, whether AMP changed it or not."""
        if not self._listens():
            return self.original(*arguments)
        made = Invocation(*arguments)

        def compute(arrays: Sequence[NDArray]) -> Sequence[NDArray]:
            result = self.original(*made._replace(inputs=arrays, output_is_list=True))
            return result if isinstance(result, (list, tuple)) else [result]
        called = self.called[-1] if self.called else 0
        op = self.names.get(made.handle, "?")
        is_own = made.handle in (called, twins().get(called))
        eager, decision = in_force.eager(made.inputs), None
        if eager is not None and is_own:
            operator = eager.operators.get(made.handle)  # None for calls that AMP never touches
            decision = (eager.decide(operator, made) if operator is not None and made.inputs else
                        eager.rule_of(op, made.attrs(), made.inputs[0].shape if made.inputs else None))
        outputs = self.made.called(
            op, self.names.get(called, "?") if is_own else f"+{op}", self.blocks[-1], made.inputs, compute,
            made.attrs(), Role.OWN if is_own else Role.ROUNDING if frame.imitates else _ROLES.get(op, Role.HELPER),
            None if eager is None else eager.policy, decision, writes=made.out is not None)
        if made.out is not None:
            return made.out
        return outputs if made.output_is_list or len(outputs) != 1 else outputs[0]

    def cached_op(self, original: Callable) -> Callable:
        """Make the method that runs graphs."""
        def call(operation: RewritingCachedOp, *args: NDArray, **kwargs: Any) -> Any:
            if kwargs or not self._listens():
                return original(operation, *args, **kwargs)
            with _pushed(self.whole, operation):
                return self.made.graph_called(self.blocks[-1], operation, args)
        return call

    def method(self, name: str, original: Callable) -> Callable:
        """Make the function that records a call as a whole."""
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            positions = [i for i, value in enumerate(args) if isinstance(value, NDArray)]
            if not positions or not self._listens():
                return original(*args, **kwargs)
            kinds: list[type] = []

            def compute(arrays: Sequence[NDArray]) -> Sequence[NDArray]:
                given = list(args)
                for position, array in zip(positions, arrays):
                    given[position] = array
                with _pushed(self.whole, name):
                    result = original(*given, **kwargs)
                kinds.append(type(result))
                results = result if isinstance(result, (list, tuple)) else [result]
                # What is handed back as it is has no operator to differentiate.
                return [run_operator(self.original, "_copy", [item], {}) if any(item is array for array in arrays)
                        else item for item in results]
            outputs = self.made.called(name, name, self.blocks[-1], [args[i] for i in positions], compute,
                                       is_whole=True)
            return kinds[0](outputs) if kinds[0] in (list, tuple) else outputs[0]
        return call


@contextmanager
def _pushed(stack: list[Any], value: Any) -> Iterator[None]:
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()
