"""Values and gradients of convolutions and BatchNorm with the channels last in C++, against MXNet's with them first.

In bfloat16 they are compared with the same operators of MXNet's in FP32, on rounded data.
"""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    assert_low_close,
    bfloat16,
    float32,
    normal,
    rounded,
    run,
    script,
    shapes_of_empty,
    with_gradients,
)

from gluon_amp import native
from gluon_amp.dtypes import BFLOAT16_DTYPE

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_convolution"), reason="oneDNN is missing")

LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
# The shape of the data, and the convolution: filters, kernel, stride, pad, dilate, groups, and whether it is biased.
CONVOLUTIONS = [
    ((1, 1, 1, 1), (1, (1, 1), (1, 1), (0, 0), (1, 1), 1, True)),
    ((2, 16, 8, 8), (32, (1, 1), (1, 1), (0, 0), (1, 1), 1, False)),
    ((2, 3, 9, 7), (5, (3, 3), (2, 2), (1, 1), (1, 1), 1, True)),
    ((2, 17, 8, 5), (33, (1, 1), (2, 1), (0, 0), (1, 1), 1, False)),
    ((2, 12, 9, 11), (8, (3, 2), (1, 2), (2, 0), (2, 1), 1, True)),
    ((3, 24, 7, 7), (24, (3, 3), (1, 1), (1, 1), (1, 1), 24, False)),
    ((3, 19, 8, 9), (19, (3, 3), (2, 2), (1, 1), (1, 1), 19, True)),
    ((2, 96, 13, 11), (96, (3, 3), (2, 2), (1, 1), (1, 1), 96, False)),
    ((1, 32, 12, 15), (32, (5, 5), (2, 1), (2, 2), (1, 1), 32, True)),
    ((1, 32, 11, 9), (32, (3, 3), (2, 2), (2, 2), (2, 2), 32, False)),
    ((2, 12, 6, 6), (8, (3, 3), (1, 1), (1, 1), (1, 1), 4, True)),
    ((2, 8, 5, 5), (16, (5, 5), (1, 1), (2, 2), (1, 1), 8, False)),
    # large products of pixels, whose weight's gradient is a dense layer's; with a stride it is none
    ((2, 136, 6, 5), (256, (1, 1), (1, 1), (0, 0), (1, 1), 1, True)),
    ((3, 728, 5, 5), (45, (1, 1), (1, 1), (0, 0), (1, 1), 1, False)),
    ((2, 136, 6, 5), (256, (1, 1), (2, 2), (0, 0), (1, 1), 1, True)),
    ((2, 136, 6, 5), (256, (1, 1), (1, 1), (1, 0), (1, 1), 1, False)),
]


def convolution_attrs(filters, kernel, stride, pad, dilate, groups, biased):
    return {"num_filter": filters, "kernel": kernel, "stride": stride, "pad": pad, "dilate": dilate,
            "num_group": groups, "no_bias": not biased}


