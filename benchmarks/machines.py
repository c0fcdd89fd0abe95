"""Put the tables of several runs of `make bench` into README.md, one section a kind of machine.

    python benchmarks/machines.py bench-own bench-avx512 bench-avx2 --write

Each folder holds the bench.json of one run. Without ``--write`` the sections are printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

from benchmarks.harness import cli, least, tables
from benchmarks.harness.errors import UsageError

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- machines: begin -->", "<!-- machines: end -->"


def section(measured: Mapping[str, Any]) -> str:
    """Return the section of one run, with its least ratio."""
    suites = [measured["parts"][name] for name in ("training", "inference") if name in measured["parts"]]
    table = tables.machine_section(measured["machine"], measured["versions"], suites, measured["seconds"])
    small = "Tiny networks: their ratios say nothing."
    verdict = small if measured.get("small") else least.verdict(suites)[0].replace("\n", "\n\n")
    return f"{table}\n{verdict}\n"


def replaced(text: str, sections: str) -> str:
    """Return a page with these sections between its marks.

    Raises
    ------
    UsageError
        If the page has no such marks.

    Examples
    --------
    >>> replaced(f"a\\n{BEGIN}\\nold\\n{END}\\nb", "new\\n").splitlines()
    ['a', '<!-- machines: begin -->', '', 'new', '', '<!-- machines: end -->', 'b']
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"expected the lines {BEGIN} and {END} in {README}, found not both")
    return f"{before}{BEGIN}\n\n{sections}\n{END}{after}"


def run(argv: Sequence[str] | None) -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="that `make bench` has written")
    parser.add_argument("--write", action="store_true", help="put them into README.md")
    args = parser.parse_args(argv)
    found = []
    for folder in args.folders:
        path = Path(folder) / "bench.json"
        try:
            found.append(section(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{path} cannot be used: {error!r}") from error
    if args.write:
        README.write_text(replaced(README.read_text(encoding="utf-8"), "\n".join(found)), encoding="utf-8")
    else:
        print("\n".join(found))



if __name__ == "__main__":
    sys.exit(cli.main(run))
