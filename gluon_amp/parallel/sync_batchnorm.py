"""``convert_sync_batchnorm``: batch normalization by the statistics of the batches of all contexts and processes."""
from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import mxnet as mx
from mxnet.gluon import Block

from .. import parallel
from .._mxnet import batch_norms, gpus
from .._mxnet.batch_norms import CustomBatchNorm, MXNetSyncBatchNorm, exchange
from .._mxnet.blocks import descendants, forget_traces
from .._mxnet.symbols import dtype_name
from ..base import checks
from ..errors import StateError, expected, warn
from .batch_norm import OPERATOR, Allreduce, Layer

__all__ = ["convert_sync_batchnorm"]

_LEAST_COPIES = 1024  # of MXNet's scratch memory: as many as operators in a step of a deep network, on all contexts
_CALLED = "convert_sync_batchnorm"


def convert_sync_batchnorm(net: Block, num_devices: int | None = None, allreduce: Allreduce | None = None) -> Block:
    """Make a network's batch normalization use the statistics of the whole batch, wherever its parts are computed.

    Works in place, in FP32, and returns the network: call it before :func:`initialize` or :func:`init`, and before the
    first step. Blocks with ``use_global_stats=True`` have nothing to synchronize and stay as they are.

    In training every context of every process must run the network, in the same order, before a result is read:
    the contexts wait for each other. Gradients of scale and shift are those of a context's own batch, for the trainer
    to add up as others. Several CPU contexts need ``MXNET_CPU_TEMP_COPY=1024`` to be set.

    Parameters
    ----------
    net : Block
        Hybridized or not, initialized or not, with FP32 parameters.
    num_devices : int, optional
        How many contexts of this process take part; the contexts that the parameters are on, when left out.
    allreduce : callable, optional
        ``allreduce(vector, name=name)`` returns the sum of a vector over all processes, the same bits in each, in
        threads of MXNet's: that of Horovod or the KVStore, when left out.
    """
    checks.instance("net", net, Block, "a Block")
    if allreduce is not None and not callable(allreduce):
        raise TypeError(expected("a callable", "allreduce", allreduce))
    blocks = batch_norms.batch_norms(net)
    _refuse_unfit(net, blocks)
    contexts, count = _contexts(net, num_devices)
    prepare = None
    if allreduce is None and parallel.size() > 1:
        allreduce, prepare = parallel.allreduce, parallel.prepare
    if count == 1 and allreduce is None:
        warn(f"{_CALLED}: one context in one process has nothing to synchronize; the network stays as it is")
        return net
    _refuse_few_resources(count, contexts)
    are_gpus = bool(contexts) and all(context.device_type == "gpu" for context in contexts)
    uses_mxnet = are_gpus and allreduce is None
    axes = {block: batch_norms.axis_of(block) for block in blocks}
    other = next((block.name for block, axis in axes.items() if axis != 1), None)
    if uses_mxnet and other:
        raise StateError(f"{_CALLED}: MXNet's SyncBatchNorm, used for the GPUs of one process, normalizes axis 1 only, "
                         f"and {other} another one. Use one process per GPU")
    for block, axis in axes.items():
        if uses_mxnet:  # which knows the layer among all networks of the process by a key
            exchange(block, MXNetSyncBatchNorm, key=f"{block.prefix}{id(block)}", ndev=count, use_global_stats=False)
        else:
            layer = Layer(count, allreduce, prepare)
            exchange(block, CustomBatchNorm, layer, op_type=OPERATOR, layer=layer.key, axis=axis)
    forget_traces(descendants(net))
    return net


def _refuse_unfit(net: Block, blocks: list[Any]) -> None:
    if mx.util.is_np_array():
        raise StateError(f"{_CALLED}: custom operators take legacy arrays only. Leave mx.npx.set_np() out")
    hidden = [block.name for block in descendants(net) if batch_norms.has_batch_norm_inside(block)]
    if hidden:
        raise StateError(f"{_CALLED}: the batch normalization inside {', '.join(hidden[:3])} is part of a "
                         "SymbolBlock's graph. Convert the network that the graph was exported from")
    own = [block for block in blocks if not batch_norms.is_plain(block)]
    if own:
        raise StateError(f"{_CALLED}: {own[0].name} is a {type(own[0]).__name__}, a subclass of BatchNorm "
                         "whose computation is its own. Use nn.BatchNorm in its place")
    low = [parameter.name for block in blocks for parameter in block.params.values()
           if dtype_name(parameter.dtype) != "float32"]
    if low:
        raise StateError(f"{_CALLED}: expected FP32 parameters, received {low[0]} in another type. Leave "
                         "net.cast out: amp.initialize and amp.init run networks in low precision")


def _contexts(net: Block, num_devices: int | None) -> tuple[list[mx.Context], int]:
    """Return the contexts that parameters are on, none of a network that is not initialized, and how many take part."""
    contexts: list[mx.Context] = []
    with suppress(RuntimeError):
        contexts += next((parameter.list_ctx() for parameter in net.collect_params().values()), [])
    count = len(contexts) if num_devices is None else checks.whole("num_devices", num_devices, 1)
    if not count:
        raise StateError(f"{_CALLED}: the network is not initialized, so that its contexts are not known. Call "
                         "net.initialize(ctx=...) first, or give num_devices")
    if contexts and count != len(contexts):
        raise ValueError(f"expected num_devices={len(contexts)}, the number of contexts that the parameters are on, "
                         f"received num_devices={num_devices}: the contexts would wait for each other for ever")
    return contexts, count


def _refuse_few_resources(count: int, contexts: list[mx.Context]) -> None:
    """Refuse CPU contexts that share scratch memory: an operator that waits for another context would block it."""
    copies = int(os.environ.get("MXNET_CPU_TEMP_COPY", "4"))
    on_cpus = any(context.device_type != "gpu" for context in contexts) or not gpus.count()
    if count > 1 and on_cpus and copies < _LEAST_COPIES:
        raise StateError(f"{_CALLED}: operators on several CPU contexts block each other without scratch memory of "
                         f"their own. Set MXNET_CPU_TEMP_COPY={_LEAST_COPIES} or more (received {copies}) "
                         "before the process starts, or use one process per context")