def convolution_arrays(shape, filters, kernel, *rest):
    *_, groups, biased = rest
    inputs = [normal(*shape), normal(filters, shape[1] // groups, *kernel, seed=1), normal(filters, seed=2)]
    return inputs if biased else inputs[:2]


def in_last(op, attrs, low=False):
    """Return a function of a map with the channels first, as MXNet's operators take it; ``low`` for one in bfloat16."""
    def function(data, *others):
        data = nd.transpose(data, LAST)
        out = run(op, [bfloat16(data) if low else data, *others], **attrs)
        return nd.transpose(float32(out) if low else out, FIRST)  # MXNet's transpose has no sound kernel in bfloat16
    return function


@pytest.mark.parametrize(("shape", "settings"), CONVOLUTIONS)
def test_convolution_equals_mxnet(shape, settings):
    attrs, inputs = convolution_attrs(*settings), convolution_arrays(shape, *settings)
    out_grad = normal(*nd.Convolution(*inputs, **attrs).shape, seed=3)
    wanted = with_gradients(lambda *each: nd.Convolution(*each, **attrs), inputs, out_grad)
    received = with_gradients(in_last("_gluon_amp_convolution", attrs), inputs, out_grad)
    assert len(received) == len(inputs) + 1
    for one, other in zip(received, wanted):
        assert one.shape == other.shape
        assert_close(one, other, 2e-6)


@pytest.mark.bf16
@pytest.mark.parametrize(("shape", "settings"), CONVOLUTIONS)
def test_convolution_in_bfloat16(shape, settings):
    attrs, (data, weight, *bias) = convolution_attrs(*settings), convolution_arrays(shape, *settings)
    inputs = [rounded(data), rounded(weight), *bias]
    out_grad = rounded(normal(*nd.Convolution(*inputs, **attrs).shape, seed=3))
    wanted = with_gradients(lambda *each: nd.Convolution(*each, **attrs), inputs, out_grad)
    received = with_gradients(in_last("_gluon_amp_convolution", attrs, low=True), inputs, out_grad)
    assert_low_close(received, wanted)


STRIDED = """
from mxnet import autograd, nd
from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke
native.load()
data, = invoke("amp_cast", [nd.ones((1, 8, 8, 32))], {"dtype": "bfloat16"})
data.attach_grad()
with autograd.record():
    out, = invoke("_gluon_amp_convolution", [data, nd.ones((32, 1, 3, 3))], {"num_filter": "32", "kernel": "(3, 3)",
                  "stride": "(2, 2)", "pad": "(1, 1)", "num_group": "32", "no_bias": "True"})
out.backward()
nd.waitall()
"""


@pytest.mark.bf16
def test_the_data_gradient_of_strided_depthwise_convolutions_runs_in_the_kernel_for_them():
    lines = [line for line in script(STRIDED, ONEDNN_VERBOSE="1").splitlines()
             if ",convolution," in line and ",backward_data," in line]
    assert [line.split(",convolution,")[1].split(":")[0] for line in lines] == ["jit_dw"]


@pytest.mark.bf16
def test_weights_of_a_convolution_are_rounded_to_nearest():
    weight = nd.array([1 + 2 ** -8 + 2 ** -12, 1 + 2 ** -8, 1 + 3 * 2 ** -8]).reshape((3, 1, 1, 1))
    out = run("_gluon_amp_convolution", [bfloat16(nd.ones((1, 2, 2, 1))), weight], num_filter=3, kernel=(1, 1),
              no_bias=True)
    assert_close(float32(out).asnumpy()[0, 0, 0], rounded(weight).asnumpy().ravel(), 0)


@pytest.mark.bf16
def test_both_types_in_turn_do_not_mix():
    attrs = {"num_filter": 32, "kernel": (1, 1), "no_bias": True}
    inputs, out_grad = [rounded(normal(2, 16, 8, 8)), rounded(normal(32, 16, 1, 1, seed=1))], normal(2, 32, 8, 8)
    found = [with_gradients(in_last("_gluon_amp_convolution", attrs, low), inputs, rounded(out_grad))
             for low in (True, False, True)]
    for first, exact, again in zip(*found):
        np.testing.assert_array_equal(first, again)
        assert_close(first, exact, BFLOAT16_ROUNDING)


def test_an_empty_batch():
    with mx.util.np_shape(True):
        inputs = [nd.zeros((0, 4, 4, 3)), normal(5, 3, 1, 1)]
        attrs = {"num_filter": 5, "kernel": (1, 1), "no_bias": True}
        shapes = shapes_of_empty(lambda *each: run("_gluon_amp_convolution", each, **attrs), inputs,
                                 nd.zeros((0, 4, 4, 5)))
        assert shapes == [(0, 4, 4, 5), (0, 4, 4, 3), (5, 3, 1, 1)]
        assert not inputs[1].grad.asnumpy().any()


def empty(*shape):
    return nd.empty(shape, dtype=BFLOAT16_DTYPE)  # MXNet casts no arrays without values


def test_an_empty_batch_in_bfloat16():
    with mx.util.np_shape(True):
        inputs, moving = [empty(0, 4, 4, 3), normal(5, 3, 1, 1), normal(5)], statistics(5)
        before = [each.asnumpy() for each in moving]

        def function(data, weight, gamma):
            out = run("_gluon_amp_convolution", [data, weight], num_filter=5, kernel=(1, 1), no_bias=True)
            return run("_gluon_amp_batch_norm", [out, gamma, nd.zeros(5), *moving], fix_gamma=False)
        shapes = shapes_of_empty(function, inputs, empty(0, 4, 4, 5))
        assert shapes == [(0, 4, 4, 5), (0, 4, 4, 3), (5, 3, 1, 1), (5,)]
        assert not any(each.grad.asnumpy().any() for each in inputs[1:])
        for one, other in zip(moving, before):
            np.testing.assert_array_equal(one.asnumpy(), other)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38, 1e-42])
