"""Joins of FP32 with low precision: in bfloat16 they are lowered where all that reads them is; graphs by hand."""
from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import batch_norm, conv, graph, op, rewrite, rewritten, variable

from gluon_amp.graph import Entry
from gluon_amp.rules import ANY_DEVICE, Cause, Device, Policy, Rule, make_policy

LOW = "bfloat16"
BIG = (2, 64, 32, 32)


def stem():
    return op("Convolution", "stem", variable("data", (2, 3, 32, 32)), variable("stem_weight", (64, 3, 3, 3)),
              num_filter=64, kernel=(3, 3), no_bias=True, shape=BIG)


def layer(name, source):
    made = conv(name, source, 64, 64)
    made.shapes = [BIG]
    return made


def join(name, *sources):
    return op("Concat", name, *sources, dim=1, num_args=len(sources), shape=(2, 128, 32, 32))


def dense_block():
    """A stem in FP32 and what two low-precision layers add to it."""
    first = stem()
    one = join("join1", first, layer("c1", first))
    return layer("out", join("join2", one, layer("c2", one)))


def types(*heads, policy=None, device=ANY_DEVICE):
    result = graph(*heads)
    rewrite(result, policy or Policy(LOW), device, check=True)
    return {node.name: Entry(node).dtype for node in result.operators()}


def test_a_dense_block_casts_its_stem_once():
    lines = rewritten(LOW, dense_block())
    assert "join1: Concat(stem_bfloat16, c1) -> bfloat16" in lines
    assert "join2: Concat(join1, c2) -> bfloat16" in lines
    assert sum("amp_cast(stem)" in line for line in lines) == 1


@pytest.mark.parametrize(("target", "device", "expected"), [
    (LOW, ANY_DEVICE, LOW), ("float16", ANY_DEVICE, "float32"), (LOW, Device(imitated=True), "float32")])
def test_only_bfloat16_has_the_range_for_it(target, device, expected):
    probabilities = op("softmax", "p", variable("x", BIG), shape=BIG)
    joined = join("join", probabilities, layer("c1", variable("y", BIG)))
    assert types(layer("out", joined), policy=Policy(target), device=device)["join"] == expected


@pytest.mark.parametrize("user", ["softmax", "output", "indirect"])
def test_what_fp32_operators_and_outputs_read_is_not_rounded(user):
    first = stem()
    joined = join("join", first, layer("c1", first))
    follower = op("Activation", "act", joined, act_type="relu", shape=(2, 128, 32, 32))
    heads = {"softmax": [op("softmax", "prob", joined, shape=(2, 128, 32, 32))], "output": [joined],
             "indirect": [op("softmax", "prob", follower, shape=(2, 128, 32, 32))]}[user]
    assert types(layer("out", joined), *heads)["join"] == "float32"


@pytest.mark.parametrize(("read", "expected"), [(False, LOW), (True, "float32")])
def test_statistics_that_are_read_are_not_rounded(read, expected):
    first = stem()
    norm = batch_norm("bn", join("join", first, layer("c1", first)))
    norm.shapes = [BIG, (64,), (64,)]
    assert types(layer("c2", Entry(norm)), *([Entry(norm, 1)] if read else []))["join"] == expected


def test_users_exclusions_and_lists_hold():
    assert types(dense_block(), policy=Policy(LOW, excluded=frozenset({"join1"})))["join1"] == "float32"
    found = types(dense_block(), policy=make_policy(LOW, {"Concat": "Concat"}, fp32_ops=["Concat"]))
    assert (found["join1"], found["join2"]) == ("float32", "float32")


def test_what_a_users_operator_reads_beside_fp32_is_not_rounded():
    rule = Rule("WIDEST", cause=Cause.USER_LIST)
    policy = Policy(LOW, overrides={"broadcast_add": (rule,)})
    first = stem()
    joined = join("join", first, layer("c1", first))
    wide = op("softmax", "p", variable("x", (2, 128, 32, 32)), shape=(2, 128, 32, 32))
    found = types(layer("out", op("broadcast_add", "own", joined, wide, shape=(2, 128, 32, 32))), policy=policy)
    assert (found["join"], found["own"]) == ("float32", "float32")


def test_joins_of_fp32_alone_stay():
    first = stem()
    assert types(layer("out", join("join", first, op("relu", "r", first, shape=BIG))))["join"] == "float32"


def test_slow_kernels_train_in_fp32_between_casts_and_convert_as_they_are():
    def net():
        return layer("c2", op("clip", "clip", layer("c1", stem()), a_min=0, a_max=6, shape=BIG))

    found = rewritten(LOW, net())
    assert "clip: clip(c1_float32) -> float32" in found
    assert "c2: Convolution(clip_bfloat16, c2_weight_bfloat16) -> bfloat16" in found
    assert types(net(), policy=replace(Policy(LOW), training=False))["clip"] == LOW
