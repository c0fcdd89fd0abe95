"""Install and remove the few replacements through which AMP sees what MXNet is about to run.

- ``mxnet.ndarray.register._imperative_invoke``: every imperative operator call.
- ``mxnet.ndarray.numpy._api_internal.tensordot``: the one NumPy operator that does not go that way.
- ``mxnet.symbol.register._symbol_creator``: custom operators, which cannot carry the mark of a region.
- ``mxnet.ndarray.CachedOp``: what a hybridized block instantiates with its traced symbol.
- ``HybridBlock._call_cached_op``: the only place that sees blocks cached before AMP was switched on, and the
  ``grad_req`` of their parameters.
- ``HybridBlock._get_graph``: a block is traced without the marks of regions around its call.
- ``Block.__call__``: where low precision begins and ends in code that is not hybridized.
- ``Block.register_child``: networks given to ``initialize`` grow.
- ``SymbolBlock.forward``: in another block's trace its operators carry the mark of the region around its call.
- ``autograd.Function.__call__``: user code that expects what it was written for.
- ``autograd.grad``, ``autograd.backward`` and ``NDArray.backward``: errors about gradients of gradients say what to do.
- ``NDArray.asnumpy``: in networks that are not hybridized Python code reads what is in bfloat16 as FP32.
- ``Trainer._update``: what the optimizer has written.
- ``Trainer.amp_loss_scale``: a property that MXNet does not have.
- ``Symbol.bind`` and ``Symbol.simple_bind``: how Module and symbol users run symbols.
"""
from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import Any, Callable, ContextManager, Iterator

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, SymbolBlock, Trainer
from mxnet.gluon.utils import _check_all_np_ndarrays
from mxnet.ndarray import NDArray, register
from mxnet.ndarray import numpy as nd_numpy
from mxnet.symbol import register as symbol_register
from mxnet.util import is_np_array

from .._mxnet.blocks import make_symbol_block_forward
from .._mxnet.invoke import StockCachedOp
from .._mxnet.symbols import make_symbol_creator, outermost_trace
from ..dtypes import BFLOAT16
from .eager_applier import frame, is_low, make_invoke, release
from .eager_native import make_native_invoke
from .executors import make_bind, make_simple_bind
from .graph_applier import RewritingCachedOp
from .second_gradients import NOT_TWICE, are_recorded
from .state import controller

_originals: list[tuple[Any, str, Any]] = []
_lock = threading.Lock()
_tracing = threading.RLock()
_ABSENT = object()


def installed() -> bool:
    """Tell whether the replacements are in place."""
    return bool(_originals)


def install() -> None:
    """Install all replacements or none; do nothing when they are installed."""
    with _lock:
        if _originals:
            return
        try:
            for owner, name, make in _REPLACEMENTS:
                original = getattr(owner, name, _ABSENT)
                setattr(owner, name, make(original))
                _originals.append((owner, name, original))
            controller.hooked = True
        except BaseException:
            _restore()
            raise


@contextmanager
def kept_in_place() -> Iterator[None]:
    """Install the replacements for the body, unless they are installed already."""
    were_installed = installed()
    install()
    try:
        yield
    finally:
        if not were_installed:
            uninstall()


def uninstall() -> None:
    """Restore MXNet exactly as it was."""
    with _lock:
        _restore()


def _restore() -> None:
    controller.hooked = False
    while _originals:
        owner, name, original = _originals.pop()
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def invoke_replaced() -> Iterator[tuple[Callable, Callable[[Callable, Callable], None]]]:
    """Give MXNet's invoke function, and a function that replaces it for the body."""
    # The function takes the new invoke function, and one that wraps what AMP makes of it.
    position = next(i for i, (_, name, _) in enumerate(_originals) if name == "_imperative_invoke")
    owner, name, original = _originals[position]
    before = getattr(owner, name)

    def put(invoke: Callable, outer: Callable[[Callable], Callable]) -> None:
        _originals[position] = (owner, name, invoke)
        setattr(owner, name, outer(make_invoke(invoke, controller.eager, controller.is_on)))
    try:
        yield original, put
    finally:
        _originals[position] = (owner, name, original)
        setattr(owner, name, before)


