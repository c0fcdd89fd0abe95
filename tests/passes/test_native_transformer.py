"""Dense layers, LayerNorm and attention in C++: graphs written by hand, and encoders against MXNet's own operators."""
from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd
from mxnet.gluon import HybridBlock, Trainer, nn
from mxnet.gluon.loss import SoftmaxCrossEntropyLoss
from native_cases import assert_close, kinds

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.graph import Entry
from gluon_amp.rules import FP32, Cause, Policy, Rule

ALL = frozenset({"_gluon_amp_layer_norm", "_gluon_amp_batch_dot", "_gluon_amp_dense", "_gluon_amp_attention"})
BATCH, LENGTH, HEADS, UNITS = 4, 32, 4, 128
WISH = Rule(FP32, cause=Cause.USER_LIST)
requires_onednn = pytest.mark.skipif(not native.is_available("_gluon_amp_attention"), reason="oneDNN is missing")


def lines(*heads, target="bfloat16", guarded=(), available=ALL, **policy):
    result = graph(*heads)
    rewrite(result, replace(Policy(target), **policy), accumulated=frozenset(guarded), native=available, check=True)
    return describe(result)


def hidden(*shape):
    return op("relu", "hidden", variable("x", shape), shape=shape)


def dense(data, units=1024, name="fc"):
    shape = data.shapes[0]
    inputs = [data, variable(f"{name}_weight", (units, shape[-1])), variable(f"{name}_bias", (units,))]
    return op("FullyConnected", name, *inputs, shape=(*shape[:-1], units), num_hidden=units, flatten=False)


def layer_norm(data, name="ln"):
    shape = data.shapes[0]
    inputs = [data, variable(f"{name}_gamma", shape[-1:]), variable(f"{name}_beta", shape[-1:])]
    return op("LayerNorm", name, *inputs, outputs=3, shape=shape)


class TestDense:
    def test_weights_are_not_cast(self):
        assert lines(dense(hidden(128, 512))) == [
            "hidden: relu(x) -> float32", "hidden_bfloat16: amp_cast(hidden) -> bfloat16",
            "fc: _gluon_amp_dense(hidden_bfloat16, fc_weight, fc_bias) -> bfloat16",
            "fc_float32: amp_cast(fc) -> float32", "out: fc_float32"]

    def test_in_fp32(self):
        assert "fc: _gluon_amp_dense(hidden, fc_weight, fc_bias) -> float32" in lines(dense(hidden(128, 512)),
                                                                                      target="float32")

    def test_small_and_first_layers_are_mxnets(self):
        assert "fc: _gluon_amp_dense(hidden_bfloat16, fc_weight, fc_bias) -> bfloat16" in lines(dense(hidden(16, 512)))
        for rows, width in ((15, 512), (3000, 255)):
            assert any(line.startswith("fc: FullyConnected") for line in lines(dense(hidden(rows, width))))
        assert any(line.startswith("fc: FullyConnected") for line in lines(dense(variable("x", (128, 512)))))

    def test_gradients_that_accumulate(self):
        result = lines(dense(hidden(128, 512)), guarded=["fc_weight"])
        assert "fc_weight_guard: _mul_scalar(fc_weight) -> float32" in result
        assert "fc: _gluon_amp_dense(hidden_bfloat16, fc_weight_guard, fc_bias) -> bfloat16" in result

    def test_excluded_layers_stay_in_fp32(self):
        result = lines(dense(hidden(128, 512)), excluded=frozenset({"fc"}))
        assert "fc: _gluon_amp_dense(hidden, fc_weight, fc_bias) -> float32" in result


class TestLayerNorm:
    def test_between_dense_layers(self):
        result = lines(dense(layer_norm(dense(hidden(128, 512))), name="next"))
        assert "ln: _gluon_amp_layer_norm(fc, ln_gamma, ln_beta) -> bfloat16" in result
        assert "next: _gluon_amp_dense(ln, next_weight, next_bias) -> bfloat16" in result

    def test_behind_fp32(self):
        result = lines(layer_norm(hidden(128, 512)))
        assert "ln: _gluon_amp_layer_norm(hidden, ln_gamma, ln_beta) -> float32" in result

    def test_in_a_users_list(self):
        result = lines(layer_norm(dense(hidden(128, 512))), overrides={"LayerNorm": (WISH,)})
        assert "ln: _gluon_amp_layer_norm(fc_float32, ln_gamma, ln_beta) -> float32" in result

    def test_followers_follow(self):
        result = lines(dense(op("Activation", "act", layer_norm(dense(hidden(128, 512))), shape=(128, 1024),
                                act_type="relu"), name="next"))
        assert "act: Activation(ln) -> bfloat16" in result


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


