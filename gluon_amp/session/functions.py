"""Precision of users' own functions and operators, by decorator or by name."""
from __future__ import annotations

import functools
from typing import Any, Callable

from mxnet.ndarray import NDArray

from .._mxnet.arrays import cast_arrays
from ..aliases import answers
from ..dtypes import FLOAT32, normalize
from ..errors import PolicyError, StateError, expected
from ..rules import RULES
from ..state.in_force import in_force, region
from ..state.policies import custom_ops
from . import hooks
from .autocast import autocast, is_switched_on
from .steps import run_in

_MARK = "__amp_custom__"


def float32_function(function: Callable) -> Callable:
    """Make a function run in FP32: low-precision array arguments are cast up, and AMP is off inside.

    Parameters
    ----------
    function : callable
        Of arrays, or of symbols inside a ``hybrid_forward``, nested in lists, tuples and dicts.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> @amp.float32_function
    ... def energy(x):
    ...     return (x ** 2).sum()
    """
    return run_in(lambda: autocast(enabled=False), function,
                  lambda args, kwargs: (cast_arrays(args, FLOAT32), cast_arrays(kwargs, FLOAT32)))


def low_precision_function(function: Callable) -> Callable:
    """Make a function run under AMP, even inside a region that switches it off.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> @amp.low_precision_function
    ... def project(x, weight):
    ...     return mx.nd.FullyConnected(x, weight, no_bias=True, num_hidden=8)
    """
    return run_in(lambda: autocast(enabled=True), function)


def register_float32_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by its :func:`float32_function`, until ``deinit``.

    Parameters
    ----------
    module : module or class
        Where the function is looked up.
    name : str
        The function's name.

    Raises
    ------
    StateError
        It is registered already.
    AttributeError
        The module has no such function.

    Examples
    --------
    ::

        amp.register_float32_function(my_layers, 'focal_loss')
    """
    _register(module, name, float32_function)


def register_low_precision_function(module: Any, name: str) -> None:
    """Replace ``module.name`` by its :func:`low_precision_function`, until ``deinit``.

    Parameters, errors and use are those of :func:`register_float32_function`.
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

    Raises
    ------
    StateError
        It is registered already, or AMP is on.
    PolicyError
        The rule is unknown.

    Examples
    --------
    >>> import gluon_amp as amp
    >>> amp.register_op('my_attention', 'NEUTRAL')
    >>> amp.deinit()
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

    Examples
    --------
    >>> import gluon_amp as amp
    >>> import mxnet as mx
    >>> class Square(mx.autograd.Function):
    ...     @amp.custom_fwd(cast_inputs='float32')
    ...     def forward(self, x):
    ...         self.save_for_backward(x)
    ...         return x * x
    ...     @amp.custom_bwd
    ...     def backward(self, gradient):
    ...         return 2 * self.saved_tensors[0] * gradient
    """
    if forward is None:
        return functools.partial(custom_fwd, cast_inputs=cast_inputs)
    wanted = None if cast_inputs is None else normalize(cast_inputs, "cast_inputs", or_float32=True)

    @functools.wraps(forward)
    def decorated(self: Any, *inputs: NDArray) -> Any:
        if wanted is None:
            self._amp_state = in_force.current()
            return forward(self, *inputs)
        with autocast(enabled=False):
            self._amp_state = in_force.current()
            return forward(self, *cast_arrays(inputs, wanted))
    setattr(decorated, _MARK, True)
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

