"""A cached op that rewrites its symbol for the precision policy in force when it is called.

``HybridBlock._build_cache`` instantiates ``mxnet.ndarray.CachedOp`` with the traced symbol. The class here takes
that place: it keeps the symbol as traced, and makes one stock cached op per way of running it.
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple, Protocol, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import CachedOp, NDArray

from ..dtypes import BFLOAT16
from ..graph import Graph
from .symbols import analyse, dtype_name, input_names, to_graph, was_traced_in_a_region

__all__ = ["Inputs", "RewritingCachedOp", "StockCachedOp", "forget"]

StockCachedOp = CachedOp


class Inputs(NamedTuple):
    """What is known of a symbol's inputs when it is about to run.

    Attributes
    ----------
    names : tuple of str
        Arguments and auxiliary states, in order.
    dtypes : tuple of str
        Their data types.
    shapes : tuple of tuple of int
        Their shapes; empty where unknown.
    device_type : str
        ``'cpu'`` or ``'gpu'``.
    guarded : frozenset of str
        The inputs whose gradient is accumulated.
    low : frozenset of str
        The data inputs that arrive in bfloat16 from a block around, standing for FP32 ones.
    """

    names: tuple[str, ...]
    dtypes: tuple[str | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    device_type: str
    guarded: frozenset[str]
    low: frozenset[str] = frozenset()


class Rewriter(Protocol):
    """Rewrites symbols for the inputs at hand."""

    def __call__(self, symbol: mx.sym.Symbol, inputs: Inputs) -> mx.sym.Symbol | None:
        """Return the rewritten symbol, None to run it as it is."""

    def plan(self, symbol: mx.sym.Symbol, inputs: Inputs) -> Graph:
        """Return the rewritten symbol as a graph, with the decision taken for every operator that was in the symbol."""

    def shape_rules(self, symbol: mx.sym.Symbol, inputs: Inputs) -> frozenset[str]:
        """Name the operators whose precision depends on these inputs' shapes, rather than on the weights'."""

    def explain(self, symbol: mx.sym.Symbol, inputs: Inputs, message: str) -> str:
        """Say what AMP did to the operator that an error message is about."""


def forget(block: Block, rewriter: Rewriter) -> None:
    """Drop what the blocks in a network have made for a rewriter."""
    operation = getattr(block, "_cached_op", None)
    if isinstance(operation, RewritingCachedOp):
        operation.forget(rewriter)
    for child in block._children.values():
        forget(child, rewriter)


class RewritingCachedOp:
    """Runs a traced symbol, rewritten as long as AMP is active.

    Parameters
    ----------
    symbol : Symbol
        The symbol as traced.
    flags : sequence of (str, object)
        The flags of MXNet's cached op.
    current : callable
        Gives the rewriter in force, None for none; told whether parts of the symbol were traced in an AMP region.

    Attributes
    ----------
    latest : Inputs or None
        What it was prepared for last; None before its first call under AMP.
    """

    def __init__(self, symbol: mx.sym.Symbol, flags: Sequence[tuple[str, Any]],
                 current: Callable[[bool], Rewriter | None]):
        self.symbol = symbol
        self.flags = flags
        self.accumulating: frozenset[str] = frozenset()
        self._current = current
        self._marked = was_traced_in_a_region(symbol)
        self._names = tuple(input_names(symbol))
        self._data_positions = tuple(dict(flags).get("data_indices", ()))
        self._plain: CachedOp | None = None
        self._variants: dict[Any, tuple[CachedOp, Inputs | None]] = {}
        self._shape_rules: dict[Any, frozenset[str]] = {}
        self._hook: tuple[Any, ...] = ()
        self.latest: Inputs | None = None

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        """Run the symbol; arguments and result are those of MXNet's cached op."""
        rewriter = self._current(self._marked)
        operation, inputs = (self._stock(), None) if rewriter is None else self._variant(rewriter, args)
        if self._hook:
            operation._register_op_hook(*self._hook)
        try:
            return operation(*args, **kwargs)
        except mx.MXNetError as error:
            if rewriter is None or inputs is None:
                raise
            raise type(error)(f"{error}\n{rewriter.explain(self.symbol, inputs, str(error))}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The symbol's inputs, in the order of the arguments."""
        return self._names

    def graph(self, args: Sequence[NDArray]) -> tuple[Graph, bool]:
        """Return the graph that a call with these arguments runs, and whether AMP rewrote it."""
        rewriter = self._current(self._marked)
        inputs = None if rewriter is None else self._variant(rewriter, args)[1]
        if rewriter is None or inputs is None:
            graph = to_graph(self.symbol)
            analyse(self.symbol, graph, {name: dtype_name(array.dtype) or "" for name, array in zip(self.names, args)},
                    {name: array.shape for name, array in zip(self.names, args)})
            return graph, False
        # One variant serves calls of several shapes.
        return rewriter.plan(self.symbol, inputs._replace(shapes=tuple(array.shape for array in args))), True

    def forget(self, rewriter: Rewriter) -> None:
        """Drop what was made for a rewriter that is not going to come back."""
        for kept in (self._variants, self._shape_rules):
            for key in [key for key in kept if key[0] is rewriter]:
                del kept[key]

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        self._hook = (callback, monitor_all)

    def _stock(self) -> CachedOp:
        if self._plain is None:
            self._plain = StockCachedOp(self.symbol, self.flags)
        return self._plain

    def _variant(self, rewriter: Rewriter, args: Sequence[NDArray]) -> tuple[CachedOp, Inputs | None]:
        """Return the cached op for these arguments, and what it was rewritten for; None when it was not."""
        dtypes = tuple(dtype_name(array.dtype) for array in args)
        device_type = args[0].context.device_type if args else "cpu"
        guarded = self._guarded(args)
        shaped = (rewriter, *(args[i].shape for i in self._data_positions))
        key = (rewriter, dtypes, device_type, guarded, self._shape_rules.get(shaped))
        if key not in self._variants or shaped not in self._shape_rules:
            shapes = tuple(array.shape for array in args)
            low = frozenset(self._names[i] for i in self._data_positions if dtypes[i] == BFLOAT16)
            inputs = self.latest = Inputs(self._names, dtypes, shapes, device_type, guarded, low)
            self._shape_rules[shaped] = rewriter.shape_rules(self.symbol, inputs)
            key = (*key[:-1], self._shape_rules[shaped])
        if key not in self._variants:
            rewritten = rewriter(self.symbol, inputs)
            self._variants[key] = ((self._stock(), None) if rewritten is None
                                   else (StockCachedOp(rewritten, self.flags), inputs))
        return self._variants[key]

    def _guarded(self, args: Sequence[NDArray]) -> frozenset[str]:
        if not autograd.is_recording():
            return frozenset()
        # MXNet does not tell an array's grad_req: a data array with a gradient buffer may accumulate.
        marked = (self._names[i] for i in self._data_positions if args[i].grad is not None)
        return self.accumulating.union(marked)
