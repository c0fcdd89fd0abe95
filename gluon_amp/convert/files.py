"""Symbols and parameters in files, as MXNet's own ``save_checkpoint`` and ``export`` write them."""
from __future__ import annotations

import os
from typing import Mapping

import mxnet as mx

from .._mxnet.symbols import first_line, load_symbol
from ..errors import GraphError
from ..files import replacing

__all__ = ["load_model", "save_model", "split"]

Arrays = Mapping[str, mx.nd.NDArray]


def save_model(prefix: str | os.PathLike, epoch: int, symbol: mx.sym.Symbol, arg_params: Arrays,
               aux_params: Arrays) -> tuple[str, str]:
    """Write ``prefix-symbol.json`` and ``prefix-NNNN.params``, casts included; both or neither.

    Parameters
    ----------
    prefix : path
        Beginning of both names.
    epoch : int
        The number in the second name.
    symbol : Symbol
        The network.
    arg_params, aux_params : mapping of str to NDArray
        Its parameters and auxiliary states.

    Returns
    -------
    (str, str)
        The files.

    Raises
    ------
    OSError
        The directory does not exist or cannot be written to.
    """
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
    """Read a symbol and its parameters.

    Parameters
    ----------
    symbol_file, params_file : path
        As :func:`save_model`, ``HybridBlock.export`` or ``mx.model.save_checkpoint`` wrote them.

    Returns
    -------
    (Symbol, dict, dict)
        The network, its parameters and its auxiliary states.

    Raises
    ------
    OSError
        A file cannot be read.
    GraphError
        A file does not hold what it should.
    """
    with open(symbol_file, encoding="utf-8", errors="replace") as file:
        symbol = load_symbol(file.read())
    with open(params_file, "rb"):
        pass  # MXNet's own error for a file that is not there does not say so
    try:
        loaded = mx.nd.load(os.fspath(params_file))
    except mx.MXNetError as error:
        raise GraphError(f"{os.fspath(params_file)!r} is no file of MXNet parameters: {first_line(error)}") from error
    if not isinstance(loaded, dict):
        raise GraphError(f"{os.fspath(params_file)!r} holds arrays without names, expected a file of export() or "
                         "save_checkpoint()")
    named = {key.split(":", 1)[1] if key.startswith(("arg:", "aux:")) else key: array for key, array in loaded.items()}
    return (symbol, *split(symbol, named))


def split(symbol: mx.sym.Symbol, arrays: Arrays) -> tuple[dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Tell a symbol's parameters from its auxiliary states."""
    auxiliary = set(symbol.list_auxiliary_states())
    return ({name: array for name, array in arrays.items() if name not in auxiliary},
            {name: array for name, array in arrays.items() if name in auxiliary})
