"""Optimizer updates of many weights at once, against MXNet's operators for one weight."""
from __future__ import annotations

from itertools import chain

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import assert_close, bfloat16, normal, requires_core, rounded

from gluon_amp import native

pytestmark = requires_core

SHAPES = [(1,), (7,), (33, 5), (3, 16, 3, 3), (40_001,)]
# Read alike by MXNet, which rounds some decimal numbers to a neighbour of the closest float32.
LRS, WDS = [0.1, 0.01, 0.05, 0.02, 0.001], [0.01, 0.0, 0.001, 0.05, 0.1]
CHOICES = [{}, {"rescale_grad": 0.25, "clip_gradient": 0.1}]


def lamb(weight, grad, mean, variance, out, lr, wd, lower_bound=-1, upper_bound=-1, **rates):
    direction = nd.lamb_update_phase1(weight, grad, mean, variance, wd=wd, t=3, **rates)
    nd.lamb_update_phase2(weight, direction, weight.norm(), direction.norm(), lr=lr, out=out, lower_bound=lower_bound,
                          upper_bound=upper_bound)


def adamw(weight, grad, mean, variance, out, lr, wd, eta=1.0, rescale_grad=1.0, **rates):
    scale = nd.array([rescale_grad])
    nd.contrib.adamw_update(weight, grad.copy(), mean, variance, scale, out=out, lr=lr, wd=wd, eta=eta, **rates)


MXNET = {
    "sgd": (nd.sgd_update, {}),
    "sgd_momentum": (nd.sgd_mom_update, {"momentum": 0.9}),
    "nag": (nd.nag_mom_update, {"momentum": 0.9}),
    "adam": (nd.adam_update, {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6}),
    "adamw": (adamw, {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "eta": 0.5}),
    "lamb": (lamb, {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6}),
}


def arrays(kind, shapes=SHAPES):
    weights = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    grads = [normal(*shape, seed=10 + seed) for seed, shape in enumerate(shapes)]
    states = [[nd.abs(normal(*shape, seed=20 + seed)) for seed, shape in enumerate(shapes)]
              for _ in range(native.UPDATES[kind])]
    return weights, grads, states


def mxnet_update(kind, weights, grads, states, lrs=LRS, wds=WDS, **options):
    for weight, grad, lr, wd, *own in zip(weights, grads, lrs, wds, *states):
        MXNET[kind][0](weight, grad, *own, out=weight, lr=lr, wd=wd, **options)


def steps(kind, count=5):
    return {"steps": [3] * count} if kind == "lamb" else {}


def copies(weights, states):
    return [weight.copy() for weight in weights], [[state.copy() for state in group] for group in states]


def compare(kind, ours, theirs):
    for one, other in zip(chain(ours[0], *ours[1]), chain(theirs[0], *theirs[1])):
        if kind == "lamb":  # norms are added up in another order
            assert_close(one.asnumpy(), other.asnumpy(), 1e-6)
        else:
            np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@pytest.mark.parametrize("kind", MXNET)
@pytest.mark.parametrize("choice", CHOICES, ids=["", "rescaled and clipped"])
def test_same_bits_as_mxnet(kind, choice):
    weights, grads, states = arrays(kind)
    theirs = copies(weights, states)
    options = {**MXNET[kind][1], **choice}
    for _ in range(3):
        native.update(kind, weights, grads, states, LRS, WDS, **options, **steps(kind))
        mxnet_update(kind, theirs[0], grads, theirs[1], **options)
    compare(kind, (weights, states), theirs)


@pytest.mark.parametrize("kind", MXNET)
def test_gradients_in_bfloat16(kind):
    weights, grads, states = arrays(kind)
    theirs = copies(weights, states)
    grads = [rounded(grad) for grad in grads]
    mixed = [bfloat16(grad) if index % 2 else grad for index, grad in enumerate(grads)]
    native.update(kind, weights, mixed, states, LRS, WDS, **MXNET[kind][1], **steps(kind))
    mxnet_update(kind, theirs[0], grads, theirs[1], **MXNET[kind][1])
    compare(kind, (weights, states), theirs)


