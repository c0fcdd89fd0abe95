"""What belongs to one C++ operator alone: randomness, exactness, layouts of its inputs, values at limits."""
from __future__ import annotations

from itertools import chain
from math import erfc, sqrt

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import (
    BFLOAT16_ROUNDING,
    assert_close,
    bfloat16,
    float32,
    normal,
    requires_core,
    rounded,
    run,
    script,
    with_gradients,
)
from test_core_operators import GATES, batch_norm, boxes, clip, convolution, mixed, pooling, resize, results, rnn

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke

pytestmark = requires_core
with_onednn = pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)


def as_mxnet(case, inputs, tolerance=0.0):
    """Compare values and gradients with MXNet's own in FP32."""
    for one, other in zip(*([*values, *grads] for values, grads, _ in (
            results(function, inputs, case.mutated) for function in (case.ours(), case.reference)))):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


class TestElementwise:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_clip_gives_a_gradient_at_a_limit(self, dtype):
        inputs = [nd.array([-0.5, 1.0, -0.75, 1.25, 0.0])]
        assert results(clip((5,)).ours(dtype), inputs, out_grads=[nd.ones(5)])[1][0].tolist() == [1, 1, 0, 0, 1]

    def test_hard_swish_gives_a_gradient_at_a_limit(self):
        data = nd.array([-3.0, 3.0, -np.inf, np.inf, np.nan, -4.0, 5.0, 0.0])
        attrs = {"shift": 3.0, "a_min": 0.0, "a_max": 6.0, "divisor": 6.0}
        out, grad = with_gradients(lambda x: run("_gluon_amp_hard_swish", [x], **attrs), [data], nd.ones(8))
        np.testing.assert_array_equal(out, np.array([0, 3, np.nan, np.inf, np.nan, 0, 5, 0], "float32"))
        np.testing.assert_allclose(grad[[0, 1, 3, 5, 6, 7]], [-0.5, 1.5, 1, 0, 1, 0.5], rtol=1e-6)
        assert np.isnan(grad[4])

    def test_gelu_is_close_to_its_definition_at_every_size(self):
        x = np.concatenate([np.linspace(-9, 9, 40_001), np.logspace(-30, 30, 61), -np.logspace(-30, 30, 61)])
        x = x.astype(np.float32)
        out, grad = with_gradients(lambda data: run("_gluon_amp_gelu", [data]), [nd.array(x)], nd.ones(len(x)))
        exact = x.astype(np.float64)
        below = np.vectorize(lambda value: erfc(-value / sqrt(2)) / 2)  # how likely a normal number is below it
        density = np.exp(-exact ** 2 / 2) / np.sqrt(2 * np.pi)
        np.testing.assert_allclose(out, exact * below(exact), rtol=5e-6, atol=1e-30)  # also where MXNet's cancels
        np.testing.assert_allclose(grad, below(exact) + exact * density, rtol=5e-6, atol=2e-7)

    def test_bfloat16_keeps_what_is_not_a_number(self):
        bits = nd.array(np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], "uint32").view("float32"))
        out = float32(run("_gluon_amp_layer_norm", [bfloat16(nd.ones((1, 3))), nd.ones(3), bits]))
        assert np.isnan(out.asnumpy()).all()

    @pytest.mark.parametrize("values", [[1e30, -1e30, 0], [1e-40, 2e-40, -1e-40], [3e38, 3e38, 3e38], [1, 1, 1],
                                        [1e8, 1e8 + 8, 1e8 - 8]])
    def test_layer_norm_of_extreme_rows(self, values):
        inputs, out_grad = [nd.array([values, [1, 2, 3]]), nd.ones(3), nd.zeros(3)], nd.array([[1, 2, 4], [0, 1, 0]])
        for one, other in zip(*(with_gradients(function, inputs, out_grad) for function in (
                lambda *each: run("_gluon_amp_layer_norm", each), nd.LayerNorm))):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("op", ["softmax", "log_softmax"])
    def test_lengths_outside_of_the_row(self, op):
        data, lengths = normal(2, 5), nd.array([-3, 99], dtype="int32")
        received = run(f"_gluon_amp_{op}", [data, lengths], use_length=True).asnumpy()
        np.testing.assert_array_equal(received[0], 0)
        assert_close(received[1], getattr(nd, op)(data).asnumpy()[1], 1e-6)

    def test_lengths_of_logarithms(self):
        data, out_grad, lengths = normal(6, 9), normal(6, 9, seed=1), nd.array([0, 1, 4, 8, 9, 2], dtype="int32")
        received = with_gradients(lambda x: run("_gluon_amp_log_softmax", [x, lengths], use_length=True), [data],
                                  out_grad)
        for row, length in enumerate(lengths.asnumpy()):
            exact = [each[row, :length].astype("float64") for each in (data, out_grad)] if length else []
            assert not any(one[row, length:].any() for one in received)
            for one, (other,) in zip(received, results(nd.log_softmax, exact[:1], (), exact[1:]) if length else ()):
                assert_close(one[row, :length], other, 1e-6)


