"""float16 imitated on the CPU: its rounding, underflow without loss scaling, overflow and recovery."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn
from networks import differentiate, sequential

import gluon_amp as amp
from gluon_amp.state import devices

FP16_EPS = 2.0 ** -11


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
def test_values_and_gradients_are_rounded_as_numpy_rounds_them(hybridize):
    mx.random.seed(3)
    net = nn.Dense(8, in_units=16, use_bias=False)
    net.initialize(mx.init.Normal(1))
    if hybridize:
        net.hybridize()
    data, up = mx.nd.random.normal(shape=(4, 16)), mx.nd.random.normal(shape=(4, 8))
    amp.init("float16")
    output = differentiate(net, data, head=up)
    half = [value.asnumpy().astype("float16").astype("float32") for value in (data, net.weight.data(), up)]
    # Sums in FP32 may differ in their last bit, which moves a value to its float16 neighbour at most.
    expected = (half[0] @ half[1].T).astype("float16").astype("float32")
    assert np.allclose(output.asnumpy(), expected, rtol=2 * FP16_EPS, atol=0)
    assert (output.asnumpy() == expected).mean() > 0.9
    gradient = (half[2].T @ half[0]).astype("float16").astype("float32")
    assert np.allclose(net.weight.grad().asnumpy(), gradient, rtol=2 * FP16_EPS, atol=0)
    assert (net.weight.grad().asnumpy() == net.weight.grad().asnumpy().astype("float16")).all()


class Faint(HybridBlock):
    """A network whose gradients are far below float16's smallest number, about 6e-8."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(1, in_units=4, use_bias=False)

    def hybrid_forward(self, F, x):
        return self.dense(x * 1e-4)


def learn(scaler, steps=60):
    net = Faint()
    net.initialize(mx.init.Zero())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 2e9})
    amp.init_trainer(trainer, scaler)
    data = mx.nd.array(np.random.RandomState(0).randn(16, 4))
    target = data.sum(axis=1, keepdims=True) * 1e-4
    losses = []
    for _ in range(steps):
        with autograd.record():
            loss = ((net(data) - target) ** 2).mean() * 1e-2
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        losses.append(loss.asscalar())
    return losses, trainer._amp_loss_scaler


def test_without_scaling_gradients_underflow_and_with_it_the_network_learns():
    amp.init("float16")
    without, _ = learn(1.0)
    assert without[-1] == without[0]
    with_scaling, scaler = learn(None)
    assert with_scaling[-1] < 0.05 * with_scaling[0]
    assert scaler.num_skipped == 0


def test_too_large_a_scale_overflows_and_recovers():
    amp.init("float16")
    with pytest.warns(UserWarning, match="20 steps in a row were skipped") as caught:
        losses, scaler = learn(amp.DynamicLossScaler(init_scale=2.0**60, max_scale=2.0**80, growth_interval=10**6))
    assert __file__ in [warning.filename for warning in caught]
    assert scaler.num_skipped > 3
    assert scaler.loss_scale == 2.0 ** (60 - scaler.num_skipped)
    assert not scaler.step_was_skipped
    assert losses[-1] < 0.05 * losses[0]


def test_it_says_what_it_is(monkeypatch):
    monkeypatch.setattr(devices, "_warned", set())
    with pytest.warns(UserWarning, match=r"slow on the cpu.*never for speed"):
        amp.init("float16")
    assert amp.active_dtype("cpu") == "float16"


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
def test_a_network_cast_by_the_user_trains_with_masters(hybridize):
    amp.init("float16")
    mx.random.seed(0)
    net = sequential([nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu"), nn.Flatten(),
                      nn.Dense(4)], mx.init.Xavier(), active=False)
    net.cast("float16")
    if hybridize:
        net.hybridize()
    data, label = mx.nd.random.normal(shape=(8, 3, 8, 8)).astype("float16"), mx.nd.array([0, 1, 2, 3] * 2)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "multi_precision": True})
    amp.init_trainer(trainer)
    losses = []
    for _ in range(20):
        with autograd.record():
            output = net(data)
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(output, label)
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(8)
        losses.append(loss.mean().asscalar())
    assert (net[0].weight.dtype, net[1].gamma.dtype, output.dtype) == ("float16", "float32", np.float16)
    assert losses[-1] < 0.2 * losses[0]
    assert {value.dtype for value in amp.master_params(trainer)} == {np.float32}


class Chained(HybridBlock):
    """An inner block that reads what a dense layer gives, excluded or in a region without AMP."""

    def __init__(self, inner, in_region):
        super().__init__()
        self.in_region = in_region
        with self.name_scope():
            self.first = nn.Dense(32, in_units=32)
        self.inner = inner

    def hybrid_forward(self, F, x):
        if not self.in_region:
            return self.inner(self.first(x))
        x = self.first(x)
        with amp.autocast(enabled=False):
            return self.inner(x)


def symbol_block():
    data = mx.sym.var("data")
    layer = mx.sym.FullyConnected(data, num_hidden=32, no_bias=True, name="imported")
    return gluon.SymbolBlock(mx.sym.tanh(layer), data)


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("in_region", [False, True], ids=["excluded", "region"])
@pytest.mark.parametrize("make", [symbol_block, lambda: nn.Dense(32, in_units=32)], ids=["symbol", "dense"])
def test_an_inner_graph_without_amp_reads_low_precision_in_fp32(make, in_region, hybridize):
    net, data = Chained(make(), in_region), mx.nd.random.normal(shape=(4, 32))
    net.initialize(mx.init.Xavier())
    net(data)
    net.inner.hybridize()
    if hybridize:
        net.hybridize()

    def run():
        result = differentiate(net, data)
        return [result.asnumpy(), net.first.weight.grad().asnumpy()]

    expected = run()
    amp.init("float16")
    if not in_region:
        amp.exclude(net.inner)
    for found, exact in zip(run(), expected):
        assert found.dtype == np.float32
        assert 0 < np.abs(found - exact).max() < 0.01 * np.abs(exact).max()  # the first layer is rounded
