"""The names of MXNet that are replaced (``_REPLACEMENTS``): AMP sees through them which graphs and operators run."""
from __future__ import annotations

import functools
import os
import threading
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.executor import Executor
from mxnet.gluon import Block, HybridBlock, SymbolBlock, Trainer
from mxnet.ndarray import NDArray, register
from mxnet.ndarray import numpy as nd_numpy
from mxnet.symbol import register as symbol_register

from .._mxnet import trainers
from .._mxnet.blocks import make_symbol_block_forward
from .._mxnet.invoke import Callback, Invoke, custom_operators
from .._mxnet.optimizer_states import STATES_BEGIN
from .._mxnet.symbols import make_symbol_creator, make_written
from ..base.context import Replaced
from ..eager.applier import make_invoke, release
from ..eager.custom_operators import References
from ..eager.gradient_fixes import NOT_TWICE
from ..eager.loss_scale import loss_scale
from ..eager.native import make_native_invoke
from ..eager.running_stats import running_stats
from ..errors import StateError
from ..machine import host
from ..machine.dtypes import BFLOAT16
from ..plan import executors
from ..plan.cached_op import RewritingCachedOp
from ..state.blocks import block_settings
from ..state.in_force import frame, in_force, run_in
from .block_calls import make_block_call, make_call_cached_op, make_get_graph, make_register_child

INVOKE = register, "_imperative_invoke"
_replaced = Replaced()
registered = Replaced()  # functions that users registered, until AMP is switched off
_lock = threading.Lock()
_Replacements = Tuple[Tuple[Any, str, Callable[[Any], Any]], ...]  # owner, name, and what makes the new of the old


def watch_symbols() -> None:
    """Install the replacements for symbols that were converted for inference, until :func:`uninstall`."""
    with _lock:
        if not _replaced:
            _replace(_OF_CONVERTED)


def install() -> None:
    """Install all replacements or none; do nothing when they are installed."""
    with _lock:
        if in_force.hooked:
            return
        host.take_little_memory()
        _replace(_REPLACEMENTS if _replaced else (*_OF_CONVERTED, *_REPLACEMENTS))
        in_force.hooked = True
        block_settings.children += 1  # nobody counted until now


def _replace(replacements: _Replacements) -> None:
    kept = len(_replaced)
    try:
        for owner, name, make in replacements:
            _replaced.put(owner, name, make(getattr(owner, name, None)))
    except BaseException:
        _restore(kept)
        raise


@contextmanager
def kept_in_place() -> Iterator[None]:
    """Install the replacements for the body, unless they are installed already."""
    were_installed, kept = in_force.hooked, len(_replaced)
    install()
    try:
        yield
    finally:
        if not were_installed:
            with _lock:
                _restore(kept)


def uninstall() -> None:
    """Restore MXNet exactly as it was."""
    with _lock:
        registered.restore()
        _restore()


def _restore(kept: int = 0) -> None:
    """Put MXNet's names back, but for so many that were replaced first."""
    in_force.hooked = False
    loss_scale.forget()
    running_stats.forget()
    _replaced.restore(kept)


def _make_invoke(original: Invoke) -> Invoke:
    in_force.invoke = original
    return make_invoke(make_native_invoke(original, in_force.runs_natively), in_force.eager, in_force.is_on)


def _make_function_call(original: Callable) -> Callable:
    @functools.wraps(original)
    def call(function: autograd.Function, *inputs: Any) -> Any:
        policy = in_force.eager(inputs)
        if policy is None or hasattr(type(function).forward, "__amp_custom__"):
            return original(function, *inputs)
        # Not written for AMP: FP32 in, and no casts inside, forward and backward.
        function.backward = run_in(in_force.off, function.backward)
        inputs = release(inputs, policy, in_force.invoke)
        with in_force.off():
            return original(function, *inputs)
    return call


def _make_backward(original: Callable, writes: bool = True) -> Callable:
    @functools.wraps(original)
    def backward(heads: Any, *args: Any, **kwargs: Any) -> Any:
        if writes:
            host.note_step("backward")
        running_stats.begin_backward()
        try:
            with loss_scale.of(heads, counts=writes):
                return original(heads, *args, **kwargs)
        except mx.MXNetError as error:
            if not in_force.is_on() or "is non-differentiable" not in str(error):
                raise
            raise type(error)(f"{error}\n{NOT_TWICE}") from error
        finally:
            Callback.check_all()  # gradients are whole, as MXNet goes on behind an error of a hook
    return backward


