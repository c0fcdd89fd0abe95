"""Which kernels are chosen: the cheapest of all assignments, by rates of CPUs, and what may not be chosen."""
from __future__ import annotations

import json
import random
from itertools import product
from math import inf

import pytest
from graphs import graph, op, rewrite, variable
from test_channels_last import block, blocks, conv, norm, plain

from gluon_amp.graph import Entry, Node
from gluon_amp.machine import costs
from gluon_amp.machine.costs import CALL, CAST, KERNELS, OPERATORS, TRANSPOSE, Kernel, Layer, Measured, Rates, rates_of
from gluon_amp.machine.host import Cpu
from gluon_amp.passes import kernels
from gluon_amp.passes.channels_last import NATIVE
from gluon_amp.rules import LOWER, Cause, Device, Policy, Rule

NONE = Cpu("another", 1, 1)
WIDE = (2, 16, 6, 6)


def rates(**layers):
    """Return rates by which pointwise convolutions cost so much in each kernel, and hardly anything else costs."""
    made = tuple(Measured(Layer((side, side), 1, 16, 16, 72), costs_, (0.0,) * 4)
                 for side, costs_ in ((1, layers["pointwise"]), (3, layers.get("others", layers["pointwise"]))))
    return Rates(NONE, "AVX2", 1.0, made, {**dict.fromkeys(OPERATORS, (0.0,) * 4),
                                           **dict.fromkeys((TRANSPOSE, CAST, CALL), (layers.get("by", 1e-3),))})


def planned(head, measured, policy=None, mixes=True, device=None):
    made = graph(head)
    rewrite(made, policy or Policy("bfloat16"), device or Device(16, mixes=mixes, measured=measured), trains=True,
            native=NATIVE, keep_outputs=False, check=True)
    return {node.name: (node.op, Entry(node).dtype, node.decision) for node in made.operators()}


class TestCheapest:
    @pytest.mark.parametrize("seed", range(30))
    def test_along_trees_none_is_cheaper(self, seed):
        draw = random.Random(seed)
        members = [kernels._Member(
            Node(draw.choice(("Convolution", "BatchNorm", "clip")), str(number)),
            [draw.choice((inf, draw.random(), draw.random())) for _ in KERNELS[1:]] + [draw.random()],
            [(draw.randrange(number), 1000, draw.random() < 0.3)] if number and draw.random() < 0.9 else [])
            for number in range(6)]
        measured = rates(pointwise=(1, 1, 1, 1), by=draw.random() / 4)
        least = min(kernels._total(members, choice, measured)
                    for choice in product(range(len(KERNELS)), repeat=len(members)))
        found = kernels._total(members, kernels._cheapest(members, measured), measured)
        assert found == pytest.approx(least)

    def test_at_joins_it_is_no_worse_than_one_kernel_for_all(self):
        draw = random.Random(0)
        for _ in range(50):
            members = [kernels._Member(Node("elemwise_add", str(number)), [draw.random() for _ in KERNELS],
                                       [(draw.randrange(number), 1000, False) for _ in range(2)]
                                       if number else []) for number in range(8)]
            measured = rates(pointwise=(1, 1, 1, 1), by=0.1)
            found = kernels._total(members, kernels._cheapest(members, measured), measured)
            assert found <= min(kernels._total(members, [kernel] * 8, measured) for kernel in range(len(KERNELS)))


@pytest.mark.parametrize(("node", "milliseconds"), [
    (conv("image", variable("data", WIDE)), 2.0),  # two of three parts: an image has no gradient
    (conv("larger", plain((4, *WIDE[1:]))), 6.0),  # twice the images
    (op("FullyConnected", "dense", plain((72, 16)), variable("weight", (16, 16)), shape=(72, 16)), 3.0),
    (op("Pooling", "pool", plain((1, 1, 10 ** 3, 10 ** 3)), shape=(1, 1, 10, 10)), 1.0),  # of its data, and a call
], ids=lambda value: getattr(value, "name", ""))
def test_the_time_of_an_operator(node, milliseconds):
    """A layer of 16 channels and 72 pixels takes 3 ms; moving a million values takes 0.5, and so does a call."""
    measured = rates(pointwise=(3.0, 9.0, 9.0, 9.0), by=0.5)
    assert kernels.predicted(node, KERNELS[0], measured) == pytest.approx(milliseconds)
    thin = op("FullyConnected", "thin", plain((1, 1000)), variable("weight", (1000, 1000)), shape=(1, 1000))
    assert kernels.predicted(thin, KERNELS[0], rates(pointwise=(1e-6,) * 4, by=0.5)) == 0.5  # to move its weight


