"""Symbols and their parameters: in files, and whether they belong together."""
from __future__ import annotations

import os
from numbers import Integral
from typing import Any, Collection, Iterable, Mapping, Sequence

import mxnet as mx

from .._mxnet.symbols import first_line, load_symbol, to_graph
from ..base.files import replacing
from ..errors import GraphError, closest, expected

Arrays = Mapping[str, mx.nd.NDArray]
LABEL = "_label"  # the end of the names that MXNet's losses and modules give to labels

# Which inputs of an operator are parameters, whatever their names: only data_names makes data of them.
_PARAMETERS = {"Convolution": (1, 2), "Deconvolution": (1, 2), "FullyConnected": (1, 2), "BatchNorm": (1, 2, 3, 4),
               "LayerNorm": (1, 2), "GroupNorm": (1, 2), "InstanceNorm": (1, 2), "Embedding": (1,), "RNN": (1,)}


def save_model(prefix: str | os.PathLike, epoch: int, symbol: mx.sym.Symbol, arg_params: Arrays,
               aux_params: Arrays) -> tuple[str, str]:
    """Write ``prefix-symbol.json`` and ``prefix-NNNN.params``, casts included; both or neither."""
    files = f"{os.fspath(prefix)}-symbol.json", f"{os.fspath(prefix)}-{epoch:04d}.params"
    arrays = {f"{kind}:{name}": array.as_nd_ndarray() for kind, each in (("arg", arg_params), ("aux", aux_params))
              for name, array in each.items()}
    with replacing(*files) as (symbol_file, params_file):
        symbol.save(symbol_file, remove_amp_cast=False)
        mx.nd.save(params_file, arrays)
    return files


def load_model(symbol_file: str | os.PathLike, params_file: str | os.PathLike
               ) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Read a symbol and its parameters; raise GraphError, which names the file, where it holds none."""
    with open(symbol_file, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        symbol = load_symbol(text)
    except GraphError as error:
        raise GraphError(f"{os.fspath(symbol_file)}: {error}") from error
    with open(params_file, "rb"):
        pass  # MXNet's own error for a file that is not there does not say so
    try:
        loaded = mx.nd.load(os.fspath(params_file))
    except mx.MXNetError as error:
        raise GraphError(f"{os.fspath(params_file)}: expected parameters as MXNet saves them, found something else "
                         f"({first_line(error)})") from error
    if not isinstance(loaded, dict):
        raise GraphError(f"{os.fspath(params_file)}: expected parameters with names, as export() and save_checkpoint() "
                         "write them, found arrays without")
    return (symbol, *split(symbol, {key.split(":", 1)[1] if key.startswith(("arg:", "aux:")) else key: array
                                    for key, array in loaded.items()}))


def split(symbol: mx.sym.Symbol, arrays: Arrays) -> tuple[dict[str, mx.nd.NDArray], dict[str, mx.nd.NDArray]]:
    """Tell a symbol's parameters from its auxiliary states."""
    auxiliary = set(symbol.list_auxiliary_states())
    return ({name: array for name, array in arrays.items() if name not in auxiliary},
            {name: array for name, array in arrays.items() if name in auxiliary})


def check_names(names: Iterable[str], known: Collection[str], argument: str) -> None:
    """Raise GraphError unless a symbol has inputs of these names."""
    if isinstance(names, str):
        raise TypeError(expected("a list of names", argument, names))
    for name in names:
        if name not in known:
            raise GraphError(f"{argument}: the symbol has no input {name!r}.{closest(name, known)}")


def shapes_in(example: Mapping[str, Any], argument: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name; a shape may stand in the place of an array."""
    shapes = {name: getattr(value, "shape", value) for name, value in example.items()}
    for name, shape in shapes.items():
        if not isinstance(shape, (tuple, list)) or not all(isinstance(size, Integral) for size in shape):
            raise TypeError(expected("an NDArray or a shape", f"{argument}[{name!r}]", example[name]))
    return {name: tuple(shape) for name, shape in shapes.items()}


def check_parameters(symbol: mx.sym.Symbol, arrays: Arrays, data_names: Sequence[str] | None) -> None:
    """Raise GraphError unless the parameters are those of the symbol."""
    graph = to_graph(symbol)
    read = {node.inputs[position].node.name for node in graph.operators() for position in _PARAMETERS.get(node.op, ())
            if position < len(node.inputs) and node.inputs[position].node.is_variable}
    needed = ({*read, *symbol.list_auxiliary_states()} if data_names is None else
              {name for name in symbol.list_inputs() if name not in data_names and not name.endswith(LABEL)})
    missing = [name for name in symbol.list_inputs() if name in needed.difference(arrays)]
    if missing:
        data = f" (now {', '.join(data_names)})" if data_names else ""
        raise GraphError(f"the parameters lack {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which the "
                         f"symbol reads: they do not belong together, or name these in data_names{data}."
                         f"{closest(missing[0], arrays)}")


def flat(value: Any) -> list[Any]:
    """Return the arrays of nested lists, None left out."""
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in flat(item)]
    return [] if value is None else [value]
