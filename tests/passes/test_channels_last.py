"""Chains of convolutions and ReLU6 with the channels last: graphs written by hand, and training against float64."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import describe, graph, op, variable
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from networks import observed, relative

import gluon_amp as amp
from gluon_amp import native, passes
from gluon_amp.graph import Entry
from gluon_amp.passes.channels_last import NATIVE
from gluon_amp.rules import Policy

pytestmark = pytest.mark.skipif(not native.operators() >= NATIVE, reason="the operators in C++ are missing")

SHAPE = (2, 8, 6, 6)
FLAGS = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


def conv(name, data, **attrs):
    settings = {"num_filter": 8, "kernel": (1, 1), "no_bias": True, **attrs}
    return op("Convolution", name, data, variable(f"{name}_weight", (8, 8, 1, 1)), shape=SHAPE, **settings)


def norm(name, data, **attrs):
    parameters = [variable(f"{name}_{part}", (8,)) for part in ("gamma", "beta", "mean", "var")]
    made = op("BatchNorm", name, data, *parameters, outputs=3, shape=SHAPE, **attrs)
    made.shapes = [SHAPE, (8,), (8,)]
    return made


def clip(name, data):
    return op("clip", name, data, shape=SHAPE, a_min=0, a_max=6)


def block(name, data, **attrs):
    """A convolution, BatchNorm and ReLU6."""
    return Entry(clip(f"{name}_relu6", Entry(norm(f"{name}_norm", conv(name, data), **attrs))))


def plain():
    """What a chain begins with, and does not take in: the gradient of an image is of no use."""
    return Entry(conv("image", variable("data", SHAPE)))


def turned(*heads, **settings):
    made = graph(*heads)
    settings = {"trains": True, "native": NATIVE, "keep_outputs": False, **settings}
    policy = settings.pop("policy", Policy("float32"))
    passes.rewrite(made, policy, **settings)
    return describe(made)


def test_a_chain_is_turned_once_and_back_again():
    assert turned(block("c", block("b", block("a", plain())))) == [
        "image: Convolution(data, image_weight) -> float32",
        "image_turned: transpose(image) -> float32",
        "a: _gluon_amp_convolution(image_turned, a_weight) -> float32",
        "a_norm: _gluon_amp_batch_norm(a, a_norm_gamma, a_norm_beta, a_norm_mean, a_norm_var) -> float32",
        "b: _gluon_amp_convolution(a_norm, b_weight) -> float32",
        "b_norm: _gluon_amp_batch_norm(b, b_norm_gamma, b_norm_beta, b_norm_mean, b_norm_var) -> float32",
        "c: _gluon_amp_convolution(b_norm, c_weight) -> float32",
        "c_norm: _gluon_amp_batch_norm(c, c_norm_gamma, c_norm_beta, c_norm_mean, c_norm_var) -> float32",
        "c_relu6_turned: transpose(c_norm) -> float32",
        "out: c_relu6_turned",
    ]


def test_shapes_are_those_of_the_turned_maps():
    shape, last = (2, 8, 6, 4), (2, 6, 4, 8)
    made = graph(block("c", block("b", block("a", plain()))))
    for node in made.operators():
        node.shapes[0] = shape
    next(node for node in made.variables() if node.name == "data").shapes[0] = shape
    passes.rewrite(made, Policy("float32"), trains=True, native=NATIVE, keep_outputs=False)
    assert {node.name: node.shapes[0] for node in made.operators()} == {
        "image": shape, "image_turned": last, "a": last, "a_norm": last, "b": last, "b_norm": last, "c": last,
        "c_norm": last, "c_relu6_turned": shape}


def test_a_sum_in_a_chain_is_guarded_where_gradients_meet():
    first = block("a", plain())
    total = Entry(op("elemwise_add", "total", first, Entry(norm("b_norm", Entry(conv("b", first)))), shape=SHAPE))
    lines = turned(block("d", block("c", total)))
    assert "a_relu6_native: _copy(a_norm) -> float32" in lines
    assert "b: _gluon_amp_convolution(a_relu6_native, b_weight) -> float32" in lines
    assert "total: elemwise_add(a_norm, b_norm) -> float32" in lines
    assert "c: _gluon_amp_convolution(total, c_weight) -> float32" in lines


def test_what_is_read_outside_is_turned_back_for_it():
    first = block("a", plain())
    last = block("d", block("c", block("b", first)))
    pooled = Entry(op("Pooling", "pool", first, shape=(2, 8, 3, 3), kernel=(2, 2)))
    lines = turned(last, pooled)
    assert "a_relu6_turned: transpose(a_norm) -> float32" in lines
    assert "pool: Pooling(a_relu6_turned) -> float32" in lines


def test_a_map_before_its_limits_is_not_lost():
    inner = Entry(norm("a_norm", Entry(conv("a", plain()))))
    limited = Entry(clip("a_relu6", inner))
    lines = turned(block("d", block("c", block("b", limited))), inner)
    assert "a_relu6: clip(a_norm) -> float32" in lines
    assert lines[-1] == "out: d_relu6_turned, a_norm_turned"


@pytest.mark.parametrize("head", [
    lambda: Entry(clip("lonely", plain())),
    lambda: block("a", plain(), axis=3),
    lambda: block("a", plain(), use_global_stats=True),
    lambda: block("b", block("a", plain())),
    lambda: Entry(conv("b", Entry(conv("a", plain())))),
])
def test_what_would_not_gain_stays(head):
    assert not any("_gluon_amp_" in line for line in turned(head()))


@pytest.mark.parametrize("settings", [{"trains": False}, {"native": frozenset()}, {"recorded": False},
                                      {"policy": Policy("bfloat16")}, {"policy": Policy("float16", imitated=True)},
                                      {"policy": Policy("float32", disabled_passes=frozenset({"channels_last"}))}])
def test_only_fp32_training_in_c_plus_plus_is_concerned(settings):
    lines = turned(block("c", block("b", block("a", plain()))), **settings)
    assert not any("_gluon_amp_convolution" in line for line in lines)


def test_statistics_that_are_outputs_stay():
    made = norm("a_norm", Entry(conv("a", plain())))
    head = block("b", Entry(clip("a_relu6", Entry(made))))
    assert "a_norm: BatchNorm(a, a_norm_gamma, a_norm_beta, a_norm_mean, a_norm_var) -> float32" in [
        line.replace("a_turned", "a") for line in turned(head, Entry(made, 1))]


class Residual(HybridBlock):
    """Inverted residuals, as in MobileNet v2, with a branch that leaves the chain."""

    def __init__(self, **kwargs):
        super().__init__(prefix="residual_", **kwargs)
        with self.name_scope():
            self.stem, self.stem_norm = nn.Conv2D(8, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=8)
            self.wide, self.deep = nn.HybridSequential(), nn.HybridSequential()
            for _ in range(2):
                self.wide.add(self._normalised(24, 1, 8, 1))
                self.deep.add(self._normalised(24, 3, 24, 24))
            self.narrow = nn.HybridSequential()
            for _ in range(2):
                self.narrow.add(self._normalised(8, 1, 24, 1))
            self.out = nn.Dense(4, in_units=8)

    @staticmethod
    def _normalised(filters, kernel, channels, groups):
        layer = nn.HybridSequential()
        layer.add(nn.Conv2D(filters, kernel, padding=kernel // 2, groups=groups, in_channels=channels, use_bias=False),
                  nn.BatchNorm(in_channels=filters, momentum=0.8, scale=groups == 1))
        return layer

    def hybrid_forward(self, F, data):
        x = F.clip(self.stem_norm(self.stem(data)), 0, 6)
        first = x
        for wide, deep, narrow in zip(self.wide, self.deep, self.narrow):
            x = x + narrow(F.clip(deep(F.clip(wide(x), 0, 6)), 0, 6))
        return self.out(F.mean(x, axis=(2, 3))), F.max(first, axis=(1, 2, 3))


def made(dtype="float32"):
    net = Residual()
    net.initialize(mx.init.Constant(1))
    values = np.random.RandomState(1)
    for name, parameter in sorted(net.collect_params().items()):
        scale = 0.1 if name.endswith("running_mean") else 0.4
        drawn = values.standard_normal(parameter.shape) * scale
        if not name.endswith("gamma") or parameter.grad_req != "null":  # MXNet sets those that are not scaled to 1
            parameter.set_data(mx.nd.array(np.abs(drawn) + 0.5 if name.endswith(("var", "gamma")) else drawn))
    net.cast(dtype)
    return net


def batch(seed=0, shape=(4, 3, 16, 16), dtype="float32"):
    return mx.nd.array(np.random.RandomState(seed).standard_normal(shape), dtype=dtype)


def results(net, batches, record=autograd.record, train_mode=True):
    """Return outputs, the gradients of the last batch and all parameters."""
    outs = []
    for x in batches:
        x.attach_grad()
        with record(train_mode):
            first, second = net(x)
            loss = (first ** 2).sum() + (second * first.sum()).sum()
        loss.backward()
        outs += [first.asnumpy(), second.asnumpy(), x.grad.asnumpy()]
    grads = [each.grad().asnumpy() for each in net.collect_params().values() if each.grad_req != "null"]
    return [*outs, *grads, *(each.data().asnumpy() for each in net.collect_params().values())]


def error(received, exact):
    """Return the distance, as a share of the length of what is no rounding: a bias before BatchNorm has no gradient."""
    return np.linalg.norm(received - exact) / max(np.linalg.norm(exact), 1e-2)


def assert_as_exact(received, stock, exact):
    """Compare with float64: rounding may be somewhat more than that of MXNet's FP32."""
    for one, other, wanted in zip(received, stock, exact):
        assert error(one, wanted) < max(4 * error(other, wanted), 2e-5)


