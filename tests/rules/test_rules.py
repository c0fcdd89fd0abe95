"""Rules and shapes: what follows from an operator's attributes and its inputs."""
from __future__ import annotations

import pytest

from gluon_amp.rules import WIDEST, Rule, make_policy, precision
from gluon_amp.rules.shapes import can_fold_stride, has_idle_taps, overruns_amx_tiles, pools_out_of_order
from gluon_amp.rules.tables import table
from gluon_amp.rules.tables.rows import as_table


def test_rules():
    types = ["bfloat16", "float32", "int32"]
    assert precision(Rule(WIDEST).decision, types, "float32", "bfloat16") == "float32"
    policy = make_policy("bfloat16", {"Convolution": "Convolution"}, fp32_ops=["Convolution"])
    assert policy.decide("Convolution", {}).rule == "FP32"


def test_tables():
    assert [rule.rule for rule in table("float16")["Convolution"]] == ["LOWER"]
    made = as_table(("sin", Rule("FP32")), (("cos", "tan"), Rule("NEUTRAL")))
    assert {name: rules[0].rule for name, rules in made.items()} == {"sin": "FP32", "cos": "NEUTRAL", "tan": "NEUTRAL"}


@pytest.mark.parametrize(("attrs", "expected"), [
    ({"kernel": "(7, 7)", "stride": "(2, 2)", "pad": "(3, 3)", "num_filter": "64"}, True),
    ({"kernel": "(3, 3)", "pad": "(1, 1)", "num_filter": "64"}, False)])
def test_strides_to_fold(attrs, expected):
    assert can_fold_stride(attrs, 3) == expected


def test_maps():
    pointwise, window = {"kernel": "(1, 1)"}, {"kernel": "(3, 3)", "pad": "(1, 1)"}
    assert [size for size in range(1, 34) if overruns_amx_tiles(pointwise, (2, 64, size, size))] == [6]
    assert [has_idle_taps(window, (2, 16, size, size)) for size in (1, 8)] == [True, False]
    assert [pools_out_of_order({"global_pool": "True"}, (4, 2048, 7, 7), amx) for amx in (True, False)] == [True, False]
