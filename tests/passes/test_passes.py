"""Rewrites against graphs written by hand. No MXNet: these run anywhere."""
from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import batch_norm, conv, describe, graph, op, rewrite, rewritten, variable

from gluon_amp import GraphError
from gluon_amp.graph import Entry, Role, cast
from gluon_amp.graph.attrs import region_mark
from gluon_amp.passes import Context, driver
from gluon_amp.passes.verify import verify
from gluon_amp.rules import ANY_DEVICE, Device, Policy, make_policy


def data(channels=16):
    return variable("data", (2, channels, 8, 8))


def test_a_block_runs_in_low_precision_with_casts_at_its_edges_only():
    first = op("Activation", "relu", Entry(batch_norm("bn", conv("c1", data(), 32, 16))), act_type="relu")
    assert rewritten("bfloat16", conv("c2", first, 32, 32)) == [
        "data_bfloat16: amp_cast(data) -> bfloat16",
        "c1_weight_bfloat16: amp_cast(c1_weight) -> bfloat16",
        "c1: Convolution(data_bfloat16, c1_weight_bfloat16) -> bfloat16",
        "bn: BatchNorm(c1, bn_gamma, bn_beta, bn_mean, bn_var) -> bfloat16",
        "relu: Activation(bn) -> bfloat16",
        "c2_weight_bfloat16: amp_cast(c2_weight) -> bfloat16",
        "c2: Convolution(relu, c2_weight_bfloat16) -> bfloat16",
        "c2_float32: amp_cast(c2) -> float32",
        "out: c2_float32",
    ]


def test_a_tensor_is_cast_once_for_all_its_readers():
    weight = variable("weight", (16, 16, 3, 3))
    x = data()
    convs = [conv(f"c{i}", x, 16, 16, weight=weight) for i in range(3)]
    result = rewritten("bfloat16", op("add_n", "sum", *convs))
    assert [line for line in result if "amp_cast" in line] == [
        "data_bfloat16: amp_cast(data) -> bfloat16", "weight_bfloat16: amp_cast(weight) -> bfloat16",
        "sum_float32: amp_cast(sum) -> float32"]


def test_fp32_operators_get_fp32_and_both_outputs_stay_fp32():
    c = conv("c", data(), 16, 16)
    result = rewritten("bfloat16", op("softmax", "prob", c), c)
    assert result[-3:] == ["c_float32: amp_cast(c) -> float32", "prob: softmax(c_float32) -> float32",
                           "out: prob, c_float32"]


def test_mixed_inputs_widen():
    c, x = conv("c", data(), 16, 16), variable("x")
    assert "sum: elemwise_add(c_float32, x) -> float32" in rewritten("bfloat16", op("elemwise_add", "sum", c, x))


