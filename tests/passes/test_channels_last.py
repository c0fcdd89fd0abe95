"""Chains of convolutions and ReLU6 with the channels last: graphs written by hand."""
from __future__ import annotations

import pytest
from graphs import describe, graph, op, rewrite, variable

from gluon_amp.graph import Entry
from gluon_amp.machine.costs import Kernel, preferring
from gluon_amp.passes.channels_last import NATIVE
from gluon_amp.rules import Device, Policy

SHAPE, WIDE = (2, 8, 6, 6), (2, 16, 6, 6)  # of 8 channels bfloat16 makes no convolution faster
LOW = Policy("bfloat16")


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


def image(channels=16):
    """A convolution of an image, which stays in FP32, and its BatchNorm and limits."""
    return Entry(clip("image_relu6", Entry(norm("image_norm", plain((2, 3, 6, 6), num_filter=channels)))))


def rectified(name, data):
    return op("Activation", name, data, shape=shape_of(data), act_type="relu")


def summed(first, second):
    """A sum of two maps, and the rectifier behind it."""
    return Entry(rectified("relu", Entry(op("elemwise_add", "total", first, second, shape=SHAPE))))


def transposed(*heads, **settings):
    made = graph(*heads)
    policy = settings.pop("policy", Policy("float32"))
    device = Device(16, measured=preferring(Kernel(policy.lowers, nhwc=True)))  # where C++ is the fastest
    rewrite(made, policy, **{"device": device, "trains": True, "native": NATIVE, "keep_outputs": False, "check": True,
                             **settings})
    return made


def lines(*heads, **settings):
    return describe(transposed(*heads, **settings))


def batch_norm(name, data, *more, dtype="float32"):
    """The line of a BatchNorm in C++."""
    inputs = ", ".join([data, *(f"{name}_{part}" for part in ("gamma", "beta", "mean", "var")), *more])
    return f"{name}: _gluon_amp_batch_norm({inputs}) -> {dtype}"


def chain(names, data, dtype="float32"):
    """The lines of blocks in C++, one behind the other."""
    found = []
    for name in names:
        found += [f"{name}: _gluon_amp_convolution({data}, {name}_weight) -> {dtype}",
                  batch_norm(f"{name}_norm", name, dtype=dtype)]
        data = f"{name}_norm"
    return found


class TestChains:
    def test_one_is_transposed_once_and_back_again(self):
        assert lines(blocks("abc", plain())) == [
            "image: Convolution(data, image_weight) -> float32", "image_turned: transpose(image) -> float32",
            *chain("abc", "image_turned"), "c_relu6_turned: transpose(c_norm) -> float32", "out: c_relu6_turned"]

    def test_in_bfloat16_casts_are_where_it_begins_and_ends(self):
        assert lines(blocks("abcde", plain(WIDE)), policy=LOW) == [
            "data_bfloat16: amp_cast(data) -> bfloat16", "image_weight_bfloat16: amp_cast(image_weight) -> bfloat16",
            "image: Convolution(data_bfloat16, image_weight_bfloat16) -> bfloat16",
            "image_float32: amp_cast(image) -> float32", "image_turned: transpose(image_float32) -> float32",
            "image_turned_bfloat16: amp_cast(image_turned) -> bfloat16",
            *chain("abcde", "image_turned_bfloat16", "bfloat16"),
            "e_norm_float32: amp_cast(e_norm) -> float32", "e_relu6_turned: transpose(e_norm_float32) -> float32",
            "out: e_relu6_turned"]