def attention(projections, bias=None, axes=(0, 2, 1, 3), softmax=None, head=lambda scores, weights, out: out):
    """Attention as Gluon traces it; ``head`` picks the output."""
    queries, keys, values = projections
    queries = op("_mul_scalar", "scaled", by_head(queries, "q", axes), shape=(BATCH * HEADS, LENGTH, UNITS // HEADS),
                 scalar=0.25)
    square = (BATCH * HEADS, LENGTH, LENGTH)
    scores = op("batch_dot", "scores", queries, by_head(keys, "k"), shape=square, transpose_b=True)
    added = scores
    if bias is not None:
        repeated = op("repeat", "repeated", bias, shape=(BATCH * HEADS, 1, LENGTH), repeats=HEADS, axis=0)
        added = op("broadcast_add", "added", scores, repeated, shape=square)
    weights = op("softmax", "weights", added, shape=square, **(softmax or {"axis": -1}))
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


def with_parts(head):
    """Return a graph in which the parts are outputs of the split."""
    seen, stack = set(), [head]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        node.inputs = [each.node.entry if each.node.op == "Part" else each for each in node.inputs]
        stack += [each.node for each in node.inputs]
    return head


def separate():
    return [variable(name, (BATCH, LENGTH, UNITS)) for name in ("queries", "keys", "values")]


class TestAttention:
    def test_of_one_projection(self):
        result = lines(with_parts(attention(joined())))
        assert result[-4:] == [
            "fc: FullyConnected(hidden_bfloat16, fc_weight_bfloat16, fc_bias_bfloat16) -> bfloat16",
            "att: _gluon_amp_attention(fc) -> bfloat16", "att_float32: amp_cast(att) -> float32", "out: att_float32"]

    def test_attributes(self):
        result = graph(with_parts(attention(joined(), variable("bias", (BATCH, 1, LENGTH)))))
        rewrite(result, Policy("float32"), native=ALL)
        node = result.operators()[-1]
        assert node.attrs == {"layout": "joined", "heads": "4", "scale": "0.25", "operands": "projections,bias"}
        assert describe(result)[-2:] == ["att: _gluon_amp_attention(fc, bias) -> float32", "out: att"]

    def test_of_three_projections(self):
        assert lines(attention(separate()), target="float32") == [
            "att: _gluon_amp_attention(queries, keys, values) -> float32", "out: att"]

    def test_of_three_projections_in_bfloat16(self):
        result = lines(attention(separate()))
        assert "att: _gluon_amp_attention(queries_bfloat16, keys_bfloat16, values_bfloat16) -> bfloat16" in result

    def test_of_three_projections_with_a_bias_between_them(self):
        """The operator reads the graph's inputs in their order."""
        result = lines(attention(separate(), variable("bias", (BATCH, 1, LENGTH))), target="float32")
        assert "att: _gluon_amp_attention(queries, keys, bias, values) -> float32" in result

    def test_one_tensor_may_be_queries_keys_and_values(self):
        queries = separate()[0]
        result = lines(attention([queries] * 3), target="float32")
        assert "att: _gluon_amp_attention(queries, queries, queries) -> float32" in result

    @pytest.mark.parametrize("read", ["scores", "weights"])
    def test_inner_results_that_are_read(self, read):
        def both(scores, weights, out):
            return op("Group", "both", out, {"scores": scores, "weights": weights}[read])

        result = lines(attention(separate(), head=both), target="float32")
        assert not any("_gluon_amp_attention" in line for line in result)

    @pytest.mark.parametrize("softmax", [{"axis": 1}, {"temperature": 2.0}, {"use_length": True}])
    def test_another_softmax(self, softmax):
        assert not any("_gluon_amp_attention" in line for line in lines(attention(separate(), softmax=softmax)))

    def test_another_order_of_heads(self):
        assert not any("_gluon_amp_attention" in line for line in lines(attention(separate(), axes=(0, 2, 3, 1))))

    def test_the_users_lists(self):
        for wish in ({"overrides": {"softmax": (WISH,)}}, {"excluded": frozenset({"scores"})}):
            assert "att: _gluon_amp_attention(queries, keys, values) -> float32" in lines(attention(separate()), **wish)

    def test_only_what_is_there(self):
        result = lines(attention(separate()), available=ALL - {"_gluon_amp_attention"})
        assert any(line.startswith("weights: softmax") for line in result)


class Layer(HybridBlock):
    """A layer of an encoder."""

    def __init__(self, units=UNITS, heads=HEADS, joint=True, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.joint = heads, joint
        with self.name_scope():
            self.projections = nn.Dense(3 * units, flatten=False, in_units=units)
            self.out = nn.Dense(units, flatten=False, in_units=units)
            self.wide = nn.Dense(16 * units, flatten=False, in_units=units)
            self.narrow = nn.Dense(units, flatten=False, in_units=16 * units)
            self.norm1, self.norm2 = nn.LayerNorm(in_channels=units), nn.LayerNorm(in_channels=units)

    def _by_head(self, F, x):
        return F.reshape(F.transpose(F.reshape(x, (0, 0, self.heads, -1)), (0, 2, 1, 3)), (-1, 0, 0), reverse=True)

    def hybrid_forward(self, F, x, bias):
        split = F.split(self.projections(x), num_outputs=3, axis=2)
        if not self.joint:
            split = [F.relu(each) for each in split]
        queries, keys, values = (self._by_head(F, each) for each in split)
        scores = F.batch_dot(queries, keys, transpose_b=True) * 0.125
        scores = F.broadcast_add(scores, F.repeat(bias, repeats=self.heads, axis=0)) if self.joint else scores
        mixed = F.reshape(F.batch_dot(F.softmax(scores), values), (-1, self.heads, 0, 0), reverse=True)
        x = self.norm1(x + self.out(F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1))))
        return self.norm2(x + self.narrow(F.LeakyReLU(self.wide(x), act_type="gelu")))


