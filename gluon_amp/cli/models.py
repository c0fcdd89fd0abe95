"""What the commands on model files share: arguments, names of files, and blocks that run them."""
from __future__ import annotations

import argparse
import os
import re
from typing import Any, Sequence

import mxnet as mx
from mxnet.gluon import SymbolBlock

from .._mxnet.blocks import load_parameters
from ..convert.files import load_model
from ..errors import GraphError
from ..passes import list_passes

__all__ = ["add_model_arguments", "data_shape", "data_shapes", "read_model", "runnable", "split_names"]

Model = Any  # (Symbol, dict of parameters, dict of auxiliary states)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the files of a network and what is known of its data."""
    parser.add_argument("symbol", metavar="SYMBOL.json", help="the FP32 network, as export() or save_checkpoint() "
                                                               "wrote it")
    parser.add_argument("params", metavar="PARAMS", help="its parameters")
    parser.add_argument("--data", metavar="NAME:SHAPE", type=data_shape, action="append", default=[],
                        help="an input and its shape, as in data:1,3,224,224; repeatable. Every input that is not a "
                             "parameter counts as data without it")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"],
                        help="the type to convert to (default: what the device runs; float32 optimises only)")
    parser.add_argument("--exclude", metavar="NAME", action="append", default=[],
                        help="an operator to keep in FP32; may hold wildcards; repeatable")
    parser.add_argument("--optimize", metavar="STEPS", type=split_names, default="all",
                        help="all, none, or optimisations separated by commas")
    parser.add_argument("--disable-pass", metavar="NAME", action="append", default=[],
                        help=f"a graph pass to switch off; repeatable. One of {', '.join(list_passes())}")
    parser.add_argument("--json", action="store_true", help="print JSON")


def data_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read ``name:1,3,224,224``.

    Raises
    ------
    argparse.ArgumentTypeError
        For text of another form.

    Examples
    --------
    >>> data_shape('data:1,3,8,8')
    ('data', (1, 3, 8, 8))
    """
    found = re.fullmatch(r"(.+):([1-9]\d*(?:,[1-9]\d*)*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a name and a shape, as in data:1,3,224,224, received {text!r}")
    return found[1], tuple(map(int, found[2].split(",")))


def split_names(text: str) -> str | list[str]:
    """Read ``all``, ``none``, or names separated by commas."""
    return text if text in ("all", "none") else text.split(",")


def data_shapes(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return the inputs that the user named, with their shapes."""
    return dict(args.data)


def read_model(args: argparse.Namespace) -> Model:
    """Read the network that the arguments name.

    Raises
    ------
    GraphError, OSError
        As :func:`gluon_amp.convert.files.load_model`.
    """
    return load_model(args.symbol, args.params)


def runnable(model: Model, names: Sequence[str]) -> SymbolBlock:
    """Make a block of a network that takes these inputs, in order."""
    symbol, arg_params, aux_params = model
    arrays = {**arg_params, **aux_params}
    missing = [name for name in symbol.list_inputs() if name not in arrays and name not in names]
    if missing:
        raise GraphError(f"{', '.join(missing[:5])} are neither parameters nor data: name data with --data")
    block = SymbolBlock(symbol, [mx.sym.var(name, dtype="float32") for name in names])
    load_parameters(block, arrays, [mx.context.current_context()])
    block.hybridize(static_alloc=True, static_shape=True)
    return block


def base_name(symbol_file: str) -> str:
    """Return what MXNet calls the prefix of a symbol file."""
    return re.sub(r"(-symbol)?\.json$", "", os.path.basename(symbol_file))


def epoch_of(params_file: str) -> int:
    """Return the number in the name of a parameter file, 0 without one."""
    found = re.search(r"-(\d{4,})\.params$", params_file)
    return int(found[1]) if found else 0
