"""``gluon-amp export-onnx``: files of an FP32 network to an ONNX file."""
from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import mxnet as mx

from ..convert import batches_of, load_model
from ..dtypes import FLOAT16, FLOAT32
from ..export import export_onnx
from ..export.onnx_file import MAX_ERRORS
from . import models
from .words import print_facts, write_json

HELP = "write the files of a trained FP32 network as ONNX, in float16 or FP32, and check it in onnxruntime"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    models.add_file_arguments(parser, types="float16 or float32 (default: float16)")
    add = parser.add_argument
    add("-o", "--output", metavar="FILE.onnx", required=True, help="the file to write")
    add("--check-data", metavar="PATH", help="an .npz file of arrays named as the inputs, or a folder of such files, "
                                             "to compare with (default: random numbers of --data's shape)")
    add("--exclude", metavar="NAME", action="append", default=[],
        help="an operator to keep in FP32; may hold wildcards; repeatable")
    add("--io-dtype", choices=(FLOAT32, FLOAT16), default=FLOAT32, help="of inputs and outputs (default: %(default)s)")
    add("--dynamic-batch", action="store_true", help="let the first dimension have any size")
    add("--max-error", type=float, metavar="E", help="the most that outputs may differ from MXNet in FP32 (default: "
                                                     f"{MAX_ERRORS[FLOAT32]:g} in float32, {MAX_ERRORS[FLOAT16]:g} in "
                                                     "float16)")


def run(args: argparse.Namespace) -> int:
    """Export, and say what was written."""
    model = load_model(args.symbol, args.params)
    models.refuse_converted(args, model)
    if args.check_data is None:
        shapes = models.required_shapes(args, model)
        mx.random.seed(0)
        data = {name: mx.nd.random.normal(shape=shape) for name, shape in shapes.items()}
    else:
        data = dict(next(iter(batches_of(args.check_data, models.inputs_of(model)))))
    with models.named_errors(args.symbol, args.params):
        record = export_onnx(models.runnable(model, list(data)), args.output, list(data.values()),
                             args.dtype or FLOAT16, exclude=args.exclude, io_dtype=args.io_dtype,
                             dynamic_batch=args.dynamic_batch, max_error=args.max_error)
    if not write_json(asdict(record), args.json):
        return 0
    facts: list[tuple[str, Any]] = [
        ("written", record.path), ("operators", f"ONNX opset {record.opset}, {record.operators} nodes"),
        ("inputs", ", ".join(f"{name} ({kind})" for name, kind in record.inputs.items())),
        ("outputs", ", ".join(f"{name} ({kind})" for name, kind in record.outputs.items()))]
    if record.target_dtype == FLOAT16:
        facts.append(("precision", f"{record.low_precision} of MXNet's operators in float16, {record.casts} casts"))
    facts += [("relative error", f"{error:.2g} of {name}, against MXNet in FP32 on "
                                 f"{'--check-data' if args.check_data else 'random numbers'}")
              for name, error in record.errors.items()]
    print_facts(facts)
    return 0
