"""Chains of convolutions and ReLU6 with the channels last: graphs written by hand, and training against float64.

In bfloat16 training is compared with what MXNet's operators give in that type.
"""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import take_for
from graphs import describe, graph, op, rewrite, variable
from mxnet import autograd
from mxnet.gluon import HybridBlock, Trainer, nn
from mxnet.gluon.loss import SoftmaxCrossEntropyLoss
from mxnet.gluon.model_zoo import vision
from networks import observed, relative

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.graph import Entry
from gluon_amp.passes import activations, channels_last
from gluon_amp.passes.activations import HARD_SWISH
from gluon_amp.passes.channels_last import NATIVE
from gluon_amp.rules import FP32, Cause, Device, Policy, Rule

pytestmark = pytest.mark.skipif(not all(map(native.is_available, NATIVE)), reason="the operators in C++ are missing")

SHAPE, WIDE = (2, 8, 6, 6), (2, 16, 6, 6)  # of 8 channels bfloat16 makes no convolution faster
MAPS = {"_gluon_amp_convolution", "_gluon_amp_batch_norm"}
FLAGS = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


def shape_of(data):
    return (data if isinstance(data, Entry) else Entry(data)).shape


def conv(name, data, **attrs):
    shape = shape_of(data)
    settings = {"num_filter": shape[1], "kernel": (1, 1), "no_bias": True, **attrs}
    weight = variable(f"{name}_weight", (settings["num_filter"], shape[1], 1, 1))
    return op("Convolution", name, data, weight, shape=(shape[0], settings["num_filter"], *shape[2:]), **settings)


def norm(name, data, **attrs):
    shape = shape_of(data)
    parameters = [variable(f"{name}_{part}", shape[1:2]) for part in ("gamma", "beta", "mean", "var")]
    made = op("BatchNorm", name, data, *parameters, outputs=3, shape=shape, **attrs)
    made.shapes = [shape, shape[1:2], shape[1:2]]
    return made


def clip(name, data):
    return op("clip", name, data, shape=shape_of(data), a_min=0, a_max=6)


def block(name, data, **attrs):
    """A convolution, BatchNorm and ReLU6."""
    return Entry(clip(f"{name}_relu6", Entry(norm(f"{name}_norm", conv(name, data), **attrs))))


def blocks(names, data):
    """A block for each letter, one behind the other."""
    for name in names:
        data = block(name, data)
    return data


def plain(shape=SHAPE, **attrs):
    """What a chain begins with, and does not take in: the gradient of an image is of no use."""
    return Entry(conv("image", variable("data", shape), **attrs))


def turned(*heads, **settings):
    made = graph(*heads)
    settings = {"trains": True, "native": NATIVE, "keep_outputs": False, **settings}
    policy = settings.pop("policy", Policy("float32"))
    rewrite(made, policy, **settings)
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
    rewrite(made, Policy("float32"), trains=True, native=NATIVE, keep_outputs=False)
    assert {node.name: node.shapes[0] for node in made.operators()} == {
        "image": shape, "image_turned": last, "a": last, "a_norm": last, "b": last, "b_norm": last, "c": last,
        "c_norm": last, "c_relu6_turned": shape}


def test_batch_norm_takes_a_sum_along():
    first = block("a", plain())
    total = Entry(op("elemwise_add", "total", first, Entry(norm("b_norm", Entry(conv("b", first)))), shape=SHAPE))
    lines = turned(block("d", block("c", total)))
    assert "b: _gluon_amp_convolution(a_norm, b_weight) -> float32" in lines
    assert ("b_norm: _gluon_amp_batch_norm(b, b_norm_gamma, b_norm_beta, b_norm_mean, b_norm_var, a_norm) -> float32"
            in lines)
    assert "c: _gluon_amp_convolution(b_norm, c_weight) -> float32" in lines


def summed(first, second):
    """A sum of two maps, and the rectifier behind it."""
    total = Entry(op("elemwise_add", "total", first, second, shape=SHAPE))
    return Entry(op("Activation", "relu", total, shape=SHAPE, act_type="relu"))


