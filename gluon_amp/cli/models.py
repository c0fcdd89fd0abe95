"""Shared by the commands on model files: arguments, names of files, and blocks that run them."""
from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import SymbolBlock

from .._mxnet.blocks import load_parameters
from .._mxnet.symbols import first_line, to_graph
from ..convert import MODES, Conversion, batches_of, conversion_of, memory_flags
from ..dtypes import INT8, normalize
from ..errors import AmpError, DTypeError, GraphError, PolicyError
from ..passes import list_passes
from .words import add_json_argument

_PARAMETERS = ("_weight", "_bias", "_gamma", "_beta", "_running_mean", "_running_var")  # how Gluon's names end

Model = Any  # (Symbol, dict of parameters, dict of auxiliary states)


def add_file_arguments(parser: argparse.ArgumentParser, what: str = "the FP32 network",
                       types: str = "bfloat16, float16 or float32 (default: what is fastest on this machine)") -> None:
    """Declare the arguments for a network's files and its data."""
    parser.add_argument("symbol", metavar="SYMBOL.json", help=f"{what}, as export() or save_checkpoint() wrote it")
    parser.add_argument("params", metavar="PARAMS", help="its parameters")
    parser.add_argument("--data", metavar="NAME:SHAPE", type=data_shape, action="append", default=[],
                        help="an input and its shape, as in data:1,3,224,224; repeatable")
    parser.add_argument("--dtype", type=dtype_name, metavar="TYPE", help=types)
    add_json_argument(parser)


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how a network is converted."""
    parser.add_argument("--exclude", metavar="NAME", action="append", default=[],
                        help="an operator to keep in FP32; may hold wildcards; repeatable")
    parser.add_argument("--optimize", metavar="STEPS", default="all",
                        type=lambda text: text if text in ("all", "none") else text.split(","),
                        help="all, none, or optimisations separated by commas")
    parser.add_argument("--disable-pass", metavar="NAME", action="append", default=[],
                        help=f"a graph pass to switch off; repeatable. One of {', '.join(list_passes())}")
    group = parser.add_argument_group("INT8", "layers in INT8, and the rest in --dtype")
    add = group.add_argument
    add("--int8", action="store_true", help="let layers run in INT8; needs --calib-data")
    add("--calib-data", metavar="PATH", help="an .npz file of arrays named as the inputs, or a directory of such files")
    add("--calib-mode", choices=MODES, default=MODES[0], help="how ranges are chosen (default: %(default)s)")
    add("--calib-batches", type=count, metavar="N", help="how many batches of 32 to take (default: all)")
    add("--max-int8-error", type=float, metavar="E", help="the most that outputs may differ from FP32, as in 0.02; the "
                                                          "fastest such network is searched")
    add("--metric", choices=("accuracy",), help="in its place: the share of right classes, on --metric-data")
    add("--metric-data", metavar="PATH", help="files like --calib-data, with labels (default: those)")
    add("--labels", metavar="NAME", default="label", help="the array of labels in them (default: %(default)s)")
    add("--budget", type=float, metavar="B", help="how much lower than in FP32 the metric may be, as in 0.005")
    add("--time-limit", type=float, metavar="SECONDS", help="when the search ends with what it has found")


def int8_arguments(args: argparse.Namespace, inputs: Sequence[str]) -> dict[str, Any]:
    """Return what a conversion is told of INT8."""
    if not args.int8:
        given = [name for name in ("calib_data", "max_int8_error", "metric", "budget", "time_limit")
                 if getattr(args, name) is not None]
        if given:
            raise PolicyError(f"--{given[0].replace('_', '-')} is for --int8: expected both")
        return {}
    metric = None
    if args.metric is not None:
        metric = partial(_accuracy, list(batches_of(args.metric_data or args.calib_data, [*inputs, args.labels])),
                         args.labels)
    return {"calib_data": args.calib_data, "calib_mode": args.calib_mode, "calib_batches": args.calib_batches,
            "max_error": args.max_int8_error, "metric": metric, "budget": args.budget, "time_limit": args.time_limit,
            "dtypes": [INT8, args.dtype] if args.dtype else None, "progress": sys.stderr.isatty()}


def _accuracy(batches: Iterable[Mapping[str, mx.nd.NDArray]], labels: str, net: Any) -> float:
    """Return the share of samples that a network gives the largest output for the right class."""
    right = count = 0
    for batch in batches:
        scores = net(*(array for name, array in batch.items() if name != labels))
        found = (scores[0] if isinstance(scores, (list, tuple)) else scores).asnumpy().argmax(axis=1)
        right += int((found == batch[labels].asnumpy()).sum())
        count += len(found)
    return right / max(count, 1)


def data_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read ``name:1,3,224,224``."""
    match = re.fullmatch(r"(.+):([1-9]\d*(?:,[1-9]\d*)*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a name and a shape, as in data:1,3,224,224, received {text!r}")
    return match[1], tuple(map(int, match[2].split(",")))


