"""Converted networks in places where others are used: inside other blocks, as symbols, around custom operators."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from mxnet.gluon import nn
from networks import Computed, masked, sequential

import gluon_amp as amp
from gluon_amp._mxnet.symbols import to_graph
from gluon_amp.convert.convert import conversion_of

DATA = np.random.RandomState(0).normal(size=(2, 16, 8, 8))
dtypes = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])


@mx.operator.register("gluon_amp_test_triple")
class _TripleProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return _Triple()


class _Triple(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 3)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 3)


class Around(gluon.HybridBlock):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def hybrid_forward(self, F, x):
        return self.inner(x) * 2


def body():
    net = sequential(lambda: [nn.Conv2D(16, 3, padding=1, in_channels=16), nn.BatchNorm(in_channels=16),
                              nn.Activation("relu")], prefix="net_", active=False)
    random = np.random.RandomState(1)
    net[0].weight.set_data(mx.nd.array(random.uniform(-0.2, 0.2, net[0].weight.shape)))
    return net


@dtypes
@pytest.mark.parametrize("with_amp", [False, True])
@pytest.mark.parametrize("hybridized", [False, True])
def test_a_converted_network_inside_another_block(hybridized, with_amp, dtype):
    data = mx.nd.array(DATA)
    expected = Around(body())(data).asnumpy()
    net = Around(amp.convert_hybrid_block(body(), dtype))
    net.hybridize(active=hybridized)
    if with_amp:
        amp.init(dtype)
    found = net(data)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.asnumpy(), expected, atol=1e-5 if dtype == "float32" else 0.05)


class Nested(gluon.HybridBlock):
    """Takes a list first, and perhaps a factor in its middle."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.layer = nn.Dense(4, in_units=3)

    def hybrid_forward(self, F, pair, factor=None, offset=None):
        made = self.layer(pair[0]) + self.layer(pair[1])
        made = made if factor is None else made * factor
        return [made if offset is None else made + offset, (made * 2,)]


class AroundNested(gluon.HybridBlock):
    def __init__(self, inner, has_offset):
        super().__init__()
        self.inner = inner
        self.has_offset = has_offset

    def hybrid_forward(self, F, x, y):
        first, (second,) = self.inner([x, x * 2], None, y) if self.has_offset else self.inner([x, x * 2])
        return first + second


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("has_offset", [False, True])
def test_a_converted_network_takes_lists_and_none_as_the_network_did(has_offset, hybridized):
    inner = Nested()
    inner.initialize(mx.init.Xavier())
    x, y = mx.nd.array(DATA[:, :3, 0, 0]), mx.nd.array(DATA[:, :4, 0, 0])
    arguments = [[x, x * 2], None, y] if has_offset else [[x, x * 2]]
    expected = inner(*arguments)
    around = AroundNested(inner, has_offset)(x, y)
    made = amp.convert_hybrid_block(inner, "float32", data_example=arguments)
    first, (second,) = made(*arguments)
    np.testing.assert_allclose(first.asnumpy(), expected[0].asnumpy(), atol=1e-6)
    np.testing.assert_allclose(second.asnumpy(), expected[1][0].asnumpy(), atol=1e-6)
    net = AroundNested(made, has_offset)
    net.hybridize(active=hybridized)
    np.testing.assert_allclose(net(x, y).asnumpy(), around.asnumpy(), atol=1e-6)


def test_a_converted_network_whose_first_argument_is_none():
    inner = Nested()
    inner.hybrid_forward = lambda F, nothing, x: inner.layer(x) if nothing is None else x
    inner.initialize()
    x = mx.nd.ones((2, 3))
    made = amp.convert_hybrid_block(inner, "float32", data_example=[None, x])
    np.testing.assert_allclose(made(None, x).asnumpy(), inner(None, x).asnumpy(), atol=1e-6)
    assert len(made(None, mx.sym.var("x")).list_outputs()) == 1
    with pytest.raises(ValueError, match="structure"):
        made(x, None)
    with pytest.raises(ValueError, match="structure"):
        made(mx.sym.var("x"), None)


class Tripled(gluon.HybridBlock):
    def __init__(self, alone):
        super().__init__()
        self.alone = alone
        with self.name_scope():
            self.layer = nn.Dense(16, in_units=16)

    def hybrid_forward(self, F, x):
        made = F.Custom(x if self.alone else self.layer(x), op_type="gluon_amp_test_triple")
        return made if self.alone else (made, F.relu(made))


@dtypes
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.filterwarnings("ignore:the converted network stays in FP32")
def test_a_custom_operator_gives_an_output(alone, dtype, tmp_path):
    net = Tripled(alone)
    net.initialize(mx.init.Uniform(0.3))
    data = mx.nd.array(DATA.reshape(-1, 16)[:4])

    def listed(value):
        return [value] if alone else value
    expected = listed(net(data))
    made = amp.convert_hybrid_block(net, dtype, data_example=data)
    symbol, parameters = made.export(str(tmp_path / "net"))
    loaded = gluon.SymbolBlock.imports(symbol, ["data"], parameters)
    for found in (listed(made(data)), listed(loaded(data))):
        for one, wanted in zip(found, expected):
            np.testing.assert_allclose(one.asnumpy(), wanted.asnumpy(), atol=1e-5 if dtype == "float32" else 0.05)
    assert conversion_of(to_graph(mx.sym.load(symbol))).target_dtype == dtype


