"""Networks whose chains of convolutions have the channels last: training against float64.

In bfloat16 training is compared with what MXNet's operators give in that type.
"""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import prefer
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from networks import relative

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet.invoke import array_at
from gluon_amp.passes import activations
from gluon_amp.passes.activations import HARD_SWISH, SWISH
from gluon_amp.passes.channels_last import NATIVE

pytestmark = pytest.mark.skipif(not all(map(native.is_available, NATIVE)), reason="the operators in C++ are missing")

MAPS = {"_gluon_amp_convolution", "_gluon_amp_batch_norm"}
FLAGS = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


@pytest.fixture(autouse=True)
def fast_in_cpp(monkeypatch):
    """Let operators in C++ be the fastest."""
    prefer(monkeypatch, nhwc=True)


class Blocks(HybridBlock):
    """A network whose body a class gives, of a convolution of an image and two results."""

    def __init__(self, channels, stem_norm=False):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.stem = nn.Conv2D(channels, 3, padding=1, in_channels=3)
            self.stem_norm = nn.BatchNorm(in_channels=channels) if stem_norm else None
            self.layers = nn.HybridSequential()
            self.out = nn.Dense(4, in_units=channels)

    def add(self, filters, kernel, channels, groups=1, momentum=0.9, scale=True):
        """Add a convolution and BatchNorm."""
        self.layers.add(nn.Conv2D(filters, kernel, padding=kernel // 2, groups=groups, in_channels=channels,
                                  use_bias=False), nn.BatchNorm(in_channels=filters, momentum=momentum, scale=scale))

    def normalised(self, number, x):
        return self.layers[2 * number + 1](self.layers[2 * number](x))

    def hybrid_forward(self, F, data):
        x = self.stem(data)
        x = first = self.start(F, x if self.stem_norm is None else self.stem_norm(x))
        x = self.body(F, x)
        return self.out(F.mean(x, axis=(2, 3))), F.max(first, axis=(1, 2, 3))


class Bottlenecks(Blocks):
    """Blocks of ResNeXt, whose last BatchNorm gives zeros for some channels."""

    def __init__(self, groups, channels):
        super().__init__(channels)
        with self.name_scope():
            for kernel, count in ((1, 1), (3, groups), (1, 1)) * 2:
                self.add(channels, kernel, channels, count)

    def start(self, F, x):
        return F.relu(x)

    def body(self, F, x):
        for start in (0, 3):
            y = F.relu(self.normalised(start, x))
            y = self.normalised(start + 2, F.relu(self.normalised(start + 1, y)))
            x = F.Activation(x + y, act_type="relu")
        return x


class Excited(Blocks):
    """Blocks of MobileNet v3: hard swish, and channels times what their means say."""

    def __init__(self, channels=16):
        super().__init__(channels)
        with self.name_scope():
            self.squeeze = nn.HybridSequential()
            for groups in (1, channels) * 2:
                self.add(channels, 5, channels, groups)
            for _ in range(2):
                self.squeeze.add(nn.Conv2D(channels, 1, in_channels=channels))

    def start(self, F, x):
        return x

    def body(self, F, x):
        for number in range(4):
            x = self.normalised(number, x)
            x = self.activated(F, x)
            if number % 2:
                means = self.squeeze[number // 2](F.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)))
                x = F.broadcast_mul(x, self.gate(F, means))
        return x

    def activated(self, F, x):
        return x * (F.clip(x + 3.0, 0, 6) / 6.0)

    def gate(self, F, means):
        return F.clip(means + 3.0, 0, 6) / 6.0


class Limited(Excited):
    """The same with a gate as GhostNet's: factors of channels come from operators that run with the channels last."""

    def gate(self, F, means):
        return F.clip(means, 0, 1)


class Swishing(Excited):
    """Blocks of EfficientNet: swish, and channels times the sigmoid of what their means say."""

    def activated(self, F, x):
        return x * F.sigmoid(x)

    def gate(self, F, means):
        return F.sigmoid(means)


class Joined(Blocks):
    """Blocks of MixNet and GhostNet: parts of the channels by filters of their own, joined again."""

    def __init__(self, channels=24):
        super().__init__(channels)
        self.channels = channels
        with self.name_scope():
            for _ in range(2):
                self.add(channels, 1, channels)
                for kernel, part in ((3, 8), (5, channels - 8)):
                    self.add(part, kernel, part, part)

    def start(self, F, x):
        return F.relu(x)

    def body(self, F, x):
        for start in (0, 3):
            y = F.relu(self.normalised(start, x))
            parts = F.slice_axis(y, axis=1, begin=0, end=8), F.slice_axis(y, axis=-3, begin=8, end=None)
            y = F.concat(*(self.normalised(start + 1 + number, part) for number, part in enumerate(parts)), dim=1)
            x = F.relu(F.slice_axis(F.concat(x, y, parts[0], dim=1), axis=1, begin=12, end=12 + self.channels) + x)
        return x


class Residual(Blocks):
    """Inverted residuals, as in MobileNet v2, with a branch that leaves the chain."""

    def __init__(self, filters=8, count=2, first_sum=0):
        super().__init__(filters, stem_norm=True)
        self.count, self.first_sum, wide = count, first_sum, 3 * filters
        with self.name_scope():
            for _ in range(count):
                self.add(wide, 1, filters, 1, 0.8)
                self.add(wide, 3, wide, wide, 0.8, scale=False)
                self.add(filters, 1, wide, 1, 0.8)

    def start(self, F, x):
        return F.clip(x, 0, 6)

    def body(self, F, x):
        for number in range(self.count):
            y = F.clip(self.normalised(3 * number, x), 0, 6)
            y = self.normalised(3 * number + 2, F.clip(self.normalised(3 * number + 1, y), 0, 6))
            x = y if number < self.first_sum else x + y
        return x


def made(kind=Residual, dtype="float32", dead=0, **settings):
    """Return a network with drawn parameters, of which some channels are 0: a rectifier passes no gradient there."""
    net = kind(**settings)
    net.initialize(mx.init.Constant(1))
    values = np.random.RandomState(1)
    for name, parameter in sorted(net.collect_params().items()):
        drawn = values.standard_normal(parameter.shape) * (0.1 if name.endswith("running_mean") else 0.4)
        if name.endswith("var") or (name.endswith("gamma") and not dead):
            drawn = np.abs(drawn) + 0.5
        elif name.endswith(("gamma", "beta")):
            drawn[:dead] = 0
        if not name.endswith("gamma") or parameter.grad_req != "null":  # MXNet sets those that are not scaled to 1
            parameter.set_data(mx.nd.array(drawn))
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


def operators_of(net):
    return {node.op for node in net._cached_op.latest.graph.operators()}


@pytest.mark.machine
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("kind", "settings", "operators"), [
    (Residual, {}, MAPS), (Bottlenecks, {"groups": 4, "channels": 16, "dead": 3}, MAPS),
    (Bottlenecks, {"groups": 12, "channels": 12, "dead": 3}, MAPS), (Excited, {}, NATIVE | {HARD_SWISH}),
    (Limited, {}, NATIVE | {HARD_SWISH}), (Swishing, {}, NATIVE | {SWISH}), (Joined, {}, MAPS),
    (Joined, {"channels": 21}, MAPS)])