class TestChoice:
    def test_each_kernel_where_it_is_the_fastest(self):
        for number, kernel in enumerate(KERNELS):
            made = planned(blocks("ab", plain(WIDE)), rates(pointwise=[0.0 if number == i else 9.0 for i in range(4)]))
            op, dtype, _ = made["b"]
            assert (op == "_gluon_amp_convolution", dtype == "bfloat16") == (kernel.nhwc, kernel.low)

    def test_both_types_in_one_network(self):
        wide = Entry(conv("large", blocks("ab", plain(WIDE)), kernel=(3, 3), pad=(1, 1)))
        made = planned(blocks("cd", wide), rates(pointwise=(9, 9, 9, 0), others=(9, 0, 9, 9)))
        assert [made[name][1] for name in ("a", "b", "large", "c", "d")] == [
            "bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"]
        assert made["large"][2].cause is Cause.DEVICE

    def test_low_precision_that_was_asked_for_on_a_slow_cpu_is_kept(self):
        made = planned(blocks("ab", plain(WIDE)), rates(pointwise=(0, 0, 9, 9)), mixes=False)
        assert made["a"][1] == "bfloat16"

    def test_what_transpositions_cost_is_counted(self):
        assert planned(block("a", plain(WIDE)), rates(pointwise=(9, 0, 9, 0), by=20.0))["a"][0] == "Convolution"
        assert planned(block("a", plain(WIDE)), rates(pointwise=(9, 0, 9, 0), by=0.1))["a"][0] != "Convolution"

    def test_sums_of_sums_are_looked_at_once(self):
        data = block("a", plain(WIDE))
        for number in range(60):
            data = Entry(op("elemwise_add", f"sum{number}", data, data, shape=WIDE))
        assert planned(data, rates(pointwise=(9, 0, 9, 0)), Policy("float32"))["a"][0] == "_gluon_amp_convolution"

    def test_users_wishes_are_not_overruled(self):
        policy = Policy("bfloat16", excluded=frozenset({"a"}))
        made = planned(blocks("ab", plain(WIDE)), rates(pointwise=(9, 9, 9, 0)), policy)
        assert (made["a"][1], made["b"][1]) == ("float32", "bfloat16")

    def test_batch_norm_of_mxnet_never_stands_before_a_transposition(self):
        """Its gradient would come from one, in plain layout, for which oneDNN has loops of reference only."""
        head = Entry(norm("n", Entry(conv("c", Entry(norm("m", conv("b", plain(WIDE), kernel=(3, 3), pad=(1, 1))))))))
        made = planned(head, rates(pointwise=(9, 0, 9, 9), others=(0, 9, 9, 9)), Policy("float32"))
        assert [made[name][0] for name in "bmcn"] == ["Convolution", "_gluon_amp_batch_norm", "_gluon_amp_convolution",
                                                      "_gluon_amp_batch_norm"]


class TestRates:
    def test_rows_are_complete(self):
        for row in costs._rows():
            assert row.layers
            assert set(row.maps) == {*OPERATORS, TRANSPOSE, CAST, CALL}
            assert all(len(each.convolution) == len(each.batch_norm) == len(KERNELS) and min(each.convolution) > 0
                       for each in row.layers)

    def test_rows_of_the_user_come_first(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        own = json.loads(costs._FILE.read_text())["rows"][0]
        costs.own_file().parent.mkdir()
        costs.own_file().write_text(json.dumps({"rows": [{**own, "gain": 7.0}]}))
        costs._rows.cache_clear()
        try:
            assert rates_of(Cpu(*own["cpu"]), own["isa"]).gain == 7.0
        finally:
            costs._rows.cache_clear()

    def test_a_layer_costs_what_the_most_similar_one_costs(self):
        measured = rates(pointwise=(1, 2, 3, 4), others=(10, 20, 30, 40))
        assert measured.convolution(Layer((1, 1), 1, 32, 16, 72)) == [2, 4, 6, 8]
        assert measured.convolution(Layer((3, 3), 1, 16, 16, 36)) == [5, 10, 15, 20]
        assert measured.conversion(10 ** 6, Kernel(False, False), Kernel(True, False)) == pytest.approx(2e-3)


@pytest.mark.parametrize(("device", "groups", "channels", "side", "is_nhwc"), [
    # Without AVX512 oneDNN computes these as products of matrices: odd channels, and large depthwise filters.
    (Device(8), 12, 12, 3, True), (Device(8), 64, 64, 5, True), (Device(8), 1, 64, 3, False),
    # With it, BatchNorm behind groups of few channels runs by loops of reference.
    (Device(16), 32, 128, 3, True), (Device(16), 58, 58, 3, True), (Device(16), 1, 64, 3, False)])
def test_what_mxnet_has_no_good_kernels_for_runs_in_cpp(device, groups, channels, side, is_nhwc):
    data = plain((4, channels, 28, 28))
    for name, number, width in (("a", 1, 1), ("b", groups, side), ("c", 1, 1)):
        data = Entry(norm(f"{name}_norm", Entry(conv(name, data, num_group=number, kernel=(width, width),
                                                     pad=(width // 2, width // 2)))))
    made = planned(data, None, Policy("float32"), device=device)
    assert (made["b"][0] != "Convolution") == is_nhwc


@pytest.mark.parametrize(("rows", "uses", "settings", "dtype"), [
    (8, 1, {}, "float32"), (16, 1, {}, "bfloat16"),
    (8, 2, {}, "bfloat16"),  # as in a cell that is unrolled, whose weight is cast once for all steps
    (8, 1, {"trains": False}, "bfloat16"), (8, 1, {"device": Device(16)}, "bfloat16"),
    (8, 1, {"policy": Policy("bfloat16", {"FullyConnected": (Rule(LOWER, cause=Cause.USER_LIST),)})}, "bfloat16")])
def test_dense_layers_of_few_rows_train_in_fp32(rows, uses, settings, dtype):
    """A cast of the weight, and of its gradient, takes longer than bfloat16 saves; both would be kept twice."""
    weight, data = variable("weight", (1024, 1024)), variable("data", (rows, 1024))
    heads = [Entry(op("FullyConnected", f"dense{number}", data, weight, shape=(rows, 1024), num_hidden=1024,
                      no_bias=True)) for number in range(uses)]
    made = graph(*heads)
    settings = {"policy": Policy("bfloat16"), "device": Device(16, mixes=True), "trains": True, "keep_outputs": False,
                "native": frozenset({"_gluon_amp_dense"}), **settings}
    rewrite(made, settings.pop("policy"), settings.pop("device"), check=True, **settings)
    assert {node.name: Entry(node).dtype for node in made.operators()}["dense0"] == dtype
