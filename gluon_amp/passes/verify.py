"""Check, behind each pass, the rules that every rewrite must keep: each yields the faults that it finds."""
from __future__ import annotations

from collections import Counter
from typing import Callable, Iterator, Sequence

from ..dtypes import LOW_PRECISION
from ..errors import GraphError
from ..graph import Graph, Role, cast_nodes
from .context import Context
from .gradients import is_scale
from .precisions import input_dtypes


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
    after = tuple(node.name for node in graph.variables() if not is_scale(node))
    if context.weights is None and after != context.variables:
        yield f"the inputs were {list(context.variables)}, they are {list(after)}"


# Each with the pass behind which it holds, and the one that ends it; empty where it always does, or none does.
_RULES: tuple[tuple[Callable[[Graph, Context], Iterator[str]], str, str], ...] = (
    (_names_are_unique, "", ""),
    (_inputs_keep_their_order, "", ""),
    (_inputs_agree, "place_casts", "imitate"),
    (_casts_are_needed, "place_casts", ""),
    (_casts_are_shared, "place_casts", "imitate"),
    (_heads_keep_their_types, "place_casts", ""),
)


def verify(graph: Graph, context: Context, done: Sequence[str]) -> None:
    """Check a graph behind the last of the passes named; a converted graph has had all passes of conversions."""
    holding = [find for find, since, until in _RULES
               if (since in ("", *done) or context.converted) and until not in done]
    faults = [fault for find in holding for fault in find(graph, context)]
    if faults:
        raise GraphError(f"the graph is not sound behind the pass {done[-1]}: {'; '.join(faults)}")
