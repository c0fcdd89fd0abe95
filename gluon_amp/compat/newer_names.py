"""Names of MXNet 2 for what MXNet 1.9.1 has under older ones: a device was called a context."""
from __future__ import annotations

import functools
import weakref
from typing import Any, Callable

import mxnet as mx
from mxnet import gluon

from .._mxnet.arrays import map_arrays
from ..convert import flat
from ..replaced import Replaced

_WANTS_NUMPY = "can only accept MXNet numpy ndarrays"  # MXNet, of a NumPy operator that was given another array
# What takes a context, and is to take ``device`` as well.
_TAKES_DEVICE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (gluon.Block, ("initialize", "load_parameters", "load_dict")),
    (gluon.ParameterDict, ("initialize", "load")),
    (gluon.Parameter, ("initialize", "data", "grad")),
    (mx.nd, ("array", "zeros", "ones", "full", "empty", "arange", "eye", "linspace")),
    (mx.np, ("array", "zeros", "ones", "full", "empty", "arange", "eye", "identity", "linspace", "logspace", "tri",
             "indices", "hanning", "hamming", "blackman")),
    (mx.np.random, ("uniform", "normal", "randint", "rand", "gamma", "beta", "exponential", "choice", "lognormal",
                    "logistic", "gumbel", "laplace", "rayleigh", "weibull", "pareto", "power")),
)
# Newer names, and the older ones.
_RENAMED: tuple[tuple[Any, str, str], ...] = (
    (mx, "Device", "Context"), (mx, "current_device", "current_context"), (mx, "device", "context"),
    (mx.context, "Device", "Context"), (mx.context, "current_device", "current_context"),
    (gluon.Block, "reset_device", "reset_ctx"), (gluon.ParameterDict, "reset_device", "reset_ctx"),
    (gluon.Parameter, "reset_device", "reset_ctx"), (gluon.Parameter, "list_device", "list_ctx"),
    (gluon.ParameterDict, "list_device", "list_ctx"),
    (mx.nd.NDArray, "device", "context"), (mx.nd.NDArray, "to_device", "as_in_context"),
)


def add(replaced: Replaced) -> None:
    """Add the names; those that MXNet has already stay."""
    for owner, names in _TAKES_DEVICE:
        for name in names:
            if hasattr(owner, name):
                replaced.put(owner, name, _taking_device(getattr(owner, name)))
    for owner, newer, older in _RENAMED:
        if not hasattr(owner, newer):
            replaced.put(owner, newer, _reset_ctx if (owner, older) == (gluon.Block, "reset_ctx")
                         else getattr(owner, older))
    replaced.put(gluon, "metric", mx.metric)
    replaced.put(gluon.utils, "split_and_load", _split_and_load(gluon.utils.split_and_load))
    replaced.put(gluon.HybridBlock, "forward", _taking_numpys(gluon.HybridBlock.forward))


def _split_and_load(function: Callable) -> Callable:
    @functools.wraps(function)
    def split_and_load(data: Any, ctx_list: Any = None, batch_axis: int = 0, even_split: bool = True,
                       device_list: Any = None) -> Any:
        if isinstance(data, mx.np.ndarray) and not mx.util.is_np_array():  # networks and losses of 1.9.1 expect those
            data = data.as_nd_ndarray()
        return function(data, device_list if ctx_list is None else ctx_list, batch_axis, even_split)
    return split_and_load


def _taking_numpys(function: Callable) -> Callable:
    """Let a network of MXNet 1's operators take ``mx.np`` arrays, and give such: in MXNet 2 there are no others."""
    of_numpy: weakref.WeakSet[gluon.HybridBlock] = weakref.WeakSet()  # those whose code calls NumPy's operators

    @functools.wraps(function)
    def forward(block: gluon.HybridBlock, *args: Any) -> Any:
        if (mx.util.is_np_array() or block in of_numpy
                or not any(isinstance(each, mx.np.ndarray) for each in flat(args))):
            return function(block, *args)
        try:
            outputs = function(block, *map_arrays(lambda array: array.as_nd_ndarray(), args))
        except TypeError as error:
            if _WANTS_NUMPY not in str(error):
                raise
            of_numpy.add(block)
            return function(block, *args)
        return map_arrays(lambda array: array.as_np_ndarray(), outputs)
    return forward


def _reset_ctx(block: gluon.Block, ctx: Any) -> None:
    """Move a block's parameters to other devices."""
    block.collect_params().reset_ctx(ctx)


def _taking_device(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            if kwargs.get("ctx") is not None:
                raise TypeError(f"{function.__name__}: expected device or ctx, which are the same, received both")
            kwargs["ctx"] = kwargs.pop("device")
        return function(*args, **kwargs)
    return call
