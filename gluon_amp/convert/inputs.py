"""Checks of what is converted: a block can be traced, and a symbol and its parameters belong together."""
from __future__ import annotations

from contextlib import suppress
from numbers import Integral
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock

from .._mxnet import blocks
from .._mxnet.symbols import to_graph
from ..errors import GraphError, StateError, closest, expected
from ..graph import Graph
from ..session.hooks import kept_in_place
from .channels import misfits

# Which inputs of an operator are parameters, whatever their names: only data_names makes data of them.
_PARAMETERS = {"Convolution": (1, 2), "Deconvolution": (1, 2), "FullyConnected": (1, 2), "BatchNorm": (1, 2, 3, 4),
               "LayerNorm": (1, 2), "GroupNorm": (1, 2), "InstanceNorm": (1, 2), "Embedding": (1,), "RNN": (1,)}


def traced_block(block: HybridBlock, example: Sequence[Any] | None,
                 is_excluded: Callable[[Block], bool] | None = None) -> blocks.Trace:
    """Trace a block, and check that its parameters have values."""
    try:
        with kept_in_place():  # for the marks of symbol blocks
            traced = blocks.trace(block, example, is_excluded)
    except Exception as error:
        raise GraphError(_untraceable(block, error, example is not None)) from error
    waiting = blocks.untouched_parameters(block, traced.symbol.list_inputs())
    if waiting and example is not None:
        with suppress(RuntimeError):  # where they were never initialized
            block(*example)  # as the user's first call would: parameters take their shapes
        waiting = blocks.untouched_parameters(block, waiting)
    if waiting:
        more = ", ..." if len(waiting) > 3 else ""
        raise StateError(f"parameters have no values yet: {', '.join(waiting[:3])}{more}. Call initialize() or "
                         "load_parameters(), and pass data_example, or run the network once, so that their shapes are "
                         "known")
    return traced


def _untraceable(block: HybridBlock, error: Exception, has_example: bool) -> str:
    """Say why a network cannot be traced."""
    told = ": ".join(text for text in (type(error).__name__, str(error)) if text)
    text = f"the network cannot be traced to a symbol ({told})."
    own = [type(each).__name__ for each in blocks.descendants(block) if blocks.has_own_forward(each)]
    if own:
        return (f"{text} {own[0]} overrides forward, which MXNet runs in Python and does not trace: give it "
                "hybrid_forward(self, F, x, ...) in its place, with F.name for mx.nd.name, or convert the blocks "
                "inside it one by one")
    return text if has_example else f"{text} If it takes other arguments than was assumed, pass data_example"


def as_example(value: Any) -> list[Any] | None:
    """Return the arguments of a call as a list."""
    if value is None:
        return None
    return list(value) if isinstance(value, (list, tuple)) else [value]


def flat(value: Any) -> list[Any]:
    """Return the arrays of nested lists, None left out."""
    if isinstance(value, (list, tuple)):
        return [array for item in value for array in flat(item)]
    return [] if value is None else [value]


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


def check_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray],
                     data_names: Sequence[str] | None) -> None:
    """Raise GraphError unless the parameters are those of the symbol."""
    graph = to_graph(symbol)
    needed = (set(symbol.list_inputs()) if data_names is not None
              else {*_read_as_parameters(graph), *symbol.list_auxiliary_states()})
    missing = [name for name in symbol.list_inputs()
               if name in needed and name not in arrays and name not in (data_names or ())]
    if missing:
        data = f" (now {', '.join(data_names)})" if data_names else ""
        raise GraphError(f"the parameters lack {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}, which the "
                         f"symbol reads: they do not belong together, or name these in data_names{data}."
                         f"{closest(missing[0], arrays)}")
    for node, name, shape, wanted in misfits(graph, {name: array.shape for name, array in arrays.items()}):
        raise GraphError(f"the parameter {name!r} has shape {tuple(shape)}, the operator {node.name!r} ({node.op}) "
                         f"needs {wanted}: the symbol and the parameters do not belong together")


def _read_as_parameters(graph: Graph) -> Iterator[str]:
    for node in graph.operators():
        for position in _PARAMETERS.get(node.op, ()):
            if position < len(node.inputs) and node.inputs[position].node.is_variable:
                yield node.inputs[position].node.name
