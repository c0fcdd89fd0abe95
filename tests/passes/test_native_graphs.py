"""Graphs written by hand, in which operators in C++ take the place of MXNet's: lines that a rewritten graph has."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from graphs import batch_norm, conv, describe, graph, op, rewrite, variable

from gluon_amp.graph import Entry
from gluon_amp.passes.native_operators import NATIVE
from gluon_amp.rules import ANY_DEVICE, FP32, Cause, Device, Policy, Rule

BIG = (4, 128, 64)
BATCH, LENGTH, HEADS, UNITS = 4, 32, 4, 128
SQUARE = (BATCH * HEADS, LENGTH, LENGTH)
ATTENTION = frozenset({"_gluon_amp_attention"})
WISH = Rule(FP32, cause=Cause.USER_LIST)
FACTS = ("recorded", "trains", "converted")


def rewritten(*heads, target="float32", native=NATIVE, guarded=(), device=ANY_DEVICE, **settings):
    """Rewrite a graph; settings are facts, and fields of the policy."""
    result = graph(*heads)
    facts = {name: settings.pop(name) for name in FACTS if name in settings}
    rewrite(result, replace(Policy(target), **settings), device, accumulated=frozenset(guarded), native=native,
            check=True, **facts)
    return result


def lines(*heads, **settings):
    return describe(rewritten(*heads, **settings))


def layer_norm(data, name="ln", **attrs):
    width = data.shapes[0][-1] if data.shapes[0] else 64
    inputs = [data, variable("gamma", (width,)), variable("beta", (width,))]
    node = op("LayerNorm", name, *inputs, outputs=3, shape=data.shapes[0], **attrs)
    node.dtypes = data.dtypes * 3
    return node


def product(a=(8, 64, 64), b=(8, 64, 64), **attrs):
    return op("batch_dot", "dot", variable("a", a), variable("b", b), shape=(a[0], a[1], b[2]), **attrs)


def limited(data, shape=BIG, name="limit"):
    return op("clip", name, data, shape=shape, a_min=0.0, a_max=6.0)


def hidden(*shape, name="hidden"):
    return op("relu", name, variable("x", shape), shape=shape)


def dense(data, units=1024, name="fc"):
    shape = data.shapes[0]
    inputs = [data, variable(f"{name}_weight", (units, shape[-1])), variable(f"{name}_bias", (units,))]
    return op("FullyConnected", name, *inputs, shape=(*shape[:-1], units), num_hidden=units, flatten=False)


def recurrent(mode="lstm", layers=2, p=0.0, joined=True, **attrs):
    """A recurrent layer as Gluon traces it."""
    units, gates = 16, {"lstm": 4, "gru": 3}[mode]
    shapes = [(gates * units, 32), (gates * units, units)] + [(gates * units, units)] * 2 * (layers - 1)
    shapes += [(gates * units,)] * len(shapes)
    parts = [op("Reshape", f"flat{i}", variable(f"w{i}", shape)) for i, shape in enumerate(shapes)]
    for part, shape in zip(parts, shapes):
        part.attrs, part.shapes = {"shape": "(-1,)"}, [(int(np.prod(shape)),)]
    total = (sum(int(np.prod(shape)) for shape in shapes),)
    parameters = op("_rnn_param_concat", "joined", *parts, shape=total) if joined else variable("vector", total)
    states = [variable(f"state{i}", (layers, 4, units)) for i in range(2 if mode == "lstm" else 1)]
    return op("RNN", "rnn", variable("data", (5, 4, 32)), parameters, *states, shape=(5, 4, units), mode=mode, p=p,
              state_size=units, num_layers=layers, **attrs)


def softmax(shape=(128, 128), kind="softmax", lengths=None, name="shares", **attrs):
    inputs = [variable("x", shape)] + ([variable("lengths", shape[:1], lengths)] if lengths else [])
    node = op(kind, name, *inputs, shape=shape)
    node.attrs = {key: str(value) for key, value in attrs.items()}
    return node


def dropout(*more, shape=(256, 512), **attrs):
    """Return heads: dropout, and outputs of it by their number."""
    node = op("Dropout", "drop", hidden(*shape), outputs=2, shape=shape, **attrs)
    return [node, *(Entry(node, output) for output in more)]


def matmul(left, right, kind="_npi_matmul", **attrs):
    shape = attrs.pop("shape", (*left[:-1], *right[-1:]) if len(right) > 1 else left[:-1])
    return op(kind, "product", variable("a", left), variable("b", right), shape=shape, **attrs)


def state(shape=(0, 128, 64)):
    """A first state as unrolled cells make it: MXNet finds its batch looking backward."""
    made = op("_zeros", "state", shape=BIG)
    made.attrs = {"shape": str(shape)}
    return made


CASES = {}
NORM = "ln: _gluon_amp_layer_norm(x, gamma, beta) -> float32"
MXNETS_NORM = "ln: LayerNorm(x, gamma, beta) -> float32"
CLIP = "limit: _gluon_amp_clip(x) -> float32"

for name, wanted, make, settings in [
        ("clip", CLIP, lambda: limited(variable("x", BIG)), {}),
        ("few values", "limit: clip(x) -> float32", lambda: limited(variable("x", (9,)), (9,)), {}),
        ("the pass is off", "limit: clip(x) -> float32", lambda: limited(variable("x", BIG)),
         {"disabled_passes": frozenset({"native_operators"})}),
        ("conversions", "limit: clip(x) -> float32", lambda: limited(variable("x", BIG)), {"training": False}),
        ("imitated", "limit: clip(x) -> float32", lambda: limited(variable("x", BIG)),
         {"target": "float16", "device": Device(imitated=True)}),
        ("nothing is there", MXNETS_NORM, lambda: layer_norm(variable("x", BIG)), {"native": frozenset()}),
        ("one is missing", "dot: batch_dot(a, b) -> float32", product, {"native": NATIVE - {"_gluon_amp_batch_dot"}}),
        ("product", "dot: _gluon_amp_batch_dot(a, b) -> float32", product, {}),
        ("small product", "dot: batch_dot(a, b) -> float32", lambda: product((8, 48, 64), (8, 64, 48)), {}),
        *((f"layer norm over {axis}", MXNETS_NORM, lambda axis=axis: layer_norm(variable("x", BIG), axis=axis), {})
          for axis in (0, 1, 2)),  # also where the axis is the last one today
        ("small norm", MXNETS_NORM, lambda: layer_norm(variable("x", (2, 64))), {}),
        ("narrow norm", MXNETS_NORM, lambda: layer_norm(variable("x", (9000, 4))), {}),
        ("norm of unknown shape", MXNETS_NORM, lambda: layer_norm(variable("x", None)), {}),
        ("norm in float64", MXNETS_NORM.replace("32", "64"), lambda: layer_norm(variable("x", BIG, "float64")), {}),
        ("norm without gradients", NORM, lambda: layer_norm(variable("x", BIG)), {"recorded": False}),
        *((f"{kind} of np {left} {right}", f"product: {taken}(a, b) -> float32",
           lambda left=left, right=right: matmul(left, right), {})
          for kind, taken, left, right in [
              ("pile", "_gluon_amp_batch_dot", (16, 128, 64), (16, 64, 128)),
              ("pile and matrix", "_gluon_amp_batch_dot", (16, 128, 64), (64, 128)),
              ("piles", "_gluon_amp_batch_dot", (4, 4, 128, 64), (4, 4, 64, 128)),
              ("matrices", "_npi_matmul", (2048, 64), (64, 128)),
              ("shared", "_npi_matmul", (16, 128, 64), (1, 64, 128)), ("vector", "_npi_matmul", (16, 128, 64), (64,)),
              ("few", "_npi_matmul", (1, 128, 64), (1, 64, 128))]),
        *((f"gemm2 over {axis}", f"product: {taken}(a, b) -> float32",
           lambda axis=axis: matmul((16, 128, 64), (16, 128, 64), "_linalg_gemm2", shape=(16, 128, 128),
                                    transpose_b=True, axis=axis), {})
          for axis, taken in ((-2, "_gluon_amp_batch_dot"), (1, "_linalg_gemm2"))),
        *((act, f"act: {taken}(x) -> float32",
           lambda act=act: op("LeakyReLU", "act", variable("x", (256, 512)), shape=(256, 512), act_type=act), {})
          for act, taken in (("gelu", "_gluon_amp_gelu"), ("elu", "LeakyReLU"))),
        *((f"dropout {attrs}", "drop: Dropout(hidden) -> float32", lambda attrs=attrs: dropout(**attrs),
           {"target": "bfloat16"})
          for attrs in ({"axes": "(0,)"}, {"p": 0.0}, {"p": 1.0}, {"shape": (16, 512)})),
        ("dropout without gradients", "drop: Dropout(hidden) -> float32", dropout,
         {"recorded": False, "target": "bfloat16"}),
        ("dropout whose mask is read", "drop: Dropout(hidden) -> float32", lambda: dropout(1), {"target": "bfloat16"}),
        ("dropout", "drop: _gluon_amp_dropout(hidden, drop_blockgrad) -> float32", dropout, {"target": "bfloat16"}),
        ("dropout of MXNet's seed", "drop: Dropout(hidden) -> float32", dropout, {}),
        ("dropout of low precision", "drop: _gluon_amp_dropout(fc, drop_blockgrad) -> bfloat16",
         lambda: op("Dropout", "drop", dense(variable("x", (256, 512)), 512), outputs=2, shape=(256, 512)),
         {"target": "bfloat16"}),
        *((f"{kind} {attrs}", f"shares: {'_gluon_amp_' * taken}{kind}(x) -> float32",
           lambda kind=kind, attrs=attrs: softmax(kind=kind, **attrs), {})
          for kind in ("softmax", "log_softmax") for attrs, taken in [
              ({"temperature": 2.0}, True), ({"axis": -1, "temperature": 0.5, "dtype": None}, True), ({}, False),
              ({"temperature": 1.0}, False), ({"temperature": -2.0}, False), ({"temperature": 2.0, "axis": 1}, True),
              ({"axis": 0}, True), ({"axis": 1}, False), ({"temperature": 2.0, "dtype": "float64"}, False)]),
        # oneDNN computes softmax in vectors of eight values, but not the gradient of its logarithm.
        *((f"gradient of {kind} {values} {recorded} {shape}",
           "shares: " + "_gluon_amp_" * (kind == "log_softmax" and values == 8 and recorded and shape[-1] > 2)
           + f"{kind}(x) -> float32", lambda kind=kind, shape=shape: softmax(shape, kind),
           {"recorded": recorded, "device": Device(values)})
          for kind in ("softmax", "log_softmax") for values in (8, 16)
          for recorded, shape in ((True, (128, 128)), (True, (8192, 2)), (False, (128, 128)))),
        *((f"lengths in {dtype}", f"shares: {'_gluon_amp_' * (dtype == 'int32')}softmax(x, lengths) -> float32",
           lambda dtype=dtype: softmax(lengths=dtype, use_length=True), {}) for dtype in ("int32", "int64", "float32")),
        ("softmax of few", "shares: softmax(x) -> float32", lambda: softmax((127, 129), temperature=2.0), {}),
        *((f"dense on {shape}", f"fc: {taken}(data, w, b) -> float32",
           lambda shape=shape: op("FullyConnected", "fc", hidden(*shape, name="data"), variable("w", (512 * 512, 1)),
                                  variable("b", (512 * 512,)), shape=(32, 512 * 512), num_hidden=512 * 512), {})
          for shape, taken in (((32,), "FullyConnected"), ((32, 1), "_gluon_amp_dense"))),
        ("dense", "fc: _gluon_amp_dense(hidden, fc_weight, fc_bias) -> float32", lambda: dense(hidden(128, 512)), {}),
        ("dense in low precision", "fc: _gluon_amp_dense(hidden_bfloat16, fc_weight, fc_bias) -> bfloat16",
         lambda: dense(hidden(16, 512)), {"target": "bfloat16"}),
        ("dense of few rows", "fc: FullyConnected(hidden, fc_weight, fc_bias) -> float32",
         lambda: dense(hidden(15, 512)), {}),
        ("small dense", "fc: FullyConnected(hidden, fc_weight, fc_bias) -> float32",
         lambda: dense(hidden(3000, 255)), {}),
        ("first dense", "fc: FullyConnected(x, fc_weight, fc_bias) -> float32",
         lambda: dense(variable("x", (128, 512))), {}),
        ("excluded dense", "fc: _gluon_amp_dense(hidden, fc_weight, fc_bias) -> float32",
         lambda: dense(hidden(128, 512)), {"target": "bfloat16", "excluded": frozenset({"fc"})}),
        ("norm behind dense", "ln: _gluon_amp_layer_norm(fc, gamma, beta) -> bfloat16",
         lambda: dense(layer_norm(dense(hidden(128, 512))), name="next"), {"target": "bfloat16"}),
        ("dense behind norm", "next: _gluon_amp_dense(ln, next_weight, next_bias) -> bfloat16",
         lambda: dense(layer_norm(dense(hidden(128, 512))), name="next"), {"target": "bfloat16"}),
        ("norm behind FP32", "ln: _gluon_amp_layer_norm(hidden, gamma, beta) -> float32",
         lambda: layer_norm(hidden(128, 512)), {"target": "bfloat16"}),
        ("listed norm", "ln: _gluon_amp_layer_norm(fc_float32, gamma, beta) -> float32",
         lambda: layer_norm(dense(hidden(128, 512))), {"target": "bfloat16", "overrides": {"LayerNorm": (WISH,)}}),
        ("what follows a norm", "act: Activation(ln) -> bfloat16",
         lambda: dense(op("Activation", "act", layer_norm(dense(hidden(128, 512))), shape=(128, 1024),
                          act_type="relu"), name="next"), {"target": "bfloat16"}),
        ("a vector of weights", "rnn: _gluon_amp_rnn(data, vector, state0, state1) -> float32",
         lambda: recurrent(joined=False), {}),
        *((f"recurrent layer with {next(iter(attrs))}", "rnn: RNN(data, joined, state0, state1) -> float32",
           lambda attrs=attrs: recurrent(**attrs), {})
          for attrs in ({"projection_size": 8}, {"lstm_state_clip_min": -1.0}, {"use_sequence_length": True})),
        *((f"state of shape {shape}", "limit: clip(state) -> float32", lambda shape=shape: limited(state(shape)), {})
          for shape in ((0, 128, 64), (-1, 128, 64), ())),
        ("a known state", "limit: _gluon_amp_clip(state) -> float32", lambda: limited(state(BIG)), {}),
        ("sum of unknown", "limit: clip(sum) -> float32",
         lambda: limited(op("broadcast_add", "sum", state(), state(), shape=BIG)), {}),
        ("sum with a known one", "limit: _gluon_amp_clip(sum) -> float32",
         lambda: limited(op("elemwise_add", "sum", state(), variable("x", BIG), shape=BIG)), {})]:
    CASES[name] = make, wanted, settings


@pytest.mark.parametrize("name", CASES)
def test_an_operator_by_itself(name):
    make, wanted, settings = CASES[name]
    made = make()
    assert wanted in lines(*(made if isinstance(made, list) else [made]), **settings)


class TestOperators:
    @pytest.mark.parametrize("output", [1, 2])
    def test_statistics_that_are_read_keep_it(self, output):
        node = layer_norm(variable("x", BIG))
        assert MXNETS_NORM in lines(node, Entry(node, output))
        assert MXNETS_NORM in lines(op("relu", "user", Entry(layer_norm(variable("x", BIG)), output)))

    def test_unknown_shapes_of_parameters(self):
        node = layer_norm(variable("x", BIG))
        node.inputs[1].node.shapes = [None]
        assert MXNETS_NORM in lines(node)

    def test_clip_in_bfloat16_runs_between_convolutions_without_casts(self):
        norm = batch_norm("bn", conv("c", variable("data", (2, 16, 8, 8)), 256, 16))
        norm.shapes = [(2, 256, 8, 8)] * 3
        result = lines(conv("d", limited(Entry(norm), (2, 256, 8, 8)), 32, 256), target="bfloat16")
        assert "limit: _gluon_amp_clip(bn) -> bfloat16" in result
        assert "d: Convolution(limit, d_weight_bfloat16) -> bfloat16" in result

    def test_random_bits_of_dropout(self):
        result = rewritten(*dropout(p=0.1, mode="always"), target="bfloat16")
        drawn = next(node for node in result.operators() if node.name == "drop_dropout")
        assert drawn.attrs == {"p": "0.5", "mode": "always"}


class TestRecurrentLayers:
    @pytest.mark.parametrize("recorded", [True, False])
    @pytest.mark.parametrize("mode", ["lstm", "gru"])
    def test_weights_are_read_where_they_are(self, mode, recorded):
        node = recurrent(mode)
        states = "state0, state1" if mode == "lstm" else "state0"
        assert lines(node, recorded=recorded) == [
            f"rnn: _gluon_amp_rnn(data, w0, w1, w2, w3, w4, w5, w6, w7, {states}) -> float32", "out: rnn"]
        assert (node.attrs["separate"], node.attrs["masks"], node.attrs["training"]) == ("True", "False", str(recorded))
        outputs = (3 if mode == "lstm" else 2) + recorded  # what is kept for a gradient is an output, too
        assert node.num_outputs == len(node.dtypes) == len(node.shapes) == outputs

    @pytest.mark.parametrize("settings", [{"excluded": frozenset({"rnn"})}, {"overrides": {"RNN": (WISH,)}}])
    def test_fp32_where_users_say_so(self, settings):
        node = recurrent()
        rewritten(node, target="bfloat16", **settings)
        assert (node.op, Entry(node).dtype) == ("_gluon_amp_rnn", "float32")
        assert "dtype" not in node.attrs

    def test_the_batch_comes_from_the_data(self):
        layer = recurrent()
        layer.shapes = [BIG]
        for name in ("h", "c"):
            first = op("_zeros", name, shape=(2, 4, 16))
            first.attrs = {"shape": "(2, 0, 16)"}
            layer.inputs[2 + (name == "c")] = Entry(first)
        assert "_gluon_amp_clip" in "".join(lines(limited(layer), native={"_gluon_amp_clip"}))
        layer.inputs[0] = Entry(state())
        assert "_gluon_amp_clip" not in "".join(lines(limited(layer)))


class TestIdentities:
    @pytest.mark.parametrize(("cap", "expected"), [(None, 3), ("3", 8), ("1", 16), ("100", 3)])
    def test_operators_share_them_as_far_as_mxnet_adds_gradients_itself(self, cap, expected, monkeypatch):
        if cap is not None:
            monkeypatch.setenv("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", cap)
        weight, data = variable("w", (512, 512)), [op("relu", f"r{i}", variable(f"x{i}", (16, 512)), shape=(16, 512))
                                                   for i in range(16)]
        layers = [op("FullyConnected", f"fc{i}", each, weight, shape=(16, 512), num_hidden=512, no_bias=True)
                  for i, each in enumerate(data)]
        result = lines(*layers, native={"_gluon_amp_dense"})
        assert sum(line.startswith("w_guard") for line in result) == expected
        assert sum("_gluon_amp_dense" in line for line in result) == 16

    def test_where_mxnet_makes_one_of_equal_operators(self):
        x = variable("x", BIG)
        halves = [op("_mul_scalar", f"half{i}", x, shape=BIG, scalar=0.5) for i in range(8)]
        result = lines(*(limited(half, name=f"limit{i}") for i, half in enumerate(halves)))
        assert all(f"limit{i}: _gluon_amp_clip(half{i}_guard) -> float32" in result for i in range(8))


def is_fused(result):
    return any("_gluon_amp_attention" in line for line in result)


def interleaved(lengths=True, dropout=0.1, heads=HEADS, repeats=HEADS, head=lambda nodes: nodes["mixed"]):
    """Self-attention as GluonNLP's BERT traces it."""
    data = op("relu", "data", variable("x", (LENGTH, BATCH, 3 * UNITS)), shape=(LENGTH, BATCH, 3 * UNITS))
    scores = op("_contrib_interleaved_matmul_selfatt_qk", "scores", data, heads=heads, shape=SQUARE)
    inputs, attrs = [scores], {"axis": -1}
    if lengths:
        wide = op("expand_dims", "wide", variable("lengths", (BATCH, LENGTH), "int32"), axis=1, dtype="int32",
                  shape=(BATCH, 1, LENGTH))
        repeated = op("broadcast_axis", "repeated", wide, axis=1, size=repeats, dtype="int32",
                      shape=(BATCH, repeats, LENGTH))
        flat = op("Reshape", "flat", repeated, reverse=True, dtype="int32", shape=(BATCH * repeats, LENGTH))
        flat.attrs["shape"] = "(-1, 0)"
        inputs, attrs = [scores, flat], {"axis": -1, "use_length": True}
    weights = softmax = op("softmax", "softmax", *inputs, shape=SQUARE, **attrs)
    if dropout is not None:
        weights = op("Dropout", "drop", softmax, outputs=2, shape=SQUARE, p=dropout)
    mixed = op("_contrib_interleaved_matmul_selfatt_valatt", "mixed", data, weights, heads=HEADS,
               shape=(LENGTH, BATCH, UNITS))
    return head({"data": data, "scores": scores, "softmax": softmax, "weights": weights, "mixed": mixed})


