"""Reading and checking the arguments of the conversions."""
from __future__ import annotations

from typing import Any, Collection, Iterable, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock

from .._mxnet import blocks
from ..errors import DTypeError, GraphError, StateError, closest, expected
from .exclusions import Exclusions

__all__ = ["as_example", "check_names", "devices_of", "flat", "given", "require", "require_block",
           "require_no_example", "traced_block"]



def traced_block(block: HybridBlock, example: Sequence[Any] | None, wanted: Exclusions) -> blocks.Traced:
    """Trace a block, and see to it that its parameters have values."""
    try:
        traced = blocks.trace(block, example, wanted.predicate())
    except Exception as error:
        hint = "" if example is not None else " If it takes other arguments than was assumed, pass data_example"
        raise GraphError(f"the network cannot be traced to a symbol ({type(error).__name__}: {error}).{hint}"
                         ) from error
    waiting = blocks.untouched_parameters(block, traced.symbol.list_inputs())
    if waiting and example is not None:
        block(*example)  # as the user's first call would: parameters take their shapes
        waiting = blocks.untouched_parameters(block, waiting)
    if waiting:
        more = ", ..." if len(waiting) > 3 else ""
        raise StateError(f"parameters have no values yet: {', '.join(waiting[:3])}{more}. Call initialize() or "
                         "load_parameters(), and pass data_example, or run the network once, so that their shapes are "
                         "known")
    return traced


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


def devices_of(value: Any, block: HybridBlock) -> list[mx.Context]:
    """Return where the converted network is to live."""
    if isinstance(value, mx.Context):
        return [value]
    if value is not None:
        return list(value)
    first = next(iter(block.collect_params().values()), None)
    return [mx.context.current_context()] if first is None else first.list_ctx()


def given(first: Any, second: Any) -> Any:
    """Return the one of two arguments of the same meaning that was given."""
    return second if first is None else first


def require(value: object, kind: Any, name: str, what: str) -> None:
    """Raise TypeError unless an argument is of a kind."""
    if not isinstance(value, kind):
        raise TypeError(expected(what, name, value))


def require_block(block: object) -> None:
    """Raise TypeError for what cannot be traced, and say why."""
    if isinstance(block, Block) and not isinstance(block, HybridBlock):
        raise TypeError(f"expected a HybridBlock, received {type(block).__name__}, a Block that runs Python code at "
                        "every call and cannot be traced: make it a HybridBlock, or convert the hybrid blocks in it")
    require(block, HybridBlock, "block", "a HybridBlock")


def require_no_example(target_dtype: object) -> None:
    """Raise for MXNet 2's order of arguments, in which example data comes second."""
    if isinstance(target_dtype, (mx.nd.NDArray, list, tuple)):
        raise DTypeError(f"expected a data type as target_dtype, received {type(target_dtype).__name__}: pass example "
                         "data as data_example=")


def check_names(names: Iterable[str], known: Collection[str], argument: str) -> None:
    """Raise GraphError for a name that is no input of a symbol."""
    for name in names:
        if name not in known:
            raise GraphError(f"{argument}: the symbol has no input {name!r}.{closest(name, known)}")
