"""Attributes of others that are replaced for a while."""
from __future__ import annotations

from typing import Any

_ABSENT = object()


class Replaced:
    """What was replaced, and is put back in the opposite order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._before)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or class until :meth:`restore`."""
        before = vars(owner).get(name, _ABSENT)  # not what it inherits
        setattr(owner, name, value)
        self._before.append((owner, name, before))

    def holds(self, owner: Any, name: str) -> bool:
        """Tell whether an attribute is replaced now."""
        return any(each is owner and known == name for each, known, _ in self._before)

    def restore(self, kept: int = 0) -> None:
        """Put everything back but what was replaced first."""
        while len(self._before) > kept:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
