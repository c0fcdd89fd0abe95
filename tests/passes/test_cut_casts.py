"""The choice of precisions by cost: graphs written by hand, random ones against all choices, and whole networks."""
from __future__ import annotations

from dataclasses import replace
from itertools import product

import mxnet as mx
import pytest
from graphs import batch_norm, conv, graph, op, rewrite, rewritten, variable
from hypothesis import given, settings
from hypothesis import strategies as st

import gluon_amp as amp
from gluon_amp.dtypes import FLOAT32
from gluon_amp.graph import Entry
from gluon_amp.passes import Context, assign_dtypes, cut_casts, place_casts, verify
from gluon_amp.passes.placement import FIXED_FP32, FIXED_LOW, Placement, Tensor
from gluon_amp.rules import Policy, make_policy
from gluon_amp.rules.costs import COSTS, Costs

LOW = "bfloat16"
BIG = (2, 64, 32, 32)
BYTES = Costs((1.0, 2.0), 0, {})  # casts cost their bytes, kernels nothing


def stem():
    return op("Convolution", "stem", variable("data", (2, 3, 32, 32)), variable("stem_weight", (64, 3, 3, 3)),
              num_filter=64, kernel=(3, 3), no_bias=True, shape=BIG)


def layer(name, source, shape=BIG):
    made = conv(name, source, 64, 64)
    made.shapes = [shape]
    return made


def dense_block():
    """A stem in FP32 and what two low-precision layers add to it."""
    first = stem()
    one = op("Concat", "join1", first, layer("c1", first), dim=1, num_args=2, shape=(2, 128, 32, 32))
    two = op("Concat", "join2", one, layer("c2", one), dim=1, num_args=2, shape=(2, 192, 32, 32))
    return layer("out", two)


def without_the_pass(*heads, policy=None):
    result = graph(*heads)
    rewrite(result, replace(policy or Policy(LOW), disabled_passes=frozenset({"cut_casts"})), check=True)
    return {node.name: Entry(node).dtype for node in result.operators()}


def types(*heads, policy=None):
    result = graph(*heads)
    rewrite(result, policy or Policy(LOW), check=True)
    return {node.name: Entry(node).dtype for node in result.operators()}


def test_a_dense_block_casts_its_stem_once():
    assert rewritten(LOW, dense_block()) == [
        "stem: Convolution(data, stem_weight) -> float32",
        "stem_bfloat16: amp_cast(stem) -> bfloat16",
        "c1_weight_bfloat16: amp_cast(c1_weight) -> bfloat16",
        "c1: Convolution(stem_bfloat16, c1_weight_bfloat16) -> bfloat16",
        "join1: Concat(stem_bfloat16, c1) -> bfloat16",
        "c2_weight_bfloat16: amp_cast(c2_weight) -> bfloat16",
        "c2: Convolution(join1, c2_weight_bfloat16) -> bfloat16",
        "join2: Concat(join1, c2) -> bfloat16",
        "out_weight_bfloat16: amp_cast(out_weight) -> bfloat16",
        "out: Convolution(join2, out_weight_bfloat16) -> bfloat16",
        "out_float32: amp_cast(out) -> float32",
        "out: out_float32",
    ]
    before = without_the_pass(dense_block())
    assert (before["join1"], before["join2"]) == ("float32", "float32")


def cheapest(placement):
    """Return the choice of precisions with all gains."""
    moved = {number for gain in placement.gains() for number in gain.operators}
    return [low != (number in moved) for number, low in enumerate(placement.low)]


def test_a_gain_that_is_too_small_a_share_of_the_cost_is_left_alone():
    tensors = [Tensor(FIXED_LOW, (0,), 5), Tensor(0, (FIXED_LOW,), 5)]
    for share, moved in ((0.0, True), (0.09, True), (0.1, False)):
        placement = Placement([False], [(90, 90)], tensors, least_share=share)
        assert placement.cost([False]) - placement.cost([True]) == 10
        assert cheapest(placement) == [moved]


def test_decisions_say_why():
    result = graph(dense_block())
    rewrite(result, Policy(LOW))
    notes = {node.name: node.decision.note for node in result.operators() if node.decision is not None}
    assert notes["join1"].startswith("in bfloat16 rather than float32: saves about 1 ms")
    assert notes["join1"].endswith("ms of casts and kernels, together with 1 more")


def test_kernels_that_are_slow_in_low_precision_run_in_fp32_between_casts():
    def net():
        return layer("c2", op("clip", "clip", layer("c1", stem()), a_min=0, a_max=6, shape=BIG))

    found = rewritten(LOW, net())
    assert "clip: clip(c1_float32) -> float32" in found
    assert "c2: Convolution(clip_bfloat16, c2_weight_bfloat16) -> bfloat16" in found
    assert without_the_pass(net())["clip"] == LOW