def _make_call_cached_op(original: Callable) -> Callable:
    @functools.wraps(original)
    def call_cached_op(block: HybridBlock, *args: Any) -> Any:
        epoch = controller.epoch()
        if not _is_current(block, epoch):
            with _tracing:  # blocks cannot be traced in two threads at once
                _rebuild(block, epoch, args)
        if isinstance(block._cached_op, RewritingCachedOp):
            block._cached_op.accumulating = _accumulating(block)
            block._cached_op.frozen = _frozen(block) if autograd.is_recording() else frozenset()
        return original(block, *args)
    return call_cached_op


def _make_get_graph(original: Callable) -> Callable:
    @functools.wraps(original)
    def get_graph(block: HybridBlock, *args: Any) -> Any:
        with outermost_trace(), controller.tracing(block):
            return original(block, *args)
    return get_graph


def _is_current(block: HybridBlock, epoch: int) -> bool:
    return isinstance(block._cached_op, RewritingCachedOp) and block.__dict__.get("_amp_epoch", 0) == epoch


def _rebuild(block: HybridBlock, epoch: int, args: tuple[Any, ...]) -> None:
    if block._cached_op is not None and block.__dict__.get("_amp_epoch", 0) != epoch:
        block._clear_cached_op()  # other blocks inside were excluded when it was traced
    if isinstance(block._cached_op, StockCachedOp):
        block._cached_op = None  # cached before AMP was switched on
    if block._cached_op is None:
        block._build_cache(*args)
        block.__dict__["_amp_epoch"] = epoch


def _accumulating(block: HybridBlock) -> frozenset[str]:
    return frozenset(source.name for is_data, source in block._cached_op_args
                     if not is_data and source.grad_req == "add")


def _frozen(block: HybridBlock) -> frozenset[str]:
    traced = block._cached_op.traced
    if not traced.biased:
        return frozenset()
    return traced.frozen({source.name: source.grad_req for is_data, source in block._cached_op_args if not is_data})


def _make_block_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(block: Block, *args: Any) -> Any:
        region = controller.region(block)
        if region is None:
            return controller.results(block, _call_in_frame(original, block, args))
        with region:
            result = _call_in_frame(original, block, args)
            policy = controller.eager(args)
        if policy is not None and controller.eager(args) is None and not any(is_low(value, policy) for value in args):
            result = release(result, policy, _uncast_invoke())  # AMP is for the network alone: FP32 code reads this
        return controller.results(block, result)
    return call


