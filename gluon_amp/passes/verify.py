"""Check what every rewrite must keep: each check yields the faults it finds."""
from __future__ import annotations

from collections import Counter
from typing import Callable, Iterator, Sequence

from ..dtypes import LOW_PRECISION
from ..errors import GraphError
from ..graph import Graph
from .assign_dtypes import input_dtypes
from .context import Context
from .place_casts import cast_nodes

__all__ = ["CHECKS", "run"]


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
        if cast.decision is None and source.dtype == cast.dtypes[0]:
            yield f"{cast!r} casts {source.dtype} to itself"
        # A CachedOp that casts between the two low-precision types in place reinterprets the bits.
        if source.dtype in LOW_PRECISION and cast.dtypes[0] in LOW_PRECISION and source.dtype != cast.dtypes[0]:
            yield f"{cast!r} casts {source.dtype} to {cast.dtypes[0]} without FP32 in between"


def _casts_are_shared(graph: Graph, context: Context) -> Iterator[str]:
    keys = Counter((cast.inputs[0].key, cast.attrs["dtype"]) for cast in cast_nodes(graph) if cast.decision is None)
    yield from (f"a tensor is cast to {dtype} {count} times" for (_, dtype), count in keys.items() if count > 1)


def _names_are_unique(graph: Graph, context: Context) -> Iterator[str]:
    names = Counter(node.name for node in graph.nodes() if node.decision is None and not node.is_variable)
    originals = {node.name for node in graph.nodes() if node.decision is not None}
    yield from (f"the name {name!r} is used {count} times" for name, count in names.items() if count > 1)
    yield from (f"the name {name!r} of a new node was taken" for name in names if name in originals)


def _heads_keep_their_types(graph: Graph, context: Context) -> Iterator[str]:
    for head, dtype in zip(graph.heads, context.outputs):
        if dtype is not None and head.dtype != dtype:
            yield f"the graph's output {head.node!r} is {head.dtype}, expected {dtype}"


Check = Callable[[Graph, Context], Iterator[str]]
CHECKS: tuple[Check, ...] = (_inputs_agree, _casts_are_needed, _casts_are_shared, _names_are_unique,
                             _heads_keep_their_types)


def run(graph: Graph, context: Context, variables: Sequence[str]) -> None:
    """Run all checks.

    Parameters
    ----------
    graph : Graph
        A rewritten graph.
    context : Context
        The settings of the rewrite.
    variables : sequence of str
        The inputs before the rewrite: engine calls pass them by position, so their order must not change.

    Raises
    ------
    GraphError
        Names every fault found.
    """
    faults = [fault for check in CHECKS for fault in check(graph, context)]
    after = [node.name for node in graph.variables()]
    if after != list(variables):
        faults.append(f"the inputs were {list(variables)}, they are {after}")
    if faults:
        raise GraphError("the rewritten graph is not sound: " + "; ".join(faults))