def test_special_values_of_a_convolution(value):
    attrs = {"num_filter": 3, "kernel": (1, 1), "no_bias": True}
    data = normal(1, 2, 3, 3)
    data[0, 1, 1, 1] = value
    inputs, out_grad = [data, normal(3, 2, 1, 1, seed=1)], normal(1, 3, 3, 3, seed=2)
    wanted = with_gradients(lambda *each: nd.Convolution(*each, **attrs), inputs, out_grad)
    received = with_gradients(in_last("_gluon_amp_convolution", attrs), inputs, out_grad)
    for one, other in zip(received, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.bf16
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_special_values_of_a_convolution_in_bfloat16(value):
    attrs = {"num_filter": 3, "kernel": (1, 1), "no_bias": True}
    data = rounded(normal(1, 2, 3, 3))
    data[0, 1, 1, 1] = value
    data = rounded(data)
    inputs, out_grad = [data, rounded(normal(3, 2, 1, 1, seed=1))], rounded(normal(1, 3, 3, 3, seed=2))
    wanted = with_gradients(lambda *each: nd.Convolution(*each, **attrs), inputs, out_grad)
    received = with_gradients(in_last("_gluon_amp_convolution", attrs, low=True), inputs, out_grad)
    for one, other in zip(received, wanted):
        np.testing.assert_allclose(one, other, rtol=2 * BFLOAT16_ROUNDING, atol=2 * BFLOAT16_ROUNDING)


def test_errors_of_a_convolution_say_what_was_expected():
    attrs = {"num_filter": 4, "kernel": (3, 3), "no_bias": True}
    with pytest.raises(mx.MXNetError, match="weight of shape"):
        run("_gluon_amp_convolution", [normal(1, 5, 5, 2), normal(4, 3, 3, 3)], **attrs)
    with pytest.raises(mx.MXNetError, match="as large as the kernel"):
        run("_gluon_amp_convolution", [normal(1, 2, 5, 2), normal(4, 2, 3, 3)], **attrs)
    with pytest.raises(mx.MXNetError, match="groups of equal size"):
        run("_gluon_amp_convolution", [normal(1, 5, 5, 3), normal(4, 3, 3, 3)], **attrs, num_group=2)
    with pytest.raises(mx.MXNetError, match="expected images"):
        run("_gluon_amp_convolution", [normal(5, 5, 3), normal(4, 3, 3, 3)], **attrs)


MAPS = [(1, 1, 1, 2), (2, 5, 3, 3), (3, 32, 4, 4), (2, 70, 9, 8), (4, 96, 28, 28)]
NO_LIMITS, RELU6, RECTIFIER = {}, {"a_min": 0.0, "a_max": 6.0}, {"a_min": 0.0, "rectifies": True}


def statistics(channels):
    return [normal(channels, seed=5), nd.abs(normal(channels, seed=6)) + 0.5]


def normalised(attrs, limits):
    """Return MXNet's BatchNorm, and clip or a rectifier behind it."""
    def function(data, gamma, beta, *moving):
        result = nd.BatchNorm(data, gamma, beta, *moving, **attrs)
        if limits == RECTIFIER:
            return nd.relu(result)
        return nd.clip(result, **limits) if limits else result
    return function


@pytest.mark.parametrize("fix_gamma", [True, False])
@pytest.mark.parametrize("limits", [NO_LIMITS, RELU6, RECTIFIER, {"a_min": -0.5, "a_max": 0.25}])
@pytest.mark.parametrize("shape", MAPS)
def test_batch_norm_equals_mxnet(shape, limits, fix_gamma):
    channels = shape[1]
    attrs = {"eps": 1e-5, "momentum": 0.7, "fix_gamma": fix_gamma}
    inputs = [normal(*shape) * 3 + 2, normal(channels, seed=1), normal(channels, seed=2) + 1]
    out_grad = normal(*shape, seed=3)
    found = []
    for function in (normalised(attrs, limits), in_last("_gluon_amp_batch_norm", {**attrs, **limits})):
        moving = statistics(channels)
        results = with_gradients(lambda *each: function(*each, *moving), [each.copy() for each in inputs], out_grad)  # noqa: B023
        found.append([*results, *(each.asnumpy() for each in moving)])
    for one, other in zip(*found):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5 * max(1, np.abs(other).max()))


