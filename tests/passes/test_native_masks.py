"""Attention in C++ with masks, lengths and dropout: graphs as GluonNLP traces them, and cells against MXNet."""
from __future__ import annotations

from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock, nn
from native_cases import assert_close, kinds

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.graph import Entry
from gluon_amp.rules import ANY_DEVICE, Device, Policy

SOFTMAX = frozenset({"_gluon_amp_softmax", "_gluon_amp_log_softmax"})
ALL = SOFTMAX | frozenset({"_gluon_amp_attention", "_gluon_amp_dropout", "_gluon_amp_gelu", "_gluon_amp_batch_dot"})
BATCH, LENGTH, HEADS, UNITS = 4, 32, 4, 128
SQUARE = (BATCH * HEADS, LENGTH, LENGTH)
requires_onednn = pytest.mark.skipif(not native.is_available("_gluon_amp_attention"), reason="oneDNN is missing")


def rewritten(*heads, target="float32", available=ALL, guarded=(), recorded=True, device=ANY_DEVICE, **policy):
    result = graph(*heads)
    rewrite(result, replace(Policy(target), **policy), device, native=available, check=True, recorded=recorded,
            accumulated=frozenset(guarded))
    return describe(result), {node.name: node for node in result.operators()}


def is_fused(lines):
    return any("_gluon_amp_attention" in line for line in lines)


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


class TestMemory:
    @pytest.mark.parametrize("target", ["float32", "bfloat16"])
    def test_of_a_decoder(self, target):
        lines, nodes = rewritten(of_memory(), target=target)
        suffix = "" if target == "float32" else "_bfloat16"
        assert f"mixed: _gluon_amp_attention(memory{suffix}, queries{suffix}) -> {target}" in lines
        assert nodes["mixed"].attrs == {"layout": "interleaved", "heads": "4", "scale": repr(32 ** -0.5),
                                        "operands": "keys_values,queries"}

    @pytest.mark.parametrize("change", [{"heads": 2}, {"another": True}])
    def test_products_that_do_not_belong_together(self, change):
        assert not is_fused(rewritten(of_memory(**change))[0])


class TestInterleaved:
    def test_with_lengths_and_dropout(self):
        lines, nodes = rewritten(interleaved())
        assert lines == [
            "data: relu(x) -> float32", "drop_ones: _ones() -> float32", "drop_dropout: Dropout(drop_ones) -> float32",
            "drop_blockgrad: BlockGrad(drop_dropout) -> float32",
            "mixed: _gluon_amp_attention(data, lengths, drop_blockgrad) -> float32", "out: mixed"]
        assert nodes["mixed"].attrs == {"layout": "interleaved", "heads": "4", "scale": repr(32 ** -0.5), "p": "0.1",
                                        "operands": "projections,lengths,bits"}
        assert nodes["drop_dropout"].attrs == {"p": "0.5"}

    def test_without_either(self):
        assert rewritten(interleaved(False, None))[0] == [
            "data: relu(x) -> float32", "mixed: _gluon_amp_attention(data) -> float32", "out: mixed"]

    def test_in_bfloat16(self):
        lines, _ = rewritten(interleaved(), target="bfloat16")
        assert "mixed: _gluon_amp_attention(data_bfloat16, lengths, drop_blockgrad) -> bfloat16" in lines

    def test_another_may_read_the_projections(self):
        lines, _ = rewritten(interleaved(head=lambda nodes: op("Group", "both", nodes["data"], nodes["mixed"])))
        assert "mixed: _gluon_amp_attention(data, lengths, drop_blockgrad) -> float32" in lines

    @pytest.mark.parametrize("read", ["scores", "softmax", "weights"])
    def test_inner_results_that_are_read(self, read):
        def both(nodes):
            return op("Group", "both", nodes["mixed"], nodes[read])

        assert not is_fused(rewritten(interleaved(head=both))[0])

    def test_masks_of_dropout_that_are_read(self):
        def both(nodes):
            return op("Group", "both", nodes["mixed"], Entry(nodes["weights"], 1))

        lines, _ = rewritten(interleaved(head=both))
        assert not is_fused(lines)
        assert "drop: Dropout(softmax) -> float32" in lines

    @pytest.mark.parametrize("change", [{"heads": 2}, {"repeats": 2}, {"dropout": 1.0}])
    def test_what_does_not_fit(self, change):
        assert not is_fused(rewritten(interleaved(**change))[0])

    def test_outputs_that_are_returned(self):
        result = interleaved(head=lambda nodes: nodes)
        assert not is_fused(rewritten(result["mixed"], result["softmax"])[0])


