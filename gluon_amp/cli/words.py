"""What the commands print, and where."""
from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from typing import Any

from ..files import replacing

STANDARD_OUTPUT = "-"


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", metavar="FILE", help="write JSON into a file, too; - prints it in place of the text")


def _finite(value: Any) -> Any:
    """Return a value with None for numbers that are not finite: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_finite, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(content: Any, path: str | None) -> bool:
    """Write JSON where --json says; return whether the text is to be printed, too."""
    text = json.dumps(_finite(content), indent=2)
    if path == STANDARD_OUTPUT:
        print(text)
    elif path is not None:
        with replacing(path) as (temporary,), open(temporary, "w", encoding="utf-8") as file:
            print(text, file=file)
    return path != STANDARD_OUTPUT


def filled(text: str, indent: int = 0) -> str:
    """Break a text into lines as wide as the terminal, and no names of files."""
    return textwrap.fill(text, max(30, shutil.get_terminal_size().columns), subsequent_indent=" " * indent,
                         break_long_words=False, break_on_hyphens=False)


def complain(text: str) -> None:
    """Print to standard error."""
    print(text, file=sys.stderr)