def test_neutral_operators_follow_their_data():
    x = variable("x", (2, 16, 8, 8))
    assert rewritten("bfloat16", op("relu", "r", x)) == ["r: relu(x) -> float32", "out: r"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float64", "bool", None])
def test_other_types_are_never_cast(dtype):
    index = variable("index", (2,), dtype)
    x = variable("x", (2, 16))
    result = rewritten("bfloat16", op("pick", "p", op("FullyConnected", "fc", x, variable("w", (4, 16))), index))
    assert "p: pick(fc_float32, index) -> float32" in result
    assert rewritten("bfloat16", op("Convolution", "c", index, variable("w"), dtype=dtype))[-1] == "out: c"


def test_few_input_channels_stay_fp32():
    stem = conv("stem", data(3), 64, 3)
    assert rewritten("bfloat16", stem) == ["stem: Convolution(data, stem_weight) -> float32", "out: stem"]
    assert "stem: Convolution(data_float16, stem_weight_float16) -> float16" in rewritten("float16", stem)


def test_conditional_rules_read_the_attribute():
    soft = op("Activation", "a", conv("c", data(), 16, 16), act_type="softsign")
    assert "a: Activation(c_float32) -> float32" in rewritten("bfloat16", soft)


def test_channels_are_padded_to_the_multiple_and_cut_again():
    head = conv("head", data(), 20, 16, bias=True)
    result = rewritten("bfloat16", op("Activation", "relu", head, act_type="relu"))
    assert result == [
        "data_bfloat16: amp_cast(data) -> bfloat16",
        "head_weight_zeros: _zeros() -> float32",
        "head_weight_padded: Concat(head_weight, head_weight_zeros) -> float32",
        "head_weight_padded_bfloat16: amp_cast(head_weight_padded) -> bfloat16",
        "head_bias_zeros: _zeros() -> float32",
        "head_bias_padded: Concat(head_bias, head_bias_zeros) -> float32",
        "head_bias_padded_bfloat16: amp_cast(head_bias_padded) -> bfloat16",
        "head: Convolution(data_bfloat16, head_weight_padded_bfloat16, head_bias_padded_bfloat16) -> bfloat16",
        "head_unpad: slice_axis(head) -> bfloat16",
        "relu: Activation(head_unpad) -> bfloat16",
        "relu_float32: amp_cast(relu) -> float32",
        "out: relu_float32",
    ]


def test_padding_says_the_shapes_it_needs():
    head = conv("head", data(), 20, 16)
    result = graph(head)
    rewrite(result, Policy("bfloat16"))
    nodes = {node.name: node for node in result.nodes()}
    assert nodes["head"].attrs["num_filter"] == "32"
    assert nodes["head_weight_zeros"].attrs["shape"] == "(12, 16, 3, 3)"
    assert nodes["head_weight"].attrs["__shape__"] == "(20, 16, 3, 3)"
    assert (nodes["head_unpad"].attrs["axis"], nodes["head_unpad"].attrs["end"]) == ("1", "20")


@pytest.mark.parametrize(("filters", "target", "padded"), [
    (32, "bfloat16", None), (24, "bfloat16", 32), (4, "bfloat16", None), (20, "float16", 24), (24, "float16", None)])
def test_only_what_gains_is_padded(filters, target, padded):
    result = graph(conv("c", data(), filters, 16))
    rewrite(result, Policy(target), check=True)
    attrs = next(node for node in result.operators() if node.op == "Convolution").attrs
    assert attrs["num_filter"] == str(padded or filters)


@pytest.mark.parametrize(("amx", "training", "padded"), [(True, True, False), (False, True, True)])
def test_before_batch_norm_amx_takes_odd_channel_counts_as_they_are(amx, training, padded):
    policy = Policy("bfloat16", training=training)
    norm = batch_norm("bn", conv("c", data(32), 40, 32, kernel=3))
    lines = rewritten("bfloat16", op("Activation", "relu", Entry(norm), act_type="relu"), policy=policy,
                      device=Device(32, amx=amx))
    assert any("slice_axis" in line for line in lines) == padded


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_groups_unknown_shapes_and_channels_behind_the_map_are_not_padded(target):
    grouped = conv("g", data(), 20, 8, num_group=2)
    unknown = conv("u", data(), 20, 16, weight=variable("w"))
    last = op("Convolution", "last", variable("images", (2, 8, 8, 16)), variable("last_weight", (20, 3, 3, 16)),
              num_filter=20, kernel=(3, 3), no_bias=True, layout="NHWC", shape=(2, 8, 8, 20))
    lines = rewritten(target, grouped, unknown, last)
    assert not [line for line in lines if "_zeros" in line]


AMX = Device(32, amx=True)


def test_with_amx_a_strided_stem_reads_squares_of_pixels_as_channels():
    stem = conv("stem", data(3), 64, 3, kernel=7, stride=(2, 2), pad=(3, 3))
    assert rewritten("bfloat16", stem, device=AMX) == [
        "data_bfloat16: amp_cast(data) -> bfloat16",
        "stem_select: _eye() -> float32",
        "stem_select1: Reshape(stem_select) -> float32",
        "stem_select2: Pad(stem_select1) -> float32",
        "stem_select2_bfloat16: amp_cast(stem_select2) -> bfloat16",
        "stem_squares: Convolution(data_bfloat16, stem_select2_bfloat16) -> bfloat16",
        "stem_weight_bfloat16: amp_cast(stem_weight) -> bfloat16",
        "stem_weight_squares: Convolution(stem_weight_bfloat16, stem_select2_bfloat16) -> bfloat16",
        "stem: Convolution(stem_squares, stem_weight_squares) -> bfloat16",
        "stem_float32: amp_cast(stem) -> float32",
        "out: stem_float32"]
    assert (stem.attrs["kernel"], stem.attrs["stride"], stem.attrs["pad"]) == ("(4, 4)", "(1, 1)", "(0, 0)")
    assert stem.inputs[1].shape == (64, 32, 4, 4)


def test_even_filters_need_no_zeros_around_them():
    stem = conv("stem", data(4), 64, 4, kernel=4, stride=(2, 2), pad=(1, 1))
    assert not any("Pad" in line for line in rewritten("bfloat16", stem, device=AMX))
    assert stem.inputs[0].node.attrs["pad"] == "(1, 1)"
    assert stem.attrs["kernel"] == "(2, 2)"


@pytest.mark.parametrize(("attrs", "channels", "device", "training"), [
    *((attrs, 3, AMX, True) for attrs in (
        {"stride": (1, 1)}, {"stride": (2, 1)}, {"kernel": 1}, {"kernel": 2}, {"dilate": (2, 2)}, {"layout": "NHWC"},
        {"filters": 8}, {"pad": (1, 0)})),
    ({}, 12, AMX, True), ({}, 3, ANY_DEVICE, True), ({}, 3, AMX, False),
    ({}, 3, Device(amx=True, imitated=True), True)])
def test_other_convolutions_keep_their_stride(attrs, channels, device, training):
    filters = attrs.pop("filters", 64)
    stem = conv("stem", data(channels), filters, channels, **{"kernel": 7, "stride": (2, 2), "pad": (3, 3), **attrs})
    stride = stem.attrs["stride"]
    policy = Policy("bfloat16", training=training)
    assert not any("_squares" in line for line in rewritten("bfloat16", stem, policy=policy, device=device))
    assert stem.attrs["stride"] == stride
    if training:
        assert stem.inputs[0].dtype == "float32"


def test_accumulated_gradients_and_grouped_weights_get_a_guard():
    c = conv("c", data(), 16, 1, num_group=16)
    result = rewritten("bfloat16", op("FullyConnected", "fc", c, variable("w"), variable("b")), accumulated=["w"])
    assert [line for line in result if "guard" in line] == [
        "c_weight_guard: _mul_scalar(c_weight) -> float32",
        "c_weight_bfloat16: amp_cast(c_weight_guard) -> bfloat16",
        "w_guard: _mul_scalar(w) -> float32",
        "w_bfloat16: amp_cast(w_guard) -> bfloat16"]


def test_accumulated_gradients_of_terms_of_a_sum_get_a_guard():
    total = op("elemwise_add", "total", variable("x", (2, 16, 8, 8)), variable("y", (2, 16, 8, 8)))
    result = rewritten("bfloat16", conv("c", total, 16, 16), accumulated=["x"])
    assert [line for line in result if "guard" in line or line.startswith("total")] == [
        "x_guard: _mul_scalar(x) -> float32", "total: elemwise_add(x_guard, y) -> float32",
        "total_bfloat16: amp_cast(total) -> bfloat16"]


def test_operands_read_for_their_shape_only_are_not_computed():
    feature = conv("feature", data(), 16, 16)
    anchors = op("slice_like", "a", variable("anchors"), op("_mul_scalar", "zero", feature, scalar=0))
    assert rewritten("bfloat16", anchors)[-4:] == [
        "a_shape: BlockGrad(feature) -> bfloat16", "a_shape_float32: amp_cast(a_shape) -> float32",
        "a: slice_like(anchors, a_shape_float32) -> float32", "out: a"]


def test_operands_read_for_their_shape_only_belong_to_the_region_of_their_reader():
    mark = region_mark("on")
    one, two = (conv(name, data(), 16, 16, **mark) for name in ("one", "two"))
    zero = op("_mul_scalar", "zero", two, shape=(2, 16, 8, 8), scalar=0, **mark)
    result = graph(op("slice_like", "s", one, zero, shape=(2, 16, 8, 8), **mark))
    rewrite(result, Policy("bfloat16"), everywhere=False, check=True)
    assert describe(result)[-4:] == [
        "s_shape: BlockGrad(two) -> bfloat16", "s: slice_like(one, s_shape) -> bfloat16",
        "s_float32: amp_cast(s) -> float32", "out: s_float32"]


def test_hidden_outputs_of_batch_norm_stay_fp32():
    bn = batch_norm("bn", conv("c", data(), 16, 16))
    assert rewritten("bfloat16", Entry(bn), Entry(bn, 1))[-1] == "out: bn_float32, bn.1"


def test_casts_of_the_users_own_are_left_alone():
    own = op("amp_cast", "own", data(), dtype="bfloat16")
    own.dtypes, own.attrs["dtype"] = ["bfloat16"], "bfloat16"
    lines = rewritten("bfloat16", conv("c", own, 16, 16), own)
    assert "c: Convolution(own, c_weight_bfloat16) -> bfloat16" in lines
    assert lines[-1] == "out: c_float32, own"


def test_a_graph_without_low_precision_is_left_alone():
    x = variable("x")
    result = graph(op("softmax", "s", op("relu", "r", x)))
    assert not any(rewrite(result, Policy("bfloat16"), check=True).values())


def test_names_that_are_taken_are_avoided():
    other = op("relu", "data_bfloat16", data())
    result = rewritten("bfloat16", conv("c", data(), 16, 16), other)
    assert "data_bfloat161: amp_cast(data) -> bfloat16" in result


def test_user_lists_come_first():
    known = {name: name for name in ("Convolution", "FullyConnected", "relu")}
    policy = make_policy("bfloat16", known, fp32_ops=["Convolution"])
    x = variable("x", (2, 16))
    c = conv("c", data(), 16, 16)
    lines = rewritten("bfloat16", c, op("FullyConnected", "fc", x, variable("w")), policy=policy)
    assert "c: Convolution(data, c_weight) -> float32" in lines
    assert "fc: FullyConnected(x_bfloat16, w_bfloat16) -> bfloat16" in lines


def test_every_node_says_who_put_it_there():
    grouped = conv("c", data(), 16, 1, num_group=16)
    clip = op("clip", "clip", Entry(batch_norm("bn", conv("odd", grouped, 20, 16))), shape=(2, 20, 8, 8), a_min=0.0,
              a_max=6.0)
    made = graph(conv("out", clip, 32, 20))
    own = {node.name for node in made.nodes()}
    rewrite(made, Policy("bfloat16"))
    roles = {node.name: node.role for node in made.nodes()}
    assert {name for name, role in roles.items() if role is Role.OWN} == own
    assert roles["c_weight_guard"] is Role.IDENTITY
    assert roles["c_weight_bfloat16"] is roles["out_float32"] is Role.CAST
    assert roles["odd_unpad"] is roles["odd_weight_zeros"] is roles["clip_relu"] is Role.HELPER


def test_casts_that_imitate_a_type_are_told_from_others():
    made = graph(op("FullyConnected", "fc", variable("x", (2, 16)), variable("w", (4, 16))))
    rewrite(made, Policy("float16"), Device(imitated=True))
    roles = {node.name: node.role for node in made.operators()}
    assert roles["x_float16"] is roles["fc_float32"] is Role.CAST
    assert {name for name, role in roles.items() if role is Role.ROUNDING} == {
        "x_float16_raised", "w_float16_raised", "fc_rounded"}


def test_passes_are_written_in_their_order():
    names = [each.name for each in driver.PASSES]
    late = [(each.name, other) for each in driver.PASSES for other in each.after
            if names.index(other) > names.index(each.name)]
    assert late == []


class TestVerifier:
    """Each fault that a rewrite could make is found and named, with the pass that made it."""

    context = Context(Policy("bfloat16"), outputs=("float32",))

    def result(self):
        made = graph(op("softmax", "prob", conv("c", data(), 16, 16)))
        rewrite(made, self.context.policy)
        return made, {node.name: node for node in made.nodes()}

    def check(self, made, message, variables=None):
        names = variables or tuple(node.name for node in made.variables())
        with pytest.raises(GraphError, match=message):
            verify(made, replace(self.context, variables=names), ["place_casts"])

    def test_a_missing_cast(self):
        made, nodes = self.result()
        nodes["prob"].inputs = [Entry(nodes["c"])]
        self.check(made, "needs float32 from .*'c'.*bfloat16")

    @pytest.mark.parametrize("name", ["carry_scale", "split_concat"])
    def test_the_pass_is_named(self, name, monkeypatch):
        def broken(made, context):
            made.nodes()[-1].role, made.nodes()[-1].name = Role.CAST, "c"  # a name of the program's
            return 1

        broken.__name__ = name
        passes = tuple(replace(each, run=broken, applies=lambda context: True) if each.name == name else each
                       for each in driver.PASSES)
        monkeypatch.setattr(driver, "PASSES", passes)
        with pytest.raises(GraphError, match=f"not sound behind the pass {name}: the name 'c' of a new node was taken"):
            rewrite(graph(op("softmax", "prob", conv("c", data(), 16, 16))), self.context.policy, check=True)

    def test_a_cast_to_the_same_type(self):
        made, nodes = self.result()
        nodes["c_float32"].inputs = [Entry(nodes["c_weight"])]
        self.check(made, "casts float32 to itself")

    def test_a_second_cast_of_a_tensor(self):
        made, nodes = self.result()
        twin = cast(Entry(nodes["data"]), "bfloat16", "twin").node
        nodes["c"].inputs = [nodes["c"].inputs[0], Entry(twin)]
        nodes["c_float32"].inputs = [Entry(nodes["c"])]
        self.check(made, "cast to bfloat16 2 times|was|2 times")

    def test_an_output_of_another_type(self):
        made, nodes = self.result()
        made.heads = [Entry(nodes["c"])]
        self.check(made, "output .*'c'.* is bfloat16")

    def test_a_name_used_twice(self):
        made, nodes = self.result()
        nodes["c_float32"].name = "c"
        self.check(made, "'c'")

    def test_inputs_in_another_order(self):
        made, _ = self.result()
        self.check(made, "the inputs were", ("c_weight", "data"))

    def test_low_precision_to_low_precision(self):
        made, nodes = self.result()
        nodes["c_float32"].dtypes, nodes["c_float32"].attrs = ["float16"], {"dtype": "float16"}
        self.check(made, "without FP32 in between")
