"""The table of docs/design/defects.md is the one in code.

    python tests/docs/test_defects_page.py

writes it anew.
"""
from __future__ import annotations

from pathlib import Path

from gluon_amp.passes.defect_table import DEFECTS

PAGE = Path(__file__).parents[2] / "docs" / "design" / "defects.md"
SOURCE = "https://github.com/apache/mxnet/blob/1.9.1/src/"


def written_anew(page):
    """Return the page with the table as it is in code."""
    rows = [f"| {', '.join(f'`{op}`' for op in row.ops)} ({row.of}) | {row.why} | {row.remedy} | "
            f"[{row.upstream.rpartition('/')[2]}]({SOURCE}{row.upstream}) |" for row in DEFECTS]
    start = page.index("|---|")
    end = page.index("\n\n", start) if "\n\n" in page[start:] else len(page.rstrip())
    return page[:start] + "\n".join(["|---|---|---|---|", *rows]) + page[end:]


def test_the_page_of_the_design_has_the_table():
    assert written_anew(PAGE.read_text()) == PAGE.read_text(), "run python tests/docs/test_defects_page.py"


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