def _make_read(original: Callable, calls: str = "hybrid_blocks") -> Callable:
    @functools.wraps(original)
    def read(array: NDArray, *args: Any, **kwargs: Any) -> Any:
        policy = in_force.eager((array,)) if getattr(frame, calls) else None
        if policy is not None and policy.target == BFLOAT16:
            with nullcontext() if calls == "hybrid_blocks" else autograd.pause():  # NumPy's have no gradient
                array = release(array, policy, in_force.invoke)
        return original(array, *args, **kwargs)
    return read


def _make_tensordot(original: Callable) -> Callable:
    @functools.wraps(original)
    def tensordot(first: Any, second: Any, axes: Any) -> Any:
        policy = in_force.eager((first, second))
        if policy is not None:
            first, second = release((first, second), policy, in_force.invoke)
        return original(first, second, axes)
    return tensordot


def _make_update(original: Callable) -> Callable:
    @functools.wraps(original)
    def update(trainer: Trainer, ignore_stale_grad: bool = False) -> None:
        scaler = trainers.attached(trainer)
        with getattr(scaler, "updating", nullcontext)():
            loss_scale.warn_of_others(trainer)
            original(trainer, ignore_stale_grad)
        if scaler is None:
            running_stats.decided(trainer, skipped=False)
    return update


def _make_load_states(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_states(trainer: Trainer, fname: Any) -> None:
        with open(fname, "rb") as file:
            if file.read(len(STATES_BEGIN)) == STATES_BEGIN:
                raise StateError(f"{os.fspath(fname)!r} was written by amp.save_states: expected "
                                 "amp.load_states(trainer, fname) for it")
        original(trainer, fname)
    return load_states


# Symbols that were converted for inference are not trained, and take no other parameters than their own, without AMP,
# too; under AMP a symbol that is bound is planned first.
_OF_CONVERTED: _Replacements = (
    (mx.sym.Symbol, "bind", executors.make_bind),
    (mx.sym.Symbol, "simple_bind", executors.make_simple_bind),
)
_REPLACEMENTS: _Replacements = (
    (*INVOKE, _make_invoke),  # every imperative operator call
    (nd_numpy._api_internal, "tensordot", _make_tensordot),  # the one NumPy operator that does not go that way
    # Operators are marked with the region that they are made in, but for custom ones, which cannot carry a mark.
    (symbol_register, "_symbol_creator", make_symbol_creator),
    (mx.ndarray, "CachedOp", lambda original: RewritingCachedOp),  # made of the symbol of a hybridized block
    # The only place that sees blocks cached before AMP was switched on, and the ``grad_req`` of their parameters.
    (HybridBlock, "_call_cached_op", make_call_cached_op),
    (HybridBlock, "_get_graph", make_get_graph),  # a block is traced without the marks of regions around its call
    (Block, "__call__", make_block_call),  # where low precision begins and ends in code that is not hybridized
    (Block, "register_child", make_register_child),  # networks given to ``initialize`` grow
    # In another block's trace the operators of a SymbolBlock carry the mark of the region around its call.
    (SymbolBlock, "forward", make_symbol_block_forward),
    (autograd.Function, "__call__", _make_function_call),  # a user's code expects FP32
    (custom_operators, "ref_holder", References),  # likewise
    # Errors about gradients of gradients say what to do, those of hooks are raised, and gradients that operators make
    # on their own carry the scale of the loss.
    (autograd, "grad", functools.partial(_make_backward, writes=False)),
    (autograd, "backward", _make_backward),
    (NDArray, "backward", _make_backward),
    # In networks that are not hybridized Python code reads bfloat16 as FP32, as NumPy has no such type; and parts and
    # other shapes of arrays are FP32, as in graphs: most of oneDNN's operators do not take them in bfloat16.
    (NDArray, "asnumpy", functools.partial(_make_read, calls="blocks")),
    (NDArray, "reshape", _make_read),
    (NDArray, "__getitem__", _make_read),
    (mx.np.ndarray, "__getitem__", _make_read),
    (Trainer, "_update", _make_update),  # running statistics, and gradients with another loss scale
    (Trainer, "load_states", _make_load_states),  # files of ``amp.save_states``, which MXNet cannot read
    # A property that MXNet does not have.
    (Trainer, "amp_loss_scale", lambda _: property(
        lambda trainer: getattr(trainers.attached(trainer), "loss_scale", 1.0),
        doc="The loss scale for the next backward; 1.0 without a loss scaler.")),
    (mx.sym.Symbol, "tojson", make_written),  # no marks of regions
    (mx.sym.Symbol, "save", make_written),  # likewise
    (Executor, "forward", executors.make_forward),  # executors that were bound before AMP was switched on
)
