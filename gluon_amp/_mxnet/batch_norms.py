"""Find batch normalization in networks, and exchange its implementation in place."""
from __future__ import annotations

from typing import Any

from mxnet.gluon import Block, SymbolBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm
from mxnet.gluon.nn import BatchNorm, BatchNormReLU
from mxnet.gluon.nn.basic_layers import _BatchNorm

from ..rules.tables.groups import BATCH_NORMS
from .blocks import descendants, graph_of
from .symbols import to_graph


def batch_norms(net: Block) -> list[_BatchNorm]:
    """Return the batch normalization blocks of a network, but for those with ``use_global_stats=True``."""
    return [block for block in descendants(net)
            if isinstance(block, _BatchNorm) and not block._kwargs.get("use_global_stats")]


def has_batch_norm_inside(block: Block) -> bool:
    """Tell whether a block holds a graph with batch normalization."""
    kinds = (*BATCH_NORMS, "_contrib_SyncBatchNorm")
    return isinstance(block, SymbolBlock) and any(node.op in kinds for node in to_graph(graph_of(block)[1]).operators())


def is_plain(block: _BatchNorm) -> bool:
    """Tell whether a block is MXNet's own batch normalization, not a subclass with another computation."""
    kind = type(block)
    return (kind in (BatchNorm, BatchNormReLU, SyncBatchNorm, CustomBatchNorm)
            # GluonCV's computes as MXNet's own, with a flag that concerns cuDNN only
            or f"{kind.__module__}.{kind.__qualname__}" == "gluoncv.nn.block.BatchNormCudnnOff")


def exchange(block: _BatchNorm, kind: type[_BatchNorm], kept: Any = None, **kernel: Any) -> None:
    """Turn a block into one that calls another operator; references to it and its parameters stay valid."""
    kernel.update({name: block._kwargs[name] for name in ("eps", "momentum", "fix_gamma")})
    block.__class__, block._kwargs = kind, kernel
    block._kept = kept  # lives as long as the block


def axis_of(block: _BatchNorm) -> int:
    """Return the axis that a block normalizes."""
    return block._kwargs.get("axis", 1)


class CustomBatchNorm(_BatchNorm):
    """Batch normalization by a custom operator."""

    def hybrid_forward(self, F: Any, x: Any, gamma: Any, beta: Any, running_mean: Any, running_var: Any) -> Any:
        """Normalize."""
        result = F.Custom(_plain(F, x), gamma, beta, running_mean, running_var, name="fwd", **self._kwargs)
        return F.relu(_plain(F, result)) if self.fuse_relu else _plain(F, result)


def _plain(F: Any, x: Any) -> Any:
    """Return a copy in plain layout, and let its gradient arrive in plain layout."""
    # On the CPU a custom operator finds garbage in what oneDNN's operators leave in layouts of their own, and behind
    # operators that may work in place.
    return F.slice(x, begin=(0,), end=(None,))


class MXNetSyncBatchNorm(SyncBatchNorm):
    """MXNet's operator over the GPUs of one process."""

    def hybrid_forward(self, F: Any, x: Any, *parameters: Any, **named: Any) -> Any:
        """Normalize."""
        result = super().hybrid_forward(F, x, *parameters, **named)
        return F.relu(result) if self.fuse_relu else result