@pytest.mark.parametrize("fix_gamma", [True, False])
@pytest.mark.parametrize("limits", [NO_LIMITS, RELU6, RECTIFIER, {"a_min": -0.5, "a_max": 0.25}])
@pytest.mark.parametrize("shape", MAPS)
def test_batch_norm_in_bfloat16(shape, limits, fix_gamma):
    channels = shape[1]
    attrs = {"eps": 1e-5, "momentum": 0.7, "fix_gamma": fix_gamma, **limits}
    inputs = [rounded(normal(*shape) * 3 + 2), normal(channels, seed=1), normal(channels, seed=2) + 1]
    out_grad = rounded(normal(*shape, seed=3))
    found = []
    for low in (True, False):  # in FP32 it equals MXNet's
        moving = statistics(channels)
        function = in_last("_gluon_amp_batch_norm", attrs, low)
        results = with_gradients(lambda *each: function(*each, *moving), [each.copy() for each in inputs], out_grad)  # noqa: B023
        found.append([*results, *(each.asnumpy() for each in moving)])
    received, wanted = found
    for one, other in zip(received[:2], wanted[:2]):
        assert_close(one, other, BFLOAT16_ROUNDING)
    for one, other in zip(received[2:], wanted[2:]):  # float32, of the same values
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("low", [False, pytest.param(True, marks=pytest.mark.bf16)])
@pytest.mark.parametrize("limits", [NO_LIMITS, RECTIFIER])
@pytest.mark.parametrize("shape", MAPS)
def test_batch_norm_and_a_sum(shape, limits, low):
    channels = shape[1]
    attrs = {"eps": 1e-5, "momentum": 0.7, "fix_gamma": False}
    inputs = [normal(*shape), normal(*shape, seed=4), normal(channels, seed=1), normal(channels, seed=2)]
    out_grad = normal(*shape, seed=3)
    if low:
        inputs[0], inputs[1], out_grad = rounded(inputs[0]), rounded(inputs[1]), rounded(out_grad)

    def stock(data, other, *parameters):
        result = nd.BatchNorm(data, *parameters, *statistics(channels), **attrs) + other
        return nd.relu(result) if limits else result

    def in_cpp(data, other, *parameters):
        maps = [nd.transpose(each, LAST) for each in (data, other)]
        data, other = map(bfloat16, maps) if low else maps
        out = run("_gluon_amp_batch_norm", [data, *parameters, *statistics(channels), other], adds=True, **attrs,
                  **limits)
        return nd.transpose(float32(out) if low else out, FIRST)

    wanted, received = (with_gradients(function, [each.copy() for each in inputs], out_grad)
                        for function in (stock, in_cpp))
    for place, (one, other) in enumerate(zip(received, wanted)):
        assert one.shape == other.shape
        tolerance = BFLOAT16_ROUNDING if low and place < 3 else 2e-5  # maps; parameters have FP32 gradients
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(1, np.abs(other).max()))


def test_the_map_to_add_has_the_shape_of_the_data():
    inputs = [nd.ones((2, 3, 3, 4)), *[nd.ones(4)] * 4, nd.ones((2, 3, 3, 5))]
    with pytest.raises(mx.MXNetError, match="the map to add of shape"):
        run("_gluon_amp_batch_norm", inputs, adds=True).wait_to_read()


def test_a_rectifier_passes_no_gradient_where_a_result_is_0():
    data, out_grad = normal(2, 3, 4, 4), nd.ones((2, 3, 4, 4))
    parameters = [nd.array([0.0, 1.0, 0.0]), nd.array([0.0, 0.0, 1.0])]  # of the first channel all results are 0
    for limits, wanted in ((RECTIFIER, 0), (RELU6, 32)):
        function = in_last("_gluon_amp_batch_norm", {"eps": 1e-5, "fix_gamma": False, **limits})
        beta_grad = with_gradients(lambda *each: function(*each, *statistics(3)), [data, *parameters], out_grad)[3]  # noqa: B023
        assert beta_grad[0] == wanted
        assert beta_grad[2] == 32


