"""Let chains of convolutions and ReLU6 train with the channels last, in C++.

MXNet runs convolutions and BatchNorm in oneDNN's own layouts, and hands plain arrays to whatever else there is: three
times a map is written again forward and backward for each ``clip``. Operators in C++ whose maps have the channels last
need none of that, and BatchNorm takes the limits along. Where a chain begins and ends maps are transposed.
"""
from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from ..dtypes import FLOAT32
from ..graph import Entry, Graph, Node, Readers, operator, redirect, unique_name
from ..graph.attrs import integer, integers, is_set
from .context import Context
from .identities import Guards
from .known_forward import unknown_forward

_BATCH_NORM = "_gluon_amp_batch_norm"
_IN_CPP = {"Convolution": "_gluon_amp_convolution", "BatchNorm": _BATCH_NORM}
NATIVE = frozenset(_IN_CPP.values())
CONCERNED = frozenset({"Convolution", "clip"})  # what a graph has where this may do something
_ELEMENTWISE = ("clip", "relu", "Activation", "elemwise_add")
_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of a map with the channels last, and first again


def is_needed(context: Context) -> bool:
    """Tell whether FP32 training is about to run on a CPU with such operators."""
    return context.trains and context.recorded and context.target == FLOAT32 and context.native >= NATIVE


def run(graph: Graph, context: Context) -> int:
    """Put operators in C++ in the place of convolutions and BatchNorm in such chains; return how many."""
    readers = Readers(graph)
    unknown = unknown_forward(graph)
    members = [node for node in graph.operators()
               if _fits(node, readers) and not any(entry.node in unknown for entry in node.inputs[:2])]
    chains = [chain for chain in _chains(members) if _gains(chain, readers)]
    if not chains:
        return 0
    names = {node.name for node in graph.nodes()}
    guards = Guards(graph, readers, names, context)
    return sum(_turn(graph, chain, readers, guards, names) for chain in chains)


def _fits(node: Node, readers: Readers) -> bool:
    """Tell whether an operator can run with the channels last: on images, in FP32."""
    if not all(len(shape or ()) == 4 for shape in node.shapes[:1]) or any(dtype != FLOAT32 for dtype in node.dtypes):
        return False
    data = node.inputs[0] if node.inputs else None
    if data is None or len(data.shape or ()) != 4:
        return False
    if node.op == "Convolution":  # the gradient of the data is always computed: that of an image is of no use
        return (not data.node.is_variable and node.attrs.get("layout", "None") in ("None", "NCHW")
                and len(integers(node.attrs, "kernel")) == 2)
    if node.op == "BatchNorm":
        return (integer(node.attrs, "axis", 1) == 1 and not is_set(node.attrs, "use_global_stats")
                and not any(readers.of(Entry(node, hidden)) or readers.is_head(Entry(node, hidden))
                            for hidden in range(1, node.num_outputs)))
    return (node.op in _ELEMENTWISE and node.attrs.get("act_type", "relu") == "relu"
            and all(entry.shape == data.shape for entry in node.inputs))


def _chains(members: list[Node]) -> list[list[Node]]:
    """Return the groups of members that hand maps to one another, each in the graph's order."""
    number = {id(node): position for position, node in enumerate(members)}
    pairs = [(number[id(entry.node)], position) for position, node in enumerate(members)
             for entry in _maps(node) if id(entry.node) in number]
    if not pairs:
        return []
    rows, columns = zip(*pairs)
    size = len(members)
    count, group = connected_components(coo_matrix((np.ones(len(pairs)), (rows, columns)), (size, size)), False)
    return [[node for node, each in zip(members, group) if each == chain] for chain in range(count)]


def _maps(node: Node) -> list[Entry]:
    """Return the inputs of a member that are maps."""
    return node.inputs if node.op in _ELEMENTWISE else node.inputs[:1]


def _gains(chain: list[Node], readers: Readers) -> bool:
    """Tell whether fewer maps are transposed than are written again for each ``clip``."""
    inside = {id(node) for node in chain}
    begins = sum(id(entry.node) not in inside for node in chain for entry in _maps(node))
    ends = sum(_leaves(node, inside, readers) for node in chain)
    return sum(node.op == "clip" for node in chain) > begins + ends


def _leaves(node: Node, inside: set[int], readers: Readers) -> bool:
    entry = Entry(node)
    return readers.is_head(entry) or any(id(reader) not in inside for reader in readers.of(entry))


def _turn(graph: Graph, chain: list[Node], readers: Readers, guards: Guards, names: set[str]) -> int:
    """Turn the maps of a chain; return how many operators run in C++ then."""
    inside = {id(node) for node in chain}
    ends = {Entry(node).key: transposed(Entry(node), _FIRST, names) for node in chain if _leaves(node, inside, readers)}
    for node in graph.nodes():
        if id(node) not in inside:
            node.inputs = [ends.get(entry.key, entry) for entry in node.inputs]
    graph.heads = [ends.get(head.key, head) for head in graph.heads]
    for node in chain:
        count = len(_maps(node))
        is_native = node.op in _IN_CPP
        maps = [transposed(entry, _LAST, names) if id(entry.node) not in inside else
                guards.before(entry) if is_native else entry for entry in node.inputs[:count]]
        # The moving averages, which BatchNorm writes, have no gradient.
        parameters = [guards.before(entry) for entry in node.inputs[count:count + 2]] if is_native else []
        node.inputs = [*maps, *parameters, *node.inputs[count + len(parameters):]]
        node.shapes = [_in_order(node.shapes[0], _LAST), *node.shapes[1:]]
        if is_native:
            node.replaced, node.op = node.op, _IN_CPP[node.op]
    limited = {Entry(node).key: node.inputs[0] for node in chain if node.op == "clip" and _is_limit(node, readers)}
    for node in chain:
        if Entry(node).key in limited:
            source = limited[Entry(node).key].node
            source.attrs = {**source.attrs, **{name: node.attrs[name] for name in ("a_min", "a_max")}}
    redirect(graph, limited)
    return sum(node.op in NATIVE for node in chain)


def _is_limit(clip: Node, readers: Readers) -> bool:
    """Tell whether BatchNorm gives a ``clip`` all that it reads, and nobody else anything."""
    (source,) = clip.inputs
    return source.node.op == _BATCH_NORM and readers.only(source) is clip


def transposed(entry: Entry, axes: tuple[int, ...], names: set[str]) -> Entry:
    """Return a map with its axes in another order."""
    made = operator("transpose", unique_name(f"{entry.node.name}_turned", names), [entry], entry, axes=axes)
    made.shapes = [_in_order(entry.shape, axes)]
    return Entry(made)


def _in_order(shape: tuple[int, ...] | None, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((shape or ())[axis] for axis in axes)
