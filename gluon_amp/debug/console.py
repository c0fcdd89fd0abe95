"""Print tables as wide as there is room."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 170  # of files and pipes, unless COLUMNS says otherwise


def print_table(make: Callable[[int], Table]) -> None:
    """Print the table that a function makes for a number of columns."""
    from rich.console import Console

    console = Console()
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console = Console(width=_WIDTH)
    console.print(make(console.width))
