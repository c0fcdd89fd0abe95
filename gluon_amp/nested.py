"""Values that nest, such as regions: the innermost counts where the code that entered it runs.

They belong to a context of Python's ``contextvars``: a new thread has none of them, each asyncio task has its own.
"""
from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Callable, Generic, TypeVar

Value = TypeVar("Value")


class Entry:
    """A value, told from equal ones by where it was entered."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class Nested(Generic[Value]):
    """The values that are entered and not left, in the current context."""

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

    def leave_last(self, is_meant: Callable[[Value], bool]) -> Value | None:
        """Take the innermost value of a kind out and return it; None where there is none."""
        for entry in reversed(self.entries()):
            if is_meant(entry.value):
                self.leave(entry)
                return entry.value
        return None

    def entered(self, value: Value) -> _Entered:
        """Return a context manager that has a value inside of the others during its body."""
        return _Entered(self, value)


class _Entered:
    __slots__ = ("_entry", "_nested", "_value")

    def __init__(self, nested: Nested, value: Any):
        self._nested, self._value = nested, value

    def __enter__(self) -> None:
        self._entry = self._nested.enter(self._value)

    def __exit__(self, *details: Any) -> None:
        self._nested.leave(self._entry)
