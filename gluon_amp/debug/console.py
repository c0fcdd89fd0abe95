"""Print tables as wide as there is room, names always whole."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Sequence

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 170  # of files and pipes, unless COLUMNS says otherwise
_UNLIMITED = 100_000


def print_table(table: Table, dispensable: Sequence[str] = (), wide: bool = False) -> None:
    """Print a table; where there is little room it does without some columns, unless it is to be as wide as it is."""
    from rich.console import Console

    console = Console()
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console = Console(width=_WIDTH)
    if not wide:
        table = fitted(table, dispensable, console.width)
    Console(width=max(console.width, _UNLIMITED if wide else _least(table))).print(table)


def fitted(table: Table, dispensable: Sequence[str], width: int) -> Table:
    """Leave columns out of a table, in the order given, until it fits into a width; return it."""
    for name in dispensable:
        if _least(table) <= width:
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
