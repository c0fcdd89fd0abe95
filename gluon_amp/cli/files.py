"""``gluon-amp convert``, ``report`` and ``export-onnx``: networks in files of a symbol and parameters."""
from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, Sequence

import mxnet as mx
from mxnet.gluon import SymbolBlock

from .._mxnet.blocks import load_parameters
from .._mxnet.symbols import first_line, to_graph
from ..convert import (
    MODES,
    batches_of,
    check_parameters,
    conversion_of,
    convert_model,
    drawback_here,
    load_model,
    memory_flags,
    save_model,
)
from ..debug.report import report as report_of
from ..errors import AmpError, GraphError
from ..export import export_onnx
from ..export.onnx_file import MAX_ERRORS
from ..machine.dtypes import FLOAT16, FLOAT32, INT8
from ..passes import list_passes
from ..session.autocast import autocast
from ..session.init import deinit, init

Model = Any  # (Symbol, dict of parameters, dict of auxiliary states)


def declare(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the commands and their arguments."""
    parser = command("convert", convert, "convert the files of a trained FP32 network for inference: mixed precision, "
                     "folded and fused operators")
    _add_files(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="where to write the files; made if absent")
    parser.add_argument("--optimize", metavar="STEPS", default="all",
                        type=lambda text: text if text in ("all", "none") else text.split(","),
                        help="all, none, or optimisations separated by commas")
    parser.add_argument("--disable-pass", metavar="NAME", action="append", default=[],
                        help=f"a graph pass to switch off; repeatable. One of {', '.join(list_passes())}")
    add = parser.add_argument_group("INT8", "layers in INT8, and the rest in --dtype").add_argument
    add("--int8", action="store_true", help="let layers run in INT8; needs --calib-data")
    add("--calib-data", metavar="PATH", help="an .npz file of arrays named as the inputs, or a directory of such files")
    add("--calib-mode", choices=MODES, help=f"how ranges are chosen (default: {MODES[0]})")
    add("--calib-batches", type=int, metavar="N", help="how many batches of 32 to take (default: all)")
    add("--max-int8-error", type=float, metavar="E", help="the most that outputs may differ from FP32, as in 0.02; the "
                                                          "fastest such network is searched")
    parser = command("report", report, "run a network once and list its operators, the precision of each, and why")
    _add_files(parser, "a network, converted or not", excludes=False)
    parser.add_argument("--by", choices=["operator", "block", "op"], default="operator",
                        help="a line for each operator, block or kind of operator (default: %(default)s)")
    parser.add_argument("--wide", action="store_true", help="print every column, however narrow the terminal is")
    parser.add_argument("--time", action="store_true", help="measure the time of every operator")
    parser = command("export-onnx", write_onnx, "write the files of a trained FP32 network as ONNX, in float16 or "
                     "FP32, and check it in onnxruntime")
    _add_files(parser, types="float16 or float32 (default: float16)")
    add = parser.add_argument
    add("-o", "--output", metavar="FILE.onnx", required=True, help="the file to write")
    add("--check-data", metavar="PATH", help="an .npz file of arrays named as the inputs, or a folder of such files, "
                                             "to compare with (default: random numbers of --data's shape)")
    add("--dynamic-batch", action="store_true", help="let the first dimension have any size")
    add("--max-error", type=float, metavar="E",
        help="the most that outputs may differ from MXNet in FP32 (default: "
             f"{MAX_ERRORS[FLOAT32]:g} in float32, {MAX_ERRORS[FLOAT16]:g} in float16)")


def _add_files(parser: argparse.ArgumentParser, what: str = "the FP32 network", excludes: bool = True,
               types: str = "bfloat16, float16 or float32 (default: what is fastest on this machine)") -> None:
    parser.add_argument("symbol", metavar="SYMBOL.json", help=f"{what}, as export() or save_checkpoint() wrote it")
    parser.add_argument("params", metavar="PARAMS", help="its parameters")
    parser.add_argument("--data", metavar="NAME:SHAPE", type=data_shape, action="append", default=[],
                        help="an input and its shape, as in data:1,3,224,224; repeatable")
    parser.add_argument("--dtype", metavar="TYPE", help=types)
    if excludes:
        parser.add_argument("--exclude", metavar="NAME", action="append", default=[],
                            help="an operator to keep in FP32; may hold wildcards; repeatable")


def filled(text: str, indent: int = 0) -> str:
    """Break a text into lines as wide as the terminal, and no names of files."""
    return textwrap.fill(text, max(30, shutil.get_terminal_size().columns), subsequent_indent=" " * indent,
                         break_long_words=False, break_on_hyphens=False)


def data_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read ``name:1,3,224,224``."""
    match = re.fullmatch(r"(.+):([1-9]\d*(?:,[1-9]\d*)*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a name and a shape, as in data:1,3,224,224, received {text!r}")
    return match[1], tuple(map(int, match[2].split(",")))


def convert(args: argparse.Namespace) -> int:
    """Convert, write the files and say what was done."""
    prefix = os.path.join(args.output, re.sub(r"(-symbol)?\.json$", "", os.path.basename(args.symbol)))
    epoch = re.search(r"-(\d{4,})\.params$", args.params)
    number = int(epoch[1]) if epoch else 0
    written = map(os.path.realpath, (f"{prefix}-symbol.json", f"{prefix}-{number:04d}.params"))
    if {os.path.realpath(args.symbol), os.path.realpath(args.params)} & set(written):
        raise GraphError(f"the converted files would replace the FP32 ones: expected another directory, received "
                         f"--output={args.output!r}")
    model, shapes = _fp32_model(args), dict(args.data)
    with _named_errors(args.symbol, args.params):
        made = convert_model(model[0], model[1], model[2], INT8 if args.int8 else args.dtype, exclude=args.exclude,
                             optimize=args.optimize, disable_passes=args.disable_pass, data_example=shapes,
                             data_names=list(shapes) or None, calib_data=args.calib_data, calib_mode=args.calib_mode,
                             calib_batches=args.calib_batches, max_error=args.max_int8_error,
                             dtypes=[INT8, args.dtype] if args.int8 and args.dtype else None)
    os.makedirs(args.output, exist_ok=True)
    files = save_model(prefix, number, *made)
    record: Any = conversion_of(to_graph(made[0]))
    print(filled(f"Converted to {record.summary()}", 2))
    print(f"Written: {files[0]}\n         {files[1]}")
    if not shapes:
        print("Add the shape of every input, as in --data data:1,3,224,224: with it precisions are chosen by the sizes "
              "of tensors, which saves casts.", file=sys.stderr)
    return 0


def report(args: argparse.Namespace) -> int:
    """Report on a network, and on how it was converted."""
    model = load_model(args.symbol, args.params)
    record, shapes = conversion_of(to_graph(model[0])), _required_shapes(args, model)
    with _named_errors(args.symbol), ExitStack() as stack:
        block = runnable(model, list(shapes))
        mx.random.seed(0)
        data = tuple(mx.nd.random.uniform(shape=shape) for shape in shapes.values())
        if record is None:
            init(args.dtype)
            stack.callback(deinit)
        else:
            stack.enter_context(autocast(enabled=False))
        made = report_of(block, data, time=args.time)
    slow = record and drawback_here(record.target_dtype)
    if slow:
        print(f"gluon-amp report: warning: {slow}", file=sys.stderr)
    if record:
        print(filled(f"Converted to {record.summary()}", 2))
    made.print(args.by, wide=args.wide)
    return 0


def write_onnx(args: argparse.Namespace) -> int:
    """Export, and say what was written."""
    model = _fp32_model(args)
    if args.check_data is None:
        mx.random.seed(0)
        data = {name: mx.nd.random.normal(shape=shape) for name, shape in _required_shapes(args, model).items()}
    else:
        data = dict(next(iter(batches_of(args.check_data, _inputs_of(model)))))
    with _named_errors(args.symbol, args.params):
        record = export_onnx(runnable(model, list(data)), args.output, list(data.values()), args.dtype or FLOAT16,
                             exclude=args.exclude, dynamic_batch=args.dynamic_batch,
                             max_error=args.max_error)
    print(filled(f"Written {record.summary()}, on {'--check-data' if args.check_data else 'random numbers'}", 2))
    return 0


def _fp32_model(args: argparse.Namespace) -> Model:
    """Read a network; raise GraphError for one that is converted."""
    model = load_model(args.symbol, args.params)
    record = conversion_of(to_graph(model[0]))
    if record is not None:
        raise GraphError(f"{args.symbol} is converted already, to {record.types}: expected the FP32 network "
                         f"that it was made from. `gluon-amp report {args.symbol} ...` says what was done")
    return model


def _required_shapes(args: argparse.Namespace, model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs; raise GraphError where the user left one out."""
    shapes, inputs = dict(args.data), _inputs_of(model)
    unknown = next((name for name in shapes if name not in model[0].list_inputs()), None)
    if unknown is not None:
        raise GraphError(f"{args.symbol}: the network has no input {unknown!r}, only {', '.join(inputs)}")
    with _named_errors(args.symbol, args.params):
        check_parameters(model[0], {**model[1], **model[2]}, None)
    missing = [name for name in inputs if name not in shapes]
    if missing or not shapes:
        options = " ".join(f"--data {name}:1,3,224,224" for name in missing or ["data"])
        raise GraphError(f"{args.symbol}: expected the shape of every input. Add {options}, with the network's own "
                         "shape")
    return shapes


def _inputs_of(model: Model) -> list[str]:
    """Name the inputs of a network that are no parameters; labels of output layers are left out."""
    symbol, arg_params, aux_params = model
    return [name for name in symbol.list_inputs()
            if name not in arg_params and name not in aux_params and not name.endswith("_label")]


@contextmanager
def _named_errors(*files: str) -> Iterator[None]:
    """Begin errors with the names of the files that they are about."""
    try:
        yield
    except AmpError as error:
        raise type(error)(f"{' and '.join(files)}: {error}") from error
    except mx.MXNetError as error:
        raise GraphError(f"{' and '.join(files)}: the network does not run on data of these shapes: "
                         f"{first_line(error)}") from error


def runnable(model: Model, names: Sequence[str]) -> SymbolBlock:
    """Make a block of a network that takes these inputs, in order."""
    symbol, arg_params, aux_params = model
    block = SymbolBlock(symbol, [mx.sym.var(name, dtype="float32") for name in names])
    load_parameters(block, {**arg_params, **aux_params}, [mx.context.current_context()])
    block.hybridize(**memory_flags(to_graph(symbol)))
    return block
