"""What the commands say of conversions and machines, and how they print it."""
from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from typing import Any, Iterable

from ..convert.convert import Conversion
from ..dtypes import FLOAT16, FLOAT32
from ..files import replacing

STANDARD_OUTPUT = "-"

# Of one and of several.
_STEPS = {
    "drop_training": ("operator that only training needs is dropped", "operators that only training needs are dropped"),
    "fold_batch_norm": ("batch normalization is part of the layer before it now",
                        "batch normalizations are part of the layers before them now"),
    "fold_padding": ("padding is part of the convolution behind it now",
                     "paddings are part of the convolutions behind them now"),
    "shape_operands": ("operand that gives only its shape is not computed",
                       "operands that give only their shapes are not computed"),
    "align_channels": ("convolution is padded with zeros to the channels that fast kernels need",
                       "convolutions are padded with zeros to the channels that fast kernels need"),
    "cast_params_offline": ("parameter is {stored} {dtype}", "parameters are {stored} {dtype}"),
    "fuse": ("operator does the work of several", "operators do the work of several"),
}


def done(record: Conversion) -> list[str]:
    """Say in sentences what a conversion did."""
    is_imitated = record.target_dtype == FLOAT16 and not record.low_precision
    if record.int8:
        first = f"{_layers(len(record.int8), record)} run in INT8, the other operators in {record.target_dtype}"
    elif record.target_dtype == FLOAT32:
        first = f"{record.reason or 'float32 was asked for'}: all {counted(record.operators, 'operator')} run in FP32"
    else:
        first = (f"float16 is imitated: values are rounded to it by {counted(record.casts, 'cast')}, kernels are FP32's"
                 if is_imitated else
                 f"{record.low_precision} of {counted(record.operators, 'operator')} run in {record.target_dtype}, "
                 f"with {counted(record.casts, 'cast')} between precisions")
    reasons = [f"{_layers(number, record)} do not run in INT8: {reason}"
               for reason, number in Counter(record.wide.values()).most_common()]
    off = ([] if record.error is None else
           [f"outputs are {record.error:.2%} off FP32 on the data that INT8 was calibrated with"])
    stored = "rounded to" if is_imitated else "stored in"
    steps = [f"{times} {_STEPS[name][times != 1].format(stored=stored, dtype=record.target_dtype)}"
             for name, times in record.steps.items() if times and name in _STEPS]
    kept = [f"kept in FP32 on request: {', '.join(record.excluded)}"] if record.excluded else []
    return [first, *reasons, *off, *steps, *kept]


def _layers(number: int, record: Conversion) -> str:
    return f"{number} of {counted(len(record.int8) + len(record.wide), 'layer')}"


def counted(number: int, noun: str) -> str:
    """Write a number and its noun."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


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
