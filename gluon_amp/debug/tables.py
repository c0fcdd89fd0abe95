"""Tables of rich: names and texts are the user's, so that nothing in them is taken for markup."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Collection, Mapping, Sequence

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 170  # of files and pipes, unless COLUMNS says otherwise
_UNLIMITED = 100_000


def text_table(lines: Sequence[Mapping[str, str]], numbers: Collection[str], summary: str,
               red: Collection[int] = ()) -> Table:
    """Return a table of lines with the same columns, some of numbers, and a summary that begins above it."""
    from rich.table import Table
    from rich.text import Text

    title, _, caption = summary.partition("\n")
    table = Table(title=Text(title), caption=Text(caption), title_justify="left", caption_justify="left")
    for number, name in enumerate(lines[0] if lines else ()):
        # The names of operators in the first column are broken last.
        table.add_column(name, no_wrap=not number, overflow="fold", justify="right" if name in numbers else "left")
    for number, line in enumerate(lines):
        table.add_row(*map(Text, line.values()), style="red" if number in red else None)
    return table


def print_table(table: Table, wide: bool) -> None:
    """Print a table as wide as the terminal, or as wide as it is; names of operators are never broken."""
    from rich.console import Console

    console = Console()
    width = console.width
    if wide or not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        width = _UNLIMITED if wide else _WIDTH
    names = [len(str(cell)) for column in table.columns[:1] for cell in column.cells]
    Console(width=max(width, max(names, default=0) + 4 * len(table.columns))).print(table)
