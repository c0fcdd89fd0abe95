"""Run any registered operator by its registered name, and what MXNet has registered.

MXNet generates Python functions for most operators only, scattered over a dozen modules, some under other names.
"""
from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
from mxnet import autograd
from mxnet.base import _LIB, check_call, py_str
from mxnet.ndarray import NDArray, register
from mxnet.ndarray import numpy as nd_numpy

from .numpy_2 import attribute_text

Invoke = Callable[..., Any]  # takes what :class:`Invocation` holds, in its order
# MXNet's own, whatever takes their place later.
UpstreamCachedOp = mx.ndarray.CachedOp
original_invoke = register._imperative_invoke
custom_operators = mx.operator._registry  # of those written in Python
# What computes without a call of that function, or into arrays that were made before.
PAST_INVOKE: tuple[tuple[Any, str], ...] = (
    *((NDArray, name) for name in ("__getitem__", "reshape", "astype", "copy", "as_in_context", "as_np_ndarray")),
    *((mx.np.ndarray, name) for name in ("__getitem__", "astype", "copy", "as_in_ctx", "as_nd_ndarray")),
    (autograd.Function, "__call__"), (nd_numpy._api_internal, "tensordot"))


@lru_cache(maxsize=1)
def registered_operators() -> Mapping[str, str]:
    """Map every name of an operator of MXNet, aliases included, to the name it is registered under."""
    # The operators in C++ of this package are left out: they take the place of others after these were decided on.
    # Symbol JSON holds registered names only, and users write aliases: no public function leads from one to the other.
    known, registered = {}, ctypes.c_char_p()
    for name in mx.operator.get_all_registered_operators():
        if not name.startswith(("_gluon_amp_", "_backward__gluon_amp_")):
            check_call(_LIB.MXSymbolGetAtomicSymbolName(ctypes.c_void_p(handle_of(name)), ctypes.byref(registered)))
            known[name] = py_str(registered.value)
    return known


@lru_cache(maxsize=None)
def handle_of(name: str) -> int:
    """Return the handle that MXNet's generated functions call an operator by; aliases share it."""
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
    return handle.value or 0


@lru_cache(maxsize=None)
def parameters_of(name: str) -> Mapping[str, str]:
    """Return the parameters of an operator, inputs among them, each with what MXNet says of its type."""
    _, names, types = mx.operator.get_operator_arguments(name)
    return dict(zip(names, types))


class Invocation(NamedTuple):
    """A call of an operator: the arguments of MXNet's ``_imperative_invoke``."""

    handle: int
    inputs: Sequence[NDArray]
    keys: Sequence[str]
    values: Sequence[Any]
    out: Any
    is_np_op: bool
    output_is_list: bool

    def attrs(self) -> dict[str, str]:
        """Return the operator's attributes, as a symbol's JSON holds them."""
        return dict(zip(self.keys, map(attribute_text, self.values)))


Runs = Mapping[int, Callable[[Invoke, Invocation], Any]]  # how operators run, by their handles


def run_operator(function: Invoke, op: str, inputs: Sequence[NDArray], attrs: Mapping[str, Any], out: Any = None,
                 is_np_op: bool = False, output_is_list: bool = False) -> Any:
    """Run an operator by a function that takes the place of ``_imperative_invoke``."""
    return function(handle_of(op), list(inputs), list(attrs), list(attrs.values()), out, is_np_op, output_is_list)


def invoke(op: str, inputs: Sequence[NDArray], attrs: Mapping[str, Any], is_np_op: bool = False) -> list[NDArray]:
    """Run an operator as a program does; return its outputs."""
    return run_operator(register._imperative_invoke, op, inputs, attrs, None, is_np_op, output_is_list=True)


class Callback:
    """A function that C calls: ctypes prints what it raises and goes on, here the first error is kept."""

    _failed = threading.local()  # the callbacks that raised something in this thread since its last backward pass

    def __init__(self, function: Callable[..., None]):
        self._function = function
        self._error: BaseException | None = None

    def __call__(self, *arguments: Any) -> None:
        if self._error is None:
            try:
                self._function(*arguments)
            except BaseException as error:  # Ctrl-C, too
                self._error = error
                vars(self._failed).setdefault("callbacks", set()).add(self)

    def check(self) -> None:
        """Raise the error that was kept: for behind the call that called back."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    @classmethod
    def check_all(cls) -> None:
        """Do so for those of this thread: for behind a backward pass, which calls back for any network."""
        for one in vars(cls._failed).pop("callbacks", ()):
            one.check()


def array_at(handle: int) -> NDArray:
    """Return the array that a callback is told of."""
    return NDArray(ctypes.cast(handle, mx.base.NDArrayHandle), writable=False)


def zeros_for(symbol: mx.sym.Symbol, names: Sequence[str], given: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return zeros for arguments that are not given: labels, of which only the shapes count."""
    if not names:
        return {}
    known = {name: given[name].shape for name in symbol.list_inputs() if name in given}
    shapes = dict(zip(symbol.list_arguments(), symbol.infer_shape(**known)[0]))
    return {name: mx.nd.zeros(shapes[name]) for name in names}


def run_onednn_operator() -> None:
    """Run an operator of oneDNN, so that oneDNN reads its settings."""
    mx.nd.Activation(mx.nd.zeros((1, 1), ctx=mx.cpu()), act_type="relu").wait_to_read()
