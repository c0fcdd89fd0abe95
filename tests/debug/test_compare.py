"""compare: errors that NumPy gives as well, faults at known places, hybridized or not, and nothing changed."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import HybridBlock, nn
from networks import NETWORKS, gradients, outputs_of, ready, sequential

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.base.metrics import relative_error

hybridized_or_not = pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])


def half(array):
    return array.astype("float16").astype("float32")


def distance(expected, found):
    return float(np.linalg.norm((expected.astype("float64") - found).ravel()) / np.linalg.norm(expected.ravel()))


def two_layers(hybridize):
    mx.random.seed(2)
    net = sequential(lambda: [nn.Dense(32, in_units=16, use_bias=False),
                              nn.Dense(8, in_units=32, use_bias=False)], mx.init.Normal(1), "net_", active=hybridize)
    return net, mx.nd.random.normal(shape=(64, 16))


@hybridized_or_not
def test_errors_are_those_of_numpy(hybridize):
    net, data = two_layers(hybridize)
    x, v, w = data.asnumpy(), net[0].weight.data().asnumpy(), net[1].weight.data().asnumpy()
    first, second = amp.compare(net, data, target_dtype="float16").operators
    y = x @ v.T
    rounded = half(half(x) @ half(v).T)
    assert (first.op, first.block, first.dtype) == ("FullyConnected", "net_dense0", "float16")
    assert first.isolated == pytest.approx(distance(y, rounded), rel=0.01)
    assert first.accumulated == pytest.approx(first.isolated)
    assert second.isolated == pytest.approx(distance(y @ w.T, half(half(y) @ half(w).T)), rel=0.01)
    assert second.accumulated == pytest.approx(distance(y @ w.T, half(rounded @ half(w).T)), rel=0.01)
    assert second.accumulated > 1.2 * second.isolated


@hybridized_or_not
def test_gradient_errors_are_those_of_numpy(hybridize):
    net, data = two_layers(hybridize)
    x, v, w = data.asnumpy(), net[0].weight.data().asnumpy(), net[1].weight.data().asnumpy()
    comparison = amp.compare(net, data, lambda output: (output * 3).sum(), target_dtype="float16")
    first, second = comparison.operators
    y, up = x @ v.T, np.full((64, 8), 3.0, "float32")
    assert second.gradient == 0  # 3 is a float16 number
    assert first.gradient == pytest.approx(distance(up @ w, half(up @ half(w))), rel=0.01)
    assert comparison.parameters["net_dense1_weight"] == pytest.approx(
        distance(up.T @ y, half(up.T @ half(half(x) @ half(v).T))), rel=0.01)
    data_gradient, weight_gradient = (half(up) @ half(w), up @ w), (half(up).T @ half(y), up.T @ y)
    pairs = [(plain, half(low)) for low, plain in (data_gradient, weight_gradient)]
    assert second.isolated_gradient == pytest.approx(relative_error(pairs), rel=0.01)


class Planted(HybridBlock):
    """Exact in float16 but for one operator, which loses a part of its result or overflows."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        with self.name_scope():
            self.first = nn.Dense(4, in_units=4, use_bias=False)
            self.bad = nn.Dense(4, in_units=4, use_bias=False)
            self.last = nn.Dense(4, in_units=4, use_bias=False)

    def hybrid_forward(self, F, x):
        return self.last(self.bad(self.first(x)))


def planted(value, hybridize):
    net = Planted(value, prefix="planted_")
    net.initialize(mx.init.Constant(0))
    for layer, diagonal in ((net.first, 2.0), (net.bad, value), (net.last, 0.5)):
        layer.weight.set_data(mx.nd.array(np.eye(4) * diagonal))
    net.hybridize(hybridize)
    return net, mx.nd.array([[1.0, 2.0, 4.0, 8.0]])


@hybridized_or_not
def test_the_inexact_operator_comes_first(hybridize):
    net, data = planted(1 + 2.0 ** -12, hybridize)  # float16 has nothing between 1 and 1 + 2 ** -10
    comparison = amp.compare(net, data, target_dtype="float16")
    worst = comparison.worst(1, by="isolated")[0]
    assert worst.block == "planted_dense1"
    assert worst.isolated == pytest.approx(2.0 ** -12, rel=1e-3)
    by_block = {item.block: item for item in comparison.operators}
    assert by_block["planted_dense0"].accumulated == 0
    assert by_block["planted_dense2"].isolated == pytest.approx(2.0 ** -12, rel=0.01)  # its input is inexact in float16
    assert by_block["planted_dense2"].accumulated == pytest.approx(2.0 ** -12, rel=1e-3)


