"""Attention in converted networks: in bfloat16 where MXNet has no kernel, and of MXNet's operators in files."""
from __future__ import annotations

import numpy as np
import pytest
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd, nd
from mxnet.gluon import SymbolBlock
from native_cases import assert_close
from test_native_masks import ALL, BATCH, LENGTH, UNITS, interleaved, network
from test_native_transformer import network as encoder

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.plan.cached_op import prepared_operations
from gluon_amp.rules import Policy

requires_onednn = pytest.mark.skipif(not native.is_available("_gluon_amp_attention"), reason="oneDNN is missing")
KINDS = ["lengths", "mask", "memory", "joint", "apart"]


def converted_lines(*heads, training=False, **settings):
    """Rewrite a converted graph, as it is when it is about to run."""
    result = graph(*heads)
    rewrite(result, Policy("bfloat16", training=training, **settings), native=ALL, converted=True, check=True,
                   recorded=False)
    return describe(result)


def cast(node, dtype):
    return op("amp_cast", f"{node.name}_{dtype}", node, shape=node.shapes[0], dtype=dtype)


def between_dense_layers():
    """Attention as a conversion leaves it: FP32 between casts."""
    shape = (LENGTH, BATCH, 3 * UNITS)
    low = op("FullyConnected", "before", variable("x", shape, "bfloat16"), shape=shape, dtype="bfloat16")
    nodes = interleaved(False, None, head=lambda found: found)
    wide = cast(low, "float32")
    for name in ("scores", "mixed"):
        nodes[name].inputs[0] = nodes[name].inputs[0]._replace(node=wide)
    last = cast(nodes["mixed"], "bfloat16")
    return op("FullyConnected", "after", last, shape=(LENGTH, BATCH, UNITS), dtype="bfloat16"), nodes["mixed"]


class TestGraphs:
    def test_casts_go(self):
        assert converted_lines(between_dense_layers()[0]) == [
            "before: FullyConnected(x) -> bfloat16", "mixed: _gluon_amp_attention(before) -> bfloat16",
            "after: FullyConnected(mixed) -> bfloat16", "out: after"]

    def test_readers_of_fp32_get_it(self):
        assert converted_lines(*between_dense_layers()) == [
            "before: FullyConnected(x) -> bfloat16", "mixed: _gluon_amp_attention(before) -> bfloat16",
            "after: FullyConnected(mixed) -> bfloat16", "mixed_float32: amp_cast(mixed) -> float32",
            "out: after, mixed_float32"]

    @pytest.mark.parametrize("setting", [{"excluded": frozenset({"mixed"})}, {"training": True}])
    def test_fp32_where_it_is_wanted(self, setting):
        assert "mixed: _gluon_amp_attention(before_float32) -> float32" in converted_lines(
            between_dense_layers()[0], **setting)


def made(kind):
    """Return a network with attention, and its inputs."""
    random = np.random.RandomState(7)

    def normal(*shape):
        return nd.array(random.normal(size=shape))

    if kind in ("joint", "apart"):
        bias = nd.zeros((BATCH, 1, LENGTH))
        bias[:, :, LENGTH // 2:] = -1e4
        return encoder(joint=kind == "joint"), [normal(BATCH, LENGTH, UNITS), bias]
    extra = {"lengths": nd.array(random.randint(1, LENGTH, size=(BATCH, LENGTH))),
             "mask": nd.array(random.uniform(size=(BATCH, LENGTH, LENGTH)) < 0.6),
             "memory": normal(BATCH, LENGTH + 9, UNITS)}[kind]
    return network(kind), [normal(BATCH, LENGTH, UNITS), extra]


def attention_of(net):
    ((_, operation),) = prepared_operations(net)
    return [node for node in operation.latest.graph.operators() if node.op == "_gluon_amp_attention"]


@requires_onednn
@pytest.mark.bf16
@pytest.mark.parametrize("kind", KINDS)
class TestNetworks:
    def test_values(self, kind):
        net, inputs = made(kind)
        expected = net(*inputs).asnumpy()
        converted = amp.convert_hybrid_block(net, "bfloat16", data_example=inputs)
        received = converted(*inputs).asnumpy()
        assert np.linalg.norm(received - expected) <= 0.02 * np.linalg.norm(expected)
        assert [node.dtypes for node in attention_of(converted)] == [["bfloat16"]]
        with autograd.record(train_mode=False):  # a graph of its own
            assert_close(converted(*inputs).asnumpy(), received, 1e-6)

    def test_excluded_operators_stay_in_fp32(self, kind):
        net, inputs = made(kind)
        expected = net(*inputs).asnumpy()
        converted = amp.convert_hybrid_block(net, "bfloat16", data_example=inputs, fp32_ops=["softmax"])
        received = converted(*inputs).asnumpy()
        assert np.linalg.norm(received - expected) <= 0.02 * np.linalg.norm(expected)
        assert [node.dtypes for node in attention_of(converted)] == [["float32"]]

    def test_files_hold_mxnets_operators(self, kind, tmp_path):
        net, inputs = made(kind)
        converted = amp.convert_hybrid_block(net, "bfloat16", data_example=inputs)
        expected = converted(*inputs).asnumpy()
        files = converted.export(str(tmp_path / "net"))
        assert '"_gluon_amp_' not in (tmp_path / "net-symbol.json").read_text()
        names = converted_inputs(converted)
        inputs = inputs[:len(names)]
        stock = SymbolBlock.imports(files[0], names, files[1])
        received = stock(*inputs).asnumpy()
        assert np.linalg.norm(received - expected) <= 0.02 * np.linalg.norm(expected)
        amp.init("bfloat16")
        stock.hybridize()
        assert np.linalg.norm(stock(*inputs).asnumpy() - expected) <= 0.02 * np.linalg.norm(expected)


def converted_inputs(net):
    ((_, operation),) = prepared_operations(net)
    return sorted(name for name in operation.names if name.startswith("data"))


@requires_onednn
@pytest.mark.bf16
def test_gradients_accumulate():
    """Of an input that all projections come from, with one cast."""
    def gradient(**options):
        net, inputs = made("joint")
        converted = amp.convert_hybrid_block(net, "bfloat16", data_example=inputs, optimize="none", **options)
        inputs[0].attach_grad("add")
        for _ in range(2):
            with autograd.record():
                out = converted(*inputs)
            out.backward(nd.array(np.random.RandomState(5).normal(size=out.shape)))
        return inputs[0].grad.asnumpy()

    expected, received = gradient(disable_passes=["native_operators"]), gradient()
    assert np.linalg.norm(received - expected) <= 0.05 * np.linalg.norm(expected)