@pytest.mark.parametrize("options", [{"lower_bound": 50.0}, {"upper_bound": 0.5}, {"bias_correction": False}])
def test_bounds_of_lamb(options):
    weights, grads, states = arrays("lamb")
    theirs = copies(weights, states)
    native.update("lamb", weights, grads, states, LRS, WDS, steps=[3] * 5, **options)
    mxnet_update("lamb", theirs[0], grads, theirs[1], **options)
    compare("lamb", (weights, states), theirs)


def test_adamw_with_a_rate_for_every_weight():
    weights, grads, states = arrays("adamw")
    theirs = copies(weights, states)
    etas = [0.5, 1.0, 0.25, 2.0, 0.125]
    native.update("adamw", weights, grads, states, LRS, WDS, etas=etas)
    for weight, grad, lr, wd, eta, *own in zip(theirs[0], grads, LRS, WDS, etas, *theirs[1]):
        adamw(weight, grad, *own, out=weight, lr=lr, wd=wd, eta=eta)
    compare("adamw", (weights, states), theirs)
    with pytest.raises(mx.MXNetError, match="expected as many etas as weights, received 1 for 5"):
        native.update("adamw", weights, grads, states, LRS, WDS, etas=[1.0])


def test_lamb_of_a_weight_of_zeros():
    weights, grads, states = [nd.zeros(3)], [nd.ones(3)], [[nd.zeros(3)], [nd.zeros(3)]]
    theirs = copies(weights, states)
    native.update("lamb", weights, grads, states, [0.1], [0.01], steps=[3])
    mxnet_update("lamb", theirs[0], grads, theirs[1])
    compare("lamb", (weights, states), theirs)


@pytest.mark.parametrize("values", [[np.nan, 1, 1], [np.inf, -np.inf, 1], [1e30, -3e38, 0], [1e-40, -1e-42, 0]])
@pytest.mark.parametrize("kind", MXNET)
def test_special_gradients(kind, values):
    weights, _, states = arrays(kind, [(3,)])
    theirs = copies(weights, states)
    for clip in (-1, 0.5):
        options = {"clip_gradient": clip, **({"epsilon": 1e-6} if kind.startswith("adam") else {})}
        native.update(kind, weights, [nd.array(values)], states, [0.1], [0.01], **options, **steps(kind, 1))
        mxnet_update(kind, theirs[0], [nd.array(values)], theirs[1], **options)
    compare(kind, (weights, states), theirs)


def test_slices_need_not_be_aligned():
    whole, grad = normal(100), normal(99)
    wanted = whole.copy()[1:]
    nd.sgd_update(wanted, grad, out=wanted, lr=0.1)
    native.update("sgd", [whole[1:]], [grad], [], [0.1], [0.0])
    np.testing.assert_array_equal(whole[1:].asnumpy(), wanted.asnumpy())


def test_weights_in_a_layout_of_onednn():
    """Inference leaves a convolution's weight in such a layout, and MXNet would drop what is written to it."""
    weight, grad = normal(32, 32, 3, 3), normal(32, 32, 3, 3, seed=1)
    wanted = weight.asnumpy() - np.float32(0.5) * grad.asnumpy()
    nd.Convolution(normal(2, 32, 8, 8), weight, kernel=(3, 3), num_filter=32, no_bias=True).wait_to_read()
    native.update("sgd", [weight], [grad], [], [0.5], [0.0])
    np.testing.assert_array_equal(weight.asnumpy(), wanted)


def test_written_in_order_with_other_operators():
    weight, ones = nd.zeros((1000, 1000)), nd.ones((1000, 1000))
    for _ in range(10):
        seen = weight * 2
        native.update("sgd", [weight], [ones], [], [-1.0], [0.0])
        weight += seen
    assert weight[0, 0].asscalar() == (3 ** 10 - 1) / 2


def test_weights_and_states_do_not_fit():
    with pytest.raises(mx.MXNetError, match="a gradient or a state of shape"):
        native.update("adam", [nd.ones(3)], [nd.ones(3)], [[nd.zeros(3)], [nd.zeros(4)]], [0.1], [0.0])


def test_contexts():
    for context in (mx.cpu(0), mx.cpu(1)):
        weight = nd.ones(5, ctx=context)
        native.update("sgd", [weight], [nd.ones(5, ctx=context)], [], [0.5], [0.0])
        assert weight.context == context
        assert weight.asnumpy().tolist() == [0.5] * 5