@hybridized_or_not
def test_an_overflow_is_an_infinite_error(hybridize):
    net, data = planted(8192.0, hybridize)
    comparison = amp.compare(net, data, target_dtype="float16")
    assert [item.isolated for item in comparison.operators] == [0, np.inf, np.inf]  # the last cannot read 65536 either
    assert [item.accumulated for item in comparison.operators] == [0, np.inf, np.inf]
    assert comparison.outputs == (np.inf,)
    # What follows the culprit is not marked.
    culprit = next(item for item in comparison.operators if np.isinf(item.accumulated))
    assert comparison.summary.endswith(f"The first infinite error is that of {culprit.name}")
    table = comparison.table()
    marked = [str(name) for name, row in zip(table.columns[0].cells, table.rows) if row.style == "red"]
    assert marked == [culprit.name]
    assert comparison.culprit is comparison.operators[1]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("name", list(NETWORKS))
def test_it_sees_what_comes_out(name, dtype):
    make, shape = NETWORKS[name]
    net, data = ready(make(), shape, active=False)
    eager = amp.compare(net, data, target_dtype=dtype, train_mode=False, gradients=False)
    net.hybridize()
    hybridized = amp.compare(net, data, target_dtype=dtype, train_mode=False, gradients=False)
    assert not amp.is_active()
    plain = outputs_of(net, data)
    amp.init(dtype)
    mixed = outputs_of(net, data)
    assert hybridized.outputs == pytest.approx([distance(a, b) for a, b in zip(plain, mixed)], rel=1e-3, abs=1e-6)
    if (name, dtype) == ("recurrent", "bfloat16") and native.is_available("_gluon_amp_rnn"):  # in graphs alone
        assert [np.isnan(row.isolated) for row in hybridized.operators if row.op == "RNN"] == [True]
    else:
        assert eager.outputs == pytest.approx(hybridized.outputs, rel=0.05, abs=1e-5)


@hybridized_or_not
def test_parameter_gradients_are_those_of_training(hybridize):
    make, shape = NETWORKS["attention"]
    net, data = ready(make(), shape, active=hybridize)
    comparison = amp.compare(net, data, lambda output: (output ** 2).mean() * 64, target_dtype="float16")
    plain = gradients(net, data, scale=64)
    amp.init("float16")
    mixed = gradients(net, data, scale=64)
    assert set(comparison.parameters) == set(plain)
    for name, error in comparison.parameters.items():
        assert error == pytest.approx(distance(plain[name], mixed[name]), rel=0.05, abs=1e-6), name


def test_random_operators_draw_alike():
    net = sequential([nn.Dense(64, in_units=64), nn.Dropout(0.5), nn.Dense(64, in_units=64)], mx.init.Xavier())
    comparison = amp.compare(net, mx.nd.ones((8, 64)), target_dtype="float16")
    assert comparison.outputs[0] < 0.002


def test_the_setting_in_force_is_compared():
    net, data = two_layers(True)
    amp.init("float16", fp32_ops=["FullyConnected"])
    assert {item.dtype for item in amp.compare(net, data).operators} == {"float32"}
    assert {item.dtype for item in amp.compare(net, data, target_dtype="float16").operators} == {"float16"}
    policy = amp.Policy("float16", excluded=frozenset({"net_dense0_fwd"}))
    assert [item.dtype for item in amp.compare(net, data, policy=policy).operators] == ["float32", "float16"]


def test_mistakes_are_refused():
    net, data = two_layers(True)
    with pytest.raises(amp.PolicyError, match="expected target_dtype or policy, received both"):
        amp.compare(net, data, target_dtype="float16", policy=amp.Policy("float16"))
    with pytest.raises(TypeError, match="expected a Policy, received policy='float16'"):
        amp.compare(net, data, policy="float16")
    with pytest.raises(amp.DTypeError, match="received target_dtype='int8'"):
        amp.compare(net, data, target_dtype="int8")
    with pytest.raises(ValueError, match="one of accumulated, isolated"):
        amp.compare(net, data, target_dtype="float16").worst(by="size")


def test_loops_in_graphs():
    class Loop(HybridBlock):
        def hybrid_forward(self, F, x):
            return F.contrib.foreach(lambda row, state: (row + state, state * 2), x * 3, F.ones((4,)))[0]

    net, data = Loop(), mx.nd.ones((3, 4))
    net.hybridize()
    comparison = amp.compare(net, data, target_dtype="float16", gradients=False)
    assert [item.op for item in comparison.operators] == ["_mul_scalar", "_ones", "_foreach"]
    assert comparison.outputs == (0.0,)