def dropout(*more, shape=(256, 512), **attrs):
    """Return heads: dropout of a variable, and outputs of it by their number."""
    node = op("Dropout", "drop", op("relu", "data", variable("x", shape), shape=shape), outputs=2, shape=shape, **attrs)
    return [node, *(Entry(node, output) for output in more)]


class TestElementwise:
    """Dropout and GELU by themselves."""

    def test_dropout(self):
        lines, nodes = rewritten(*dropout(p=0.1, mode="always"))
        assert lines[-2:] == ["drop: _gluon_amp_dropout(data, drop_blockgrad) -> float32", "out: drop"]
        assert nodes["drop_dropout"].attrs == {"p": "0.5", "mode": "always"}

    def test_dropout_has_the_precision_of_its_data(self):
        wide = [variable("weight", (512, 512)), variable("bias", (512,))]
        dense = op("FullyConnected", "fc", variable("x", (256, 512)), *wide, shape=(256, 512), num_hidden=512)
        lines, _ = rewritten(op("Dropout", "drop", dense, outputs=2, shape=(256, 512)), target="bfloat16")
        assert "drop: _gluon_amp_dropout(fc, drop_blockgrad) -> bfloat16" in lines

    def test_dropout_where_nobody_asks_for_gradients(self):
        assert "drop: Dropout(data) -> float32" in rewritten(*dropout(), recorded=False)[0]

    @pytest.mark.parametrize("attrs", [{"axes": "(0,)"}, {"p": 0.0}, {"p": 1.0}, {"shape": (16, 512)}])
    def test_other_dropout(self, attrs):
        assert "drop: Dropout(data) -> float32" in rewritten(*dropout(**attrs))[0]

    def test_dropout_whose_mask_is_read(self):
        assert "drop: Dropout(data) -> float32" in rewritten(*dropout(1))[0]

    @pytest.mark.parametrize(("kind", "taken"), [("gelu", "_gluon_amp_gelu"), ("elu", "LeakyReLU")])
    def test_gelu(self, kind, taken):
        act = op("LeakyReLU", "act", variable("x", (256, 512)), shape=(256, 512), act_type=kind)
        assert rewritten(act)[0] == [f"act: {taken}(x) -> float32", "out: act"]

    @pytest.mark.parametrize(("axis", "taken"), [(-2, "_gluon_amp_batch_dot"), (1, "_linalg_gemm2")])
    def test_products(self, axis, taken):
        left, right = variable("a", (16, 128, 64)), variable("b", (16, 128, 64))
        product = op("_linalg_gemm2", "product", left, right, shape=(16, 128, 128), transpose_b=True, axis=axis)
        assert rewritten(product)[0] == [f"product: {taken}(a, b) -> float32", "out: product"]


    @pytest.mark.parametrize(("left", "right", "taken"), [
        ((16, 128, 64), (16, 64, 128), "_gluon_amp_batch_dot"), ((16, 128, 64), (64, 128), "_gluon_amp_batch_dot"),
        ((4, 4, 128, 64), (4, 4, 64, 128), "_gluon_amp_batch_dot"), ((2048, 64), (64, 128), "_npi_matmul"),
        ((16, 128, 64), (1, 64, 128), "_npi_matmul"), ((16, 128, 64), (64,), "_npi_matmul"),
        ((1, 128, 64), (1, 64, 128), "_npi_matmul")])
    def test_products_of_numpy(self, left, right, taken):
        shape = (*left[:-1], *right[-1:]) if len(right) > 1 else left[:-1]
        product = op("_npi_matmul", "product", variable("a", left), variable("b", right), shape=shape)
        assert rewritten(product)[0] == [f"product: {taken}(a, b) -> float32", "out: product"]