def test_of_several_operators_the_slow_one_goes_alone():
    norm = batch_norm("bn", layer("c1", stem()))
    norm.shapes = [BIG, (64,), (64,)]
    found = types(layer("c2", op("abs", "abs", Entry(norm), shape=BIG)))
    assert (found["bn"], found["abs"]) == (LOW, "float32")


@pytest.mark.parametrize("reader", ["softmax", "output", "indirect"])
def test_what_fp32_operators_and_outputs_read_is_not_rounded(reader):
    first = stem()
    join = op("Concat", "join", first, layer("c1", first), dim=1, num_args=2, shape=(2, 128, 32, 32))
    follower = op("Activation", "act", join, act_type="relu", shape=(2, 128, 32, 32))
    heads = {"softmax": [op("softmax", "prob", join, shape=(2, 128, 32, 32))], "output": [join],
             "indirect": [op("softmax", "prob", follower, shape=(2, 128, 32, 32))]}[reader]
    heads = [layer("out", join), *heads]
    assert types(*heads)["join"] == "float32"


def test_statistics_that_are_read_are_not_rounded():
    norm = batch_norm("bn", stem())
    norm.shapes = [BIG, (64,), (64,)]
    heads = [layer(f"c{i}", Entry(norm)) for i in range(2)]
    assert types(*heads, Entry(norm, 1))["bn"] == "float32"


def test_users_exclusions_and_lists_hold():
    assert types(dense_block(), policy=Policy(LOW, excluded=frozenset({"join1"})))["join1"] == "float32"
    found = types(dense_block(), policy=make_policy(LOW, {"Concat": "Concat"}, fp32_ops=["Concat"]))
    assert (found["join1"], found["join2"]) == ("float32", "float32")


def test_ties_stay_as_they_were():
    def net():
        middle = op("BlockGrad", "same", layer("c1", stem()), shape=BIG)
        return op("softmax", "prob", middle, shape=BIG)

    assert types(net()) == without_the_pass(net())


@pytest.mark.parametrize("shape", [None, (2, 0, 32, 32)])
def test_operators_of_unknown_size_stay_as_they_were(shape):
    def net():
        first = stem()
        return layer("out", op("Concat", "join", first, layer("c1", first), dim=1, num_args=2, shape=shape))

    assert types(net())["join"] == "float32"


@pytest.mark.parametrize("policy", [Policy("float16"), Policy(LOW, imitated=True)])
def test_without_measured_costs_nothing_moves(policy):
    assert "cut_casts" not in rewrite(graph(dense_block()), policy)


def test_outputs_in_whatever_type_they_get_keep_it():
    first = stem()
    join = op("Concat", "join", first, layer("c1", first), dim=1, num_args=2, shape=(2, 128, 32, 32))
    result = graph(layer("out", join), join)
    rewrite(result, Policy(LOW), keep_outputs=False)
    assert [head.dtype for head in result.heads] == [LOW, "float32"]


@pytest.mark.parametrize("costs", [COSTS[LOW], Costs((0.01, 0.02), 0, {})])
def test_large_costs_fit_the_solver(costs):
    tensors = [Tensor(FIXED_LOW, (0,), 10**12), Tensor(0, (1, FIXED_LOW), 3 * 10**12), Tensor(1, (FIXED_FP32,), 10**11)]
    placement = Placement([False, False], [(0, 0), (10**9, 0)], tensors)
    assert cheapest(placement) == [True, True]
    assert placement.cost([True, True]) == 10**11


OPERATORS = st.sampled_from(["Convolution", "softmax", "elemwise_add", "Concat", "clip", "BatchNorm", "BlockGrad"])


@st.composite
def random_graphs(draw):
    """Up to ten operators with random readers and sizes."""
    tensors = [Entry(variable("x", (2, 64, 8, draw(st.sampled_from([8, 64])))))]
    for number in range(draw(st.integers(3, 10))):
        kind, name = draw(OPERATORS), f"n{number}"
        first, second = (draw(st.sampled_from(tensors)) for _ in range(2))
        shape = draw(st.sampled_from([(2, 64, 8, 8), (2, 64, 64, 64), (2, 64, 8, 16), None]))
        if kind == "Convolution":
            made = layer(name, first, shape)
        elif kind == "BatchNorm":
            made = batch_norm(name, first)
            made.shapes = [shape, (64,), (64,)]
        else:
            made = op(kind, name, *([first, second] if kind in ("elemwise_add", "Concat") else [first]), shape=shape)
        tensors.append(Entry(made))
    heads = draw(st.lists(st.sampled_from(tensors[1:]), min_size=1, max_size=3, unique_by=lambda entry: entry.key))
    return graph(*heads)


