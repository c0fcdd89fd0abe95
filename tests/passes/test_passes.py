"""Rewrites against graphs written by hand. No MXNet: these run anywhere."""
from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import batch_norm, conv, describe, graph, op, rewrite, rewritten, variable

from gluon_amp import GraphError
from gluon_amp.graph import Entry, Role
from gluon_amp.graph.attrs import region_mark
from gluon_amp.passes import Context, driver
from gluon_amp.passes.driver import verify
from gluon_amp.rules import Policy, make_policy


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


def users_lists():
    known = {name: name for name in ("Convolution", "FullyConnected", "relu")}
    return make_policy("bfloat16", known, fp32_ops=["Convolution"])


def dense(x=None):
    return op("FullyConnected", "fc", x or variable("x", (2, 16)), variable("w", (4, 16)))


def after(kind, name, **attrs):
    return op(kind, name, conv("c", data(), 16, 16), **attrs)


@pytest.mark.parametrize(("target", "head", "line"), [
    ("bfloat16", lambda: op("elemwise_add", "sum", conv("c", data(), 16, 16), variable("x")),
     "sum: elemwise_add(c_float32, x) -> float32"),
    ("bfloat16", lambda: after("softmax", "prob"), "prob: softmax(c_float32) -> float32"),
    ("bfloat16", lambda: op("relu", "r", data()), "r: relu(data) -> float32"),
    ("bfloat16", lambda: conv("stem", data(3), 64, 3), "stem: Convolution(data, stem_weight) -> float32"),
    ("float16", lambda: conv("stem", data(3), 64, 3),
     "stem: Convolution(data_float16, stem_weight_float16) -> float16"),
    ("bfloat16", lambda: after("Activation", "a", act_type="softsign"), "a: Activation(c_float32) -> float32"),
    *(("bfloat16", lambda dtype=dtype: op("pick", "p", dense(), variable("index", (2,), dtype)),
       "p: pick(fc_float32, index) -> float32") for dtype in ("int32", "int64", "float64", "bool", None)),
    *(("bfloat16", lambda dtype=dtype: op("Convolution", "c", variable("index", (2,), dtype), variable("w"),
                                          dtype=dtype), "out: c")
      for dtype in ("int32", "int64", "float64", "bool", None)),
    (users_lists(), lambda: conv("c", data(), 16, 16), "c: Convolution(data, c_weight) -> float32"),
    (users_lists(), dense, "fc: FullyConnected(x_bfloat16, w_bfloat16) -> bfloat16")])
def test_the_type_of_an_operator(target, head, line):
    policy = Policy(target) if isinstance(target, str) else target
    assert line in rewritten(policy.target_dtype, head(), policy=policy)


def test_operands_read_for_their_shape_only_are_not_computed():
    feature = conv("feature", data(), 16, 16)
    anchors = op("slice_like", "a", variable("anchors"), op("_mul_scalar", "zero", feature, scalar=0))
    assert rewritten("bfloat16", anchors)[-4:] == [
        "a_shape: BlockGrad(feature) -> bfloat16", "a_shape_float32: amp_cast(a_shape) -> float32",
        "a: slice_like(anchors, a_shape_float32) -> float32", "out: a"]


def test_operands_read_for_their_shape_only_belong_to_the_region_of_their_user():
    mark = region_mark("on")
    one, two = (conv(name, data(), 16, 16, **mark) for name in ("one", "two"))
    zero = op("_mul_scalar", "zero", two, shape=(2, 16, 8, 8), scalar=0, **mark)
    result = graph(op("slice_like", "s", one, zero, shape=(2, 16, 8, 8), **mark))
    rewrite(result, Policy("bfloat16"), everywhere=False, check=True)
    assert describe(result)[-4:] == [
        "s_shape: BlockGrad(two) -> bfloat16", "s: slice_like(one, s_shape) -> bfloat16",
        "s_float32: amp_cast(s) -> float32", "out: s_float32"]


def test_outputs_stay_fp32():
    c = conv("c", data(), 16, 16)
    assert rewritten("bfloat16", op("softmax", "prob", c), c)[-1] == "out: prob, c_float32"


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

    @pytest.mark.parametrize(("damage", "message"), [
        (lambda made, nodes: setattr(nodes["prob"], "inputs", [Entry(nodes["c"])]),
         "needs float32 from .*'c'.*bfloat16"),
        (lambda made, nodes: setattr(nodes["c_float32"], "inputs", [Entry(nodes["c_weight"])]),
         "casts float32 to itself"),
        (lambda made, nodes: setattr(made, "heads", [Entry(nodes["c"])]), "output .*'c'.* is bfloat16"),
        (lambda made, nodes: setattr(nodes["c_float32"], "name", "c"), "'c'"),
        (lambda made, nodes: (setattr(nodes["c_float32"], "dtypes", ["float16"]),
                              setattr(nodes["c_float32"], "attrs", {"dtype": "float16"})),
         "without FP32 in between")])
    def test_faults(self, damage, message):
        made, nodes = self.result()
        damage(made, nodes)
        self.check(made, message)

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
