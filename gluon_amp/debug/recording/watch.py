"""Let everything that MXNet runs go over a tape for a while.

Meanwhile these names are replaced, beside those of ``hooks``:

- the invoke function, on both sides of AMP's: what the program calls, and what runs in the end, casts included,
- ``RewritingCachedOp.__call__``: a hybridized block's graph runs node by node,
- ``Block.__call__``: which block operators belong to,
- what MXNet runs without an operator call, or into arrays made before: slices, copies, ``autograd.Function``.
"""
from __future__ import annotations

import functools
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray
from mxnet.ndarray import numpy as nd_numpy
from mxnet.symbol.numpy import _Symbol as NumpySymbol

from ..._mxnet.operators import handle_of, registered_operators
from ...rules import Decision
from ...runtime import hooks
from ...runtime.eager_applier import twins
from ...runtime.graph_applier import RewritingCachedOp
from ...runtime.state import controller
from .tape import Tape

__all__ = ["watching"]

Invoke = Callable[..., Any]

_OPAQUE: tuple[tuple[Any, str], ...] = (
    *((NDArray, name) for name in ("__getitem__", "reshape", "astype", "copy", "as_in_context", "as_np_ndarray")),
    *((mx.np.ndarray, name) for name in ("__getitem__", "astype", "copy", "as_in_ctx", "as_nd_ndarray")),
    (autograd.Function, "__call__"), (nd_numpy._api_internal, "tensordot"))


@contextmanager
def watching() -> Iterator[Tape]:
    """Record what the current thread runs in the body.

    Yields
    ------
    Tape
        Filled while the body runs.
    """
    with ExitStack() as stack:
        stack.enter_context(hooks.kept_in_place())
        original, put = stack.enter_context(hooks.invoke_replaced())
        watch = _Watch(Tape(original))
        put(watch.inner(original), watch.outer)
        replacements: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (RewritingCachedOp, "__call__", watch.cached_op), (Block, "__call__", watch.block),
            *((owner, name, functools.partial(watch.opaque, name)) for owner, name in _OPAQUE)]
        for owner, name, make in replacements:
            stack.enter_context(_replaced(owner, name, make))
        yield watch.tape


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@functools.lru_cache(maxsize=1)
def _names() -> Mapping[int, str]:
    return {handle_of(name): name for name in set(registered_operators().values())}


class _Watch:
    """Puts what is called on the tape."""

    def __init__(self, tape: Tape):
        self.tape = tape
        self.thread = threading.get_ident()
        self.deaf = 0  # how many calls that are recorded as a whole are under way
        self.called: list[int] = []  # the operators that the program called and that are under way
        self.blocks: list[Block] = []
        self._prefixes: dict[int, list[tuple[str, str]]] = {}

    def listens(self) -> bool:
        return not self.deaf and threading.get_ident() == self.thread

    @property
    def block_name(self) -> str:
        return self.blocks[-1].name if self.blocks else ""

    def outer(self, invoke: Invoke) -> Invoke:
        """Make what the program calls."""
        def called(handle: int, *args: Any) -> Any:
            if not self.listens():
                return invoke(handle, *args)
            self.called.append(handle)
            try:
                return invoke(handle, *args)
            finally:
                self.called.pop()
        return called

    def inner(self, invoke: Invoke) -> Invoke:
        """Make what AMP, or the program where AMP leaves a call alone, calls in the end."""
        def run(handle: int, inputs: Sequence[NDArray], keys: Sequence[str], values: Sequence[Any], out: Any,
                is_np_op: bool, output_is_list: bool) -> Any:
            if out is not None or not self.listens():
                return invoke(handle, inputs, keys, values, out, is_np_op, output_is_list)
            op = _names().get(handle, "")
            called = self.called[-1] if self.called else 0
            inserted = handle not in (called, twins().get(called))
            name = f"{self.block_name}/{'+' + op if inserted else _names()[called]}"
            outputs = self.tape.run(
                lambda arrays: invoke(handle, arrays, keys, values, None, is_np_op, True), inputs, op, name,
                self.block_name, dict(zip(keys, map(str, values))), inserted, self._rule(handle, inputs, keys, values))
            return outputs if output_is_list or len(outputs) != 1 else outputs[0]
        return run

    def _rule(self, handle: int, inputs: Sequence[NDArray], keys: Sequence[str],
              values: Sequence[Any]) -> Decision | None:
        """Return what AMP decides on a call."""
        policy = controller.eager(inputs) if inputs else None
        operator = policy.operators.get(handle) if policy is not None else None
        return policy.decide(operator, inputs, keys, values) if policy is not None and operator is not None else None

    def cached_op(self, original: Callable) -> Callable:
        """Run the graphs of cached ops node by node."""
        def call(cached_op: RewritingCachedOp, *args: NDArray, **kwargs: Any) -> Any:
            if kwargs or not self.listens():
                return original(cached_op, *args, **kwargs)
            graph = cached_op.graph(args)
            outputs = self.tape.interpret(graph, dict(zip(cached_op.names, args)), self._block_of)
            if isinstance(cached_op.symbol, NumpySymbol):
                with self._silence():
                    outputs = [self.tape.alias(array.as_np_ndarray(), array) for array in outputs]
            return outputs[0] if len(outputs) == 1 else outputs
        return call

    def block(self, original: Callable) -> Callable:
        """Note which block is being called."""
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

    def opaque(self, op: str, original: Callable) -> Callable:
        """Record a call as a whole."""
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            positions = [i for i, value in enumerate(args) if isinstance(value, NDArray)]
            if not positions or not self.listens():
                return original(*args, **kwargs)
            kinds: list[type] = []

            def compute(arrays: Sequence[NDArray]) -> Sequence[NDArray]:
                given = list(args)
                for position, array in zip(positions, arrays):
                    given[position] = array
                with self._silence():
                    result = original(*given, **kwargs)
                kinds.append(type(result))
                results = result if isinstance(result, (list, tuple)) else [result]
                # What is handed back as it is has no operator to differentiate.
                return [self.tape.call("_copy", [item], {})[0] if any(item is array for array in arrays) else item
                        for item in results]
            outputs = self.tape.run(compute, [args[i] for i in positions], op, f"{self.block_name}/{op}",
                                    self.block_name, {}, repeatable=False)
            return kinds[0](outputs) if kinds[0] in (list, tuple) else outputs[0]
        return call

    @contextmanager
    def _silence(self) -> Iterator[None]:
        self.deaf += 1
        try:
            yield
        finally:
            self.deaf -= 1

    def _block_of(self, node: str) -> str:
        """Name the innermost block inside the current one whose prefix a node's name has."""
        if not self.blocks:
            return ""
        around = self.blocks[-1]
        if id(around) not in self._prefixes:
            self._prefixes[id(around)] = sorted(set(_prefixes(around)), key=lambda pair: -len(pair[0]))
        return next((name for prefix, name in self._prefixes[id(around)] if node.startswith(prefix)), around.name)


def _prefixes(block: Block) -> Iterator[tuple[str, str]]:
    if block.prefix:
        yield block.prefix, block.name
    for child in block._children.values():
        yield from _prefixes(child)
