"""Find batch normalization in networks."""
from __future__ import annotations

from typing import Iterator

from mxnet import gluon
from mxnet.gluon import Block, SymbolBlock
from mxnet.gluon.nn.basic_layers import _BatchNorm

from ..op_lists.groups.layers import BATCH_NORMS, SYNC_BATCH_NORM
from .symbols import to_graph

__all__ = ["batch_norm_parameters", "blocks_of"]


def blocks_of(net: Block) -> Iterator[Block]:
    """Yield a block and all blocks inside, each once."""
    seen: set[int] = set()
    waiting = [net]
    while waiting:
        block = waiting.pop()
        if id(block) not in seen:
            seen.add(id(block))
            yield block
            waiting.extend(block._children.values())


def batch_norm_parameters(net: Block) -> Iterator[gluon.Parameter]:
    """Yield scale, shift and statistics of every batch normalization, in blocks and in the graphs of SymbolBlocks."""
    for block in blocks_of(net):
        if isinstance(block, _BatchNorm):
            yield from block.params.values()
        elif isinstance(block, SymbolBlock):
            known = block.collect_params()
            for node in to_graph(block._cached_graph[1]).operators():
                if node.op in (*BATCH_NORMS, *SYNC_BATCH_NORM):
                    yield from (known[entry.node.name] for entry in node.inputs[1:5] if entry.node.name in known)