def test_a_mean_far_from_zero_does_not_lose_the_deviation():
    data = normal(4, 8, 16, 16) + 1e4
    out = in_last("_gluon_amp_batch_norm", {"eps": 1e-12, "fix_gamma": True})(
        data, nd.ones(8), nd.zeros(8), *statistics(8)).asnumpy()
    exact = data.asnumpy().astype("float64")
    exact = (exact - exact.mean((0, 2, 3), keepdims=True)) / exact.std((0, 2, 3), keepdims=True)
    assert np.abs(out - exact).max() < 2e-3  # data of 1e4 is a multiple of 1e-3


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e-42])
def test_special_values_stay_in_their_channel(value, low):
    data = normal(2, 3, 4, 4)
    data[1, 1, 2, 2] = value
    moving = statistics(3)
    inputs, out_grad = [data, nd.ones(3), nd.zeros(3)], normal(2, 3, 4, 4, seed=1)
    out, *grads = with_gradients(
        lambda *each: in_last("_gluon_amp_batch_norm", {**RELU6, "fix_gamma": False}, low)(*each, *moving), inputs,
        out_grad)
    is_finite = [True, bool(np.isfinite(value)), True]
    assert [bool(np.isfinite(out[:, channel]).all()) for channel in range(3)] == is_finite
    assert [bool(np.isfinite(each)) for each in moving[0].asnumpy()] == is_finite
    assert np.isfinite(grads[0][:, 0]).all()
    assert np.isfinite(grads[1][[0, 2]]).all()


def test_an_empty_batch_leaves_the_moving_averages():
    with mx.util.np_shape(True):
        moving = statistics(3)
        before = [each.asnumpy() for each in moving]
        shapes = shapes_of_empty(lambda *each: run("_gluon_amp_batch_norm", [*each, *moving]),
                                 [nd.zeros((0, 4, 4, 3)), nd.ones(3), nd.zeros(3)], nd.zeros((0, 4, 4, 3)))
        assert shapes == [(0, 4, 4, 3), (0, 4, 4, 3), (3,), (3,)]
        for one, other in zip(moving, before):
            np.testing.assert_array_equal(one.asnumpy(), other)


CHANNELS = [(1, 1, 1, 1), (2, 3, 5, 7), (1, 65, 1, 9), (2, 64, 12, 11), (3, 130, 4, 4), (1, 16, 120, 113)]


@pytest.mark.parametrize("low", [False, pytest.param(True, marks=pytest.mark.bf16)])
@pytest.mark.parametrize("shape", CHANNELS)
def test_means_and_factors_of_channels_equal_numpy(shape, low):
    data, out_grad, factors = normal(*shape), normal(*shape, seed=1), normal(*shape[:2], 1, 1, seed=2)
    if low:
        data, out_grad = rounded(data), rounded(out_grad)
    exact, grad, times = (each.asnumpy().astype("float64") for each in (data, out_grad, factors))
    tolerance = BFLOAT16_ROUNDING if low else 2e-6
    wanted = [exact * times, grad * times, (grad * exact).sum((2, 3), keepdims=True)]
    for one, other in zip(with_gradients(in_last("_gluon_amp_scale_channels", {}, low), [data, factors], out_grad),
                          wanted):
        assert_close(one, other, tolerance)
    mean_grad = rounded(factors) if low else factors

    def means(data):
        data = nd.transpose(data, LAST)
        out = run("_gluon_amp_channel_means", [bfloat16(data) if low else data])
        return float32(out) if low else out

    mean, data_grad = with_gradients(means, [data], mean_grad)
    assert_close(mean, exact.mean((2, 3), keepdims=True), tolerance)
    spread = np.broadcast_to(mean_grad.asnumpy().astype("float64") / np.prod(shape[2:]), shape)
    assert_close(data_grad, spread, tolerance)


def test_means_and_factors_of_no_images():
    with mx.util.np_shape(True):
        data, factors = nd.zeros((0, 3, 4, 5)), nd.zeros((0, 5, 1, 1))
        assert shapes_of_empty(lambda *each: run("_gluon_amp_scale_channels", each), [data, factors], data) == [
            (0, 3, 4, 5), (0, 3, 4, 5), (0, 5, 1, 1)]
        assert shapes_of_empty(lambda each: run("_gluon_amp_channel_means", [each]), [data], factors) == [
            (0, 5, 1, 1), (0, 3, 4, 5)]


@pytest.mark.parametrize(("op", "shapes", "message"), [
    ("_gluon_amp_channel_means", [(2, 3, 4)], "expected images, received data of shape"),
    ("_gluon_amp_scale_channels", [(2, 3, 4)] * 2, "expected images, received data of shape"),
    ("_gluon_amp_scale_channels", [(2, 3, 4, 5), (2, 3, 1, 1)], "the factors")])
def test_other_shapes_are_refused(op, shapes, message):
    with pytest.raises(mx.MXNetError, match=message):
        run(op, [nd.ones(shape) for shape in shapes]).wait_to_read()
