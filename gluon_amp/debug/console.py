"""Print tables as wide as there is room, names always whole."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Callable, Sequence

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 170  # of files and pipes, unless COLUMNS says otherwise
_UNLIMITED = 100_000


def print_table(make: Callable[[int | None], Table], wide: bool) -> None:
    """Print the table that a function makes for a number of columns, or as wide as it is."""
    from rich.console import Console

    console = Console()
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console = Console(width=_WIDTH)
    table = make(None if wide else console.width)
    Console(width=_UNLIMITED if wide else max(console.width, _least(table))).print(table)


def fitted(table: Table, dispensable: Sequence[str], width: int | None) -> Table:
    """Leave columns out of a table, in the order given, until it fits into a width, if there is one; return it."""
    for name in dispensable:
        if width is None or _least(table) <= width:
            break
        kept = [column for column in table.columns if column.header != name]
        table.columns = [replace(column, _index=number) for number, column in enumerate(kept)]
    return table


def _least(table: Table) -> int:
    """Return the characters that a table takes where cells are not broken but in columns with a least width."""
    from rich.cells import cell_len
    from rich.text import Text

    return 1 + sum(3 + (column.min_width or max(cell_len(Text.from_markup(str(cell)).plain)
                                                for cell in (column.header, *column.cells)))
                   for column in table.columns)
