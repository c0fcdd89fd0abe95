"""From the arguments of a conversion to what is to be done."""
from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import mxnet as mx

from .._mxnet.symbols import to_graph
from .exclusions import Exclusions
from .graphs import Request
from .policies import inference_policy
from .settings import target_of

__all__ = ["make_request"]


def make_request(symbol: mx.sym.Symbol, target_dtype: object, lists: tuple[Any, Any, Any], wanted: Exclusions,
                 device: mx.Context, disabled: frozenset[str], cast_outputs: bool, tuning: Any) -> Request:
    """Return what is to be done to a symbol; see :func:`gluon_amp.convert_hybrid_block` for errors.

    Parameters
    ----------
    symbol : Symbol
        The network.
    target_dtype : object
        The type to convert to, as the user gave it.
    lists : tuple
        The user's lists of operators: in low precision, in FP32, in FP32 under conditions.
    wanted : Exclusions
        What stays in FP32.
    device : Context
        Where the network will run.
    disabled : frozenset of str
        The passes that are off.
    cast_outputs : bool
        Whether outputs are cast back to FP32.
    tuning : Tuning, path or bool
        Measurements to heed.
    """
    names = ("target_precision_ops", "fp32_ops", "conditional_fp32_ops")
    on_gpu = device.device_type == "gpu"
    policy = inference_policy(target_of(target_dtype), "gpu" if on_gpu else "cpu", dict(zip(names, lists)), tuning)
    nodes = wanted.nodes(to_graph(symbol))
    policy = replace(policy, excluded=nodes, training=False, disabled_passes=disabled)
    return Request(policy, cast_outputs, not on_gpu, metadata.version("gluon_amp"))