def variables_of(*heads):
    made = graph(*heads)
    before = [node.name for node in made.variables()]
    rewrite(made, Policy("float32"), trains=True, native=NATIVE, keep_outputs=False, check=True)
    return describe(made), before, [node.name for node in made.variables()]


@pytest.mark.parametrize("skips_first", [False, True])
def test_a_sum_and_its_rectifier_are_batch_norms_in_either_order(skips_first):
    skip = blocks("abc", plain())
    body = Entry(norm("e_norm", Entry(conv("e", block("d", skip)))))
    lines, before, after = variables_of(summed(*(skip, body) if skips_first else (body, skip)))
    assert ("e_norm: _gluon_amp_batch_norm(e, e_norm_gamma, e_norm_beta, e_norm_mean, e_norm_var, c_norm) -> float32"
            in lines)
    assert not any("elemwise_add" in line or "Activation" in line for line in lines)
    assert before == after


def test_the_order_of_variables_stays_where_both_maps_are_batch_norms():
    def both():
        start = blocks("abc", plain())
        return [Entry(norm(f"{name}_norm", Entry(conv(name, start)))) for name in "xy"]

    lines, before, after = variables_of(summed(*both()))
    assert any(line.startswith("x_norm: ") and "x_norm_var, y_norm)" in line for line in lines)
    assert before == after
    first, second = both()
    lines, before, after = variables_of(summed(Entry(clip("x_relu6", first)), second))  # x_norm has its limits
    assert "total: elemwise_add(x_norm, y_norm) -> float32" in lines
    assert before == after


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


LOW = Policy("bfloat16")


@pytest.mark.parametrize("settings", [{"trains": False}, {"native": frozenset()}, {"recorded": False},
                                      {"policy": Policy("float16")},
                                      {"policy": Policy("float16"), "device": Device(imitated=True)},
                                      {"policy": LOW, "device": Device(imitated=True)},
                                      {"policy": Policy("float32", disabled_passes=frozenset({"channels_last"}))}])
def test_only_training_in_c_plus_plus_is_concerned(settings):
    lines = turned(blocks("abcde", plain(WIDE)), **settings)
    assert not any("_gluon_amp_convolution" in line for line in lines)


def test_in_bfloat16_casts_are_where_a_chain_begins_and_ends():
    inner = [line for name, data in zip("abcde", ("image_turned_bfloat16", "a_norm", "b_norm", "c_norm", "d_norm"))
             for line in (f"{name}: _gluon_amp_convolution({data}, {name}_weight) -> bfloat16",
                          f"{name}_norm: _gluon_amp_batch_norm({name}, {name}_norm_gamma, {name}_norm_beta, "
                          f"{name}_norm_mean, {name}_norm_var) -> bfloat16")]
    assert turned(blocks("abcde", plain(WIDE)), policy=LOW, check=True) == [
        "data_bfloat16: amp_cast(data) -> bfloat16",
        "image_weight_bfloat16: amp_cast(image_weight) -> bfloat16",
        "image: Convolution(data_bfloat16, image_weight_bfloat16) -> bfloat16",
        "image_float32: amp_cast(image) -> float32",
        "image_turned: transpose(image_float32) -> float32",
        "image_turned_bfloat16: amp_cast(image_turned) -> bfloat16",
        *inner,
        "e_norm_float32: amp_cast(e_norm) -> float32",
        "e_relu6_turned: transpose(e_norm_float32) -> float32",
        "out: e_relu6_turned",
    ]


@pytest.mark.parametrize(("names", "policy", "is_turned"), [
    ("abc", Policy("float32"), True), ("ab", Policy("float32"), False), ("abcde", LOW, True), ("abcd", LOW, False)])
def test_a_transposition_between_casts_has_to_save_more(names, policy, is_turned):
    lines = turned(blocks(names, plain(WIDE)), policy=policy)
    assert any("_gluon_amp_convolution" in line for line in lines) == is_turned


