"""What operator tables are written as, and made of."""
from __future__ import annotations

from typing import Any, Mapping, Tuple

from ..decision import Rule

# Each the name of an operator, or the names of several that share a fate, and their rules in order of precedence.
Rows = Tuple[Tuple[Any, ...], ...]
Table = Mapping[str, Tuple[Rule, ...]]


def as_table(*rows: tuple[Any, ...]) -> Table:
    """Return ``{name: (Rule, ...)}``."""
    found: dict[str, tuple[Rule, ...]] = {}
    for names, *rules in rows:
        for name in (names,) if isinstance(names, str) else names:
            if name in found:
                raise ValueError(f"the operator {name!r} is in two rows of the table")
            found[name] = tuple(rules)
    return found
