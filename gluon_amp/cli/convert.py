"""``gluon-amp convert``: files of an FP32 network to files of a mixed-precision one."""
from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from .._mxnet.symbols import to_graph
from ..convert import convert_model
from ..convert.convert import conversion_of
from ..convert.files import save_model
from ..errors import GraphError
from .models import add_model_arguments, base_name, data_shapes, epoch_of, read_model

NAME = "convert"
HELP = "convert the files of a trained FP32 network for mixed-precision inference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where to write the files; made if absent")


def run(args: argparse.Namespace) -> int:
    """Convert, write the files and say what was done."""
    prefix = os.path.join(args.output, base_name(args.symbol))
    _refuse_to_overwrite(args, prefix)
    symbol, arg_params, aux_params = converted(args)
    os.makedirs(args.output, exist_ok=True)
    files = save_model(prefix, epoch_of(args.params), symbol, arg_params, aux_params)
    record = conversion_of(to_graph(symbol))
    sizes = [os.path.getsize(args.params), os.path.getsize(files[1])]
    if args.json:
        print(json.dumps({"files": files, "parameter_bytes": sizes, **asdict(record)}, indent=2))  # type: ignore[arg-type]
    else:
        print(f"{record.summary() if record else ''}\nparameters: {sizes[0]:,} to {sizes[1]:,} bytes")
        print("\n".join(files))
    return 0


def converted(args: argparse.Namespace) -> Any:
    """Read the network that the arguments name, and convert it."""
    shapes = data_shapes(args)
    symbol, arg_params, aux_params = read_model(args)
    return convert_model(symbol, arg_params, aux_params, args.dtype, exclude=args.exclude, optimize=args.optimize,
                         data_names=list(shapes) or None, data_example=shapes, disable_passes=args.disable_pass)


def _refuse_to_overwrite(args: argparse.Namespace, prefix: str) -> None:
    written = {f"{prefix}-symbol.json", f"{prefix}-{epoch_of(args.params):04d}.params"}
    if {os.path.realpath(args.symbol), os.path.realpath(args.params)} & set(map(os.path.realpath, written)):
        raise GraphError("the converted files would replace the FP32 ones: choose another directory than "
                         f"{args.output!r}")
