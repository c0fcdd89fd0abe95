"""The blocks that users keep in FP32, with everything below them, and a warning of what is in no network."""
from __future__ import annotations

import fnmatch
import gc
import weakref
from typing import Any, Callable, Container, Iterator, NamedTuple, Sequence

from mxnet.gluon import Block

from .._mxnet.blocks import descendants, subtrees
from ..errors import closest, warn


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
    """Blocks, classes of blocks, and names of blocks with wildcards; `given` is whether there are any.

    A block is kept in FP32 with all blocks inside it, whatever calls them; a class or a name reaches what is inside of
    such blocks in the network that is called. Blocks are referred to weakly. What was found is kept until something is
    added, or a block anywhere gets another child.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Exclude nothing."""
        self.given = False
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()
        self._patterns: dict[type | str, None] = {}
        self._unseen: list[_Unseen] = []
        self._ran: weakref.WeakSet[Block] = weakref.WeakSet()  # outermost blocks, while targets are unseen
        self._begin_again(0)

    def _begin_again(self, children: int) -> None:
        self._children = children
        self._below: weakref.WeakSet[Block] | None = None  # the blocks, and all that are inside of them now
        # With its class, which may be exchanged: whether a block is excluded wherever it is called.
        self._answers: weakref.WeakKeyDictionary[Block, tuple[type, bool]] = weakref.WeakKeyDictionary()
        self._inside: weakref.WeakKeyDictionary[Block, weakref.WeakSet[Block]] = weakref.WeakKeyDictionary()

    def add(self, targets: Sequence[Any]) -> bool:
        """Exclude more; tell whether anything is new."""
        new = [target for target in targets if target not in (self._blocks if isinstance(target, Block)
                                                              else self._patterns)]
        for target in new:
            if isinstance(target, Block):
                # A slice of a network is a block that nobody keeps: those inside of it count by themselves.
                self._blocks.update(descendants(target))
            else:
                self._patterns[target] = None
            self._unseen.append(_Unseen.of(target))
        self.given = self.given or bool(new)
        self._begin_again(self._children)
        return bool(new)

    def match(self, block: Block, children: int) -> bool:
        """Tell whether a block is excluded wherever it is called; `children` says how often one was added anywhere."""
        if children != self._children:
            self._begin_again(children)
        known = self._answers.get(block)
        if known is None or known[0] is not type(block):
            known = self._answers[block] = type(block), block in self._all_below() or self._fits(block)
        return known[1]

    def inside(self, outermost: Block, children: int, is_traced: bool = False) -> Container[Block]:
        """Return what is excluded in a network by class or name of what it is in; a traced one calls none of it."""
        if self._unseen:
            self._look_for_unseen(outermost)
        if is_traced or not self._patterns:
            return ()
        if children != self._children:
            self._begin_again(children)
        found = self._inside.get(outermost)
        if found is None:
            found = self._inside[outermost] = weakref.WeakSet(subtrees(outermost, self._fits))
        return found

    def _all_below(self) -> weakref.WeakSet[Block]:
        if self._below is None:
            self._below = weakref.WeakSet(inner for block in self._blocks for inner in descendants(block))
        return self._below

    def _fits(self, block: Block) -> bool:
        return any(is_target(block, pattern) for pattern in self._patterns)

    def _look_for_unseen(self, outermost: Block) -> None:
        blocks = list(descendants(outermost))
        self._unseen = [each for each in self._unseen if not any(map(each.includes, blocks))]
        if not self._unseen or not outermost.collect_params():  # a loss is no network
            return
        again = outermost in self._ran
        self._ran.add(outermost)
        missing = [each for each in self._unseen if again or not each.may_run_later()]
        self._unseen = [each for each in self._unseen if each not in missing]
        for each in missing:
            hint = closest(each.name, [block.name for block in blocks]) if each.is_pattern else ""
            warn(f"amp.exclude: no block {each.name!r} is in {outermost.name!r} or in another network that "
                 f"ran: it excludes nothing.{hint}")


class _Unseen(NamedTuple):
    """A target that is in none of the networks that ran."""

    name: str
    is_pattern: bool
    includes: Callable[[Block], bool]
    may_run_later: Callable[[], bool]  # whether it is about a block of a network that has not run yet

    @classmethod
    def of(cls, target: Block | type | str) -> _Unseen:
        """Describe a target; a block may go meanwhile."""
        if isinstance(target, Block):
            return cls(target.name, False, weakref.WeakSet(descendants(target)).__contains__, lambda: True)

        def includes(block: Block) -> bool:
            return is_target(block, target)
        return cls(target if isinstance(target, str) else target.__name__, isinstance(target, str), includes,
                   lambda: any(map(includes, _living_blocks())))


def _living_blocks() -> Iterator[Block]:
    return (thing for thing in gc.get_objects() if issubclass(type(thing), Block) and "_prefix" in thing.__dict__)
