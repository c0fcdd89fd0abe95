"""Channels that are followed through graphs written by hand."""
from __future__ import annotations

from graphs import batch_norm, conv, graph, op, variable

from gluon_amp.convert.parameters import misfits


def shapes_of(*heads):
    result = graph(*heads)
    return result, {node.name: node.shapes[0] for node in result.variables() if node.shapes[0]}


def wrong(*heads, **changed):
    result, shapes = shapes_of(*heads)
    return {(node.name, name) for node, name, *_ in misfits(result, {**shapes, **changed})}


def chain():
    first = conv("first", variable("data"), 8, 3)
    second = conv("second", op("relu", "act", batch_norm("norm", first)), 16, 8)
    pool = op("Flatten", "flat", op("Pooling", "pool", second, global_pool=True))
    return op("FullyConnected", "fc", pool, variable("fc_weight", (4, 16)), num_hidden=4, no_bias=True)


def test_what_fits_is_not_mentioned():
    assert wrong(chain()) == set()


def test_layers_are_compared_with_those_before_them():
    assert wrong(chain(), second_weight=(16, 9, 3, 3)) == {("second", "second_weight")}
    assert wrong(chain(), norm_gamma=(16,)) == {("norm", "norm_gamma")}
    assert wrong(chain(), fc_weight=(4, 32)) == {("fc", "fc_weight")}


def test_what_cannot_be_told_is_left_alone():
    first = conv("first", variable("data"), 8, 3)
    reshaped = op("Reshape", "shaped", first, shape=(0, 4, -1, 2))
    second = conv("second", reshaped, 16, 5)
    flat = op("FullyConnected", "fc", second, variable("fc_weight", (4, 999)), num_hidden=4, no_bias=True)
    assert wrong(flat) == set()
    last = conv("last", variable("other"), 8, 3, layout="NHWC")
    assert wrong(conv("next", last, 8, 99)) == set()


def test_joins_groups_and_transposed_convolutions():
    left, right = conv("left", variable("data"), 8, 3), conv("right", variable("more"), 24, 3)
    joined = op("Concat", "joined", left, right, dim=1)
    assert wrong(conv("next", joined, 8, 32)) == set()
    assert wrong(conv("next", joined, 8, 8)) == {("next", "next_weight")}
    assert wrong(conv("grouped", joined, 8, 8, num_group=4)) == set()
    up = op("Deconvolution", "up", joined, variable("up_weight", (8, 4, 2, 2)), num_filter=4, kernel=(2, 2))
    assert wrong(up) == {("up", "up_weight")}
    total = op("elemwise_add", "sum", left, conv("again", left, 8, 8))
    assert wrong(conv("next", total, 8, 9)) == {("next", "next_weight")}


def test_dense_layers_along_the_last_axis():
    first = op("FullyConnected", "one", variable("data"), variable("one_weight", (8, 3)), num_hidden=8, flatten=False)
    again = op("FullyConnected", "two", first, variable("two_weight", (4, 9)), num_hidden=4, flatten=False)
    assert wrong(again) == {("two", "two_weight")}
    # Behind a flat=False layer the number of places is unknown.
    rows = op("FullyConnected", "two", first, variable("two_weight", (4, 40)), num_hidden=4)
    assert wrong(rows) == set()