def test_training_is_that_of_float64(kind, settings, operators, flags, monkeypatch):
    """Networks train in FP32, under AMP as exactly as without it."""
    monkeypatch.setattr(activations, "_LEAST", 1)
    batches = [batch(seed, (size, 3, 16, width)) for seed, (size, width) in enumerate([(4, 16), (2, 12), (4, 16)])]
    exact = results(made(kind, "float64", **settings), [each.astype("float64") for each in batches])
    stock = results(made(kind, **settings), batches)
    amp.init("float32")
    net = made(kind, **settings)
    net.hybridize(**flags)
    for one, other, wanted in zip(results(net, batches), stock, exact):  # somewhat more rounding than MXNet's
        assert error(one, wanted) < max(4 * error(other, wanted), 2e-5)
    assert operators_of(net) >= operators


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_joins_and_slices_of_channels_are_in_the_chain(dtype):
    amp.init(dtype)
    net = made(Joined)
    net.hybridize()
    results(net, [batch()])
    nodes = net._cached_op.latest.graph.operators()
    assert {node.op: {node.attrs["dim" if node.op == "Concat" else "axis"]} for node in nodes
            if node.op in ("Concat", "slice_axis") and node.shapes[0][0] == 4} == {"Concat": {"3"}, "slice_axis": {"3"}}
    assert sum(node.op == "transpose" for node in nodes) <= 3  # behind the stem, for the maximum and for the mean


# Of which all sums are in bfloat16, as those of MobileNet v2.
IN_BFLOAT16 = {"filters": 16, "count": 3, "first_sum": 1}


def in_bfloat16(settings, batches, off=(), grad_req="write", **flags):
    amp.init("bfloat16", disable_passes=off)
    net = made(**settings)
    net.collect_params().setattr("grad_req", grad_req)
    net.collect_params(".*running.*").setattr("grad_req", "null")
    net.hybridize(**flags)
    found = results(net, batches), operators_of(net)
    amp.deinit()
    return found


@pytest.mark.bf16
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("settings", [IN_BFLOAT16, {"kind": Joined}, {"kind": Joined, "channels": 21}],
                         ids=["residual", "joined", "joined in odd parts"])
def test_training_in_bfloat16_is_as_exact_as_mxnets(settings, flags, grad_req):
    batches = [batch(seed, (size, 3, 16, width)) for seed, (size, width) in enumerate([(4, 16), (2, 12)])]
    net = made(dtype="float64", **settings)
    net.collect_params().setattr("grad_req", grad_req)
    net.collect_params(".*running.*").setattr("grad_req", "null")
    exact = results(net, [each.astype("float64") for each in batches])
    stock, without = in_bfloat16(settings, batches, ["channels_last"], grad_req, **flags)
    received, operators = in_bfloat16(settings, batches, (), grad_req, **flags)
    assert operators >= MAPS
    assert not operators & {"BatchNorm", "_gluon_amp_clip"} - without
    for one, other, wanted in zip(received, stock, exact):
        assert error(one, wanted) < max(2 * error(other, wanted), 2 ** -7)


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


def test_a_hook_sees_maps_with_the_channels_first():
    def shapes():
        seen, net = {}, made()
        net.hybridize(static_alloc=True)
        net(batch())
        net.register_op_hook(lambda name, op, handle: seen.setdefault(name, array_at(handle).shape))
        with autograd.record():
            net(batch())
        mx.nd.waitall()
        return seen
    expected = shapes()
    amp.init("float32")
    found = shapes()
    common = {name for name, shape in expected.items() if len(shape) == 4} & found.keys()
    assert len(common) > 10
    assert {name: found[name] for name in common} == {name: expected[name] for name in common}