def network(grad_req="write", joint=True, **flags):
    mx.random.seed(3)
    net = Layer(joint=joint, prefix="layer_")
    net.initialize(mx.init.Xavier())
    net.collect_params().setattr("grad_req", grad_req)
    net.hybridize(**flags)
    return net


def train(net, grad_req, batches=(32, 28)):
    found = []
    for batch in batches:
        random = np.random.RandomState(batch)
        x, bias = mx.nd.array(random.normal(size=(batch, LENGTH, UNITS))), mx.nd.zeros((batch, 1, LENGTH))
        bias[:, :, LENGTH // 2:] = -1e4
        for array in (x, bias):
            array.attach_grad(grad_req)
        net.collect_params().zero_grad()
        for _ in range(2):
            with autograd.record():
                out = net(x, bias)
            out.backward(mx.nd.array(random.normal(size=out.shape)))
        found += [out.asnumpy(), x.grad.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]
    return found


FLAGS = [{"static_alloc": False}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


@requires_onednn
class TestNetworks:
    @pytest.mark.parametrize("joint", [True, False])
    @pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static memory", "static"])
    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_values_and_gradients_are_mxnets(self, flags, grad_req, joint):
        expected = train(network(grad_req, joint, **flags), grad_req)
        amp.init("float32")
        net = network(grad_req, joint, **flags)
        for one, other in zip(train(net, grad_req), expected):
            assert_close(one, other, 5e-6)  # a chain of several operators
        assert {"_gluon_amp_layer_norm", "_gluon_amp_dense"} <= kinds(net)

    @pytest.mark.bf16
    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_in_bfloat16(self, grad_req):
        expected = train(network(grad_req, False, static_alloc=True), grad_req)
        amp.init("bfloat16")
        net = network(grad_req, False, static_alloc=True)
        for one, other in zip(train(net, grad_req), expected):
            assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(other)
        assert {"_gluon_amp_attention", "_gluon_amp_dense"} <= kinds(net)

    @pytest.mark.bf16
    @pytest.mark.slow
    def test_an_encoder_reaches_the_loss_of_fp32(self):
        expected = np.array(losses())
        amp.init("bfloat16")
        received = np.array(losses())
        assert expected[-50:].mean() < 0.5 * expected[:10].mean()
        assert abs(received[-50:].mean() - expected[-50:].mean()) < 0.1 * expected[:10].mean()


def losses(steps=300, batch=16, classes=8):
    """Train to find the most frequent direction of noisy vectors; return the losses."""
    net = nn.HybridSequential()
    mx.random.seed(3)
    body, head = network(), nn.Dense(classes, in_units=UNITS)
    head.initialize(mx.init.Xavier())
    net.add(body, head)
    trainer = Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    if amp.is_active():
        amp.init_trainer(trainer)
    random, loss_of, found = np.random.RandomState(5), SoftmaxCrossEntropyLoss(), []
    directions, bias = random.normal(size=(classes, UNITS)), mx.nd.zeros((batch, 1, LENGTH))
    for _ in range(steps):
        labels = random.randint(classes, size=batch)
        chosen = np.where(random.uniform(size=(batch, LENGTH)) < 0.4, labels[:, None],
                          random.randint(classes, size=(batch, LENGTH)))
        x = mx.nd.array(directions[chosen] + random.normal(size=(batch, LENGTH, UNITS)))
        with autograd.record():
            loss = loss_of(head(body(x, bias).mean(axis=1)), mx.nd.array(labels))
        loss.backward()
        trainer.step(batch)
        found.append(float(loss.mean().asscalar()))
    return found
