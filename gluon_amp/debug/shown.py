"""How results show themselves: tables of rich, in terminals and notebooks, and the picture of a report."""
from __future__ import annotations

import os
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Collection, Mapping, Sequence

from ..errors import StateError
from ..files import replacing
from .records import OpRecord

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH, _UNLIMITED = 170, 100_000  # of files and pipes, unless COLUMNS says otherwise; and where all is wanted
# Colours that people with any kind of colour vision tell apart (https://jfly.uni-koeln.de/color/).
_COLOURS = {"int8": "#CC79A7", "bfloat16": "#56B4E9", "float16": "#009E73", "float32": "#E69F00"}
_OTHER, _CAST = "#BBBBBB", "#D55E00"
_MOST_NAMES = 60  # of operators below the picture


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


def draw(rows: Sequence[OpRecord], title: str, is_timed: bool, path: Any = None) -> Any:
    """Draw each operator's part of the time, or of the arithmetic, and below it a strip of precisions and casts."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise StateError(f"plot: {error}. Install it with pip install 'gluon_amp[debug]'") from error
    sizes = [row.milliseconds if is_timed else row.flops for row in rows]
    places, whole = range(len(rows)), sum(sizes) or 1
    colours = [_COLOURS.get(str(row.precision), _OTHER) for row in rows]
    figure = Figure(figsize=(max(7.0, min(0.22 * len(rows), 16.0)), 4.5), layout="constrained")
    bars, strip = figure.subplots(2, sharex=True, height_ratios=(9, 1))
    bars.bar(places, [100 * size / whole for size in sizes], color=colours, width=0.9)
    bars.set(ylabel=f"% of the {'time' if is_timed else 'arithmetic'}")
    bars.set_title(title, fontsize=9, wrap=True, parse_math=False)
    strip.bar(places, [1] * len(rows), color=colours, width=1.0)
    cast = [place for place, row in zip(places, rows) if row.casts]
    marks = strip.plot(cast, [1.3] * len(cast), "v", color=_CAST, markersize=4, label=f"with casts: {len(cast)}")
    strip.set(xlim=(-1, len(rows)), ylim=(0, 1.7), yticks=[], xlabel="operators, in the order in which they run")
    if len(rows) <= _MOST_NAMES:
        strip.set_xticks(places, [row.name for row in rows], rotation=90, fontsize=6, parse_math=False)
    kinds = [Patch(color=_COLOURS.get(str(dtype), _OTHER), label=f"{dtype}: {count}")
             for dtype, count in Counter(row.precision for row in rows).most_common()]
    bars.legend(handles=[*kinds, *marks], fontsize=8, frameon=False)
    figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]  # notebooks show it as text without
    if path is not None:
        with replacing(path) as (temporary,):
            figure.savefig(temporary, format=Path(path).suffix[1:] or "png", dpi=130)
    return figure


def _png(figure: Any) -> bytes:
    content = BytesIO()
    figure.savefig(content, format="png", dpi=100)
    return content.getvalue()