class TestSums:
    @staticmethod
    def rewritten(head):
        """Return the lines of a graph; its variables stay in their order."""
        before = [node.name for node in graph(head).variables()]
        made = transposed(head)
        assert [node.name for node in made.variables()] == before
        return describe(made)

    @pytest.mark.parametrize("skips_first", [False, True])
    def test_and_a_rectifier_in_either_order(self, skips_first):
        skip = blocks("abc", plain())
        body = Entry(norm("e_norm", Entry(conv("e", block("d", skip)))))
        result = self.rewritten(summed(*(skip, body) if skips_first else (body, skip)))
        assert batch_norm("e_norm", "e", "c_norm") in result
        assert not any("elemwise_add" in line or "Activation" in line for line in result)

    @pytest.mark.parametrize("is_limited", [False, True])
    def test_where_both_maps_are_batch_norms(self, is_limited):
        start = blocks("abc", plain())
        first, second = (Entry(norm(f"{name}_norm", Entry(conv(name, start)))) for name in "xy")
        first = Entry(clip("x_relu6", first)) if is_limited else first  # x_norm has its limits
        result = self.rewritten(summed(first, second))
        assert ("total: elemwise_add(x_norm, y_norm) -> float32" in result) == is_limited
        assert (batch_norm("x_norm", "x", "y_norm") in result) != is_limited


class TestEdges:
    def test_what_is_read_outside_is_transposed_back_for_it(self):
        first = block("a", plain())
        pooled = Entry(op("Pooling", "pool", first, shape=(2, 8, 3, 3), kernel=(2, 2)))
        result = lines(blocks("bcd", first), pooled)
        assert "a_relu6_turned: transpose(a_norm) -> float32" in result
        assert "pool: Pooling(a_relu6_turned) -> float32" in result

    def test_a_map_before_its_limits_is_not_lost(self):
        inner = Entry(norm("a_norm", Entry(conv("a", plain()))))
        result = lines(blocks("bcd", Entry(clip("a_relu6", inner))), inner)
        assert "a_relu6: clip(a_norm) -> float32" in result
        assert result[-1] == "out: d_relu6_turned, a_norm_turned"

    def test_statistics_that_are_outputs_stay(self):
        made = norm("a_norm", Entry(conv("a", plain())))
        result = lines(block("b", Entry(clip("a_relu6", Entry(made)))), Entry(made, 1))
        assert any(line.startswith("a_norm: BatchNorm") for line in result)

    def test_what_is_read_in_fp32_is_not_rounded(self):
        first = image()
        result = lines(blocks("abcde", first), Entry(op("exp", "outside", first, shape=WIDE)), policy=LOW)
        assert batch_norm("image_norm", "image_turned") in result
        assert "image_norm_bfloat16: amp_cast(image_norm) -> bfloat16" in result
        assert "outside: exp(image_relu6_turned) -> float32" in result

    def test_an_excluded_convolution_stands_between_casts(self):
        head = blocks("fghij", Entry(conv("x", blocks("abcde", plain(WIDE)))))
        result = lines(head, policy=Policy("bfloat16", excluded=frozenset({"x"})))
        assert "e_norm_float32: amp_cast(e_norm) -> float32" in result
        assert "x: _gluon_amp_convolution(e_norm_float32, x_weight) -> float32" in result
        assert "f: _gluon_amp_convolution(x_bfloat16, f_weight) -> bfloat16" in result


@pytest.mark.parametrize("head", [
    lambda: block("a", plain(), axis=3), lambda: block("a", plain(), use_global_stats=True)])
def test_batch_norm_that_c_plus_plus_does_not_compute_stays(head):
    assert not any("_gluon_amp_batch_norm" in line for line in lines(head()))


@pytest.mark.parametrize(("names", "settings"), [
    ("abcde", {"trains": False}), ("abcde", {"native": frozenset()}), ("abcde", {"recorded": False}),
    ("abcde", {"policy": Policy("float16")}),
    ("abcde", {"policy": Policy("float16"), "device": Device(imitated=True)}),
    ("abcde", {"policy": LOW, "device": Device(imitated=True)}),
    ("abcde", {"policy": Policy("float32", disabled_passes=frozenset({"channels_last"}))})])
def test_where_nothing_runs_in_c_plus_plus(names, settings):
    assert not any("_gluon_amp_convolution" in line for line in lines(blocks(names, plain(WIDE)), **settings))