def operators_of(net):
    return {node.op for node in net._cached_op.latest.graph.operators()}


@pytest.mark.machine
@pytest.mark.parametrize("flags", FLAGS)
def test_training_is_that_of_float64(flags):
    batches = [batch(seed, (size, 3, 16, width)) for seed, (size, width) in enumerate([(4, 16), (2, 12), (4, 16)])]
    exact = results(made("float64"), [each.astype("float64") for each in batches])
    stock = results(made(), batches)
    amp.init("float32")
    net = made()
    net.hybridize(**flags)
    assert_as_exact(results(net, batches), stock, exact)
    assert operators_of(net) >= NATIVE


def test_gradients_are_added_where_asked_for():
    batches = [batch(seed) for seed in range(2)]
    sums = []
    for on in (False, True):
        net = made()
        net.collect_params().setattr("grad_req", "add")
        if on:
            amp.init("float32")
            net.hybridize(static_alloc=True)
        sums.append(results(net, batches))
    for one, other in zip(*sums):
        assert error(one, other) < 1e-3


@pytest.mark.parametrize("record", [False, True])
def test_other_modes_use_the_moving_averages_and_leave_them(record):
    stock, net, x = made(), made(), batch()
    with autograd.record(False):
        expected = [each.asnumpy() for each in stock(x)]
    amp.init("float32")
    net.hybridize(static_alloc=True)
    with autograd.record():
        net(x)
    trained = [each.data().asnumpy() for each in net.collect_params().values()]
    for one, other in zip(stock.collect_params().values(), net.collect_params().values()):
        other.set_data(one.data())
    if record:
        with autograd.record(False):
            outs = net(x)
    else:
        outs = net(x)
    for one, other in zip(outs, expected):
        assert relative(one.asnumpy(), other) < 1e-5
    for one, other in zip(stock.collect_params().values(), net.collect_params().values()):
        np.testing.assert_array_equal(other.data().asnumpy(), one.data().asnumpy())
    assert any((one != other.data().asnumpy()).any() for one, other in zip(trained, net.collect_params().values()))


def test_a_hook_sees_the_programs_maps():
    def run():
        net = made()
        net.hybridize(static_alloc=True)
        return observed(net, batch())
    expected = run()
    amp.init("float32")
    received = run()
    assert list(received) == list(expected)
    for name, (kind, values) in expected.items():
        assert received[name][0] == kind
        np.testing.assert_allclose(received[name][1], values, rtol=1e-3, atol=1e-4)
