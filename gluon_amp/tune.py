"""Measure on this machine which operators low precision makes faster."""
from __future__ import annotations

import logging
import os
from typing import Any

import mxnet as mx
from mxnet.gluon import HybridBlock

from . import checks
from ._mxnet import blocks
from ._mxnet.symbols import analyse, dtype_name, to_graph
from ._mxnet.timing import time_in_both
from .convert.inputs import as_example, flat, traced_block
from .graph import Graph, Node
from .progress import progress_bar
from .rules import LOWER, Policy
from .rules.measurements import Tuning, default_cache, signature
from .state.devices import machine, support
from .state.policies import device_policies

_logger = logging.getLogger("gluon_amp")


def tune(net: HybridBlock, data: Any, *, training: bool = True, rounds: int = 5,
         cache: str | os.PathLike | None = None, progress: bool = True) -> Tuning:
    """Measure every kind of low-precision operator of a network, in low precision and in FP32.

    Each operator runs by itself on random data of the shapes that it has in the network, both ways in turns. Nothing is
    done to the network, and nothing changes until the result is given to :func:`init` or a conversion: operators that
    low precision makes clearly slower then stay in FP32.

    Parameters
    ----------
    net : HybridBlock
        With parameters that have values, or get them from ``data``.
    data : NDArray or sequence of NDArray
        Arguments of a call, of the batch size that is going to be used.
    training : bool
        Whether to time backward passes too.
    rounds : int
        How often each operator is timed.
    cache : path, optional
        The file to add the measurements to; a file in the user's cache directory by default.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    Tuning
        ``slow`` names what is going to stay in FP32; ``milliseconds`` holds all times. Both are empty on a device that
        runs in FP32 anyway.

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
    if not policy.lowers:
        _logger.info("There is nothing to measure: the %s runs in float32, because %s", kind, policy.reason)
    graph = _analysed(net, example, arrays)
    nodes = {signature(node.op, node.attrs, node.inputs[0].shape or ()): node for node in graph.operators()
             if _is_measurable(node, policy)}
    times = {name: time_in_both(node.op, node.attrs, [entry.shape or () for entry in node.inputs], policy.target_dtype,
                                training, rounds, device)
             for name, node in progress_bar(nodes.items(), desc="tune", unit="operator", shown=progress)}
    tuning = Tuning(machine(kind, policy.target_dtype), times)
    tuning.save(default_cache() if cache is None else cache)
    return tuning


def _analysed(net: HybridBlock, example: list[Any], arrays: list[mx.nd.NDArray]) -> Graph:
    traced = traced_block(net, example)
    names = [variable.name for variable in traced.inputs]
    known = {**dict(zip(names, arrays)), **blocks.parameters_of(net, traced.symbol.list_inputs())}
    graph = to_graph(traced.symbol)
    analyse(traced.symbol, graph, {name: dtype_name(array.dtype) or "" for name, array in known.items()},
            {name: array.shape for name, array in known.items()})
    return graph


def _is_measurable(node: Node, policy: Policy) -> bool:
    shapes = [entry.shape for entry in node.inputs]
    return all(shapes) and bool(shapes) and policy.decide(node.op, node.attrs, shapes[0]).rule == LOWER
