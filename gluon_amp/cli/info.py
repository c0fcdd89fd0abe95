"""``gluon-amp info``: what a file holds, and how it was converted."""
from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

from .._mxnet.symbols import dtype_name, to_graph
from ..convert.convert import conversion_of
from ..convert.model_files import load_arrays, load_symbol_file
from ..convert.options import drawback_here
from .words import add_json_argument, counted, done, filled, write_json

HELP = "say what a file of a network holds: whether it is converted, to which type, and what was done"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="a symbol (.json) or parameters (.params)")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Read the file and print what it is."""
    describe = _parameters if args.file.endswith(".params") else _symbol
    content, lines = describe(args.file)
    if write_json(content, args.json):
        print("\n".join([filled(f"{args.file}: {lines[0]}"), *(filled(f"  {line}", 4) for line in lines[1:])]))
    return 0


def _symbol(path: str) -> tuple[dict[str, Any], list[str]]:
    graph = to_graph(load_symbol_file(path))
    record = conversion_of(graph)
    operators, variables = len(graph.operators()), len(graph.variables())
    if record is None:
        return ({"converted": False, "operators": operators},
                [f"not converted. {counted(operators, 'operator')}, {variables} inputs and parameters",
                 "gluon-amp convert makes it faster for inference"])
    slow = drawback_here(record.target_dtype)
    return ({"converted": True, **asdict(record)},
            [f"converted to {record.types} by gluon_amp {record.version}", *done(record),
             *([f"warning: {slow}"] if slow else [])])


def _parameters(path: str) -> tuple[dict[str, Any], list[str]]:
    arrays = load_arrays(path)
    types = Counter(str(dtype_name(array.dtype)) for array in arrays.values())
    values = sum(array.size for array in arrays.values())
    return ({"arrays": len(arrays), "values": values, "types": dict(types)},
            [f"{counted(len(arrays), 'array')} of {counted(values, 'value')}",
             *(f"{number} in {dtype}" for dtype, number in types.most_common())])