class TestSoftmax:
    @pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
    @pytest.mark.parametrize(("attrs", "replaced"), [
        ({"temperature": 2.0}, True), ({"axis": -1, "temperature": 0.5, "dtype": None}, True), ({}, False),
        ({"temperature": 1.0}, False), ({"temperature": -2.0}, False), ({"temperature": 2.0, "axis": 1}, True),
        ({"axis": 0}, True), ({"axis": 1}, False),
        ({"temperature": 2.0, "dtype": "float64"}, False)])
    def test_what_onednn_does_not_run(self, kind, attrs, replaced):
        node = op(kind, "shares", variable("x", (128, 128)), shape=(128, 128))
        node.attrs = {name: str(value) for name, value in attrs.items()}
        assert rewritten(node)[0] == [f"shares: {'_gluon_amp_' * replaced}{kind}(x) -> float32", "out: shares"]

    @pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
    @pytest.mark.parametrize("values", [8, 16])
    @pytest.mark.parametrize(("recorded", "shape"), [(True, (128, 128)), (True, (8192, 2)), (False, (128, 128))])
    def test_gradients_without_kernels(self, kind, values, recorded, shape):
        """MXNet's oneDNN computes softmax in vectors of eight values, but not the gradient of its logarithm."""
        node = op(kind, "shares", variable("x", shape), shape=shape)
        lines, _ = rewritten(node, recorded=recorded, device=Device(values))
        replaced = kind == "log_softmax" and values == 8 and recorded and shape[-1] > 2
        assert lines == [f"shares: {'_gluon_amp_' * replaced}{kind}(x) -> float32", "out: shares"]

    @pytest.mark.parametrize(("dtype", "replaced"), [("int32", True), ("int64", False), ("float32", False)])
    def test_lengths(self, dtype, replaced):
        lengths = variable("lengths", (128,), dtype)
        node = op("softmax", "shares", variable("x", (128, 128)), lengths, shape=(128, 128), use_length=True)
        other = op("softmax", "others", variable("y", (128, 128)), lengths, shape=(128, 128), use_length=True)
        op_name = "_gluon_amp_softmax" if replaced else "softmax"
        assert rewritten(node, other)[0] == [
            f"shares: {op_name}(x, lengths) -> float32", f"others: {op_name}(y, lengths) -> float32",
            "out: shares, others"]

    def test_few_values(self):
        node = op("softmax", "shares", variable("x", (127, 129)), shape=(127, 129), temperature=2.0)
        assert rewritten(node)[0][0] == "shares: softmax(x) -> float32"


class Plain(HybridBlock):
    """Softmax with lengths and a temperature of a product of np arrays' operator, and what reads it twice."""

    def hybrid_forward(self, F, x, lengths):
        shares = F.softmax(F.broadcast_mul(x, x), F.cast(lengths, "int32"), use_length=True, temperature=3.0)
        return shares * F.log_softmax(x, temperature=0.5)


@pytest.mark.skipif(not native.is_available("_gluon_amp_softmax"), reason=native.load()[0].missing)
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("static", [False, True])
def test_softmax_in_a_network(grad_req, static):
    x, lengths = nd.random.normal(shape=(8, 64, 64)), nd.array(np.random.RandomState(1).randint(65, size=(8, 64)))

    def results():
        net = Plain()
        net.hybridize(static_alloc=static, static_shape=static)
        for array in (x, lengths):
            array.attach_grad(grad_req)
        for _ in range(2):
            with autograd.record():
                out = net(x, lengths)
            out.backward(x)
        return net, [out.asnumpy(), x.grad.asnumpy(), lengths.grad.asnumpy()]

    _, expected = results()
    amp.init("float32")
    net, received = results()
    for one, other in zip(received, expected):
        assert_close(one, other, 2e-6)
    assert {"_gluon_amp_softmax", "_gluon_amp_log_softmax"} <= kinds(net)
    found = amp.report(net, [x, lengths])
    assert {row.op for row in found.operators if row.native} == {"softmax", "log_softmax"}


