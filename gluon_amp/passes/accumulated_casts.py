"""Let the casts of a program, or of its conversion, add to gradients: MXNet's write none where these accumulate."""
from __future__ import annotations

from ..dtypes import FLOAT32, LOW_PRECISION
from ..graph import Entry, Graph, cast_nodes, guard
from .context import Context

_FLOATS = (FLOAT32, *LOW_PRECISION)


def is_needed(context: Context) -> bool:
    """Tell whether gradients of variables accumulate."""
    return bool(context.facts.accumulated)


def run(graph: Graph, context: Context) -> int:
    """Put an operator that changes nothing before the casts of such variables; return how many."""
    guards: dict[str, Entry] = {}
    for node in cast_nodes(graph):
        source = node.inputs[0]
        name = source.node.name
        if source.node.is_variable and name in context.facts.accumulated and source.dtype in _FLOATS:
            if name not in guards:
                guards[name] = guard(source, graph.new_name(f"{name}_guard"))
            node.inputs = [guards[name]]
    return len(guards)
