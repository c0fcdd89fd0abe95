"""Check what every rewrite must keep: each check yields the faults it finds."""
from __future__ import annotations

from collections import Counter
from typing import Callable, Iterator

from ..dtypes import LOW_PRECISION
from ..errors import GraphError
from ..graph import Graph, Role, cast_nodes
from . import carry_scale
from .assign_dtypes import input_dtypes
from .context import Context


def _inputs_agree(graph: Graph, context: Context) -> Iterator[str]:
    for node in graph.operators():
        if node.decision is None:
            continue
        for entry, wanted in zip(node.inputs, input_dtypes(node, context)):
            if wanted is not None and entry.dtype != wanted:
                yield f"{node!r} needs {wanted} from {entry.node!r}, which gives {entry.dtype}"


def _casts_are_needed(graph: Graph, context: Context) -> Iterator[str]:
    for cast in cast_nodes(graph):
        source = cast.inputs[0]
        if cast.role is not Role.OWN and source.dtype == cast.dtypes[0]:
            yield f"{cast!r} casts {source.dtype} to itself"
        # A CachedOp that casts between the two low-precision types in place reinterprets the bits.
        if source.dtype in LOW_PRECISION and cast.dtypes[0] in LOW_PRECISION and source.dtype != cast.dtypes[0]:
            yield f"{cast!r} casts {source.dtype} to {cast.dtypes[0]} without FP32 in between"


def _casts_are_shared(graph: Graph, context: Context) -> Iterator[str]:
    keys = Counter((cast.inputs[0].key, cast.attrs["dtype"]) for cast in cast_nodes(graph)
                   if cast.role is not Role.OWN)
    yield from (f"a tensor is cast to {dtype} {count} times" for (_, dtype), count in keys.items() if count > 1)


def _names_are_unique(graph: Graph, context: Context) -> Iterator[str]:
    operators = graph.operators()
    names = Counter(node.name for node in operators if node.role is not Role.OWN)
    originals = {node.name for node in operators if node.role is Role.OWN}
    yield from (f"the name {name!r} is used {count} times" for name, count in names.items() if count > 1)
    yield from (f"the name {name!r} of a new node was taken" for name in names if name in originals)


def _heads_keep_their_types(graph: Graph, context: Context) -> Iterator[str]:
    for head, dtype in zip(graph.heads, context.outputs):
        if dtype is not None and head.dtype != dtype:
            yield f"the graph's output {head.node!r} is {head.dtype}, expected {dtype}"


def _inputs_keep_their_order(graph: Graph, context: Context) -> Iterator[str]:
    after = tuple(node.name for node in graph.variables() if not carry_scale.is_scale(node))
    if context.weights is None and after != context.variables:
        yield f"the inputs were {list(context.variables)}, they are {list(after)}"


Check = Callable[[Graph, Context], Iterator[str]]
CHECKS: tuple[Check, ...] = (_inputs_agree, _casts_are_needed, _casts_are_shared, _names_are_unique,
                             _heads_keep_their_types, _inputs_keep_their_order)


def is_needed(context: Context) -> bool:
    """Tell whether the user, or a test, asked for it."""
    return context.check


def run(graph: Graph, context: Context) -> int:
    """Run all checks; return 0."""
    faults = [fault for check in CHECKS for fault in check(graph, context)]
    if faults:
        raise GraphError("the rewritten graph is not sound: " + "; ".join(faults))
    return 0
