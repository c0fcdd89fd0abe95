"""How results show themselves: in a line where Python prints them, as a table or text in a notebook."""
from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Iterator

if TYPE_CHECKING:
    from rich.table import Table

_MOST = 20  # rows of a table


class Shown:
    """A result with a text; a subclass may have a table, and say how all of it is seen."""

    _rest: ClassVar[str] = "print() it"

    def _shown_table(self) -> Table | None:
        """Return the table for a notebook, what matters most first; None where there is text only."""
        return None

    def __repr__(self) -> str:
        first, *others = str(self).splitlines() or [""]
        return f"<{type(self).__name__}: {first}{' ...' if others else ''}>"

    def _repr_html_(self) -> str:
        table = self._shown_table()
        if table is None:
            return f"<pre>{escape(str(self))}</pre>"
        return f"<p>{escape(str(self))}</p>" + "".join(_html(table, self._rest))


def _html(table: Any, rest: str) -> Iterator[str]:
    from rich.text import Text

    columns = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    rows = list(zip(*columns))
    heads = "".join(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    yield f"<table><thead><tr>{heads}</tr></thead><tbody>"
    for row in rows[:_MOST]:
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</tbody></table>"
    if len(rows) > _MOST:
        yield f"<p>and {len(rows) - _MOST} more rows</p>"
    yield f"<p>To see everything: {escape(rest)}</p>"