class TestMaps:
    @pytest.mark.parametrize("aligned", [True, False])
    @pytest.mark.parametrize("size", [(4, 5), (4, 9), (7, 5), (3, 3)])
    def test_infinities_reach_as_far_as_in_mxnets_resizing(self, size, aligned):
        """Maps that keep their size are copied."""
        data, out_grad = normal(1, 2, 4, 5), normal(1, 2, *size, seed=1)
        data[0, 0, 1, 2], data[0, 1, 2, 3], out_grad[0, 0, 1, 1] = np.inf, np.nan, -np.inf
        case = resize((1, 2, 4, 5), size, aligned)
        for one, other in zip(*(with_gradients(function, [data], out_grad) for function in (
                lambda x: case.ours()(x)[0], case.reference))):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        low = with_gradients(lambda x: case.ours("bfloat16")(x)[0], [data], out_grad)
        for one, other in zip(low, (data, out_grad)) if size == (4, 5) else ():
            np.testing.assert_array_equal(one, rounded(other).asnumpy())

    @pytest.mark.parametrize("pad", [0, 1])
    @pytest.mark.parametrize("value", [-np.inf, np.nan, np.finfo("float32").min])
    def test_windows_without_a_largest_value_keep_their_gradient(self, value, pad):
        data = normal(2, 3, 9, 7)
        data[:, 1:, 2:8] = value
        data[1, 2, 3, 3] = 7
        as_mxnet(pooling((2, 3, 9, 7), (3, 3), (2, 2), (pad, pad), pool_type="max"), [data])

    def test_many_values_are_added_up_exactly(self):
        exact = np.float64(np.float32(0.1)) * 100_000
        received = run("_gluon_amp_sum", [nd.full((100_000, 16), 0.1)], axis=0).asnumpy()
        np.testing.assert_allclose(received, np.full(16, exact), rtol=1e-7)

    def test_a_rectifier_passes_no_gradient_where_a_result_is_0(self):
        for limits, wanted in (("relu", 0), ("relu6", 32)):
            function = batch_norm((2, 3, 4, 4), limits).ours()
            parameters = [nd.array([0.0, 1.0, 0.0]), nd.array([0.0, 0.0, 1.0])]  # all results of the first channel: 0
            grads = with_gradients(lambda *each: function(*each, nd.zeros(3), nd.ones(3))[0],  # noqa: B023
                                   [normal(2, 4, 4, 3), *parameters], nd.ones((2, 4, 4, 3)))
            assert (grads[3][0], grads[3][2]) == (wanted, 32)

    def test_a_mean_far_from_zero_does_not_lose_the_deviation(self):
        data = normal(4, 16, 16, 8) + 1e4
        out = run("_gluon_amp_batch_norm", [data, nd.ones(8), nd.zeros(8), nd.zeros(8), nd.ones(8)], eps=1e-12)
        exact = data.asnumpy().astype("float64")
        exact = (exact - exact.mean((0, 1, 2))) / exact.std((0, 1, 2))
        assert np.abs(out.asnumpy() - exact).max() < 2e-3  # data of 1e4 is a multiple of 1e-3

    def test_scores_and_boxes_that_are_no_numbers(self):
        data = boxes(1, 40)
        data[0, ::5, 1], data[0, 3, 1], data[0, 1::7, 3] = np.nan, np.inf, np.nan
        found = run("_gluon_amp_box_nms", [nd.array(data)]).asnumpy()
        assert (found[0, 0, 1], np.isfinite(found[0, :, 1]).sum()) == (np.inf, 39)
        assert not np.isnan(found[..., 1]).any()


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


