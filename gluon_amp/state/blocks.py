"""What users said of single blocks: those that stay in FP32, and the networks of ``initialize``."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Sequence

from mxnet.gluon import Block

from .exclusions import Exclusions
from .frame import frame
from .in_force import in_force, region
from .networks import Level, Network, Networks


class _BlockSettings:
    """Says what a block's call is to run in."""

    def __init__(self) -> None:
        self.exclusions = Exclusions()
        self.networks = Networks()
        self.level: Level | None = None  # by initialize
        self.changes = 0  # of exclusions and networks
        self.children = 0  # how often a block got another child

    def exclude(self, targets: Sequence[Any]) -> None:
        """Keep blocks, classes of blocks, or names of blocks (with wildcards) in FP32."""
        self.changes += self.exclusions.add(targets)

    def cast(self, networks: Mapping[Block, Network]) -> None:
        """Run whole networks under states of their own."""
        self.networks.add(networks)
        self.changes += 1

    def clear(self) -> None:
        """Forget everything that users said."""
        self.level = None
        self.networks.clear()
        self.exclusions.clear()

    def epoch(self) -> int:
        """Return a number for what blocks are traced under, 0 for nothing; where it changes they are traced again."""
        return self.changes if self.has_any() else 0

    def has_any(self) -> bool:
        """Tell whether any block is excluded, or runs under a state of its own."""
        return self.exclusions.given or self.networks.given

    def region(self, block: Block) -> Any:
        """Return the region that a block's call is to run in, None for the one around it."""
        if self.exclusions.given and self._is_excluded(block):
            return in_force.off()
        network = self._network(block) if self.networks.given else None
        if network is None or network.state is None or in_force.is_switched_off():
            return None
        return region(network.state)

    @contextmanager
    def tracing(self, block: Block) -> Iterator[None]:
        """Trace a block in the body, by a call of it or not; the blocks inside know what is excluded."""
        if self.exclusions.given and not frame.blocks:
            frame.excluded = self.exclusions.inside(block, self.children)
        if self.networks.given and not frame.blocks:
            frame.parts = self.networks.parts(block, (self.changes, self.children))
        frame.blocks += 1
        try:
            yield
        finally:
            frame.blocks -= 1

    def _network(self, block: Block) -> Network | None:
        """Return the network that a block is; outside of all regions, also the one that it is a part of."""
        if not frame.blocks:
            frame.parts = self.networks.parts(block, (self.changes, self.children))
        network = self.networks.get(block)
        return frame.parts.get(block) if network is None and not in_force.regions.entries() else network

    def _is_excluded(self, block: Block) -> bool:
        if not frame.blocks:  # the outermost: since its last call blocks may have been added
            frame.excluded = self.exclusions.inside(block, self.children, self._is_traced(block))
        return block in frame.excluded or self.exclusions.match(block, self.children)

    def _is_traced(self, block: Block) -> bool:
        return block.__dict__.get("_cached_op") is not None and block.__dict__.get("_amp_epoch") == self.epoch()


block_settings = _BlockSettings()
