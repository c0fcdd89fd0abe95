"""Measure on this machine which operators low precision makes faster, and which chains of convolutions C++ does."""
from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Collection, Mapping, NamedTuple

import mxnet as mx
from mxnet.gluon import HybridBlock

from . import checks, passes
from ._mxnet import blocks
from ._mxnet.symbols import analyse, dtype_name, from_graph, to_graph
from ._mxnet.timing import interleaved, time_in_both, training_step
from .convert.inputs import as_example, flat, traced_block
from .graph import Graph, Node, has_control_flow
from .passes import channels_last
from .plan.planner import native_for
from .progress import progress_bar
from .rules import LOWER, Policy
from .rules.measurements import Tuning, default_cache, signature
from .state.devices import machine, support
from .state.policies import device_policies

_logger = logging.getLogger("gluon_amp")


def tune(net: HybridBlock, data: Any, *, training: bool = True, rounds: int = 5,
         cache: str | os.PathLike | None = None, progress: bool = True) -> Tuning:
    """Measure every kind of low-precision operator of a network, and its chains of convolutions.

    Each operator runs by itself on random data of the shapes that it has in the network, in low precision and in FP32
    in turns. For each large chain of convolutions that may train in C++ (the pass ``channels_last``) the whole network
    takes training steps, on copies of its parameters, with that chain in C++ and in MXNet's operators. Nothing is done
    to the network, and nothing changes until the result is given to :func:`init` or a conversion: operators that low
    precision makes clearly slower then stay in FP32, and chains run as they were clearly faster.

    Parameters
    ----------
    net : HybridBlock
        With parameters that have values, or get them from ``data``.
    data : NDArray or sequence of NDArray
        Arguments of a call, of the batch size that is going to be used.
    training : bool
        Whether to time backward passes too, and chains.
    rounds : int
        How often each operator and chain is timed.
    cache : path, optional
        The file to add the measurements to; a file in the user's cache directory by default.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    Tuning
        ``slow`` names the operators that are going to stay in FP32, and the chains in MXNet's operators; ``fast`` the
        chains that are going to run in C++; ``milliseconds`` holds all times. On a device that runs in FP32 anyway
        chains alone are measured.

    Raises
    ------
    StateError, GraphError
        As in :func:`convert_hybrid_block`.
    TypeError
        ``net`` is not a HybridBlock.
    OSError, PolicyError
        The cache cannot be written, or is another kind of file.

    Examples
    --------
    >>> import gluon_amp as amp, mxnet as mx, os, tempfile
    >>> net = mx.gluon.nn.Dense(32, in_units=32)
    >>> net.initialize()
    >>> kept = os.path.join(tempfile.mkdtemp(), 'tuning.json')
    >>> tuning = amp.tune(net, mx.nd.ones((8, 32)), cache=kept, progress=False)
    >>> tuning.slow <= set(tuning.milliseconds)
    True
    >>> amp.init(tuning=kept)
    >>> amp.deinit()
    """
    checks.instance("net", net, HybridBlock, "a HybridBlock")
    checks.whole("rounds", rounds, 1, "a number of rounds above 0")
    example = as_example(data) or []
    arrays = flat(example)
    device = arrays[0].context if arrays else mx.context.current_context()
    kind = f"gpu({device.device_id})" if device.device_type == "gpu" else "cpu"
    policy = device_policies({kind: support(device.device_type, device.device_id)})[kind]
    traced = _analysed(net, example, arrays)
    waiting: dict[str, Callable[[], tuple[float, float]]] = {
        signature(node.op, node.attrs, node.inputs[0].shape or ()): partial(
            time_in_both, node.op, node.attrs, [entry.shape or () for entry in node.inputs], policy.target_dtype,
            training, rounds, device)
        for node in traced.graph.operators() if _is_measurable(node, policy)}
    if training:
        waiting.update((key, partial(_time_chain, traced, policy, kind, key, rounds))
                       for key in _chains(traced, policy, kind))
    if not waiting:
        why = f"the {kind} runs in float32, because {policy.reason}" if not policy.lowers else \
            "no operator of the network runs in low precision"
        _logger.info("There is nothing to measure: %s. No chain of convolutions may train in C++ either", why)
    times = {name: time() for name, time in progress_bar(waiting.items(), desc="tune", unit="operator", shown=progress)}
    tuning = Tuning(machine(kind, policy.target_dtype), times)
    tuning.save(default_cache() if cache is None else cache)
    return tuning


class _Analysed(NamedTuple):
    """A network as traced, with its arrays."""

    symbol: mx.sym.Symbol
    graph: Graph  # with the types and shapes of all tensors
    arrays: Mapping[str, mx.nd.NDArray]  # data and parameters, by the names of the symbol's inputs
    parameters: Collection[str]  # the names of those that are no data


def _analysed(net: HybridBlock, example: list[Any], arrays: list[mx.nd.NDArray]) -> _Analysed:
    traced = traced_block(net, example)
    names = [variable.name for variable in traced.inputs]
    parameters = blocks.parameters_of(net, traced.symbol.list_inputs())
    known = {**dict(zip(names, arrays)), **parameters}
    graph = to_graph(traced.symbol)
    analyse(traced.symbol, graph, {name: dtype_name(array.dtype) or "" for name, array in known.items()},
            {name: array.shape for name, array in known.items()})
    return _Analysed(traced.symbol, graph, known, parameters.keys())


def _is_measurable(node: Node, policy: Policy) -> bool:
    shapes = [entry.shape for entry in node.inputs]
    return all(shapes) and bool(shapes) and policy.decide(node.op, node.attrs, shapes[0]).rule == LOWER


def _context(graph: Graph, policy: Policy, kind: str) -> passes.Context:
    """Return the context of training steps under a policy, on a kind of device."""
    facts = passes.Facts(device=kind, trains=True)
    return passes.Context.of(graph, policy, facts, native=native_for(graph, facts))


def _chains(traced: _Analysed, policy: Policy, kind: str) -> list[str]:
    """Return the keys of the network's chains of convolutions, each once."""
    graph = traced.graph.copy()
    context = _context(graph, policy, kind)
    # Static memory, which steps are timed with, is wrong for MXNet's loops and branches.
    if not channels_last.is_needed(context) or has_control_flow(graph):
        return []
    passes.run(graph, context, before="channels_last")
    return list(dict.fromkeys(channels_last.keys_of(graph, context)))


def _time_chain(traced: _Analysed, policy: Policy, kind: str, key: str, rounds: int) -> tuple[float, float]:
    """Return the milliseconds of a training step with a chain in MXNet's operators, and in C++."""
    choices = [replace(policy, slow=frozenset([key])), replace(policy, fast=frozenset([key]))]
    in_mxnet, in_cpp = interleaved([_step(traced, choice, kind) for choice in choices], rounds)
    return in_mxnet, in_cpp


def _step(traced: _Analysed, policy: Policy, kind: str) -> Callable[[], None]:
    """Return a training step of the network as it is under a policy, without its loss and update."""
    graph = traced.graph.copy()
    passes.run(graph, _context(graph, policy, kind))
    return training_step(from_graph(graph, traced.symbol), traced.arrays, traced.parameters)
