"""Tensors keep the names that users know them by."""
from __future__ import annotations

import re
from typing import Callable, Sequence

from ..graph import MULTICAST, Entry, Graph, Node, Role, operator, unique_name

_ONE = "_output"  # what MXNet appends to the name of a node with one output
_OUT = "_out"  # what it appends for np.matmul, np.concatenate and their kin


def name_results(graph: Graph) -> None:
    """Give what gives the program's results the program's names: behind a padded convolution that is the cut."""
    for node in graph.operators():
        if node.stands_for and node.inputs[0].node.name == node.stands_for:
            node.inputs[0].node.name, node.name = graph.new_name(f"{node.stands_for}_padded"), node.stands_for


def name_outputs(graph: Graph, wanted: Sequence[str], current: Callable[[], Sequence[str]]) -> None:
    """Give the outputs of a graph the names they had, where another operator gives them now."""
    names = {node.name for node in graph.nodes()}
    joined: dict[str, Node] = {}
    for _ in range(2):  # a node that makes room for another may have given an output a name
        for position, (name, other) in enumerate(zip(wanted, current())):
            several = re.fullmatch(rf"(.+){_ONE}(\d+)", name)
            if name != other and name.endswith(_ONE):
                graph.heads[position] = _carried(graph, position, name[:-len(_ONE)], names)
            elif name != other and name.endswith(_OUT) and graph.heads[position].shape != ():
                graph.heads[position] = _carried_by_numpys(graph, position, name[:-len(_OUT)], names)
            elif name != other and several:
                graph.heads[position] = _carried_jointly(graph, position, several[1], int(several[2]), joined, names)


def _carried(graph: Graph, position: int, name: str, names: set[str]) -> Entry:
    """Return an output under a name; behind a node that gives other outputs too an identity gets it."""
    head = graph.heads[position]
    node = head.node
    others = [other for place, other in enumerate(graph.heads) if place != position and other.node is node]
    if node.is_variable or node.num_outputs > 1 or others:
        node = operator("_copy", name, [head], head, Role.HELPER)
    _make_room(graph, name, node, names)
    node.name = name
    return Entry(node, 0)


def _carried_by_numpys(graph: Graph, position: int, name: str, names: set[str]) -> Entry:
    """Return an output under a name like those of NumPy's operators: that of one array joined gives the array."""
    head = graph.heads[position]
    node = operator("_npi_concatenate", name, [head], head, Role.HELPER, num_args=1, axis=0)
    _make_room(graph, name, node, names)
    return Entry(node)


def _carried_jointly(graph: Graph, position: int, name: str, output: int, joined: dict[str, Node],
                     names: set[str]) -> Entry:
    """Return an output under a name like those of a node with several outputs."""
    head = graph.heads[position]
    if name not in joined:
        count = max([output + 1, *(node.num_outputs for node in graph.nodes() if node.name == name)])
        joined[name] = operator(MULTICAST, name, [head] * count, head, Role.HELPER, num_outputs=count)
        joined[name].num_outputs = count
        _make_room(graph, name, joined[name], names)
    joined[name].inputs[output] = head
    return Entry(joined[name], output)


def _make_room(graph: Graph, name: str, owner: Node, names: set[str]) -> None:
    """Rename other nodes that have a name; one whose several outputs users know by it keeps it."""
    known = {id(head.node) for head in graph.heads if head.node.num_outputs > 1}
    for node in graph.nodes():
        if node.name == name and node is not owner and not node.is_variable and id(node) not in known:
            node.name = unique_name(f"{name}_low", names)