def of_memory(keys=LENGTH + 9, heads=HEADS, another=False):
    """Attention of a decoder to what an encoder gives."""
    queries = op("relu", "queries", variable("x", (LENGTH, BATCH, UNITS)), shape=(LENGTH, BATCH, UNITS))
    memory = op("relu", "memory", variable("y", (keys, BATCH, 2 * UNITS)), shape=(keys, BATCH, 2 * UNITS))
    square = (BATCH * HEADS, LENGTH, keys)
    scores = op("_contrib_interleaved_matmul_encdec_qk", "scores", queries, memory, heads=heads, shape=square)
    softmax = op("softmax", "softmax", scores, shape=square, axis=-1)
    values = op("relu", "values", memory, shape=(keys, BATCH, 2 * UNITS)) if another else memory
    return op("_contrib_interleaved_matmul_encdec_valatt", "mixed", values, softmax, heads=HEADS,
              shape=(LENGTH, BATCH, UNITS))


class TestInterleavedAttention:
    def test_another_may_read_the_projections(self):
        both = interleaved(head=lambda nodes: op("Group", "both", nodes["data"], nodes["mixed"]))
        assert "mixed: _gluon_amp_attention(data_bfloat16, lengths, drop_blockgrad) -> bfloat16" in lines(
            both, native=ATTENTION, target="bfloat16")

    @pytest.mark.parametrize(("read", "output"), [("scores", 0), ("softmax", 0), ("weights", 0), ("weights", 1)])
    def test_inner_results_that_are_read(self, read, output):
        def both(nodes):
            return op("Group", "both", nodes["mixed"], Entry(nodes[read], output))

        assert not is_fused(lines(interleaved(head=both), target="bfloat16"))

    def test_outputs_that_are_returned(self):
        result = interleaved(head=lambda nodes: nodes)
        assert not is_fused(lines(result["mixed"], result["softmax"], target="bfloat16"))

    @pytest.mark.parametrize("head", [
        lambda: interleaved(heads=2), lambda: interleaved(repeats=2), lambda: interleaved(dropout=1.0),
        lambda: of_memory(heads=2), lambda: of_memory(another=True)])
    def test_what_does_not_belong_together(self, head):
        assert not is_fused(lines(head()))