def test_what_goes_along_with_its_data_joins_a_chain_in_bfloat16():
    first = Entry(clip("image_relu6", Entry(norm("image_norm", plain((2, 3, 6, 6), num_filter=16)))))
    lines = turned(blocks("abcd", first), policy=LOW, check=True)
    assert lines[:4] == [
        "image: Convolution(data, image_weight) -> float32",
        "image_turned: transpose(image) -> float32",
        "image_turned_bfloat16: amp_cast(image_turned) -> bfloat16",
        "image_norm: _gluon_amp_batch_norm(image_turned_bfloat16, image_norm_gamma, image_norm_beta, image_norm_mean, "
        "image_norm_var) -> bfloat16",
    ]


def test_what_is_in_fp32_for_its_few_channels_alone_joins_a_chain_in_bfloat16():
    narrow = Entry(norm("narrow_norm", Entry(conv("narrow", blocks("abc", plain(WIDE)), num_filter=8))))
    wide = Entry(clip("d_relu6", Entry(conv("d", narrow, num_filter=16))))
    lines = turned(blocks("ef", wide), policy=LOW, check=True)
    assert "narrow: _gluon_amp_convolution(c_norm, narrow_weight) -> bfloat16" in lines
    assert "d: _gluon_amp_convolution(narrow_norm, d_weight) -> bfloat16" in lines
    assert sum("transpose" in line for line in lines) == 2


def test_what_is_read_in_fp32_is_not_rounded_for_a_chain():
    made = norm("image_norm", plain((2, 3, 6, 6), num_filter=16))
    first = Entry(clip("image_relu6", Entry(made)))
    lines = turned(blocks("abcde", first), Entry(op("exp", "outside", first, shape=WIDE)), policy=LOW, check=True)
    assert any(line.startswith("image_norm: BatchNorm") and line.endswith("float32") for line in lines)
    assert "image_relu6_turned: transpose(image_relu6) -> float32" in lines
    assert "outside: exp(image_relu6) -> float32" in lines


@pytest.mark.parametrize("policy", [
    Policy("bfloat16", excluded=frozenset({"c_norm"})), Policy("bfloat16", excluded=frozenset({"c"})),
    Policy("bfloat16", {"clip": (Rule(FP32, note="wished", cause=Cause.USER_LIST),)})])
def test_a_chain_that_is_partly_fp32_by_a_wish_stays(policy):
    lines = turned(blocks("abcde", plain(WIDE)), policy=policy, check=True)
    assert not any("_gluon_amp_convolution" in line for line in lines)


def test_casts_on_either_side_of_what_stays_in_fp32_bound_two_chains():
    policy = Policy("bfloat16", excluded=frozenset({"x"}))
    lines = turned(blocks("fghij", Entry(conv("x", blocks("abcde", plain(WIDE))))), policy=policy, check=True)
    assert "x: Convolution(e_relu6_turned, x_weight) -> float32" in lines
    assert "x_turned: transpose(x) -> float32" in lines
    assert sum("_gluon_amp_convolution" in line for line in lines) == 10


def test_what_follows_a_chain_takes_its_type_again():
    last = blocks("abcde", plain(WIDE))
    pooled = Entry(op("Pooling", "pool", last, shape=(2, 16, 3, 3), kernel=(2, 2), stride=(2, 2)))
    lines = turned(pooled, policy=LOW, check=True)
    assert "pool: Pooling(e_relu6_turned) -> float32" in lines


def test_statistics_that_are_outputs_stay():
    made = norm("a_norm", Entry(conv("a", plain())))
    head = block("b", Entry(clip("a_relu6", Entry(made))))
    assert "a_norm: BatchNorm(a, a_norm_gamma, a_norm_beta, a_norm_mean, a_norm_var) -> float32" in [
        line.replace("a_turned", "a") for line in turned(head, Entry(made, 1))]