@with_onednn
@pytest.mark.bf16
class TestWeightsInFp32:
    def test_they_are_rounded_to_nearest(self):
        weight = nd.array([[1 + 2 ** -8 + 2 ** -12, 1 + 2 ** -8, 1 + 3 * 2 ** -8]])
        received = run("_gluon_amp_dense", [bfloat16(nd.array(np.eye(3))), weight], num_hidden=1, no_bias=True)
        assert_close(float32(received).asnumpy(), rounded(weight).asnumpy().T, 0)
        out = run("_gluon_amp_convolution", [bfloat16(nd.ones((1, 2, 2, 1))), weight.reshape((3, 1, 1, 1))],
                  num_filter=3, kernel=(1, 1), no_bias=True)
        assert_close(float32(out).asnumpy()[0, 0, 0], rounded(weight).asnumpy()[0], 0)

    def test_both_types_one_after_the_other_do_not_mix(self):
        case = convolution((2, 16, 8, 8), 32, biased=False)
        inputs = case.arrays("bfloat16")
        found = [results(case.ours(dtype), inputs)[1] for dtype in ("bfloat16", "float32", "bfloat16")]
        for first, exact, again in zip(*found):
            np.testing.assert_array_equal(first, again)
            assert_close(first, exact, BFLOAT16_ROUNDING)

    def test_the_data_gradient_of_strided_depthwise_convolutions_runs_in_the_kernel_for_them(self):
        lines = [line for line in script(STRIDED, ONEDNN_VERBOSE="1").splitlines()
                 if ",convolution," in line and ",backward_data," in line]
        assert [line.split(",convolution,")[1].split(":")[0] for line in lines] == ["jit_dw"]


