"""Install and remove the few replacements through which AMP sees what MXNet is about to run.

- ``mxnet.ndarray.CachedOp``: what a hybridized block instantiates with its traced symbol.
- ``HybridBlock._call_cached_op``: the only place that sees blocks cached before AMP was switched on, and the
  ``grad_req`` of their parameters.
- ``Symbol.bind`` and ``Symbol.simple_bind``: how Module and symbol users run symbols.
"""
from __future__ import annotations

import functools
from itertools import zip_longest
from typing import Any, Callable

import mxnet as mx
from mxnet.gluon import HybridBlock

from ..dtypes import FLOAT32
from .cached_op import Inputs, Rewriter, RewritingCachedOp, StockCachedOp
from .symbols import dtype_name

__all__ = ["install", "uninstall"]

_originals: list[tuple[Any, str, Any]] = []


def install(current_rewriter: Callable[[], Rewriter | None]) -> None:
    """Put the replacements in place; all or none.

    Parameters
    ----------
    current_rewriter : callable
        Gives the rewriter in force, None for none.
    """
    RewritingCachedOp.current_rewriter = staticmethod(current_rewriter)
    try:
        _replace(mx.ndarray, "CachedOp", lambda _: RewritingCachedOp)
        _replace(HybridBlock, "_call_cached_op", _make_call_cached_op)
        _replace(mx.sym.Symbol, "bind", lambda original: _make_bind(original, current_rewriter))
        _replace(mx.sym.Symbol, "simple_bind", lambda original: _make_simple_bind(original, current_rewriter))
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Restore MXNet exactly as it was."""
    while _originals:
        setattr(*_originals.pop())
    RewritingCachedOp.current_rewriter = staticmethod(lambda: None)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    _originals.append((owner, name, original))


def _make_call_cached_op(original: Callable) -> Callable:
    @functools.wraps(original)
    def call_cached_op(block: HybridBlock, *args: Any) -> Any:
        if isinstance(block._cached_op, StockCachedOp):
            block._cached_op = None  # cached before AMP was switched on
        if block._cached_op is None:
            block._build_cache(*args)
        if isinstance(block._cached_op, RewritingCachedOp):
            block._cached_op.accumulating = _accumulating(block)
        return original(block, *args)
    return call_cached_op


def _accumulating(block: HybridBlock) -> frozenset[str]:
    if not mx.autograd.is_recording():
        return frozenset()
    return frozenset(source.name for is_data, source in block._cached_op_args
                     if not is_data and source.grad_req == "add")


def _make_bind(original: Callable, current_rewriter: Callable[[], Rewriter | None]) -> Callable:
    @functools.wraps(original)
    def bind(symbol: mx.sym.Symbol, ctx: mx.Context, args: Any, args_grad: Any = None, grad_req: Any = "write",
             aux_states: Any = None, **kwargs: Any) -> Any:
        rewriter = current_rewriter()
        rewritten = None
        if rewriter is not None and isinstance(ctx, mx.Context):
            arrays = {**_by_name(args, symbol.list_arguments()),
                      **_by_name(aux_states, symbol.list_auxiliary_states())}
            dtypes = {name: dtype_name(array.dtype) for name, array in arrays.items()}
            shapes = {name: array.shape for name, array in arrays.items()}
            rewritten = rewriter(symbol, _inputs(symbol, ctx, dtypes, shapes, grad_req))
        executor = original(symbol if rewritten is None else rewritten, ctx, args, args_grad, grad_req, aux_states,
                            **kwargs)
        executor._symbol = symbol  # outputs keep the names that the user's symbol gives them
        return executor
    return bind


def _make_simple_bind(original: Callable, current_rewriter: Callable[[], Rewriter | None]) -> Callable:
    @functools.wraps(original)
    def simple_bind(symbol: mx.sym.Symbol, ctx: mx.Context, grad_req: Any = "write", type_dict: Any = None,
                    **kwargs: Any) -> Any:
        rewriter = current_rewriter()
        rewritten = None
        if rewriter is not None and isinstance(ctx, mx.Context):
            dtypes = _inferred_dtypes(symbol, type_dict or {})
            shapes = _inferred_shapes(symbol, kwargs)
            rewritten = rewriter(symbol, _inputs(symbol, ctx, dtypes, shapes, grad_req))
            if rewritten is not None:
                # Behind a cast MXNet cannot infer the type of a variable: say it.
                type_dict = {**{name: dtype for name, dtype in dtypes.items() if dtype}, **(type_dict or {})}
        executor = original(symbol if rewritten is None else rewritten, ctx, grad_req, type_dict, **kwargs)
        executor._symbol = symbol
        return executor
    return simple_bind


def _inputs(symbol: mx.sym.Symbol, ctx: mx.Context, dtypes: dict[str, str | None],
            shapes: dict[str, tuple[int, ...]], grad_req: Any) -> Inputs:
    names = tuple(symbol.list_inputs())
    requests = _by_name([grad_req] * len(symbol.list_arguments()) if isinstance(grad_req, str) else grad_req,
                        symbol.list_arguments())
    guarded = frozenset(name for name, request in requests.items() if request == "add")
    return Inputs(names, tuple(dtypes.get(name) for name in names), tuple(shapes.get(name, ()) for name in names),
                  ctx.device_type, guarded)


def _by_name(values: Any, names: list[str]) -> dict[str, Any]:
    if values is None:
        return {}
    pairs = values.items() if isinstance(values, dict) else zip(names, values)
    return {name: value for name, value in pairs if value is not None}


def _inferred_dtypes(symbol: mx.sym.Symbol, type_dict: dict[str, Any]) -> dict[str, str | None]:
    arguments, _, auxiliary = symbol.infer_type_partial(**type_dict)
    names = symbol.list_arguments() + symbol.list_auxiliary_states()
    found = map(dtype_name, [*(arguments or []), *(auxiliary or [])])
    return {name: dtype or FLOAT32 for name, dtype in zip_longest(names, found)}  # simple_bind's own default


def _inferred_shapes(symbol: mx.sym.Symbol, given: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    known = {name: shape for name, shape in given.items() if isinstance(shape, tuple)}
    arguments, _, auxiliary = symbol.infer_shape_partial(**known)
    names = symbol.list_arguments() + symbol.list_auxiliary_states()
    return {name: shape for name, shape in zip(names, [*(arguments or []), *(auxiliary or [])]) if shape}