def bottleneck(name, data, groups, channels=16, side=1):
    """Convolutions with BatchNorm and a rectifier, the second of them in groups and of this kernel."""
    for part, count, kernel in (("a", 1, 1), ("b", groups, side), ("c", 1, 1)):
        made = Entry(norm(f"{name}{part}_norm", conv(f"{name}{part}", data, num_group=count, num_filter=channels,
                                                     kernel=(kernel, kernel), pad=(kernel // 2, kernel // 2))))
        data = Entry(op("Activation", f"{name}{part}_relu", made, shape=made.shape, act_type="relu"))
    return data


WITH_AVX512, WITH_AVX2, FP32_ONLY = Device(16), Device(8), Policy("float32")


def test_a_batch_norm_behind_groups_turns_a_chain_and_takes_its_rectifier_along():
    made = graph(bottleneck("x", plain(WIDE), 4))
    rewrite(made, FP32_ONLY, WITH_AVX512, trains=True, native=NATIVE, keep_outputs=False, check=True)
    assert describe(made)[2:] == [
        "xa: _gluon_amp_convolution(image_turned, xa_weight) -> float32",
        "xa_norm: _gluon_amp_batch_norm(xa, xa_norm_gamma, xa_norm_beta, xa_norm_mean, xa_norm_var) -> float32",
        "xb: _gluon_amp_convolution(xa_norm, xb_weight) -> float32",
        "xb_norm: _gluon_amp_batch_norm(xb, xb_norm_gamma, xb_norm_beta, xb_norm_mean, xb_norm_var) -> float32",
        "xc: _gluon_amp_convolution(xb_norm, xc_weight) -> float32",
        "xc_norm: _gluon_amp_batch_norm(xc, xc_norm_gamma, xc_norm_beta, xc_norm_mean, xc_norm_var) -> float32",
        "xc_relu_turned: transpose(xc_norm) -> float32",
        "out: xc_relu_turned",
    ]
    attrs = next(node.attrs for node in made.operators() if node.name == "xb_norm")
    assert (attrs["a_min"], attrs["rectifies"], attrs.get("a_max")) == ("0", "True", None)


@pytest.mark.parametrize(("groups", "device", "channels", "is_turned"), [
    (4, WITH_AVX512, 16, True),
    (4, WITH_AVX2, 16, False),  # for which oneDNN has kernels
    (2, WITH_AVX512, 32, False),  # whole blocks of channels
    (1, WITH_AVX512, 16, False), (16, WITH_AVX512, 16, False), (24, WITH_AVX512, 24, True),
    (1, WITH_AVX512, 24, False)])
def test_which_convolutions_mxnet_runs_slowly(groups, device, channels, is_turned):
    lines = turned(bottleneck("x", plain((2, channels, 6, 6)), groups, channels), device=device)
    assert any("_gluon_amp_convolution" in line for line in lines) == is_turned


def test_those_in_groups_are_slow_in_bfloat16_as_well():
    lines = turned(bottleneck("x", plain((2, 16, 6, 6)), 4, 16), policy=LOW, device=WITH_AVX512)
    assert any("_gluon_amp_convolution" in line for line in lines)


@pytest.mark.parametrize(("groups", "channels", "side", "is_turned"), [
    (12, 12, 3, True), (16, 16, 3, False), (16, 16, 5, True),  # depthwise: odd channels, a large kernel
    (4, 16, 3, True), (4, 16, 1, False), (2, 16, 3, False), (1, 12, 3, True), (1, 16, 3, False)])
def test_which_convolutions_are_products_of_matrices_without_avx512(groups, channels, side, is_turned):
    head = bottleneck("x", plain((2, channels, 6, 6)), groups, channels, side)
    lines = turned(head, device=WITH_AVX2)
    assert any("_gluon_amp_convolution" in line for line in lines) == is_turned


def test_the_convolution_of_an_image_behind_batch_norm_stays_without_avx512():
    """As in ResNet v2, which begins with BatchNorm."""
    image = Entry(norm("first", variable("data", (2, 3, 6, 6))))
    made = Entry(norm("second", conv("stem", image, num_filter=16, kernel=(7, 7), pad=(3, 3))))
    lines = turned(op("Activation", "relu", made, shape=made.shape, act_type="relu"), device=WITH_AVX2)
    assert "stem: Convolution(first, stem_weight) -> float32" in lines


def test_convolutions_in_groups_without_batch_norm_train_in_c_plus_plus(monkeypatch):
    take_for(monkeypatch, "AVX512_CORE")
    net = nn.HybridSequential()
    net.add(nn.Conv2D(24, 1, in_channels=3))
    for _ in range(4):
        net.add(nn.Conv2D(24, 3, padding=1, groups=24, in_channels=24, activation="relu"))
    net.initialize()
    net.hybridize()
    amp.init()
    with autograd.record():
        net(mx.nd.ones((2, 3, 8, 8))).backward()
    assert "_gluon_amp_convolution" in operators_of(net)


class Bottlenecks(HybridBlock):
    """Blocks of ResNeXt, whose last BatchNorm gives zeros for some channels."""

    def __init__(self, groups, channels=16, **kwargs):
        super().__init__(prefix="bottlenecks_", **kwargs)
        with self.name_scope():
            self.stem = nn.Conv2D(channels, 3, padding=1, in_channels=3)
            self.layers = nn.HybridSequential()
            for kernel, count in ((1, 1), (3, groups), (1, 1)) * 2:
                self.layers.add(nn.Conv2D(channels, kernel, padding=kernel // 2, groups=count, in_channels=channels,
                                          use_bias=False), nn.BatchNorm(in_channels=channels))
            self.out = nn.Dense(4, in_units=channels)

    def hybrid_forward(self, F, data):
        x = first = F.relu(self.stem(data))
        for start in (0, 6):
            y = x
            for place in range(start, start + 6, 2):
                y = self.layers[place + 1](self.layers[place](y))
                y = y if place == start + 4 else F.relu(y)
            x = F.Activation(x + y, act_type="relu")
        return self.out(F.mean(x, axis=(2, 3))), F.max(first, axis=(1, 2, 3))


def filled(net, dtype, dead=0):
    """Draw the parameters of a network, with some channels that are 0: a rectifier passes no gradient there."""
    net.initialize(mx.init.Constant(1))
    values = np.random.RandomState(1)
    for name, parameter in sorted(net.collect_params().items()):
        drawn = values.standard_normal(parameter.shape) * 0.4
        if name.endswith(("gamma", "beta")):
            drawn[:dead] = 0
        parameter.set_data(mx.nd.array(np.abs(drawn) + 0.5 if name.endswith("var") else drawn))
    net.cast(dtype)
    return net


def bottlenecks(groups, channels, dtype="float32"):
    return filled(Bottlenecks(groups, channels), dtype, dead=3)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("groups", "channels"), [(4, 16), (12, 12)])
def test_training_of_groups_is_that_of_float64(flags, groups, channels, monkeypatch):
    monkeypatch.setattr(channels_last, "BLOCK", 8)  # as on a CPU with AVX512
    assert trained(lambda *dtype: bottlenecks(groups, channels, *dtype), flags) >= MAPS


def hard_swish(name, data):
    """The operators that MobileNet v3 makes a hard swish of."""
    made = data
    for part, kind, attrs in (("plus", "_plus_scalar", {"scalar": 3.0}), ("limits", "clip", {"a_min": 0, "a_max": 6}),
                              ("over", "_div_scalar", {"scalar": 6.0})):
        made = Entry(op(kind, f"{name}_{part}", made, shape=shape_of(data), **attrs))
    return Entry(op("elemwise_mul", name, data, made, shape=shape_of(data)))


def test_means_and_factors_of_channels_need_no_transposition(monkeypatch):
    monkeypatch.setattr(activations, "_LEAST", 1)
    data = hard_swish("swish", blocks("ab", plain()))
    means = Entry(op("Pooling", "means", data, shape=(2, 8, 1, 1), global_pool=True, pool_type="avg", kernel=(1, 1)))
    factors = Entry(op("sigmoid", "factors", means, shape=(2, 8, 1, 1)))
    scaled = Entry(op("broadcast_mul", "scaled", data, factors, shape=SHAPE))
    assert turned(block("c", scaled), native=NATIVE | {HARD_SWISH}, check=True)[6:] == [
        "swish: _gluon_amp_hard_swish(b_norm) -> float32",
        "means: _gluon_amp_channel_means(swish) -> float32",
        "factors: Activation(means) -> float32",
        "scaled: _gluon_amp_scale_channels(swish, factors) -> float32",
        "c: _gluon_amp_convolution(scaled, c_weight) -> float32",
        "c_norm: _gluon_amp_batch_norm(c, c_norm_gamma, c_norm_beta, c_norm_mean, c_norm_var) -> float32",
        "c_relu6_turned: transpose(c_norm) -> float32",
        "out: c_relu6_turned",
    ]


class Excited(HybridBlock):
    """Blocks of MobileNet v3: hard swish, and channels times what their means say."""

    def __init__(self, channels=16, **kwargs):
        super().__init__(prefix="excited_", **kwargs)
        with self.name_scope():
            self.stem = nn.Conv2D(channels, 3, padding=1, in_channels=3)
            self.layers, self.squeeze = nn.HybridSequential(), nn.HybridSequential()
            for groups in (1, channels) * 2:
                self.layers.add(nn.Conv2D(channels, 5, padding=2, groups=groups, in_channels=channels, use_bias=False),
                                nn.BatchNorm(in_channels=channels))
            for _ in range(2):
                self.squeeze.add(nn.Conv2D(channels, 1, in_channels=channels))
            self.out = nn.Dense(4, in_units=channels)

    def hybrid_forward(self, F, data):
        x = first = self.stem(data)
        for number in range(4):
            x = self.layers[2 * number + 1](self.layers[2 * number](x))
            x = x * (F.clip(x + 3.0, 0, 6) / 6.0)
            if number % 2:
                means = self.squeeze[number // 2](F.Pooling(x, global_pool=True, pool_type="avg", kernel=(1, 1)))
                x = F.broadcast_mul(x, F.clip(means + 3.0, 0, 6) / 6.0)
        return self.out(F.mean(x, axis=(2, 3))), F.max(first, axis=(1, 2, 3))


def excited(dtype="float32"):
    return filled(Excited(), dtype)


@pytest.mark.machine
@pytest.mark.parametrize("flags", FLAGS)
def test_training_of_hard_swish_and_factors_is_that_of_float64(flags, monkeypatch):
    monkeypatch.setattr(activations, "_LEAST", 1)
    assert trained(excited, flags) >= NATIVE | {HARD_SWISH}


class Residual(HybridBlock):
    """Inverted residuals, as in MobileNet v2, with a branch that leaves the chain."""

    def __init__(self, filters=8, count=2, first_sum=0, **kwargs):
        super().__init__(prefix="residual_", **kwargs)
        self.first_sum = first_sum
        with self.name_scope():
            self.stem = nn.Conv2D(filters, 3, padding=1, in_channels=3)
            self.stem_norm = nn.BatchNorm(in_channels=filters)
            self.wide, self.deep = nn.HybridSequential(), nn.HybridSequential()
            for _ in range(count):
                self.wide.add(self._normalised(3 * filters, 1, filters, 1))
                self.deep.add(self._normalised(3 * filters, 3, 3 * filters, 3 * filters))
            self.narrow = nn.HybridSequential()
            for _ in range(count):
                self.narrow.add(self._normalised(filters, 1, 3 * filters, 1))
            self.out = nn.Dense(4, in_units=filters)

    @staticmethod
    def _normalised(filters, kernel, channels, groups):
        layer = nn.HybridSequential()
        layer.add(nn.Conv2D(filters, kernel, padding=kernel // 2, groups=groups, in_channels=channels, use_bias=False),
                  nn.BatchNorm(in_channels=filters, momentum=0.8, scale=groups == 1))
        return layer

    def hybrid_forward(self, F, data):
        x = F.clip(self.stem_norm(self.stem(data)), 0, 6)
        first = x
        for number, (wide, deep, narrow) in enumerate(zip(self.wide, self.deep, self.narrow)):
            y = narrow(F.clip(deep(F.clip(wide(x), 0, 6)), 0, 6))
            x = y if number < self.first_sum else x + y
        return self.out(F.mean(x, axis=(2, 3))), F.max(first, axis=(1, 2, 3))


def made(dtype="float32", **settings):
    net = Residual(**settings)
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


def trained(make, flags):
    """Train networks in FP32, under AMP as exactly as without it; return the operators that ran."""
    batches = [batch(seed, (size, 3, 16, width)) for seed, (size, width) in enumerate([(4, 16), (2, 12), (4, 16)])]
    exact = results(make("float64"), [each.astype("float64") for each in batches])
    stock = results(make(), batches)
    amp.init("float32")
    net = make()
    net.hybridize(**flags)
    assert_as_exact(results(net, batches), stock, exact)
    return operators_of(net)


@pytest.mark.machine
@pytest.mark.parametrize("flags", FLAGS)
def test_training_is_that_of_float64(flags):
    assert trained(made, flags) >= MAPS


# Of which all sums are in bfloat16, as those of MobileNet v2.
IN_BFLOAT16 = {"filters": 16, "count": 3, "first_sum": 1}


def in_bfloat16(batches, off=(), grad_req="write", **flags):
    amp.init("bfloat16", disable_passes=off)
    net = made(**IN_BFLOAT16)
    net.collect_params().setattr("grad_req", grad_req)
    net.collect_params(".*running.*").setattr("grad_req", "null")
    net.hybridize(**flags)
    found = results(net, batches), operators_of(net)
    amp.deinit()
    return found


@pytest.mark.bf16
@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("flags", FLAGS)
def test_training_in_bfloat16_is_as_exact_as_mxnets(flags, grad_req):
    batches = [batch(seed, (size, 3, 16, width)) for seed, (size, width) in enumerate([(4, 16), (2, 12)])]
    net = made("float64", **IN_BFLOAT16)
    net.collect_params().setattr("grad_req", grad_req)
    net.collect_params(".*running.*").setattr("grad_req", "null")
    exact = results(net, [each.astype("float64") for each in batches])
    stock, without = in_bfloat16(batches, ["channels_last"], grad_req, **flags)
    received, operators = in_bfloat16(batches, (), grad_req, **flags)
    assert operators >= MAPS
    assert not operators & {"BatchNorm", "_gluon_amp_clip"} - without
    for one, other, wanted in zip(received, stock, exact):
        assert error(one, wanted) < max(2 * error(other, wanted), 2 ** -7)


def step(target=None, off=(), steps=1):
    """Return the loss of each step of MobileNet v2, the gradients of the first, and the operators."""
    if target:
        amp.init(target, disable_passes=off)
    mx.random.seed(5)
    net = vision.get_mobilenet_v2(0.5, classes=8)
    net.initialize(mx.init.Xavier(magnitude=2))
    net(batch(shape=(1, 3, 64, 64)))  # in FP32, without a plan for training
    net.hybridize(static_alloc=True)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9})
    data, labels = batch(3, (8, 3, 64, 64)), mx.nd.arange(8)
    losses, grads = [], {}
    for _ in range(steps):
        with autograd.record():
            loss = SoftmaxCrossEntropyLoss()(net(data), labels).mean()
        loss.backward()
        grads = grads or {name: each.grad().asnumpy() for name, each in net.collect_params().items()
                          if each.grad_req != "null"}
        trainer.step(1)
        losses.append(loss.asscalar())
    operators = operators_of(net) if target else set()
    amp.deinit()
    return losses, grads, operators


@pytest.mark.bf16
def test_a_step_of_mobilenet_v2_in_bfloat16_is_as_exact_as_mxnets():
    (wanted,), exact, _ = step()
    (stock,), other, _ = step("bfloat16", ["channels_last"])
    (received,), grads, operators = step("bfloat16")
    assert operators >= MAPS
    assert abs(received - wanted) < max(2 * abs(stock - wanted), 0.02 * wanted)
    shares = [error(one, wanted) / error(two, wanted)
              for one, two, wanted in zip(grads.values(), other.values(), exact.values())]
    assert np.median(shares) < 1.25


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
