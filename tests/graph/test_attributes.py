"""What attributes of nodes say, and names of nodes."""
from __future__ import annotations

from gluon_amp.graph import Graph, unique_name
from gluon_amp.graph.attrs import integer, integers, is_set, parameters


def test_attributes_are_read():
    assert is_set({"no_bias": "True"}, "no_bias")
    assert is_set({}, "fix_gamma", default=True)
    assert [integer({"num_group": "2"}, "num_group", 1), integer({}, "axis", 1)] == [2, 1]
    assert [integers({"kernel": "(3, 3)"}, "kernel"), integers({}, "kernel")] == [[3, 3], []]
    assert integers({"shape": "(0, -1)"}, "shape") == [0, -1]
    assert parameters({"num_hidden": "8", "__amp__": "on"}) == {"num_hidden": "8"}


def test_names():
    assert unique_name("fc_cast", {"fc_cast"}) == "fc_cast1"


def test_the_smallest_graph():
    text = ('{"nodes": [{"op": "null", "name": "x", "inputs": []}], "arg_nodes": [0], "node_row_ptr": [0, 1],'
            ' "heads": [[0, 0, 0]]}')
    assert repr(Graph.from_json(text).variables()) == "[Node(null 'x')]"
