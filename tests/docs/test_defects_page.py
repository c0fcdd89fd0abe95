"""The tables of docs/design/defects.md are those in code.

    python tests/docs/test_defects_page.py

writes it anew.
"""
from __future__ import annotations

from pathlib import Path

from gluon_amp.passes.gradient_fixes import FIXES
from gluon_amp.passes.identities import IDENTITIES

PAGE = Path(__file__).parents[2] / "docs" / "design" / "defects.md"
SOURCE = "https://github.com/apache/mxnet/blob/1.9.1/src/"


def written_anew(page):
    """Return the page with the tables as they are in code."""
    fixes = [f"| {names(row)} ({', '.join(map(str, row.of))}) | {row.why} | {row.remedy} | {source(row)} |"
             for row in FIXES]
    identities = [f"| {names(row)} | {row.of.value} | {row.why} | {source(row)} |" for row in IDENTITIES]
    parts = page.split("|---|---|---|---|\n")
    assert len(parts) == 3
    written = [parts[0]]
    for rows, part in zip((fixes, identities), parts[1:]):
        _, separator, rest = part.partition("\n\n")
        written.append("\n".join(["|---|---|---|---|", *rows]) + (separator + rest or "\n"))
    return "".join(written)


def names(row):
    return ", ".join(f"`{op}`" for op in row.ops)


def source(row):
    return f"[{row.upstream.rpartition('/')[2]}]({SOURCE}{row.upstream})"


def test_the_page_of_the_design_has_the_tables():
    assert written_anew(PAGE.read_text()) == PAGE.read_text(), "run python tests/docs/test_defects_page.py"


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
