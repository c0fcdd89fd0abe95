"""Settings of single blocks: the blocks that stay in FP32, and the networks of ``initialize``."""
from __future__ import annotations

import fnmatch
import gc
import weakref
from contextlib import contextmanager
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from mxnet.gluon import Block

from .._mxnet.arrays import cast_arrays
from .._mxnet.blocks import descendants, subtrees
from ..errors import closest, warn
from .in_force import frame, in_force, region
from .state import State


def can_be_target(value: object) -> bool:
    """Tell whether a value is a block, a class of blocks, or a name with wildcards."""
    return isinstance(value, (Block, str)) or (isinstance(value, type) and issubclass(value, Block))


def is_named(name: str, pattern: str) -> bool:
    """Tell whether a user's pattern is a name, brackets and stars in it included, or fits it."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def is_target(block: Block, target: Block | type | str) -> bool:
    """Tell whether a block is the target that a user excludes, one of its class, or one that it names."""
    if isinstance(target, str):
        return is_named(block.name, target)
    return isinstance(block, target) if isinstance(target, type) else block is target


class Network(NamedTuple):
    """How a network given to ``initialize`` runs."""

    state: State | None  # in force inside its calls; None for the one around
    output_dtype: str | None = None  # the type of its floating-point results; None to leave them as they are


class _BlockSettings:
    """Tells the state that a block's call runs under. Blocks are referred to weakly."""

    # A block is kept in FP32 with all blocks inside it, whatever calls them; a class or a name reaches the blocks
    # inside of the blocks it fits in the network that is called.

    def __init__(self) -> None:
        self.changes = 0  # of exclusions and networks
        self.children = 0  # how often a block got another child
        self.clear()

    def clear(self) -> None:
        """Forget all settings of blocks."""
        self.level: Any = None  # by initialize, for trainers: a function that gives loss scalers
        self._excludes = self._has_networks = False
        self._excluded: weakref.WeakSet[Block] = weakref.WeakSet()
        self._patterns: dict[type | str, None] = {}
        self._unseen: list[str] = []  # names that no network was called for
        self._networks: weakref.WeakKeyDictionary[Block, Network] = weakref.WeakKeyDictionary()
        self._version: tuple[int, int] | None = None  # of the settings and blocks that the answers below are for

    def _begin_again(self) -> None:
        """Forget the answers that were kept where a setting was added, or a block anywhere got another child."""
        version = self.changes, self.children
        if self._version == version:
            return
        # the excluded blocks, and all blocks that are inside of them now
        self._below = weakref.WeakSet(inner for block in self._excluded for inner in descendants(block))
        # With its class, which may be exchanged: whether a block is excluded wherever it is called.
        self._answers: weakref.WeakKeyDictionary[Block, tuple[type, bool]] = weakref.WeakKeyDictionary()
        self._inside: weakref.WeakKeyDictionary[Block, weakref.WeakSet[Block]] = weakref.WeakKeyDictionary()
        # the blocks inside networks: containers may be iterated, and not called
        self._parts: weakref.WeakKeyDictionary[Block, Network] = weakref.WeakKeyDictionary(
            {part: network for net, network in self._networks.items() if network.state is not None
             for part in descendants(net)})
        self._version = version  # last: other threads may ask meanwhile

    def exclude(self, targets: Sequence[Any]) -> None:
        """Keep blocks, classes of blocks, or names of blocks (with wildcards) in FP32."""
        new = [target for target in targets if target not in (self._excluded if isinstance(target, Block)
                                                              else self._patterns)]
        for target in new:
            if isinstance(target, Block):
                # A slice of a network is a block that nobody keeps: the blocks inside of it count by themselves.
                self._excluded.update(descendants(target))
            else:
                self._patterns[target] = None
                self._unseen += [target] if isinstance(target, str) else []
        self._excludes = self._excludes or bool(new)
        self.changes += bool(new)

    def cast(self, networks: Mapping[Block, Network]) -> None:
        """Run whole networks under states of their own."""
        self._networks.update(networks)
        self._has_networks = self._has_networks or bool(networks)
        self.changes += 1

    def epoch(self) -> int:
        """Return the number of the settings that blocks are traced under, 0 for none; another one traces them again."""
        return self.changes if self.has_any() else 0

    def has_any(self) -> bool:
        """Tell whether any block is excluded, or runs under a state of its own."""
        return self._excludes or self._has_networks

    def have_states(self) -> bool:
        """Tell whether any network runs under a state of its own."""
        return any(network.state is not None for network in self._networks.values())

    def region(self, block: Block) -> Any:
        """Return the region that a block's call is to run in, None for the one around it."""
        if not self.has_any():
            return None
        self._begin_again()
        if not frame.blocks:  # a network that is traced already calls no block inside it
            self._enter(block, is_traced=(block.__dict__.get("_cached_op") is not None
                                          and block.__dict__.get("_amp_epoch") == self.changes))
        if self._excludes and self._is_excluded(block):
            return in_force.off()
        if not self._has_networks:
            return None
        network, regions = self._networks.get(block), in_force.regions.entries()
        if network is None and not regions:
            network = frame.parts.get(block)
        is_off = regions and not (regions[-1].value and regions[-1].value.enabled)
        if network is None or network.state is None or is_off:
            return None
        return region(network.state)

    def results(self, block: Block, value: Any) -> Any:
        """Return a block's results, in the type that its network is to give."""
        network = self._networks.get(block) if self._has_networks else None
        return value if network is None or network.output_dtype is None else cast_arrays(value, network.output_dtype)

    @contextmanager
    def tracing(self, block: Block) -> Iterator[None]:
        """Trace a block in the body, by a call of it or not; the blocks inside know which are excluded."""
        if self.has_any() and not frame.blocks:
            self._begin_again()
            self._enter(block)
        frame.blocks += 1
        try:
            yield
        finally:
            frame.blocks -= 1

    def _enter(self, outermost: Block, is_traced: bool = False) -> None:
        """Note which blocks inside of the outermost one are excluded by a block around them, or parts of networks."""
        self._look_for_unseen(outermost)
        frame.parts = {} if outermost in self._networks else self._parts
        frame.excluded = ()
        if self._patterns and not is_traced:
            if outermost not in self._inside:
                self._inside[outermost] = weakref.WeakSet(subtrees(outermost, self._fits))
            frame.excluded = self._inside[outermost]

    def _is_excluded(self, block: Block) -> bool:
        known = self._answers.get(block)
        if known is None or known[0] is not type(block):
            known = self._answers[block] = type(block), block in self._below or self._fits(block)
        return known[1] or block in frame.excluded

    def _fits(self, block: Block) -> bool:
        return any(is_target(block, pattern) for pattern in self._patterns)

    def _look_for_unseen(self, outermost: Block) -> None:
        """Warn of names that no block has, as the first network runs."""
        if not self._unseen or not outermost.collect_params():  # a loss is no network
            return
        living = [thing for thing in gc.get_objects() if issubclass(type(thing), Block) and "_prefix" in vars(thing)]
        for name in self._unseen:
            if not any(is_target(block, name) for block in living):
                hint = closest(name, [block.name for block in descendants(outermost)])
                warn(f"amp.exclude: no block {name!r} is in {outermost.name!r} or in another network: it excludes "
                     f"nothing.{hint}")
        self._unseen = []


block_settings = _BlockSettings()
