"""Dictionaries that keep the latest entries only."""
from __future__ import annotations

from typing import Any


def remember(entries: dict[Any, Any], key: Any, value: Any, most: int) -> Any:
    """Add an entry, and drop the oldest where there are more than ``most``; return the value."""
    entries[key] = value
    while len(entries) > most:
        entries.pop(next(iter(entries)), None)
    return value