class TestValuesThatAreNotFinite:
    def network(self):
        net = sequential(lambda: [nn.Conv2D(8, 3, in_channels=4), nn.BatchNorm(in_channels=8),
                                  nn.Dense(2, in_units=8 * 36)], prefix="odd_", active=False)
        net(mx.nd.ones((1, 4, 8, 8)))
        return net

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_they_are_named(self, value):
        net = self.network()
        net[1].running_var.data()[3] = value
        with pytest.warns(UserWarning, match=r"infinite or NaN values in odd_batchnorm0_running_var: "):
            amp.convert_hybrid_block(net, "float32")
        symbol = net(mx.sym.var("data"))
        arrays = {name: parameter.data() for name, parameter in net.collect_params().items()}
        with pytest.warns(UserWarning, match="odd_batchnorm0_running_var"):
            amp.convert_model(symbol, arrays, {}, "float32")

    def test_large_finite_ones_are_not(self, recwarn):
        net = self.network()
        net[0].weight.set_data(mx.nd.full((8, 4, 3, 3), 3e38))
        amp.convert_hybrid_block(net, "float32")
        assert not [warning for warning in recwarn if "NaN" in str(warning.message)]


def test_files_of_the_network_before_are_refused_and_its_own_are_read(tmp_path):
    net = sequential(lambda: [nn.Conv2D(8, 3, in_channels=4), nn.BatchNorm(in_channels=8),
                              nn.Dense(2, in_units=8 * 36)], prefix="before_")
    net(mx.nd.ones((1, 4, 8, 8)))
    net.export(str(tmp_path / "before"))
    converted = amp.convert_hybrid_block(net, "float32")
    kept = {name: parameter.data().asnumpy() for name, parameter in converted.collect_params().items()}
    with pytest.raises(AssertionError, match="Parameter 'before_batchnorm0_weight' is missing in file"):
        converted.load_parameters(str(tmp_path / "before-0000.params"))
    converted.save_parameters(str(tmp_path / "own"))
    converted.load_parameters(str(tmp_path / "own"))
    for name, parameter in converted.collect_params().items():
        np.testing.assert_array_equal(parameter.data().asnumpy(), kept[name])


def standardised(F, x, weight, other):
    centred = F.broadcast_sub(weight, F.mean(weight, axis=(1, 2, 3), keepdims=True))
    spread = F.sqrt(F.mean(F.square(centred), axis=(1, 2, 3), keepdims=True) + 1e-5)
    return F.broadcast_mul(F.broadcast_div(centred, spread), other)


@dtypes
@pytest.mark.parametrize(("compute", "is_stored"), [
    (masked, True), (standardised, True),
    (lambda F, x, weight, other: F.broadcast_mul(weight, F.Dropout(other, p=0.5)), True),  # which is dropped before
    (lambda F, x, weight, other: F.broadcast_mul(weight, F.broadcast_add(other, F.mean(x, keepdims=True))), False),
    (lambda F, x, weight, other: weight + 0 * F.random.normal_like(weight), False),
], ids=["masked", "standardised", "dropout", "of the data", "drawn"])
def test_weights_that_are_computed_from_parameters_are_stored(compute, is_stored, dtype, tmp_path):
    """They are a layer's weights then: BatchNorm is folded into them."""
    net = sequential(lambda: [Computed(compute), nn.BatchNorm(in_channels=16)], mx.init.Uniform(0.3), prefix="net_")
    data = mx.nd.array(DATA)
    expected = net(data).asnumpy()
    made = amp.convert_hybrid_block(net, dtype, data_example=data)
    np.testing.assert_allclose(made(data).asnumpy(), expected, atol=1e-5 if dtype == "float32" else 0.05)
    assert (made.conversion.steps["fold_weights"], made.conversion.steps["fold_batch_norm"]) == (is_stored, is_stored)
    if is_stored:
        assert {name: parameter.shape for name, parameter in made.collect_params().items()} == {
            "net_batchnorm0_weight": (16, 16, 3, 3), "net_batchnorm0_bias": (16,)}
    made.save_parameters(str(tmp_path / "own"))
    made.load_parameters(str(tmp_path / "own"))


def test_weights_that_others_read_are_not_kept_twice():
    data, weight = mx.sym.var("data"), mx.sym.var("w")
    layer = mx.sym.FullyConnected(data, mx.sym.transpose(weight), num_hidden=16, no_bias=True)
    symbol, arrays = mx.sym.FullyConnected(layer, weight, num_hidden=16, no_bias=True), {"w": mx.nd.ones((16, 16))}
    made, kept, _ = amp.convert_model(symbol, arrays, {}, "float32", optimize="all")
    assert "transpose" in made.tojson()
    assert kept.keys() == arrays.keys()
