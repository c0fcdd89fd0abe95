"""oneDNN's fusion in converted networks: no tensor that something else reads is fused away."""
from __future__ import annotations

import mxnet as mx
import pytest
from cpu_kinds import take_for
from mxnet.gluon import HybridBlock, nn
from native_cases import kinds
from networks import outputs_of, relative

import gluon_amp as amp
from gluon_amp.machine.dtypes import cpu_support

LOW = cpu_support().dtype
ACTIVATIONS = {
    "relu": lambda F, x: F.Activation(x, act_type="relu"),
    "sigmoid": lambda F, x: F.Activation(x, act_type="sigmoid"),
    "gelu": lambda F, x: F.LeakyReLU(x, act_type="gelu"),
    "leaky": lambda F, x: F.LeakyReLU(x, act_type="leaky", slope=0.1),
    "clip": lambda F, x: F.clip(x, a_min=0, a_max=1),
    "square": lambda F, x: F.square(x),
    "abs": lambda F, x: F.abs(x),
}


class Layer(HybridBlock):
    """A convolution or dense layer, and what a function makes of it and of the input."""

    def __init__(self, function, dense=False):
        super().__init__(prefix="net_")
        self.function, self.dense = function, dense
        self.weight = self.params.get("weight", shape=(16, 16) if dense else (16, 16, 1, 1))

    def hybrid_forward(self, F, x, weight):
        def layer(value):
            if self.dense:
                return F.FullyConnected(value, weight, num_hidden=16, no_bias=True, flatten=False)
            return F.Convolution(value, weight, kernel=(1, 1), num_filter=16, no_bias=True)
        return self.function(F, layer, x)


def check(function, dense, dtype, data=None, **options):
    net = Layer(function, dense)
    mx.random.seed(2)
    net.initialize(mx.init.Normal(0.4))
    data = mx.nd.random.normal(shape=(4, 16) if dense else (2, 16, 5, 5)) if data is None else data
    expected = outputs_of(net, data)
    found = amp.convert_hybrid_block(net, dtype, data_example=data, **options)
    for _ in range(2):  # what a first call leaves in place counts in the second
        result = found(data)
        values = [mx.nd.amp_cast(one, dtype="float32").asnumpy()
                  for one in (result if isinstance(result, (list, tuple)) else [result])]
        for one, other in zip(expected, values):
            assert relative(one, other) < (1e-5 if dtype == "float32" else 0.03)
    return found


@pytest.mark.parametrize("dtype", sorted({"float32", LOW}))
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
class TestLayerAndActivation:
    def test_both_are_outputs(self, name, dense, dtype):
        def function(F, layer, x):
            y = layer(x)
            return y, ACTIVATIONS[name](F, y)
        check(function, dense, dtype, cast_outputs=False)
        check(function, dense, dtype)

    def test_both_are_read(self, name, dense, dtype):
        def function(F, layer, x):
            y = layer(x)
            return F.concat(ACTIVATIONS[name](F, y), y * 2, ACTIVATIONS[name](F, y + 1), dim=1)
        check(function, dense, dtype)


SUMS = {
    "layer and its activation": lambda F, y, x: y + F.Activation(y, act_type="relu"),
    "activation and its layer": lambda F, y, x: F.Activation(y, act_type="relu") + y,
    "layer twice": lambda F, y, x: y + y,
    "layer, then the sum": lambda F, y, x: (y, y + x),
    "the sum and what reads it": lambda F, y, x: (lambda z: (z, F.Activation(z, act_type="relu")))(y + x),
    "the input twice": lambda F, y, x: F.Activation(x + y, act_type="relu") + x,
    "the input again later": lambda F, y, x: (F.Activation(y + x, act_type="relu"), x * 2),
    "an inner tensor again later": lambda F, y, x: (lambda z: F.concat(y + z, z * 3, dim=1))(F.tanh(x)),
    "an inner output": lambda F, y, x: (lambda z: (y + z, z))(F.tanh(x)),
}


@pytest.mark.parametrize("dtype", sorted({"float32", LOW}))
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", sorted(SUMS))
def test_sums(name, dense, dtype):
    check(lambda F, layer, x: SUMS[name](F, layer(x), x), dense, dtype)


@pytest.mark.parametrize("identity", ["identity", "Dropout"])
def test_identities_that_are_kept(identity):
    def function(F, layer, x):
        y = layer(x)
        z = F.identity(y) if identity == "identity" else F.Dropout(y, p=0.5)
        halves = F.SliceChannel(y, num_outputs=2, axis=1)
        return z, F.identity(halves[1]), F.Dropout(halves[0]) + halves[1], F.Activation(z, act_type="relu")
    check(function, False, "float32", optimize=["fuse"])


def test_what_can_be_fused_is():
    def residual(F, layer, x):
        y = F.Activation(layer(x), act_type="relu")
        z = F.Activation(layer(y) + y, act_type="relu")
        return F.Activation(layer(z) + z, act_type="relu")
    made = check(residual, False, "float32")
    assert made.conversion.steps["fuse"] == 3


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_without_avx512_a_rectifier_is_not_fused_with_the_product_of_large_strided_filters(isa, monkeypatch):
    """AlexNet's first layer takes 9.7 ms with its rectifier fused, 7.0 ms without it, which takes 0.1 ms itself."""
    take_for(monkeypatch, isa)
    net, data = nn.HybridSequential(), mx.nd.random.normal(shape=(2, 3, 23, 23))
    net.add(nn.Conv2D(16, 11, strides=4, padding=2, in_channels=3), nn.Activation("relu"))
    net.initialize(mx.init.Normal(0.4))
    expected = outputs_of(net, data)
    made = amp.convert_hybrid_block(net, "float32", data_example=data)
    assert relative(expected[0], made(data).asnumpy()) < 1e-5
    assert ("Activation" in kinds(made)) == (isa == "AVX2")


@pytest.mark.parametrize(("channels", "groups", "products"), [
    (16, 1, []), (12, 1, ["AVX2", "AVX512_CORE"]), (24, 4, ["AVX2", "AVX512_CORE"]), (16, 4, ["AVX2"]), (32, 4, []),
    (12, 12, ["AVX2", "AVX512_CORE"]), (16, 16, [])])
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_nothing_is_fused_with_products_of_matrices(channels, groups, products, isa, monkeypatch):
    """oneDNN adds a sum to the product of odd channels value by value."""
    class Net(HybridBlock):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2D(channels, 3, padding=1, groups=groups, in_channels=channels, use_bias=False)
            self.norm = nn.BatchNorm(in_channels=channels)

        def hybrid_forward(self, F, x):
            return F.Activation(self.norm(self.layer(x)) + x, act_type="relu")

    take_for(monkeypatch, isa)
    net, data = Net(), mx.nd.random.normal(shape=(2, channels, 6, 6))
    net.initialize(mx.init.Normal(0.4))
    expected = outputs_of(net, data)
    made = amp.convert_hybrid_block(net, "float32", data_example=data)
    assert relative(expected[0], made(data).asnumpy()) < 1e-5
    ops = kinds(made)
    assert "_sg_mkldnn_conv" in ops
    assert ("elemwise_add" in ops) == (isa in products)
