"""Arithmetic against counts made by hand, from the definition of each operator."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon.model_zoo import vision

import gluon_amp as amp
from gluon_amp.debug.records import MATRIX_OPERATORS, flops
from gluon_amp.rules.tables import groups

CASES = {
    "convolution": ("Convolution", [(2, 3, 8, 8), (4, 3, 5, 5)], (2, 4, 4, 4), 2 * (2 * 4 * 4 * 4) * (3 * 5 * 5), {}),
    "grouped": ("Convolution", [(2, 8, 8, 8), (8, 1, 3, 3)], (2, 8, 8, 8), 2 * (2 * 8 * 8 * 8) * 9, {"num_group": 8}),
    "one dimension": ("Convolution", [(2, 3, 8), (4, 3, 5)], (2, 4, 4), 2 * (2 * 4 * 4) * 15, {}),
    "transposed convolution": ("Deconvolution", [(2, 3, 4, 4), (3, 5, 2, 2)], (2, 5, 8, 8),
                               2 * (2 * 3 * 4 * 4) * (5 * 2 * 2), {}),
    "dense": ("FullyConnected", [(7, 5), (3, 5)], (7, 3), 2 * 7 * 3 * 5, {}),
    "dense along the last axis": ("FullyConnected", [(7, 2, 5), (3, 5)], (7, 2, 3), 2 * 7 * 2 * 3 * 5, {}),
    "dot": ("dot", [(7, 5), (5, 3)], (7, 3), 2 * 7 * 3 * 5, {}),
    "dot, transposed": ("dot", [(5, 7), (5, 3)], (7, 3), 2 * 7 * 3 * 5, {"transpose_a": True}),
    "batch_dot": ("batch_dot", [(4, 7, 5), (4, 5, 3)], (4, 7, 3), 2 * 4 * 7 * 3 * 5, {}),
    "batch_dot, transposed": ("batch_dot", [(4, 5, 7), (4, 5, 3)], (4, 7, 3), 2 * 4 * 7 * 3 * 5,
                              {"transpose_a": True}),
    # 4 heads of 2: queries, keys and values of 8 numbers each; length 6, batch 3.
    "self-attention scores": ("_contrib_interleaved_matmul_selfatt_qk", [(6, 3, 24)], (12, 6, 6),
                              2 * (12 * 6 * 6) * 2, {"heads": 4}),
    "self-attention values": ("_contrib_interleaved_matmul_selfatt_valatt", [(6, 3, 24), (12, 6, 6)], (6, 3, 8),
                              2 * (6 * 3 * 8) * 6, {"heads": 4}),
    # Two layers of 4 gates with 5 units, from 3 numbers: 4*5*(3+5) and 4*5*(5+5) weights, at 7 steps of 2 sequences.
    "LSTM": ("RNN", [(7, 2, 3)], (7, 2, 5), 2 * 7 * 2 * (4 * 5 * 8 + 4 * 5 * 10),
             {"mode": "lstm", "state_size": 5, "num_layers": 2}),
    "GRU both ways": ("RNN", [(7, 2, 3)], (7, 2, 10), 2 * 7 * 2 * 2 * (3 * 5 * 8),
                      {"mode": "gru", "state_size": 5, "num_layers": 1, "bidirectional": True}),
    "elementwise": ("elemwise_add", [(4, 5), (4, 5)], (4, 5), 20, {}),
    "a sum reads more than it writes": ("sum", [(4, 5)], (4,), 20, {}),
    "data movement": ("transpose", [(4, 5)], (5, 4), 0, {}), "a cast": ("amp_cast", [(4, 5)], (4, 5), 0, {})}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_counts(case):
    kind, shapes, output, expected, attrs = case
    assert flops(kind, {name: str(value) for name, value in attrs.items()}, shapes, output) == expected


@pytest.mark.parametrize("shapes", [[None, (4, 3, 3, 3)], [(2, 3, 8, 8), None]])
def test_what_is_unknown_counts_nothing(shapes):
    assert flops("Deconvolution", {}, shapes, (2, 5, 8, 8)) == 0


def test_products_and_layers_are_counted():
    expected = {"Convolution", "FullyConnected", "Deconvolution", "RNN", *groups.ATTENTION, *groups.ONEDNN_SUBGRAPHS,
                *groups.BATCHED_PRODUCTS}
    assert expected <= MATRIX_OPERATORS


def test_resnet18_has_as_many_multiply_adds_as_its_paper_says():
    net = vision.resnet18_v1(classes=1000)
    net.initialize()
    net.hybridize()
    found = amp.report(net, mx.nd.zeros((1, 3, 224, 224)))
    products = sum(row.flops for row in found.operators if row.op in MATRIX_OPERATORS) / 2
    assert products == pytest.approx(1.8e9, rel=0.02)  # table 1 of arXiv:1512.03385
    assert np.isclose(found.flops / 2, products, rtol=0.01)
