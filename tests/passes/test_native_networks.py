"""Networks with operators in C++ against MXNet's own operators, in training."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import HybridBlock, SymbolBlock, nn, rnn
from native_cases import assert_close, kinds, requires_core, results_of_batches
from native_networks import FLAGS, LENGTH, distance, inputs, network, requires_onednn, train
from networks import differentiate, sequential

import gluon_amp as amp
from gluon_amp import native

pytestmark = requires_core
RUN = {"everything": {"_gluon_amp_layer_norm", "_gluon_amp_clip"},
       "joint": {"_gluon_amp_layer_norm", "_gluon_amp_dense"},
       "apart": {"_gluon_amp_attention", "_gluon_amp_layer_norm", "_gluon_amp_dense"},
       "lengths": {"_gluon_amp_attention"}, "mask": {"_gluon_amp_attention"}, "memory": {"_gluon_amp_attention"},
       "softmax": {"_gluon_amp_softmax", "_gluon_amp_log_softmax"}}
CELLS = ["lengths", "mask", "memory"]
TYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)]
several_flags = pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static memory", "static"])


def needs_onednn(*kinds):
    return [pytest.param(kind, marks=requires_onednn) if kind != "everything" else kind for kind in kinds]


@pytest.mark.parametrize("kind", needs_onednn(*RUN))
@several_flags
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_values_and_gradients_are_mxnets(kind, flags, grad_req):
    expected = train(network(kind, grad_req, flags), kind, grad_req)
    amp.init("float32")
    net = network(kind, grad_req, flags)
    for one, other in zip(train(net, kind, grad_req), expected):
        assert_close(one, other, 2e-6 if kind in ("everything", "softmax") else 5e-6)  # of several operators in a chain
    assert RUN[kind] <= kinds(net)


@pytest.mark.bf16
@pytest.mark.parametrize("kind", needs_onednn("apart", *CELLS))
@several_flags
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_in_bfloat16(kind, flags, grad_req):
    expected = train(network(kind, grad_req, flags), kind, grad_req)
    amp.init("bfloat16")
    net = network(kind, grad_req, flags)
    assert distance(train(net, kind, grad_req), expected) <= 0.05
    assert RUN[kind] - {"_gluon_amp_layer_norm"} <= kinds(net)


@pytest.mark.bf16  # in FP32 dropout is MXNet's
@pytest.mark.parametrize("kind", needs_onednn(*CELLS))
@pytest.mark.parametrize("flags", FLAGS[::2], ids=["dynamic", "static"])
class TestDropout:
    def test_it_follows_the_seed(self, kind, flags):
        amp.init("bfloat16")
        net = network(kind, flags=flags, dropout=0.4)
        one, same, other = (train(net, kind, seed=seed) for seed in (1, 1, 2))
        for first, second in zip(one, same):
            np.testing.assert_array_equal(first, second)
        assert any((first != second).any() for first, second in zip(one, other))

    def test_it_keeps_the_mean_and_does_nothing_in_inference(self, kind, flags):
        x, extra = inputs(kind, 8)
        extra = {"lengths": mx.nd.full((8, LENGTH), LENGTH), "mask": mx.nd.ones((8, LENGTH, LENGTH))}.get(kind, extra)
        expected = network(kind, flags=flags, dropout=0.4)(x, extra).asnumpy()
        amp.init("bfloat16")
        net = network(kind, flags=flags, dropout=0.4)
        assert_close(net(x, extra).asnumpy(), expected, 0.02)
        with autograd.record(train_mode=False):
            assert_close(net(x, extra).asnumpy(), expected, 0.02)
        total = 0
        for _ in range(60):
            with autograd.record():
                total = total + net(x, extra)
        assert np.linalg.norm(total.asnumpy() / 60 - expected) < 0.2 * np.linalg.norm(expected)
        assert "_gluon_amp_attention" in kinds(net)


@pytest.mark.parametrize("kind", needs_onednn(*CELLS))
def test_dropout_in_fp32_draws_mxnets_numbers(kind):
    expected = train(network(kind, dropout=0.4), kind, seed=1)
    amp.init("float32")
    net = network(kind, flags={}, dropout=0.4)
    for one, other in zip(train(net, kind, seed=1), expected):
        assert_close(one, other, 5e-6)
    assert not {"_gluon_amp_attention", "_gluon_amp_dropout"} & kinds(net)


def test_eight_gradients_of_one_tensor():
    """From eight gradients on MXNet lets operators add to what is there."""
    def many(F, x):
        y = F.tanh(x)
        return sum(F.clip(y * (1 / 3), -i / 10, i / 10) + F.clip(y, -i / 10, i / 10) for i in range(1, 12))

    def gradient():
        net = nn.HybridLambda(many)
        net.hybridize()
        (x,) = inputs(batch=64)
        x.attach_grad()
        differentiate(net, x)
        return x.grad.asnumpy()

    expected = gradient()
    amp.init("float32")
    assert_close(gradient(), expected, 1e-6)


def test_without_a_batch():
    net = sequential([nn.LayerNorm(in_channels=64), nn.HybridLambda(lambda F, x: F.clip(x, -1, 1))])
    amp.init("float32")
    with mx.util.np_shape(True):
        for count in (512, 0, 512):
            x = mx.nd.ones((count, 64))
            x.attach_grad()
            out = differentiate(net, x)
            assert out.shape == x.grad.shape == (count, 64)
    assert "_gluon_amp_layer_norm" in kinds(net)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("how", ["executor", "block"])
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_that_many_dense_layers_share(dtype, how, grad_req, transposed):
    x, weight = mx.sym.var("x"), mx.sym.var("w", shape=(512, 512))
    for step in range(17):
        used = mx.sym.transpose(weight) if transposed else weight
        x = mx.sym.tanh(mx.sym.FullyConnected(x, used, num_hidden=512, no_bias=True, name=f"fc{step}"))
    generator = np.random.RandomState(3)
    values = {"x": generator.normal(size=(16, 512)), "w": generator.normal(size=(512, 512)) / 23}

    def gradients():
        if how == "executor":
            executor = x.simple_bind(mx.cpu(), grad_req, x=(16, 512), w=(512, 512))
            executor.copy_params_from({name: mx.nd.array(value) for name, value in values.items()})
            for _ in range(2):
                executor.forward(is_train=True)
                executor.backward(mx.nd.ones((16, 512)))
            return [executor.grad_dict[name].asnumpy() for name in values]
        net = SymbolBlock(x, [mx.sym.var("x")])
        net.initialize()
        shared = net.collect_params()["w"]
        shared.set_data(mx.nd.array(values["w"]))
        shared.grad_req = grad_req
        net.hybridize(static_alloc=True)
        data = mx.nd.array(values["x"])
        data.attach_grad(grad_req)
        for _ in range(2):
            differentiate(net, data)
        return [data.grad.asnumpy(), shared.grad().asnumpy()]

    expected = gradients()
    amp.init(dtype)
    assert distance(gradients(), expected) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.skipif(not native.is_available("_gluon_amp_dense"), reason=native.load()[1].missing)
@pytest.mark.parametrize("width", [4, 16])  # too few for a recurrent layer in C++, and enough
def test_a_dense_layer_behind_a_recurrent_one_is_in_cpp(width):
    net = sequential([rnn.LSTM(512, input_size=width),
                      nn.Dense(512, flatten=False, in_units=512)], mx.init.Xavier(), active=False)
    x = mx.nd.random.uniform(shape=(16, 1, width))
    expected = results_of_batches(net, "write", [x])
    net.hybridize(static_alloc=True)
    amp.init("float32")
    for one, other in zip(results_of_batches(net, "write", [x]), expected):
        assert_close(one, other, 1e-5)
    in_cpp = {row.op for row in amp.report(net, x, train=True).operators if row.native}
    assert in_cpp == {"FullyConnected"} | ({"RNN"} if width > 4 else set())


@pytest.mark.parametrize("target", TYPES)
def test_an_unrolled_cell_has_a_first_state_without_a_batch(target):
    class Unrolled(HybridBlock):
        def __init__(self):
            super().__init__()
            self.cell = rnn.LSTMCell(512, input_size=32)

        def hybrid_forward(self, F, x):
            return self.cell.unroll(2, x, layout="NTC", merge_outputs=True)[0]

    net = Unrolled()
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.uniform(shape=(64, 2, 32))
    expected = net(x).asnumpy()
    net.hybridize()
    amp.init(target)
    received = differentiate(net, x)
    assert_close(received.asnumpy(), expected, 1e-6 if target == "float32" else 0.02)
    symbol = net(mx.sym.var("data"))
    arrays = {name: each.data() for name, each in net.collect_params().items()}
    assert_close(symbol.eval(data=x, **arrays)[0].asnumpy(), expected, 1e-6 if target == "float32" else 0.02)


def test_sparse_arguments_keep_mxnets_operators():
    net = nn.HybridLambda(lambda F, x: F.clip(x, -1, 6))
    net.hybridize()
    dense = mx.nd.ones((300, 100)) * 9
    amp.init("float32")
    assert net(dense).asnumpy().max() == 6
    assert net(dense.tostype("row_sparse")).asnumpy().max() == 6


@pytest.mark.parametrize(("kind", "operators"), [
    ("everything", {"LayerNorm", "clip"}), pytest.param("softmax", {"softmax", "log_softmax"}, marks=requires_onednn)])
def test_a_report_says_which_ran(kind, operators):
    amp.init("float32")
    net, arrays = network(kind, flags={"static_alloc": True}), inputs(kind)
    found = amp.report(net, arrays, train=True)
    rows = {row.name: row for row in found.operators if row.native}
    assert {row.op for row in rows.values()} >= operators
    assert f"{len(rows)} of the operators ran in C++" in found.summary
    assert all(row.flops and row.observed == "float32" and row.shape for row in rows.values())
    amp.deinit()
    amp.init("float32", disable_passes=["native_operators"])
    assert not any(row.native for row in amp.report(net, arrays).operators)


@pytest.mark.parametrize("target", TYPES)
def test_means_of_few_channels_over_many_pixels(target):
    """oneDNN computes their gradient value by value: in FP32 too, where the data comes from a bfloat16 network."""
    def results():
        net = sequential([nn.Conv2D(32, 3, in_channels=3, activation="relu"), nn.GlobalAvgPool2D(),
                          nn.Dense(4, in_units=32)], mx.init.Xavier(rnd_type="gaussian"))
        loss = differentiate(lambda: net(mx.nd.random.normal(shape=(2, 3, 66, 66))).square().sum())
        return net, [loss.asnumpy(), *(each.grad().asnumpy() for name, each in net.collect_params().items()
                                       if each.grad_req != "null")]

    mx.random.seed(3)
    expected = results()[1]
    amp.init(target)
    mx.random.seed(3)
    net, found = results()
    assert {"_gluon_amp_pooling", "_gluon_amp_channel_means"} & kinds(net)
    assert distance(found, expected) <= (1e-5 if target == "float32" else 0.05)
