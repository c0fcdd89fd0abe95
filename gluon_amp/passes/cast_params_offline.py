"""Compute once, offline, what a rewrite does to parameters: casts, and the zero filters of channel alignment."""
from __future__ import annotations

from typing import Iterator

from ..dtypes import FLOAT32, LOW_PRECISION
from ..graph import CAST, VARIABLE, Entry, Graph, Node, Readers, Role, redirect
from ..graph.attrs import DTYPE, MADE, TYPE_FLAGS
from .context import Context, Weights


def run(graph: Graph, context: Context) -> int:
    """Replace inserted operators that depend on parameters only by their results; return how many were stored."""
    # A parameter that is cast, and is read nowhere else, keeps its name; every other result gets one of its own.
    weights = context.weights
    if weights is None:
        return 0
    constant = _constants(graph, weights)
    readers = Readers(graph)
    moved: dict[tuple[int, int], Entry] = {}
    for node in graph.operators():
        if id(node) in constant and any(id(reader) not in constant for reader in readers.of(Entry(node))):
            variable = _variable(node, readers)
            weights.rename(node.name, variable.name)
            moved[Entry(node).key] = Entry(variable)
    redirect(graph, moved)
    return len(moved) + _store_what_the_program_casts(graph, weights, context.target)


def _constants(graph: Graph, weights: Weights) -> dict[int, str]:
    """Compute what depends on parameters only; return each such node and the name of its value."""
    constants: dict[int, str] = {}
    for node in graph.nodes():
        if node.is_variable:
            if node.name in weights:
                constants[id(node)] = node.name
        elif node.role is not Role.OWN and all(id(entry.node) in constants for entry in node.inputs):
            weights.compute(node.name, node.op, node.attrs, [constants[id(entry.node)] for entry in node.inputs])
            constants[id(node)] = node.name
    return constants


def _store_what_the_program_casts(graph: Graph, weights: Weights, target: str) -> int:
    """Store parameters in low precision where only the program's own casts to it read them; return how many."""
    # The casts stay, and do nothing: they may be outputs.
    readers, count = Readers(graph), 0
    for node in graph.variables():
        reading = readers.of(Entry(node))
        if (node.name in weights and node.dtypes == [FLOAT32] and reading and not readers.is_head(Entry(node))
                and all(reader.op == CAST and reader.dtypes == [target] for reader in reading)):
            weights.compute(reading[0].name, CAST, {"dtype": target}, [node.name])
            weights.rename(reading[0].name, node.name)
            node.dtypes, node.attrs = [target], {**node.attrs, DTYPE: str(TYPE_FLAGS[target])}
            count += 1
    return count


def _variable(node: Node, readers: Readers) -> Node:
    """Make the variable that stands for a result."""
    source, dtype = next(_sources(node), node), node.dtypes[0]
    # Behind a cast MXNet cannot infer the type of a variable: say it.
    attrs = {DTYPE: str(TYPE_FLAGS[dtype])} if dtype in LOW_PRECISION else {}
    variable = Node(VARIABLE, node.name, attrs, dtypes=list(node.dtypes), shapes=list(node.shapes))
    if node.shapes == source.shapes and readers.is_read_once(Entry(source)):
        variable.name, variable.attrs = source.name, {**source.attrs, **attrs}
    else:
        variable.attrs[MADE] = source.attrs.get(MADE, source.name)
    return variable


def _sources(node: Node) -> Iterator[Node]:
    """Yield the parameters that a result depends on: one, and zeros beside it."""
    if node.is_variable:
        yield node
    for entry in node.inputs:
        yield from _sources(entry.node)
