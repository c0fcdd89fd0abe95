"""Channels, strides and padding of convolutions that suit oneDNN: graphs by hand, and values and gradients."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import batch_norm, conv, graph, op, plans_of, rewrite, rewritten, variable
from mxnet.gluon import nn
from networks import differentiate

import gluon_amp as amp
from gluon_amp.graph import Entry
from gluon_amp.machine.dtypes import cpu_support
from gluon_amp.rules import ANY_DEVICE, Device, Policy
from gluon_amp.state import devices

AMX = Device(32, amx=True)
FILTERS = 32


def data(channels=16):
    return variable("data", (2, channels, 8, 8))


def convolution(filters, channels=160, kernel=3, shape=(2, 160, 16, 16), **attrs):
    node = conv("c", variable("data", shape), filters, channels, kernel, **attrs)
    node.shapes = [(shape[0], filters, *shape[2:])]
    return node


def is_padded(*heads, target="float32", training=True, device=ANY_DEVICE):
    found = rewritten(target, *heads, policy=Policy(target, training=training), device=device)
    return any("_unpad" in line for line in found)


def integers(shape, seed, largest=8, unit=8):
    """Values that bfloat16 holds exactly."""
    return mx.nd.array(np.random.RandomState(seed).randint(-largest, largest + 1, shape) / unit)


def steps(net, x, head, grad_req="write"):
    """Return the output of two equal steps, and the gradients that they leave."""
    x.attach_grad(grad_req)
    for _ in range(2):
        y = differentiate(net, x, head=head)
    gradients = [each.grad().asnumpy() for each in net.collect_params().values() if each.grad_req != "null"]
    return [y.asnumpy(), x.grad.asnumpy(), *gradients]


class TestChannels:
    @pytest.mark.parametrize(("filters", "target", "padded"), [
        (32, "bfloat16", None), (24, "bfloat16", 32), (4, "bfloat16", None), (20, "float16", 24),
        (24, "float16", None)])
    def test_only_where_it_gains(self, filters, target, padded):
        result = graph(conv("c", data(), filters, 16))
        rewrite(result, Policy(target), check=True)
        attrs = next(node for node in result.operators() if node.op == "Convolution").attrs
        assert attrs["num_filter"] == str(padded or filters)

    @pytest.mark.parametrize(("amx", "training", "padded"), [(True, True, False), (False, True, True)])
    def test_before_batch_norm_amx_takes_odd_counts_as_they_are(self, amx, training, padded):
        norm = batch_norm("bn", conv("c", data(32), 40, 32, kernel=3))
        head = op("Activation", "relu", Entry(norm), act_type="relu")
        assert is_padded(head, target="bfloat16", training=training, device=Device(32, amx=amx)) == padded

    @pytest.mark.parametrize("target", ["bfloat16", "float16"])
    @pytest.mark.parametrize("node", [
        lambda: conv("g", data(), 20, 8, num_group=2), lambda: conv("u", data(), 20, 16, weight=variable("w")),
        lambda: op("Convolution", "last", variable("images", (2, 8, 8, 16)), variable("w", (20, 3, 3, 16)),
                   num_filter=20, kernel=(3, 3), no_bias=True, layout="NHWC", shape=(2, 8, 8, 20))],
        ids=["groups", "unknown shapes", "channels behind the map"])
    def test_others_are_left_alone(self, node, target):
        assert not is_padded(node(), target=target)

    @pytest.mark.parametrize(("filters", "settings", "padded"), [
        *((filters, {}, True) for filters in (20, 84, 126, 324)),  # products of matrices otherwise
        (24, {"device": Device(16)}, True), (24, {"device": Device(8)}, False), (32, {}, False),
        *((324, {"training": False, "device": Device(multiple)}, padded) for multiple, padded in (
            (None, False), (1, False), (8, True), (16, True))),
        (12, {"training": False, "device": Device(16), "channels": 8, "shape": (1, 8, 8, 8)}, True),
        (12, {"training": False, "device": Device(16), "channels": 3, "shape": (1, 3, 8, 8)}, False),  # an image
        (84, {"training": False, "device": Device(16), "kernel": 1}, False), (84, {"kernel": 1}, False),
        (84, {"shape": (1, 160, 8, 8)}, False),
        (84, {"channels": 64, "shape": (2, 64, 16, 16)}, False), (84, {"channels": 80, "num_group": 2}, False)])
    def test_in_fp32(self, filters, settings, padded):
        where = {name: settings.pop(name) for name in ("device", "training") if name in settings}
        node = convolution(filters, **settings)
        assert is_padded(node, **where) == padded
        node = convolution(filters, **settings)
        node.shapes = [None]
        assert is_padded(node, **where) == (padded and "training" in where)  # which looks at the weight alone

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_values_and_gradients_in_fp32(self, grad_req):
        """On integers, whose sums are exact in any order."""
        net = nn.Conv2D(20, 3, padding=1, in_channels=128, prefix="net_")
        net.initialize()
        net.collect_params().setattr("grad_req", grad_req)
        for seed, parameter in enumerate(net.collect_params().values()):
            parameter.set_data(integers(parameter.shape, seed, 3, 1))
        net.hybridize()
        arrays = integers((2, 128, 14, 14), 3, 3, 1), integers((2, 20, 14, 14), 4, 3, 1)
        expected = steps(net, *arrays, grad_req)
        net.collect_params().zero_grad()
        amp.init("float32")
        for one, other in zip(steps(net, *arrays, grad_req), expected):
            np.testing.assert_array_equal(one, other)


class TestStrides:
    @pytest.mark.parametrize(("attrs", "channels", "device", "training"), [
        *((attrs, 3, AMX, True) for attrs in (
            {"stride": (1, 1)}, {"stride": (2, 1)}, {"kernel": 1}, {"kernel": 2}, {"dilate": (2, 2)},
            {"layout": "NHWC"}, {"filters": 8}, {"pad": (1, 0)})),
        ({}, 12, AMX, True), ({}, 3, ANY_DEVICE, True), ({}, 3, AMX, False),
        ({}, 3, Device(amx=True, imitated=True), True)])
    def test_others_keep_theirs(self, attrs, channels, device, training):
        settings = {"kernel": 7, "stride": (2, 2), "pad": (3, 3), "filters": 64, **attrs}
        stem = conv("stem", data(channels), settings.pop("filters"), channels, **settings)
        stride = stem.attrs["stride"]
        policy = Policy("bfloat16", training=training)
        assert not any("_squares" in line for line in rewritten("bfloat16", stem, policy=policy, device=device))
        assert stem.attrs["stride"] == stride
        if training:
            assert stem.inputs[0].dtype == "float32"


@pytest.mark.bf16
class TestStridedStems:
    @pytest.fixture(autouse=True)
    def with_amx(self, monkeypatch):
        with_tiles = cpu_support("AVX512_CORE_BF16")._replace(amx=True, channel_multiple=32)
        monkeypatch.setattr(devices, "cpu_support", lambda: with_tiles)

    @staticmethod
    def stem(kernel=7, pad=3, channels=3, bias=False, grad_req="write"):
        stem = nn.Conv2D(FILTERS, kernel, 2, pad, in_channels=channels, use_bias=bias)
        stem.initialize()
        stem.weight.set_data(integers(stem.weight.shape, 0))
        stem.collect_params().setattr("grad_req", grad_req)
        stem.hybridize(static_alloc=True, static_shape=True)
        return stem

    @pytest.mark.parametrize(("kernel", "pad", "size", "channels", "bias", "grad_req"), [
        (7, 3, (32, 32), 3, False, "write"), (7, 3, (31, 33), 3, True, "add"), (3, 1, (32, 33), 3, False, "write"),
        (3, 0, (33, 32), 1, True, "add"), (4, 1, (32, 31), 4, True, "write"), (4, 3, (16, 16), 3, False, "write"),
        (5, 2, (17, 16), 8, False, "write"), (7, 0, (41, 40), 2, False, "write")])
    def test_values_and_gradients_are_those_of_fp32(self, kernel, pad, size, channels, bias, grad_req):
        stem, x = self.stem(kernel, pad, channels, bias, grad_req), integers((2, channels, *size), 1)
        head = integers(stem(x).shape, 2)
        expected = steps(stem, x, head)
        stem.collect_params().zero_grad()
        amp.init("bfloat16")
        results = steps(stem, x, head)
        made = stem._cached_op.graph([x, *(parameter.data() for parameter in stem.collect_params().values())])
        assert sum(node.op == "Convolution" for node in made.operators()) == 3
        for result, wanted in zip(results, expected):
            assert np.abs(result - wanted).max() <= 2 ** -7 * np.abs(wanted).max()  # rounded to bfloat16 twice

    def test_one_graph_serves_maps_of_even_and_of_odd_size(self):
        stem = self.stem()
        amp.init("bfloat16")
        shapes = [stem(mx.nd.ones(shape)).shape for shape in [(2, 3, 32, 32), (1, 3, 31, 33), (3, 3, 64, 32)]]
        assert shapes == [(2, FILTERS, 16, 16), (1, FILTERS, 16, 17), (3, FILTERS, 32, 16)]
        assert len(plans_of(stem)) == 1

    def test_parameters_and_files_keep_the_users_shapes(self, tmp_path):
        stem, x = self.stem(), integers((2, 3, 32, 32), 1)
        amp.init("bfloat16")
        steps(stem, x, None)
        stem.export(str(tmp_path / "stem"))
        assert stem.weight.shape == stem.weight.grad().shape == (FILTERS, 3, 7, 7)
        assert mx.nd.load(str(tmp_path / "stem-0000.params"))[f"arg:{stem.weight.name}"].shape == (FILTERS, 3, 7, 7)
        assert "_eye" not in (tmp_path / "stem-symbol.json").read_text()


def zeros_around(widths=(0, 0, 0, 0, 2, 2, 1, 1), shape=(2, 16, 12, 10), **attrs):
    node = op("Pad", "p", data(), **{"mode": "constant", "pad_width": widths, **attrs})
    node.shapes = [shape]
    return node


def behind(node, name="c", **attrs):
    made = conv(name, node, 16, 16, 3, **attrs)
    made.shapes = [(2, 16, 10, 8)]
    return made


class TestPadding:
    """Convolutions take over the zeros around their data."""

    @pytest.mark.parametrize(("pads", "heads"), [
        (False, lambda node: [behind(node)]), (False, lambda node: [behind(node), behind(node, "d")]),
        (True, lambda node: [behind(node), node]), (True, lambda node: [behind(node), op("relu", "r", node)]),
        (True, lambda node: [behind(node, layout="NHWC")])],
        ids=["one", "several", "an output", "another user", "channels last"])
    def test_which_convolutions_pad(self, pads, heads):
        assert any("Pad" in line for line in rewritten("float32", *heads(zeros_around()))) == pads

    @pytest.mark.parametrize(("widths", "shape", "attrs"), [
        ((0, 0, 0, 0, 0, 1, 0, 1), (2, 16, 9, 9), {}), ((0, 0, 1, 1, 0, 0, 0, 0), (2, 18, 8, 8), {}),
        ((0, 0, 0, 0, 2, 2, 1, 1), (2, 16, 12, 10), {"constant_value": 1.0}),
        ((0, 0, 0, 0, 2, 2, 1, 1), (2, 16, 12, 10), {"mode": "edge"})],
        ids=["one side", "channels", "not with zeros", "edges"])
    def test_what_is_left_alone(self, widths, shape, attrs):
        assert "Pad" in str(rewritten("float32", behind(zeros_around(widths, shape, **attrs))))

    @pytest.mark.parametrize("dilation", [1, 2])
    def test_a_separable_convolution_of_xception_gives_the_same(self, dilation):
        xception = pytest.importorskip("gluoncv.model_zoo.xception")
        x = mx.nd.array(np.random.RandomState(1).normal(size=(2, 16, 9, 9)))

        def run():
            mx.random.seed(5)
            net = xception.SeparableConv2d(16, 32, dilation=dilation, norm_layer=nn.BatchNorm, norm_kwargs={})
            net.initialize(mx.init.Xavier())
            net.hybridize()
            return steps(net, x, None)

        expected = run()
        amp.init("float32")
        for one, other in zip(run(), expected):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
