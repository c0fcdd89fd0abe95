"""Values that nest, such as regions, and attributes of modules and classes that are replaced for a while."""
from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
_ABSENT = object()


class Entry:
    """A value, told from equal ones by where it was entered."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class ContextStack(Generic[Value]):
    """The values that are entered and not left: a new thread has none, each asyncio task has its own."""

    def __init__(self, name: str):
        self._entries: ContextVar[tuple[Entry, ...]] = ContextVar(name, default=())
        self.entries = self._entries.get  # a function: the entries, innermost last

    def enter(self, value: Value) -> Entry:
        """Put a value inside of the others; return what :meth:`leave` takes."""
        entry = Entry(value)
        self._entries.set((*self.entries(), entry))
        return entry

    def leave(self, entry: Entry) -> None:
        """Take a value out; generators that wait may leave theirs in any order."""
        self._entries.set(tuple([each for each in self.entries() if each is not entry]))

    def entered(self, value: Value) -> _Entered:
        """Return a context manager that has a value inside of the others during its body."""
        return _Entered(self, value)


class _Entered:
    """A context manager: calls enter several, and a generator would take twice the time."""

    __slots__ = ("_entry", "_stack", "_value")

    def __init__(self, stack: ContextStack, value: Any):
        self._stack, self._value = stack, value

    def __enter__(self) -> None:
        self._entry = self._stack.enter(self._value)

    def __exit__(self, *details: Any) -> None:
        self._stack.leave(self._entry)


class Replaced:
    """Attributes of modules and classes that are replaced, and put back in the opposite order."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._before)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until :meth:`restore`."""
        before = vars(owner).get(name, _ABSENT)  # not an inherited one
        setattr(owner, name, value)
        self._before.append((owner, name, before))

    def holds(self, owner: Any, name: str) -> bool:
        """Tell whether an attribute is replaced now."""
        return any(each is owner and known == name for each, known, _ in self._before)

    def restore(self, kept: int = 0) -> None:
        """Put all attributes back but the ``kept`` that were replaced first."""
        while len(self._before) > kept:
            owner, name, before = self._before.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
