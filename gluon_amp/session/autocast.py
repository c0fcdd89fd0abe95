"""Regions: ``autocast``, and the precision of users' own functions and operators, by decorator or by name."""
from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, Callable

from mxnet.ndarray import NDArray

from .._mxnet.arrays import cast_arrays
from ..base.aliases import answers
from ..base.context import ContextStack
from ..errors import DTypeError, PolicyError, StateError, expected
from ..graph.attrs import REGION_ON
from ..machine.dtypes import FLOAT32, normalize
from ..rules import RULES, Policy
from ..state.devices import choose, device_supports, warn_if_slow
from ..state.in_force import frame, in_force, region, run_in
from ..state.state import State, custom_ops, device_policies
from . import hooks
from .init import is_switched_on

# The regions entered and not left, and how many calls of hybrid blocks each hides; an object may be entered twice.
_entered: ContextStack[tuple[autocast, region, int]] = ContextStack("gluon_amp_autocast")


class autocast:
    """Switch mixed precision on or off for a region: a context manager, and a decorator.

    Regions nest, the innermost counts, and each belongs to its thread, and to its asyncio task. They work with and
    without :func:`init`. Inside a ``hybrid_forward`` that is being traced, the operators keep the region's setting, so
    that the hybridized block obeys it whenever it runs.

    Parameters
    ----------
    enabled : bool
        False runs the region in FP32.
    dtype : {'float16', 'bfloat16', 'float32'}, numpy dtype or None
        The low-precision type; None takes the one of ``init``, or the device's. ``'float32'`` runs the region in FP32,
        as ``enabled=False`` does.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> with amp.autocast(enabled=False):
    ...     amp.is_active()
    False
    """

    @answers(target_dtype="it is called dtype",
             device_type="the device of the arrays decides: leave it out, as in amp.autocast(dtype='float16')",
             cache_enabled="a graph casts each parameter once: leave it out")
    def __init__(self, enabled: bool = True, dtype: object = None):
        if not isinstance(enabled, bool):  # autocast('cuda') and autocast('bfloat16'), as they are written elsewhere
            try:
                remedy = f"a type goes by name: amp.autocast(dtype={normalize(enabled, or_float32=True)!r})"
            except DTypeError:
                remedy = ("the device of the arrays decides, not an argument: amp.autocast(), or "
                          "amp.autocast(dtype='float16')")
            raise TypeError(f"{expected('True or False', 'enabled', enabled)}: {remedy}")
        wanted = None if dtype is None else normalize(dtype, "dtype", or_float32=True)
        self._enabled = enabled and wanted != FLOAT32
        self._dtype = wanted if self._enabled else None
        if self._dtype is not None:
            choose(self._dtype, device_supports())

    def __enter__(self) -> autocast:
        hooks.install()  # they stay, for blocks that are traced here
        hidden = 0
        if self._enabled:
            entered = region(self._state(), self._dtype or REGION_ON)
            if in_force.current() is None:
                hidden = frame.hybrid_blocks  # the code around does not know low precision; that in FP32 does
        else:
            entered = in_force.off()
        frame.hybrid_blocks -= hidden
        entered.__enter__()
        _entered.enter((self, entered, hidden))
        return self

    def __exit__(self, *details: Any) -> None:
        left = next((entry for entry in reversed(_entered.entries()) if entry.value[0] is self), None)
        if left is not None:  # asyncio may end an asynchronous generator elsewhere: nothing is to be undone there
            _entered.leave(left)
            _, entered, hidden = left.value
            entered.__exit__(*details)
            frame.hybrid_blocks += hidden  # a generator may begin in a call of a block and end outside of it

    def __call__(self, function: Callable) -> Callable:
        """Return a function that runs in the region."""
        return run_in(lambda: self, function)

    def _state(self) -> State:
        """Return the state around that fits, or make one."""
        around = in_force.current()
        around = around if around is not None and around.enabled else in_force.state
        wanted = self._dtype
        if around is not None and wanted in (None, *(policy.target_dtype for policy in around.policies.values())):
            return around if wanted is None else _of_one_type(around, wanted)
        disabled = frozenset(name for policy in (around.policies.values() if around is not None else ())
                             for name in policy.disabled_passes)
        settings = wanted, disabled, frozenset(custom_ops.items())

        def made() -> State:
            chosen = choose(wanted, device_supports())
            warn_if_slow(chosen)
            state = State.on(chosen, device_policies(chosen, disabled))
            in_force.marked = in_force.marked or state.disabled()
            return state

        return in_force.remembered(settings, made)