def by_head(data, name, axes=(0, 2, 1, 3)):
    batch, length, units = data.shapes[0]
    width = units // HEADS
    split = op("Reshape", f"{name}_split", data, shape=(batch, length, HEADS, width))
    split.attrs = {"shape": f"(0, 0, {HEADS}, -1)"}
    moved = op("transpose", f"{name}_moved", split, shape=(batch, HEADS, length, width), axes=axes)
    joined = op("Reshape", name, moved, shape=(batch * HEADS, length, width))
    joined.attrs = {"shape": "(-1, 0, 0)", "reverse": "True"}
    return joined


def from_heads(data, name):
    count, length, width = data.shapes[0]
    split = op("Reshape", f"{name}_split", data, shape=(count // HEADS, HEADS, length, width))
    split.attrs = {"shape": f"(-1, {HEADS}, 0, 0)", "reverse": "True"}
    moved = op("transpose", f"{name}_moved", split, shape=(count // HEADS, length, HEADS, width), axes=(0, 2, 1, 3))
    joined = op("Reshape", name, moved, shape=(count // HEADS, length, HEADS * width))
    joined.attrs = {"shape": "(0, 0, -1)"}
    return joined


def attention(projections=None, bias=None, axes=(0, 2, 1, 3), softmax=None, head=lambda scores, weights, out: out):
    """Attention as Gluon traces it; ``head`` picks the output."""
    queries, keys, values = projections or separate()
    queries = op("_mul_scalar", "scaled", by_head(queries, "q", axes), shape=(BATCH * HEADS, LENGTH, UNITS // HEADS),
                 scalar=0.25)
    scores = op("batch_dot", "scores", queries, by_head(keys, "k"), shape=SQUARE, transpose_b=True)
    added = scores
    if bias is not None:
        repeated = op("repeat", "repeated", bias, shape=(BATCH * HEADS, 1, LENGTH), repeats=HEADS, axis=0)
        added = op("broadcast_add", "added", scores, repeated, shape=SQUARE)
    weights = op("softmax", "weights", added, shape=SQUARE, **(softmax or {"axis": -1}))
    mixed = op("batch_dot", "mixed", weights, by_head(values, "v"), shape=(BATCH * HEADS, LENGTH, UNITS // HEADS))
    return head(scores, weights, from_heads(mixed, "att"))


def joined():
    """Queries, keys and values as parts of one projection."""
    data = dense(hidden(BATCH, LENGTH, UNITS), 3 * UNITS)
    split = op("SliceChannel", "split", data, outputs=3, shape=(BATCH, LENGTH, UNITS), num_outputs=3, axis=2)
    parts = []
    for output in range(3):
        part = op("Part", "part")
        part.shapes, part.entry = [(BATCH, LENGTH, UNITS)], Entry(split, output)
        parts.append(part)
    return parts


def separate():
    return [variable(name, (BATCH, LENGTH, UNITS)) for name in ("queries", "keys", "values")]


class TestAttention:
    @pytest.mark.parametrize("change", [
        {"head": lambda scores, weights, out: op("Group", "both", out, scores)},  # inner results that are read
        {"head": lambda scores, weights, out: op("Group", "both", out, weights)},
        {"softmax": {"axis": 1}}, {"softmax": {"temperature": 2.0}}, {"axes": (0, 2, 3, 1)}])
    def test_another(self, change):
        assert not is_fused(lines(attention(**change)))

    @pytest.mark.parametrize("wish", [{"overrides": {"softmax": (WISH,)}}, {"excluded": frozenset({"scores"})}])
    def test_the_users_lists(self, wish):
        assert "att: _gluon_amp_attention(queries, keys, values) -> float32" in lines(attention(), target="bfloat16",
                                                                                     **wish)


def converted_lines(*heads, training=False, **settings):
    """Rewrite a converted graph, as it is when it is about to run."""
    return lines(*heads, target="bfloat16", training=training, converted=True, recorded=False, **settings)


def between_dense_layers():
    """Attention as a conversion leaves it: FP32 between casts."""
    def cast(node, dtype):
        return op("amp_cast", f"{node.name}_{dtype}", node, shape=node.shapes[0], dtype=dtype)

    shape = (LENGTH, BATCH, 3 * UNITS)
    low = op("FullyConnected", "before", variable("x", shape, "bfloat16"), shape=shape, dtype="bfloat16")
    nodes, wide = interleaved(False, None, head=lambda found: found), cast(low, "float32")
    for name in ("scores", "mixed"):
        nodes[name].inputs[0] = nodes[name].inputs[0]._replace(node=wide)
    last = cast(nodes["mixed"], "bfloat16")
    return op("FullyConnected", "after", last, shape=(LENGTH, BATCH, UNITS), dtype="bfloat16"), nodes["mixed"]


class TestConverted:
    def test_users_of_fp32_get_it(self):
        assert converted_lines(*between_dense_layers()) == [
            "before: FullyConnected(x) -> bfloat16", "mixed: _gluon_amp_attention(before) -> bfloat16",
            "after: FullyConnected(mixed) -> bfloat16", "mixed_float32: amp_cast(mixed) -> float32",
            "out: after, mixed_float32"]