def all_choices(placement):
    for low in product([False, True], repeat=len(placement.low)):
        if all(low[second] or not low[first] for first, second in placement.implied):
            yield list(low)


@settings(max_examples=150, deadline=None)
@given(random_graphs(), st.sampled_from([COSTS[LOW], BYTES]))
def test_no_choice_costs_less(made, costs):
    context = Context.of(made, Policy(LOW))
    assign_dtypes.run(made, context)
    placement = replace(cut_casts.Choice(made, context, costs).placement, least_share=0)  # takes every gain there is
    found = cheapest(placement)
    assert placement.cost(found) == min(map(placement.cost, all_choices(placement)))
    assert found in list(all_choices(placement))
    if placement.cost(found) == placement.cost(placement.low):
        assert found == placement.low


@settings(max_examples=150, deadline=None)
@given(random_graphs(), st.sampled_from([COSTS[LOW], BYTES]))
def test_what_is_applied_is_what_was_chosen_and_sound(made, costs):
    context = Context.of(made, Policy(LOW))
    assign_dtypes.run(made, context)
    before = precisions(made, context)
    read_in_fp32 = {head.key for head in made.heads}
    choice = cut_casts.Choice(made, context, costs)
    expected = dict(zip((node.name for node in choice.operators), cheapest(choice.placement)))
    choice.apply()
    after = precisions(made, context)
    assert {name: after[name] == LOW for name in expected} == expected
    assert {name: kind for name, kind in after.items() if name not in expected} == \
        {name: kind for name, kind in before.items() if name not in expected}
    for node in made.operators():
        for entry in node.inputs:
            if after.get(entry.node.name) == LOW and before[entry.node.name] == FLOAT32:
                assert LOW in (before[node.name], after[node.name])
                assert entry.key not in read_in_fp32
    place_casts.run(made, context)
    verify.run(made, context)


def precisions(made, context):
    return {node.name: assign_dtypes.data_precision(node, context) for node in made.operators()}


def test_a_deep_graph_takes_little_time():
    x = Entry(variable("data", BIG))
    for number in range(1000):
        norm = batch_norm(f"bn{number}", layer(f"c{number}", x))
        norm.shapes = [BIG, (64,), (64,)]
        x = Entry(op("elemwise_add", f"add{number}", x, op("Activation", f"act{number}", Entry(norm), act_type="relu",
                                                          shape=BIG), shape=BIG))
    made = graph(x)
    context = Context.of(made, Policy(LOW))
    assign_dtypes.run(made, context)
    choice = cut_casts.Choice(made, context, COSTS[LOW])
    assert len(choice.operators) == 2000
    assert len(cheapest(choice.placement)) == 2000


@pytest.mark.bf16
@pytest.mark.parametrize("name", ["mobilenetv3_small", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenetv2_1.0", "densenet121", "yolo3_mobilenet0.25"))])
def test_networks_are_as_close_to_fp32_as_without(name, monkeypatch):
    from zoo import Bench, distance, measured

    bench = Bench(name)
    plain = measured(bench, active=False)
    amp.init("bfloat16")
    found = distance(plain, measured(bench, active=True))
    bench.task.net.hybridize()
    monkeypatch.setattr(cut_casts, "COSTS", {})
    amp.deinit()
    amp.init("bfloat16")
    swept = distance(plain, measured(bench, active=True))
    assert found["not_finite"] == []
    assert all(found[kind] < 1.5 * swept[kind] + 0.01 for kind in ("outputs", "gradients", "batch_gradients")), \
        (found, swept)


@pytest.mark.bf16
def test_explain_says_what_was_saved():
    class Net(mx.gluon.HybridBlock):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            with self.name_scope():
                self.first = mx.gluon.nn.Conv2D(64, 1, in_channels=64)
                self.second = mx.gluon.nn.Conv2D(64, 1, in_channels=64)

        def hybrid_forward(self, F, x):
            return self.second(F.clip(self.first(x), 0, 6))

    net = Net()
    net.initialize()
    net.hybridize()
    amp.init("bfloat16", disable_passes=["native_operators"])  # in C++ clip runs in bfloat16
    (item,) = amp.explain(net, "*clip*", mx.nd.ones((8, 64, 32, 32))).operators
    assert item.operator.observed == "float32"
    assert "in float32 rather than bfloat16: saves about" in item.why