def dtype_name(text: str) -> str:
    """Read a type in any spelling."""
    try:
        return normalize(text, "--dtype", or_float32=True)
    except DTypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Read a whole number above 0."""
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, received {text!r}")
    return int(text)


def required_shapes(args: argparse.Namespace, model: Model) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all inputs; raise GraphError where the user left one out."""
    shapes = dict(args.data)
    inputs = inputs_of(model)
    unknown = next((name for name in shapes if name not in model[0].list_inputs()), None)
    if unknown is not None:
        raise GraphError(f"{args.symbol}: the network has no input {unknown!r}, only {', '.join(inputs)}")
    missing = [name for name in inputs if name not in shapes]
    unread = [name for name in {**model[1], **model[2]} if name not in model[0].list_inputs()]
    lacking = [name for name in missing if name.endswith(_PARAMETERS)]
    if lacking and unread:
        raise GraphError(f"{args.symbol} and {args.params} do not belong together: the parameters lack "
                         f"{_some(lacking)}, which the network reads, and hold {_some(unread)}, which it does not")
    if missing or not shapes:
        options = " ".join(f"--data {name}:1,3,224,224" for name in missing or ["data"])
        raise GraphError(f"{args.symbol}: expected the shape of every input. Add {options}, with the network's own "
                         "shape")
    return shapes


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def inputs_of(model: Model) -> list[str]:
    """Name the inputs of a network that are no parameters; labels of output layers are left out."""
    symbol, arg_params, aux_params = model
    return [name for name in symbol.list_inputs()
            if name not in arg_params and name not in aux_params and not name.endswith("_label")]


@contextmanager
def named_errors(*files: str) -> Iterator[None]:
    """Begin errors with the names of the files that they are about."""
    try:
        yield
    except AmpError as error:
        raise type(error)(f"{' and '.join(files)}: {error}") from error
    except mx.MXNetError as error:
        raise GraphError(f"{' and '.join(files)}: the network does not run on data of these shapes: "
                         f"{first_line(error)}") from error


def record_of(model: Model) -> Conversion | None:
    """Return how a network was converted; None for one that was not."""
    return conversion_of(to_graph(model[0]))


def refuse_converted(args: argparse.Namespace, model: Model) -> None:
    """Raise GraphError for a network that was converted before."""
    record = record_of(model)
    if record is not None:
        raise GraphError(f"{args.symbol} is converted already, to {record.types}: expected the FP32 network "
                         f"that it was made from. `gluon-amp report {args.symbol} ...` says what was done")


def runnable(model: Model, names: Sequence[str]) -> SymbolBlock:
    """Make a block of a network that takes these inputs, in order."""
    symbol, arg_params, aux_params = model
    arrays = {**arg_params, **aux_params}
    missing = [name for name in symbol.list_inputs() if name not in arrays and name not in names]
    if missing:
        raise GraphError(f"{', '.join(missing[:5])} are neither parameters nor data: name data with --data")
    block = SymbolBlock(symbol, [mx.sym.var(name, dtype="float32") for name in names])
    load_parameters(block, arrays, [mx.context.current_context()])
    block.hybridize(**memory_flags(to_graph(symbol)))
    return block


def base_name(symbol_file: str) -> str:
    """Return what MXNet calls the prefix of a symbol file."""
    return re.sub(r"(-symbol)?\.json$", "", os.path.basename(symbol_file))


def epoch_of(params_file: str) -> int:
    """Return the number in the name of a parameter file, 0 without one."""
    match = re.search(r"-(\d{4,})\.params$", params_file)
    return int(match[1]) if match else 0
