"""Symbols that were converted for inference: they are not trained, and take the parameters made for them only.

A conversion that folds, drops or fuses operators notes on the variables concerned what it did. The notes go along into
files, into parts of the symbol, and into symbols made of it.
"""
from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Collection, Mapping

import mxnet as mx
from mxnet.executor import Executor
from mxnet.gluon import Parameter
from mxnet.module import Module

from .._mxnet.symbols import to_graph
from .._mxnet.trainers import trainer_of, trains_anything
from ..errors import StateError
from ..graph import cast_nodes
from ..graph.attrs import INFERENCE, MADE

_INSTEAD = "train the FP32 network under amp.init(), and convert it afterwards"


def by_name(values: Any, names: list[str]) -> dict[str, Any]:
    """Return arrays, or what is requested of them, by the names of the inputs; MXNet takes lists and dicts.

    What a dict holds beside them means nothing to MXNet.
    """
    if values is None:
        return {}
    pairs = values.items() if isinstance(values, dict) else zip(names, values)
    known = set(names)
    return {name: value for name, value in pairs if value is not None and name in known}


def requests_of(grad_req: Any, symbol: mx.sym.Symbol) -> dict[str, str]:
    """Return what is requested of each argument."""
    names = symbol.list_arguments()
    return by_name([grad_req] * len(names) if isinstance(grad_req, str) else grad_req, names)


def refuse_training(symbol: mx.sym.Symbol, requests: Mapping[str, str]) -> None:
    """Raise StateError where a gradient is requested that a conversion has spoilt."""
    for name, reason in spoilt_gradients(symbol).items():
        if requests.get(name, "null") != "null":
            raise StateError(f"the symbol was converted for inference, and cannot be trained: expected grad_req='null' "
                             f"for {name!r} ({reason}), received {requests[name]!r}. To run it bind it with "
                             f"for_training=False, or grad_req='null'; to train it, {_INSTEAD}, or convert it with "
                             "optimize='none'")


def refuse_lost_sums(symbol: mx.sym.Symbol, requests: Mapping[str, str], ctx: Any) -> None:
    """Raise StateError where MXNet would lose a gradient that accumulates, as its casts do on CPUs."""
    added = {name for name, request in requests.items() if request == "add"}
    if not added or not isinstance(ctx, mx.Context) or ctx.device_type == "gpu":
        return
    lost = {node.inputs[0].node.name for node in cast_nodes(to_graph(symbol))} & added
    if lost:
        raise StateError(f"expected grad_req='write' for {min(lost)!r}, received 'add': amp_cast, which reads it in "
                         "the symbol, loses gradients that are added. Bind it under amp.init(), which mends that")


def spoilt_gradients(symbol: mx.sym.Symbol) -> dict[str, str]:
    """Name the variables whose gradients a conversion has spoilt, and say how."""
    return {name: f"made of {attrs[MADE]}" if MADE in attrs else attrs[INFERENCE]
            for name, attrs in symbol.attr_dict().items() if MADE in attrs or INFERENCE in attrs}


def refuse_trained(parameters: Mapping[str, Parameter], spoilt: Mapping[str, str], is_frozen: bool) -> None:
    """Raise StateError where the parameters of a converted block are trained; imported ones have gradients anyhow."""
    for name, parameter in parameters.items():
        trainer = trainer_of(parameter)
        if name in spoilt and parameter.grad_req != "null" and (is_frozen or trainer is not None):
            raise StateError("the network was converted for inference, and cannot be trained: expected "
                             f"grad_req='null' for {name!r} ({spoilt[name]}), received {parameter.grad_req!r}. To "
                             f"fine-tune it, {_INSTEAD}")
        if is_frozen and trainer is not None and not trains_anything(trainer):
            raise StateError("expected a trainer with parameters to train, found one that has those of a converted "
                             f"network only, which get no gradients. To fine-tune it, {_INSTEAD}")


def refuse_foreign(symbol: mx.sym.Symbol, given: Collection[str]) -> None:
    """Raise StateError where a converted symbol gets the parameters of the network that it was made from."""
    inputs = set(symbol.list_inputs())
    made = {name: attrs[MADE] for name, attrs in symbol.attr_dict().items() if MADE in attrs and name not in given}
    if made and not inputs.issuperset(given):
        name, sources = next(iter(made.items()))
        raise StateError(f"the symbol was converted, and its parameters with it: expected those that the conversion "
                         f"returned, received some without {name!r}, which is made of {sources}. Convert these "
                         "parameters as well, or convert with optimize='none', which keeps them")


def make_bind(original: Callable) -> Callable:
    """Make the function that takes the place of ``Symbol.bind``."""
    @functools.wraps(original)
    def bind(symbol: mx.sym.Symbol, ctx: Any, args: Any, args_grad: Any = None, grad_req: Any = "write",
             *rest: Any, **kwargs: Any) -> Any:
        if isinstance(args, dict):
            refuse_foreign(symbol, args)
        gradients = by_name(args_grad, symbol.list_arguments())
        requests = {name: request for name, request in requests_of(grad_req, symbol).items() if name in gradients}
        refuse_training(symbol, requests)
        refuse_lost_sums(symbol, requests, ctx)
        return original(symbol, ctx, args, args_grad, grad_req, *rest, **kwargs)
    return bind


def make_simple_bind(original: Callable) -> Callable:
    """Make the function that takes the place of ``Symbol.simple_bind``."""
    @functools.wraps(original)
    def simple_bind(symbol: mx.sym.Symbol, /, ctx: Any, grad_req: Any = "write", *rest: Any, **kwargs: Any) -> Any:
        requests = requests_of(grad_req, symbol)
        refuse_training(symbol, requests)
        refuse_lost_sums(symbol, requests, ctx)
        return original(symbol, ctx, grad_req, *rest, **kwargs)
    return simple_bind


def make_init_params(original: Callable) -> Callable:
    """Make the function that takes the place of ``Module.init_params``."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_params(module: Module, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(module, *args, **kwargs).arguments.get("arg_params")
        if given is not None:
            refuse_foreign(module.symbol, given)
        original(module, *args, **kwargs)
    return init_params


def make_copy_params_from(original: Callable) -> Callable:
    """Make the function that takes the place of ``Executor.copy_params_from``."""
    @functools.wraps(original)
    def copy_params_from(executor: Executor, arg_params: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        refuse_foreign(executor._symbol, arg_params)
        original(executor, arg_params, *args, **kwargs)
    return copy_params_from
