"""The blocks that users keep in FP32, with everything below them, and a warning of what is in no network."""
from __future__ import annotations

import fnmatch
import gc
import warnings
import weakref
from typing import Any, Iterator, Sequence

from mxnet.gluon import Block

from .._mxnet.blocks import descendants, subtrees
from ..errors import closest


def can_be_target(value: object) -> bool:
    """Tell whether a value is a block, a class of blocks, or a name with wildcards."""
    return isinstance(value, (Block, str)) or (isinstance(value, type) and issubclass(value, Block))


def is_named(name: str, pattern: str) -> bool:
    """Tell whether a user's pattern is a name, brackets and stars in it included, or fits it."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def is_target(block: Block, target: Block | type | str) -> bool:
    """Tell whether a block is, or is named by, what a user excludes."""
    if isinstance(target, str):
        return is_named(block.name, target)
    return isinstance(block, target) if isinstance(target, type) else block is target


class Exclusions:
    """Blocks, classes of blocks, and names of blocks with wildcards; false when there are none."""

    def __init__(self) -> None:
        self._targets: list[Any] = []
        self._unseen: list[Any] = []  # in none of the networks that ran
        self._ran: weakref.WeakSet[Block] = weakref.WeakSet()  # outermost blocks, while targets are unseen

    def __bool__(self) -> bool:
        return bool(self._targets)

    def add(self, targets: Sequence[Any]) -> None:
        """Exclude more."""
        self._targets.extend(targets)
        self._unseen.extend(targets)

    def clear(self) -> None:
        """Exclude nothing."""
        self._targets.clear()
        self._unseen.clear()
        self._ran.clear()

    def match(self, block: Block) -> bool:
        """Tell whether a block is excluded by itself."""
        return any(is_target(block, target) for target in self._targets)

    def inside(self, outermost: Block, is_traced: bool = False) -> set[int]:
        """Return the ids of the excluded blocks that a call may meet; a traced block calls none of those inside."""
        if self._unseen:
            self._look_for_unseen(outermost)
        excluded = set() if is_traced else subtrees(outermost, self.match)
        for target in self._targets:
            # What a container holds may be called by anything.
            if isinstance(target, Block) and id(target) not in excluded:
                excluded |= subtrees(target, lambda _: True)
        return excluded

    def _look_for_unseen(self, outermost: Block) -> None:
        blocks = list(descendants(outermost))
        self._unseen = [target for target in self._unseen if not any(is_target(block, target) for block in blocks)]
        if not self._unseen or not outermost.collect_params():  # a loss is no network
            return
        again = outermost in self._ran
        self._ran.add(outermost)
        missing = [target for target in self._unseen if again or not _may_run_later(target)]
        self._unseen = [target for target in self._unseen if target not in missing]
        for target in missing:
            name = target if isinstance(target, str) else getattr(target, "__name__", None) or target.name
            hint = closest(target, [block.name for block in blocks]) if isinstance(target, str) else ""
            warnings.warn(f"amp.exclude: no block {name!r} is in {outermost.name!r} or in another network that ran: it "
                          f"excludes nothing.{hint}", stacklevel=5)


def _may_run_later(target: Any) -> bool:
    """Tell whether a target is about a block of a network that has not run yet."""
    return isinstance(target, Block) or any(is_target(block, target) for block in _living_blocks())


def _living_blocks() -> Iterator[Block]:
    return (thing for thing in gc.get_objects() if issubclass(type(thing), Block) and "_prefix" in thing.__dict__)
