"""Symbols and parameters in files, as MXNet's own ``save_checkpoint`` and ``export`` write them."""
from __future__ import annotations

import os
from typing import Mapping

import mxnet as mx

from .._mxnet.symbols import first_line, load_symbol
from ..errors import GraphError
from ..files import replacing

Arrays = Mapping[str, mx.nd.NDArray]


def save_model(prefix: str | os.PathLike, epoch: int, symbol: mx.sym.Symbol, arg_params: Arrays,
               aux_params: Arrays) -> tuple[str, str]:
    """Write ``prefix-symbol.json`` and ``prefix-NNNN.params``, casts included; both or neither."""
    files = f"{os.fspath(prefix)}-symbol.json", f"{os.fspath(prefix)}-{epoch:04d}.params"
    arrays = {**{f"arg:{name}": array.as_nd_ndarray() for name, array in arg_params.items()},
              **{f"aux:{name}": array.as_nd_ndarray() for name, array in aux_params.items()}}
    with replacing(*files) as (symbol_file, params_file):
        symbol.save(symbol_file, remove_amp_cast=False)
        mx.nd.save(params_file, arrays)
    return files


def load_model(symbol_file: str | os.PathLike,
               params_file: str | os.PathLike) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray],
                                                        dict[str, mx.nd.NDArray]]:
    """Read a symbol and its parameters."""
    symbol = load_symbol_file(symbol_file)
    named = {key.split(":", 1)[1] if key.startswith(("arg:", "aux:")) else key: array
             for key, array in load_arrays(params_file).items()}
    return (symbol, *split(symbol, named))


def load_symbol_file(path: str | os.PathLike) -> mx.sym.Symbol:
    """Read a symbol; raise GraphError, which names the file, where it holds none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        return load_symbol(text)
    except GraphError as error:
        raise GraphError(f"{os.fspath(path)}: {error}") from error


def load_arrays(path: str | os.PathLike) -> dict[str, mx.nd.NDArray]:
    """Read parameters; raise GraphError, which names the file, where it holds none."""
    with open(path, "rb"):
        pass  # MXNet's own error for a file that is not there does not say so
    try:
        loaded = mx.nd.load(os.fspath(path))
    except mx.MXNetError as error:
        raise GraphError(f"{os.fspath(path)}: expected parameters as MXNet saves them, found something else "
                         f"({first_line(error)})") from error
    if not isinstance(loaded, dict):
        raise GraphError(f"{os.fspath(path)}: expected parameters with names, as export() and save_checkpoint() write "
                         "them, found arrays without")
    return loaded


def split(symbol: mx.sym.Symbol, arrays: Arrays) -> tuple[dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Tell a symbol's parameters from its auxiliary states."""
    auxiliary = set(symbol.list_auxiliary_states())
    return ({name: array for name, array in arrays.items() if name not in auxiliary},
            {name: array for name, array in arrays.items() if name in auxiliary})
