"""What the commands say of conversions and machines, and how they print it."""
from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from typing import Any, Iterable

from ..convert import Conversion
from ..files import replacing

STANDARD_OUTPUT = "-"


def print_conversion(record: Conversion) -> None:
    """Print how a network was converted."""
    print(filled(f"Converted to {record.summary()}", 2))
    for reason, number in Counter(record.wide.values()).most_common():
        print(filled(f"  not in INT8: {number} layers, {reason}", 4))
    if record.excluded:
        print(filled(f"  kept in FP32 on request: {', '.join(record.excluded)}", 4))


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON into this file, too; - prints it in "
                                                       "place of the text")


def write_json(content: Any, path: str | None) -> bool:
    """Write JSON where --json says; return whether the text is to be printed, too."""
    text = json.dumps(content, indent=2)
    if path == STANDARD_OUTPUT:
        print(text)
    elif path is not None:
        with replacing(path) as (temporary,), open(temporary, "w", encoding="utf-8") as file:
            print(text, file=file)
    return path != STANDARD_OUTPUT


def filled(text: str, indent: int = 0) -> str:
    """Break a text into lines as wide as the terminal."""
    return textwrap.fill(text, max(30, shutil.get_terminal_size().columns), subsequent_indent=" " * indent)


def complain(text: str) -> None:
    """Print to standard error; only on a terminal, lines are broken."""
    if sys.stderr.isatty():
        text = "\n".join(textwrap.fill(line, shutil.get_terminal_size().columns, break_long_words=False,
                                       break_on_hyphens=False) for line in text.splitlines())
    print(text, file=sys.stderr)


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values below each other, as wide as the terminal."""
    facts = list(facts)
    width = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        lines = textwrap.wrap(str(value), max(30, shutil.get_terminal_size().columns - width)) or [""]
        print("\n".join([f"{name:<{width}}{lines[0]}", *(" " * width + line for line in lines[1:])]))
