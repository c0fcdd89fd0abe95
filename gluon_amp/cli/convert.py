"""``gluon-amp convert``: files of an FP32 network to files of a mixed-precision one."""
from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from typing import Any

from rich.filesize import decimal

from ..convert import convert_model, load_model, save_model
from ..dtypes import INT8
from ..errors import GraphError
from . import models
from .words import filled, print_conversion, write_json

HELP = "convert the files of a trained FP32 network for inference: mixed precision, folded and fused operators"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    models.add_file_arguments(parser)
    models.add_conversion_arguments(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where to write the files; made if absent")


def run(args: argparse.Namespace) -> int:
    """Convert, write the files and say what was done."""
    prefix = os.path.join(args.output, models.base_name(args.symbol))
    _refuse_to_overwrite(args, prefix)
    model = load_model(args.symbol, args.params)
    made = converted(args, model)
    os.makedirs(args.output, exist_ok=True)
    files = save_model(prefix, models.epoch_of(args.params), *made)
    record: Any = models.record_of(made)
    sizes = [os.path.getsize(args.params), os.path.getsize(files[1])]
    if not write_json({"files": files, "parameter_bytes": sizes, **asdict(record)}, args.json):
        return 0
    print_conversion(record)
    print(f"  parameters take {decimal(sizes[1])}, before {decimal(sizes[0])}")
    print(f"Written: {files[0]}\n         {files[1]}")
    if not args.data:
        options = " ".join(f"--data {name}:1,3,224,224" for name in models.inputs_of(model))
        print(filled(f"Add the shape of the input ({options}): with it precisions are chosen by the sizes of tensors, "
                     "which saves casts."), file=sys.stderr)
    return 0


def converted(args: argparse.Namespace, model: Any) -> Any:
    """Convert a network as the arguments say."""
    models.refuse_converted(args, model)
    shapes = dict(args.data)
    with models.named_errors(args.symbol, args.params):
        symbol, arg_params, aux_params = model
        inputs = list(shapes) or models.inputs_of(model)
        return convert_model(symbol, arg_params, aux_params, INT8 if args.int8 else args.dtype, exclude=args.exclude,
                             optimize=args.optimize, data_names=list(shapes) or None, data_example=shapes,
                             disable_passes=args.disable_pass, **models.int8_arguments(args, inputs))


def _refuse_to_overwrite(args: argparse.Namespace, prefix: str) -> None:
    if os.path.exists(args.output) and not os.path.isdir(args.output):
        raise GraphError(f"--output: expected a directory, and {args.output!r} is a file")
    written = {f"{prefix}-symbol.json", f"{prefix}-{models.epoch_of(args.params):04d}.params"}
    if {os.path.realpath(args.symbol), os.path.realpath(args.params)} & set(map(os.path.realpath, written)):
        raise GraphError("the converted files would replace the FP32 ones: choose another directory than "
                         f"{args.output!r}")
