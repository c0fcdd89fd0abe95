"""Symbol JSON to graph and back."""
from __future__ import annotations

import json

import pytest
from graphs import graph, op, variable

from gluon_amp import GraphError
from gluon_amp.graph import Entry, Graph, unique_name
from gluon_amp.graph.attrs import integer, integers, is_set, parameters

MLP = {
    "nodes": [
        {"op": "null", "name": "data", "inputs": []},
        {"op": "null", "name": "fc_weight", "attrs": {"__lr_mult__": "2.0"}, "inputs": []},
        {"op": "FullyConnected", "name": "fc", "attrs": {"num_hidden": "4", "no_bias": "True"},
         "inputs": [[0, 0, 0], [1, 0, 0]]},
        {"op": "_foreach", "name": "loop", "attrs": {"num_args": "2"}, "inputs": [[2, 0, 0]],
         "subgraphs": [{"nodes": [], "heads": []}]},
    ],
    "arg_nodes": [0, 1], "node_row_ptr": [0, 1, 2, 3, 5], "heads": [[3, 1, 0]],
    "attrs": {"mxnet_version": ["int", 10901]}}


def test_attributes_are_read():
    assert is_set({"no_bias": "True"}, "no_bias")
    assert is_set({}, "fix_gamma", default=True)
    assert [integer({"num_group": "2"}, "num_group", 1), integer({}, "axis", 1)] == [2, 1]
    assert [integers({"kernel": "(3, 3)"}, "kernel"), integers({}, "kernel")] == [[3, 3], []]
    assert integers({"shape": "(0, -1)"}, "shape") == [0, -1]
    assert parameters({"num_hidden": "8", "__amp__": "on"}) == {"num_hidden": "8"}


def test_a_graph_is_written_as_it_was_read():
    assert json.loads(Graph.from_json(json.dumps(MLP)).to_json()) == MLP


def test_attributes_of_old_files_are_read():
    old = {**MLP, "nodes": [{**node, "param": {"a": "1"}, "attr": {"b": "2"}, "attrs": {}} for node in MLP["nodes"]]}
    assert Graph.from_json(json.dumps(old)).nodes()[0].attrs == {"a": "1", "b": "2"}


@pytest.mark.parametrize(("change", "message"), [
    ({"heads": [[9, 0, 0]]}, "node 9"),
    ({"heads": [[2, 1, 0]]}, "output 1"),
    ({"nodes": None}, "TypeError"),
    ({"nodes": [{"op": "relu", "name": "r", "inputs": [[1, 0, 0]]}]}, "does not come before")])
def test_a_malformed_graph_is_refused_with_the_place(change, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_json(json.dumps({**MLP, **change}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_text_that_is_no_symbol_is_refused(text):
    with pytest.raises(GraphError, match="not the JSON text of an MXNet symbol"):
        Graph.from_json(text)


def test_a_cycle_is_found():
    first = op("relu", "first", variable("x"))
    second = op("relu", "second", first)
    first.inputs = [Entry(second)]
    with pytest.raises(GraphError, match=r"cycle through Node\(relu"):
        graph(second).nodes()


def test_the_order_is_depth_first_whatever_the_depth():
    node = variable("x")
    for number in range(5000):
        node = op("relu", f"r{number}", node)
    assert [n.name for n in graph(node).nodes()][:3] == ["x", "r0", "r1"]


def test_inputs_come_in_the_order_of_their_first_reader():
    a, b, c = (variable(name) for name in "abc")
    assert [v.name for v in graph(op("Concat", "out", op("add_n", "sum", b, a), c, a)).variables()] == ["b", "a", "c"]


def test_unique_names_count_up():
    taken = {"a", "a1"}
    assert [unique_name("a", taken), unique_name("b", taken), unique_name("a", taken)] == ["a2", "b", "a3"]
