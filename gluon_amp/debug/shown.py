"""How results show themselves: tables of rich, in terminals and notebooks."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Collection, Mapping, Sequence

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH, _UNLIMITED = 170, 100_000  # of files and pipes, unless COLUMNS says otherwise; and where all is wanted


class Shown:
    """A result: one line where Python prints it, a table in notebooks, its summary as text."""

    summary: str

    def __rich__(self) -> Table:
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = (), exclude: Any = (), **_: Any) -> dict[str, str]:
        return self.__rich__()._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def __str__(self) -> str:
        return self.summary

    @property
    def headline(self) -> str:
        """The first line of the summary."""
        return self.summary.partition("\n")[0]


def text_table(lines: Sequence[Mapping[str, str]], numbers: Collection[str], summary: str,
               red: Collection[int] = ()) -> Table:
    """Return a table of lines with the same columns, some of numbers, and a summary that begins above it."""
    from rich.table import Table
    from rich.text import Text

    # Names are the user's: as Text nothing in them is markup.
    title, _, caption = summary.partition("\n")
    table = Table(title=Text(title), caption=Text(caption), title_justify="left", caption_justify="left")
    for number, name in enumerate(lines[0] if lines else ()):
        table.add_column(name, no_wrap=not number, overflow="fold", justify="right" if name in numbers else "left")
    for number, line in enumerate(lines):
        table.add_row(*map(Text, line.values()), style="red" if number in red else None)
    return table


def print_table(table: Table, wide: bool) -> None:
    """Print a table as wide as the terminal, or as wide as it is; names of operators are never broken."""
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ else _WIDTH
    names = [len(str(cell)) for column in table.columns[:1] for cell in column.cells]
    least = max(names, default=0) + 4 * len(table.columns)
    Console(width=_UNLIMITED if wide else max(width, least)).print(table)
