"""Which block the operators of a graph belong to."""
from __future__ import annotations

from mxnet.gluon import Block

from ..._mxnet.blocks import block_tree, symbol_block_nodes


class Owners:
    """Finds the innermost block inside a network whose prefix an operator's name has."""

    def __init__(self, net: Block | None):
        blocks = [block for _, block in block_tree(net)] if net is not None else []
        self._prefixes = sorted(((block.prefix, block) for block in blocks if block.prefix),
                                key=lambda pair: -len(pair[0]))
        self._members = {name: block for block in blocks for name in symbol_block_nodes(block)}

    def of(self, name: str) -> Block | None:
        """Return the block of an operator, None where no name tells."""
        if name in self._members:
            return self._members[name]
        return next((block for prefix, block in self._prefixes if name.startswith(prefix)), None)