def _make_register_child(original: Callable) -> Callable:
    @functools.wraps(original)
    def register_child(block: Block, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        controller.children += 1
    return register_child


def _call_in_frame(original: Callable, block: Block, args: tuple[Any, ...]) -> Any:
    hybrid = isinstance(block, HybridBlock)
    casts, data_gradients = frame.casts, frame.data_gradients
    if not frame.blocks:
        frame.data_gradients = are_recorded(args)
    if not hybrid or type(block).forward is not HybridBlock.forward:
        frame.casts = None  # users' Python code may write weights and run backward passes; what can be traced does not
    elif casts is None:
        frame.casts = {}
    frame.blocks += 1
    frame.hybrid_blocks += hybrid
    try:
        result = _call_with_hooks(original, block, args)
    finally:
        frame.blocks -= 1
        frame.hybrid_blocks -= hybrid
        if frame.casts is None and casts:
            casts.clear()
        frame.casts, frame.data_gradients = casts, data_gradients
    policy = controller.eager(args) if hybrid and not frame.hybrid_blocks else None
    # A user who hands low precision in gets it back.
    if policy is None or any(is_low(value, policy) for value in args):
        return result
    return release(result, policy, _uncast_invoke())


def _call_with_hooks(original: Callable, block: Block, args: tuple[Any, ...]) -> Any:
    """Call a block; its forward hooks get FP32 in place of AMP's own low precision: NumPy cannot read bfloat16."""
    policy = controller.eager(args) if block._forward_pre_hooks or block._forward_hooks else None
    if policy is None or (frame.hybrid_blocks < 2 and any(is_low(each, policy) for each in args)):
        return original(block, *args)
    readable = release(args, policy, _uncast_invoke())
    for hook in list(block._forward_pre_hooks.values()):
        hook(block, readable)
    result = block.forward(*args)
    hooks = list(block._forward_hooks.values())
    readable_result = release(result, policy, _uncast_invoke()) if hooks else None
    for hook in hooks:
        hook(block, readable, readable_result)
    if is_np_array():
        _check_all_np_ndarrays(result)
    return result


def _uncast_invoke() -> Callable:
    """Return MXNet's own way of running an operator, without casts."""
    replaced = (original for owner, name, original in _originals if name == "_imperative_invoke")
    return next(replaced, register._imperative_invoke)


def _make_function_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(function: autograd.Function, *inputs: Any) -> Any:
        policy = controller.eager(inputs)
        if policy is None or hasattr(type(function).forward, "__amp_custom__"):
            return original(function, *inputs)
        # Not written for AMP: FP32 in, and no casts inside, forward and backward.
        function.backward = _within(controller.off, function.backward)
        inputs = release(inputs, policy, _uncast_invoke())
        with controller.off():
            return original(function, *inputs)
    return call


def _make_differentiate(original: Callable) -> Callable:
    @functools.wraps(original)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except mx.MXNetError as error:
            if not controller.is_on() or "is non-differentiable" not in str(error):
                raise
            raise type(error)(f"{error}\n{NOT_TWICE}") from error
    return differentiate


def _make_asnumpy(original: Callable) -> Callable:
    @functools.wraps(original)
    def asnumpy(array: NDArray) -> Any:
        policy = controller.eager((array,)) if frame.blocks else None
        if policy is None or policy.target != BFLOAT16 or not is_low(array, policy):
            return original(array)
        with autograd.pause():
            return original(release(array, policy, _uncast_invoke()))  # as NumPy has no such type
    return asnumpy


def _within(region: Callable[[], ContextManager], function: Callable) -> Callable:
    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        with region():
            return function(*args)
    return inside


def _make_tensordot(original: Callable) -> Callable:
    @functools.wraps(original)
    def tensordot(first: Any, second: Any, axes: Any) -> Any:
        policy = controller.eager((first, second))
        if policy is not None:
            first, second = release((first, second), policy, _uncast_invoke())
        return original(first, second, axes)
    return tensordot


def _make_update(original: Callable) -> Callable:
    @functools.wraps(original)
    def update(trainer: Trainer, ignore_stale_grad: bool = False) -> None:
        original(trainer, ignore_stale_grad)
        controller.updated(trainer)
    return update


def _make_amp_loss_scale(original: Any) -> property:
    def amp_loss_scale(trainer: Trainer) -> float:
        """Return the loss scale for the next backward; 1.0 without a loss scaler."""
        return getattr(getattr(trainer, "_amp_loss_scaler", None), "loss_scale", 1.0)
    return property(amp_loss_scale, doc=amp_loss_scale.__doc__)


_REPLACEMENTS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (register, "_imperative_invoke",
     lambda original: make_invoke(make_native_invoke(original, controller.runs_natively), controller.eager,
                                  controller.is_on)),
    (nd_numpy._api_internal, "tensordot", _make_tensordot),
    (symbol_register, "_symbol_creator", make_symbol_creator),
    (mx.ndarray, "CachedOp", lambda original: RewritingCachedOp),
    (HybridBlock, "_call_cached_op", _make_call_cached_op),
    (HybridBlock, "_get_graph", _make_get_graph),
    (Block, "__call__", _make_block_call),
    (Block, "register_child", _make_register_child),
    (SymbolBlock, "forward", make_symbol_block_forward),
    (autograd.Function, "__call__", _make_function_call),
    (autograd, "grad", _make_differentiate),
    (autograd, "backward", _make_differentiate),
    (NDArray, "backward", _make_differentiate),
    (NDArray, "asnumpy", _make_asnumpy),
    (Trainer, "_update", _make_update),
    (Trainer, "amp_loss_scale", _make_amp_loss_scale),
    (mx.sym.Symbol, "bind", make_bind),
    (mx.sym.Symbol, "simple_bind", make_simple_bind),
)