@requires_onednn
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_products_of_numpy_in_a_network(grad_req):
    class Products(HybridBlock):
        def hybrid_forward(self, F, x, w):
            y = F.np.matmul(x, w)
            return F.np.matmul(y, F.np.swapaxes(x, 1, 2))

    random = np.random.RandomState(2)

    def results():
        net = Products()
        net.hybridize()
        x = mx.np.array(random_x.astype(np.float32))
        w = mx.np.array(random_w.astype(np.float32))
        for array in (x, w):
            array.attach_grad(grad_req)
        for _ in range(2):
            with autograd.record():
                out = net(x, w)
            out.backward()
        return net, [array.asnumpy() for array in (out, x.grad, w.grad)]

    random_x, random_w = random.normal(size=(16, 128, 64)), random.normal(size=(64, 64))
    mx.npx.set_np()
    try:
        _, expected = results()
        amp.init("float32")
        net, received = results()
        assert "_gluon_amp_batch_dot" in kinds(net)
    finally:
        amp.deinit()
        mx.npx.reset_np()
    for one, other in zip(received, expected):
        assert_close(one, other, 2e-6)


class Cell(HybridBlock):
    """Attention in one of the forms of GluonNLP, between dense layers."""

    def __init__(self, kind, dropout, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        with self.name_scope():
            self.projections = nn.Dense(3 * UNITS, flatten=False, in_units=UNITS)
            self.out = nn.Dense(UNITS, flatten=False, in_units=UNITS)
            self.memory = nn.Dense(2 * UNITS, flatten=False, in_units=UNITS)
            self.dropout = nn.Dropout(dropout)

    def hybrid_forward(self, F, x, extra):
        return self.out({"lengths": self._of_lengths, "mask": self._of_mask, "memory": self._of_memory}[self.kind](
            F, x, extra))

    def _of_memory(self, F, x, memory):
        queries = F.slice_axis(self.projections(F.swapaxes(x, 0, 1)), axis=2, begin=0, end=UNITS)
        keys_values = self.memory(F.swapaxes(memory, 0, 1))
        scores = F.contrib.interleaved_matmul_encdec_qk(queries, keys_values, heads=HEADS)
        weights = self.dropout(F.softmax(scores, axis=-1))
        return F.swapaxes(F.contrib.interleaved_matmul_encdec_valatt(keys_values, weights, heads=HEADS), 0, 1)

    def _of_lengths(self, F, x, lengths):
        joined = self.projections(F.swapaxes(x, 0, 1))
        scores = F.contrib.interleaved_matmul_selfatt_qk(joined, heads=HEADS)
        lengths = F.broadcast_axis(F.expand_dims(F.cast(lengths, "int32"), axis=1), axis=1, size=HEADS)
        weights = F.softmax(scores, length=F.reshape(lengths, (-1, 0), reverse=True), use_length=True, axis=-1)
        mixed = F.contrib.interleaved_matmul_selfatt_valatt(joined, self.dropout(weights), heads=HEADS)
        return F.swapaxes(mixed, 0, 1)

    def _by_head(self, F, x):
        return F.reshape(F.transpose(F.reshape(x, (0, 0, HEADS, -1)), (0, 2, 1, 3)), (-1, 0, 0), reverse=True)

    def _of_mask(self, F, x, mask):
        queries, keys, values = (self._by_head(F, F.relu(each))
                                 for each in F.split(self.projections(x), num_outputs=3, axis=2))
        mask = F.reshape(F.broadcast_axis(F.expand_dims(mask, axis=1), axis=1, size=HEADS), (-1, 0, 0), reverse=True)
        scores = F.batch_dot(F.contrib.div_sqrt_dim(queries), keys, transpose_b=True)
        weights = F.softmax(F.where(mask, scores, -1e4 * F.ones_like(scores)), axis=-1) * mask
        weights = F.reshape(self.dropout(weights), (-1, HEADS, 0, 0), reverse=True)
        mixed = F.batch_dot(F.reshape(weights, (-1, 0, 0), reverse=True), values)
        mixed = F.reshape(mixed, (-1, HEADS, 0, 0), reverse=True)
        return F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (0, 0, -1))


