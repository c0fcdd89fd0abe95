"""Calls of blocks while AMP is on: where low precision begins and ends, and which graph a hybridized block runs."""
from __future__ import annotations

import functools
import threading
from typing import Any, Callable

from mxnet import autograd
from mxnet.gluon import Block, HybridBlock

from .._mxnet.blocks import cached_op_of, call_with_hooks, grad_reqs_of, has_hooks, renew_cached_op
from .._mxnet.symbols import outermost_trace
from ..eager.applier import is_low, release
from ..eager.gradient_fixes import are_recorded
from ..machine import host
from ..plan.cached_op import RewritingCachedOp
from ..plan.executors import refuse_trained
from ..state.blocks import block_settings
from ..state.in_force import frame, in_force

_tracing = threading.RLock()


def make_call_cached_op(original: Callable) -> Callable:
    """Make the function that takes the place of ``HybridBlock._call_cached_op``: it traces a block when that is due."""
    @functools.wraps(original)
    def call_cached_op(block: HybridBlock, *args: Any) -> Any:
        epoch = block_settings.epoch()
        if _is_stale(block, epoch) or not isinstance(cached_op_of(block), RewritingCachedOp):
            with _tracing:  # blocks cannot be traced in two threads at once
                renew_cached_op(block, args, _is_stale(block, epoch))
                block.__dict__["_amp_epoch"] = epoch
        operation = cached_op_of(block)
        if isinstance(operation, RewritingCachedOp):
            operation.note_grad_reqs(grad_reqs_of(block))
            if operation.traced.spoilt and autograd.is_recording():
                refuse_trained(block.collect_params(), operation.traced.spoilt, is_frozen=False)
        return original(block, *args)
    return call_cached_op


def make_get_graph(original: Callable) -> Callable:
    """Make the function that takes the place of ``HybridBlock._get_graph``."""
    @functools.wraps(original)
    def get_graph(block: HybridBlock, *args: Any) -> Any:
        with outermost_trace(), block_settings.tracing(block):
            return original(block, *args)
    return get_graph


def _is_stale(block: HybridBlock, epoch: int) -> bool:
    """Tell whether other blocks were excluded when a block was traced, or its regions are lost, as behind a pickle."""
    return block.__dict__.get("_amp_epoch", 0) != epoch or getattr(cached_op_of(block), "is_stale", False)


def make_block_call(original: Callable) -> Callable:
    """Make the function that takes the place of ``Block.__call__``."""
    @functools.wraps(original)
    def call(block: Block, *args: Any) -> Any:
        # Inside of a block that MXNet could trace, one that adds nothing to it.
        if (frame.casts is not None and frame.hybrid_blocks and type(block).forward is HybridBlock.forward
                and not (block_settings.has_any() or has_hooks(block))):
            frame.blocks += 1
            frame.hybrid_blocks += 1
            try:
                return original(block, *args)
            finally:
                frame.blocks -= 1
                frame.hybrid_blocks -= 1
        region = block_settings.region(block)
        if region is None:
            return block_settings.results(block, _call_in_frame(original, block, args))
        with region:
            result = _call_in_frame(original, block, args)
            policy = in_force.eager(args)
        if policy is not None and in_force.eager(args) is None and not any(is_low(value, policy) for value in args):
            result = release(result, policy, in_force.invoke)  # AMP is for the network alone: FP32 code reads this
        return block_settings.results(block, result)
    return call


def make_register_child(original: Callable) -> Callable:
    """Make the function that takes the place of ``Block.register_child``: networks have grown."""
    @functools.wraps(original)
    def register_child(block: Block, *args: Any, **kwargs: Any) -> None:
        original(block, *args, **kwargs)
        block_settings.children += 1
    return register_child


def _call_in_frame(original: Callable, block: Block, args: tuple[Any, ...]) -> Any:
    hybrid = isinstance(block, HybridBlock)
    casts, data_gradients = frame.casts, frame.data_gradients
    if not frame.blocks:
        frame.data_gradients = are_recorded(args)
        if not autograd.is_recording():
            host.note_step("call")
    if not hybrid or type(block).forward is not HybridBlock.forward:
        frame.casts = None  # Python code that cannot be traced may write weights and run backward passes
    elif casts is None:
        frame.casts = {}
    frame.blocks += 1
    frame.hybrid_blocks += hybrid
    try:
        hook_policy = in_force.eager(args) if has_hooks(block) else None
        if hook_policy is None or (frame.hybrid_blocks < 2 and any(is_low(each, hook_policy) for each in args)):
            result = original(block, *args)
        else:  # forward hooks get FP32 in place of AMP's own low precision: NumPy cannot read bfloat16
            result = call_with_hooks(block, args, lambda values: release(values, hook_policy, in_force.invoke))
    finally:
        frame.blocks -= 1
        frame.hybrid_blocks -= hybrid
        if frame.casts is None and casts:
            casts.clear()
        frame.casts, frame.data_gradients = casts, data_gradients
    policy = in_force.eager(args) if hybrid and not frame.hybrid_blocks else None
    # A user who hands low precision in gets it back.
    if policy is None or any(is_low(value, policy) for value in args):
        return result
    return release(result, policy, in_force.invoke)