def _of_one_type(state: State, wanted: str) -> State:
    """Return a state in which devices of another low-precision type run FP32, as under ``init`` with the type."""
    def made() -> State:
        chosen = choose(wanted, device_supports())
        others = State.on({device: chosen[device] for device in apart}, {
            device: Policy(FLOAT32, disabled_passes=state.policies[device].disabled_passes) for device in apart})
        return State({**state.policies, **others.policies}, {**state.devices, **others.devices})

    apart = [device for device, policy in state.policies.items() if policy.lowers and policy.target_dtype != wanted]
    return in_force.remembered((wanted, state), made) if apart else state


def float32_function(function: Callable) -> Callable:
    """Make a function run in FP32: low-precision array arguments are cast up, and AMP is off inside.

    Parameters
    ----------
    function : callable
        Of arrays, or of symbols inside a ``hybrid_forward``, nested in lists, tuples and dicts.
    """
    return run_in(lambda: autocast(enabled=False), function,
                  lambda args, kwargs: (cast_arrays(args, FLOAT32), cast_arrays(kwargs, FLOAT32)))


def low_precision_function(function: Callable) -> Callable:
    """Make a function run under AMP, even inside a region that switches it off."""
    return run_in(lambda: autocast(enabled=True), function)


def register_float32_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by its :func:`float32_function`, until ``deinit``.

    Parameters
    ----------
    module : module or class
        Where the function is looked up.
    name : str
        The function's name.
    """
    _register(module, name, float32_function)


def register_low_precision_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by its :func:`low_precision_function`, until ``deinit``.

    Its parameters mean the same as in :func:`register_float32_function`.
    """
    _register(module, name, low_precision_function)


def _register(module: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    if hooks.registered.holds(module, name):
        raise StateError(f"{getattr(module, '__name__', module)}.{name} is registered already: once per function")
    original = getattr(module, name)
    if not callable(original):
        raise TypeError(expected("the name of a function", "name", name))
    hooks.registered.put(module, name, make(original))


def register_op(op_type: str, rule: str = "FP32") -> None:
    """Set the precision of a custom operator (``mx.operator.register``), until ``deinit``.

    Custom operators get FP32 without this. To have an effect it must come before ``init`` and ``initialize``.

    Parameters
    ----------
    op_type : str
        The name that the operator is registered under.
    rule : {'FP32', 'LOWER', 'WIDEST', 'NEUTRAL', 'KEEP'}
        As in the operator tables.
    """
    if rule not in RULES:
        raise PolicyError(expected(f"one of {', '.join(RULES)}", "rule", rule))
    if is_switched_on():
        raise StateError("AMP is on: call amp.register_op before amp.init() or amp.initialize()")
    if op_type in custom_ops:
        raise StateError(f"the operator {op_type!r} is registered already, with rule {custom_ops[op_type]}")
    custom_ops[op_type] = rule


@answers(device_type="the device of the arrays decides: leave it out")
def custom_fwd(forward: Callable | None = None, *, cast_inputs: object = None) -> Callable:
    """Decorate ``forward`` of a ``mx.autograd.Function`` that is written for AMP.

    Without it such a function gets FP32 arrays and runs with AMP off, forward and backward.

    Parameters
    ----------
    forward : callable
        The method.
    cast_inputs : {'float32', 'float16', 'bfloat16'} or dtype, optional
        Cast floating-point inputs to this type and run with AMP off. None leaves inputs as they come, and AMP as it is.
    """
    if forward is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)
    wanted = None if cast_inputs is None else normalize(cast_inputs, "cast_inputs", or_float32=True)

    @functools.wraps(forward)
    def decorated(self: Any, *inputs: NDArray) -> Any:
        with nullcontext() if wanted is None else autocast(enabled=False):
            self._amp_state = in_force.current()
            return forward(self, *(inputs if wanted is None else cast_arrays(inputs, wanted)))
    decorated.__amp_custom__ = True  # type: ignore[attr-defined]
    return decorated


@answers(device_type="the device of the arrays decides: leave it out")
def custom_bwd(backward: Callable) -> Callable:
    """Decorate ``backward`` of a function whose ``forward`` has :func:`custom_fwd`: AMP is as it was there.

    Gradients are returned in FP32, which the caller's buffers have.
    """
    @functools.wraps(backward)
    def decorated(self: Any, *gradients: NDArray) -> Any:
        with region(getattr(self, "_amp_state", None)):
            return cast_arrays(backward(self, *gradients), FLOAT32)
    return decorated