def network(kind, dropout=0.0, grad_req="write", **flags):
    mx.random.seed(3)
    net = Cell(kind, dropout, prefix="cell_")
    net.initialize(mx.init.Xavier())
    net.collect_params().setattr("grad_req", grad_req)
    net.hybridize(**flags)
    return net


def train(net, grad_req="write", batches=(8, 6), seed=None):
    found = []
    for batch in batches:
        random = np.random.RandomState(batch)
        x = nd.array(random.normal(size=(batch, LENGTH, UNITS)))
        extra = random.randint(LENGTH + 1, size=(batch, LENGTH))
        if net.kind == "mask":
            extra = random.uniform(size=(batch, LENGTH, LENGTH)) < 0.6
            extra[0, 3] = False  # all positions off
        elif net.kind == "memory":
            extra = random.normal(size=(batch, LENGTH + 9, UNITS))
        extra = nd.array(extra)
        for array in (x, extra):
            array.attach_grad(grad_req)
        net.collect_params().zero_grad()
        if seed is not None:
            mx.random.seed(seed)
        for _ in range(2):
            with autograd.record():
                out = net(x, extra)
            out.backward(nd.array(random.normal(size=out.shape)))
        found += [out.asnumpy(), *(each.grad.asnumpy() for each in (x, extra)),
                  *(p.grad().asnumpy() for p in net.collect_params().values() if p._data is not None)]
    return found


FLAGS = [{"static_alloc": False}, {"static_alloc": True, "static_shape": True}]


@requires_onednn
@pytest.mark.parametrize("kind", ["lengths", "mask", "memory"])
@pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static"])
class TestCells:
    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_values_and_gradients_are_mxnets(self, kind, flags, grad_req):
        expected = train(network(kind, 0.0, grad_req, **flags), grad_req)
        amp.init("float32")
        net = network(kind, 0.0, grad_req, **flags)
        for one, other in zip(train(net, grad_req), expected):
            assert_close(one, other, 5e-6)
        assert "_gluon_amp_attention" in kinds(net)

    @pytest.mark.bf16
    def test_in_bfloat16(self, kind, flags):
        expected = train(network(kind, **flags))
        amp.init("bfloat16")
        net = network(kind, **flags)
        for one, other in zip(train(net), expected):
            assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(other)
        assert "_gluon_amp_attention" in kinds(net)

    def test_dropout_follows_the_seed(self, kind, flags):
        amp.init("float32")
        net = network(kind, 0.4, **flags)
        one, same, other = (train(net, seed=seed) for seed in (1, 1, 2))
        for first, second in zip(one, same):
            np.testing.assert_array_equal(first, second)
        assert any((first != second).any() for first, second in zip(one, other))

    def test_dropout_keeps_the_mean_and_does_nothing_in_inference(self, kind, flags):
        x, extra = nd.random.normal(shape=(8, LENGTH, UNITS)), nd.full((8, LENGTH), LENGTH)
        extra = {"lengths": extra, "mask": nd.ones((8, LENGTH, LENGTH)), "memory": x[:, 3:]}[kind]
        expected = network(kind, 0.4, **flags)(x, extra).asnumpy()
        amp.init("float32")
        net = network(kind, 0.4, **flags)
        assert_close(net(x, extra).asnumpy(), expected, 5e-6)
        with autograd.record(train_mode=False):
            assert_close(net(x, extra).asnumpy(), expected, 5e-6)
        total = 0
        for _ in range(60):
            with autograd.record():
                total = total + net(x, extra)
        assert np.linalg.norm(total.asnumpy() / 60 - expected) < 0.2 * np.linalg.norm(expected)
        assert "_gluon_amp_attention" in kinds(net)