@with_onednn
class TestRecurrentLayers:
    @pytest.mark.parametrize("mode", GATES)
    def test_inference_gives_the_same(self, mode):
        case = rnn(mode)
        attrs = {**{name: str(value) for name, value in case.attrs.items()}, "training": "False"}
        for one, other in zip(invoke("_gluon_amp_rnn", case.arrays(), attrs), case.ours()(*case.arrays())):
            assert_close(one.asnumpy(), other.asnumpy(), 1e-6)

    def test_many_units(self):
        """The gradient of a state adds up many terms: as close to double precision as MXNet's."""
        case = rnn("lstm", 12, 16, 64, 650, 1, 1)
        data, parameters, *states = case.arrays()
        as_mxnet(case, [data, parameters * 0.25, *states], 2e-5)

    @pytest.mark.bf16
    @pytest.mark.parametrize("states", [1, 7, 8, 33])
    @pytest.mark.parametrize("mode", GATES)
    def test_a_direction_that_is_no_number_leaves_the_other_alone(self, mode, states):
        """Both lie beside each other."""
        case = rnn(mode, layers=1, states=states)
        data, parameters, *others = case.arrays("bfloat16")
        expected = case.ours("bfloat16")(data, parameters, *others)[0].asnumpy()
        parameters[:parameters.size // (2 * (5 + states + 2)) * 5] = np.nan  # what multiplies the data, of the first
        received = case.ours("bfloat16")(data, parameters, *others)[0].asnumpy()
        np.testing.assert_array_equal(received[..., states:], expected[..., states:])
        if mode != "rnn_relu":  # MXNet's takes what is not a number for 0
            assert np.isnan(received[..., :states]).all()


COUNT = 200_003


def bits(seed=0, count=64):
    return nd.array(np.random.RandomState(seed).randint(2, size=count) * 2)


def dropped(data, key, p=0.3):
    return run("_gluon_amp_dropout", [data, key], p=p)


class TestDropout:
    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_share_and_size_of_kept_values(self, p):
        out = dropped(nd.ones(COUNT), bits(), p).asnumpy()
        assert set(np.unique(out)) == {0, np.float32(1 / (1 - p))}
        assert abs((out != 0).mean() - (1 - p)) < 4 * np.sqrt(p * (1 - p) / COUNT)

    @pytest.mark.parametrize("hybridized", [True, False])
    def test_the_probability_is_a_half_unless_it_is_given(self, hybridized):
        class Halving(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, data):
                return F.Dropout(data)

        net = Halving()
        net.hybridize(hybridized)
        amp.init("float32")
        with mx.autograd.record():
            out = net(nd.ones(COUNT)).asnumpy()
        assert set(np.unique(out)) == {0, 2}
        assert abs((out != 0).mean() - 0.5) < 2 / np.sqrt(COUNT)

    def test_neighbours_and_rows_are_independent(self):
        kept = (dropped(nd.ones(COUNT), bits(), 0.5).asnumpy() != 0)[:195 * 1024].reshape(195, 1024) - 0.5
        for other in (np.roll(kept, 1, axis=1), np.roll(kept, 1, axis=0), np.roll(kept, 64, axis=1)):
            assert abs((kept * other).mean()) < 4 * 0.25 / np.sqrt(kept.size)
        assert abs(kept.mean(axis=0)).max() < 5.5 * 0.5 / np.sqrt(195)
        assert abs(kept.mean(axis=1)).max() < 5.5 * 0.5 / np.sqrt(1024)

    @pytest.mark.parametrize("shape", [(3, 70, 501), (1,), (1, 1, 1023), (5, 3001)])
    def test_backward_drops_the_same(self, shape):
        data, out_grad = normal(*shape), normal(*shape, seed=1)
        out, grad, of_bits = with_gradients(dropped, [data, bits()], out_grad)
        factors = dropped(nd.ones(shape), bits()).asnumpy()
        np.testing.assert_array_equal(out, data.asnumpy() * factors)
        np.testing.assert_array_equal(grad, out_grad.asnumpy() * factors)
        assert not of_bits.any()
        low = float32(dropped(bfloat16(data), bits())).asnumpy()
        np.testing.assert_array_equal(low, rounded(rounded(data) * nd.array(factors)).asnumpy())

    def test_a_row_does_not_depend_on_how_many_there_are(self):
        """Ranges are given to threads by their place alone."""
        many = dropped(nd.ones(COUNT), bits()).asnumpy()
        np.testing.assert_array_equal(dropped(nd.ones(1500), bits()).asnumpy(), many[:1500])
        with mx.util.np_shape(True):
            assert dropped(nd.zeros((0, 3)), bits()).shape == (0, 3)


def attended(*inputs, **attrs):
    return run("_gluon_amp_attention", inputs, **attrs)


SEPARATE = {"layout": "separate", "heads": 3, "masked": -1e4}


@with_onednn
class TestAttention:
    @pytest.mark.parametrize("extras", [(), ("mask",), ("lengths",), ("mask", "lengths")], ids="+".join)
    def test_dropout_of_weights(self, extras):
        """Factors are found by equal scores and values that pick one key each; then all is as with factors."""
        batch, queries, keys, units = 2, 4, 6, 12
        key, zeros = bits(), nd.zeros((batch, queries, units))
        factors = np.zeros((batch * 3, queries, keys), np.float32)
        for index in range(keys):
            picks = np.zeros((batch, keys, units), np.float32)
            picks[:, index] = keys
            out = attended(zeros, nd.zeros((batch, keys, units)), nd.array(picks), key, p=0.3, **SEPARATE,
                           operands="queries,keys,values,bits").asnumpy().reshape(batch, queries, 3, 4)[..., 0]
            factors[:, :, index] = out.transpose(0, 2, 1).reshape(batch * 3, queries)
        assert set(np.unique(factors)) == {0, np.float32(1 / 0.7)}
        random = np.random.RandomState(3)
        known = {"mask": nd.array(random.randint(2, size=(batch, queries, keys))),
                 "lengths": nd.array(random.randint(keys + 1, size=(batch, queries)), dtype="int32")}
        inputs, others = [normal(2, length, 12, seed=length) for length in (4, 6, 6)], [known[name] for name in extras]
        operands = ",".join(["queries", "keys", "values", *extras, "bits"])
        received = results(lambda *each: attended(*each, *others, key, p=0.3, **SEPARATE, operands=operands), inputs)
        given = {name: known[name] for name in extras}
        wanted = results(lambda *each: mixed(*each, 3, 1.0, **given, factors=nd.array(factors)), inputs)
        for one, other in zip([*received[0], *received[1]], [*wanted[0], *wanted[1]]):
            assert_close(one, other, 4e-6)

    def test_ones_drop_no_weights(self):
        data = normal(2, 5, 18)
        one = attended(data, nd.ones(64), p=0.5, layout="joined", heads=2, operands="projections,bits")
        np.testing.assert_array_equal(one.asnumpy(), attended(data, layout="joined", heads=2).asnumpy())

    def test_masked_tokens_count_for_nothing(self):
        data, bias = normal(2, 6, 24), nd.zeros((2, 1, 6))
        bias[:, :, 4:] = -1e4
        other = data.copy()
        other[:, 4:, 8:] = 77  # keys and values
        one, another = (attended(each, bias, layout="joined", heads=2, operands="projections,bias")[:, :4].asnumpy()
                        for each in (data, other))
        np.testing.assert_array_equal(one, another)

    def test_inputs_in_any_order(self):
        inputs = [normal(2, 5, 12, seed=seed) for seed in range(3)]
        mask = nd.array(np.random.RandomState(3).randint(2, size=(2, 5, 5)))
        one = attended(*inputs, mask, operands="queries,keys,values,mask", **SEPARATE).asnumpy()
        other = attended(mask, inputs[2], *inputs[:2], operands="mask,values,queries,keys", **SEPARATE).asnumpy()
        np.testing.assert_array_equal(one, other)

    def test_lengths_outside_of_the_row(self):
        inputs, lengths = [normal(1, length, 12) for length in (2, 5, 5)], nd.array([[-3, 99]], dtype="int32")
        out = attended(*inputs, lengths, operands="queries,keys,values,lengths", **SEPARATE).asnumpy()
        np.testing.assert_array_equal(out[0, 0], 0)
        np.testing.assert_array_equal(out[0, 1], attended(*inputs, **SEPARATE).asnumpy()[0, 1])


# Read alike by MXNet, which rounds some decimal numbers to a neighbour of the closest float32.
LRS, WDS = [0.1, 0.01, 0.05, 0.02, 0.001], [0.01, 0.0, 0.001, 0.05, 0.1]
WEIGHTS = [(1,), (7,), (33, 5), (3, 16, 3, 3), (40_001,)]


def lamb(weight, grad, mean, variance, out, lr, wd, lower_bound=-1, upper_bound=-1, **rates):
    direction = nd.lamb_update_phase1(weight, grad, mean, variance, wd=wd, t=3, **rates)
    nd.lamb_update_phase2(weight, direction, weight.norm(), direction.norm(), lr=lr, out=out, lower_bound=lower_bound,
                          upper_bound=upper_bound)


def adamw(weight, grad, mean, variance, out, lr, wd, eta=1.0, rescale_grad=1.0, **rates):
    nd.contrib.adamw_update(weight, grad.copy(), mean, variance, nd.array([rescale_grad]), out=out, lr=lr, wd=wd,
                            eta=eta, **rates)


BETAS = {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6}
MXNET = {"sgd": (nd.sgd_update, {}), "sgd_momentum": (nd.sgd_mom_update, {"momentum": 0.9}),
         "nag": (nd.nag_mom_update, {"momentum": 0.9}), "adam": (nd.adam_update, BETAS),
         "adamw": (adamw, {**BETAS, "eta": 0.5}), "lamb": (lamb, BETAS)}


class TestUpdates:
    """Optimizer updates of many weights at once have the bits of MXNet's operators for one weight."""

    def check(self, kind, weights, grads, states, lrs=LRS, wds=WDS, etas=None, steps=1, **options):
        theirs = [weight.copy() for weight in weights], [[state.copy() for state in group] for group in states]
        extras = {"steps": [3] * len(weights)} if kind == "lamb" else {"etas": etas} if etas else {}
        for _ in range(steps):
            native.update(kind, weights, grads, states, lrs, wds, **options, **extras)
            for index, (weight, grad, *own) in enumerate(zip(theirs[0], grads, *theirs[1])):
                more = {"eta": etas[index]} if etas else {}
                MXNET[kind][0](weight, float32(grad), *own, out=weight, lr=lrs[index], wd=wds[index], **options, **more)
        for one, other in zip(chain(weights, *states), chain(theirs[0], *theirs[1])):
            if kind == "lamb":  # norms are added up in another order
                assert_close(one.asnumpy(), other.asnumpy(), 1e-6)
            else:
                np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())

    def arrays(self, kind, shapes=WEIGHTS):
        weights, grads = ([normal(*shape, seed=seed + place) for place, shape in enumerate(shapes)] for seed in (0, 10))
        states = [[nd.abs(normal(*shape, seed=20 + place)) for place, shape in enumerate(shapes)]
                  for _ in range(native.UPDATES[kind])]
        return weights, grads, states

    @pytest.mark.parametrize("kind", MXNET)
    @pytest.mark.parametrize("choice", [{}, {"rescale_grad": 0.25, "clip_gradient": 0.1}], ids=["", "clipped"])
    def test_same_bits_as_mxnet(self, kind, choice):
        self.check(kind, *self.arrays(kind), steps=3, **MXNET[kind][1], **choice)

    @pytest.mark.parametrize("kind", MXNET)
    def test_gradients_in_bfloat16(self, kind):
        weights, grads, states = self.arrays(kind)
        mixed_grads = [bfloat16(grad) if index % 2 else grad for index, grad in enumerate(grads)]
        self.check(kind, weights, mixed_grads, states, **MXNET[kind][1])

    def test_lamb_of_a_weight_of_zeros(self):
        self.check("lamb", [nd.zeros(3)], [nd.ones(3)], [[nd.zeros(3)], [nd.zeros(3)]], [0.1], [0.01])

    def test_weights_in_a_layout_of_onednn(self):
        """Inference leaves a convolution's weight in such a layout, and MXNet would drop what is written to it."""
        weight, grad = normal(32, 32, 3, 3), normal(32, 32, 3, 3, seed=1)
        wanted = weight.asnumpy() - np.float32(0.5) * grad.asnumpy()
        nd.Convolution(normal(2, 32, 8, 8), weight, kernel=(3, 3), num_filter=32, no_bias=True).wait_to_read()
        native.update("sgd", [weight], [grad], [], [0.5], [0.0])
        np.testing.assert_array_equal(weight.asnumpy(), wanted)

    def test_written_in_order_with_other_operators(self):
        weight, ones = nd.zeros((1000, 1000)), nd.ones((1000, 1000))
        for _ in range(10):
            seen = weight * 2
            native.update("sgd", [weight], [ones], [], [-1.0], [0.0])
            weight += seen
        assert weight[0, 0].asscalar() == (3 ** 10 - 1) / 2
