"""Static memory of training and inference, which take turns: MXNet's cached op has one memory for both."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn
from native_cases import requires_core
from networks import differentiate, sequential

import gluon_amp as amp

pytestmark = requires_core  # whose LayerNorm makes graphs of their own for training and inference
STATIC = {"static_alloc": True, "static_shape": True}


def made(**flags):
    mx.random.seed(5)
    return sequential(lambda: [nn.Dense(64, activation="relu", in_units=8), nn.BatchNorm(in_channels=64),
                               nn.LayerNorm(in_channels=64),
                               nn.Dense(4, in_units=64)], mx.init.Xavier(), "turns_", **flags)


X = mx.nd.array(np.random.RandomState(0).normal(size=(40, 8)))


def train(net, times=1):
    for _ in range(times):
        loss = differentiate(lambda: (net(X) ** 2).sum())
    return loss


def prepared(net):
    return len(set(net._cached_op._operations.values()))


def test_a_call_before_training_keeps_no_memory():
    amp.init("float32")
    net = made(**STATIC)
    net(X)
    train(net)
    assert prepared(net) == 1


def test_long_turns_give_their_memory_back():
    amp.init("float32")
    net = made(**STATIC)
    for _ in range(3):
        train(net, 20)
        for _ in range(20):
            net(X)
        assert prepared(net) == 1


def test_short_turns_keep_what_was_made():
    amp.init("float32")
    net = made(**STATIC)
    for _ in range(3):
        train(net)
        net(X)
    found = set(net._cached_op._operations.values())
    for _ in range(3):
        train(net)
        net(X)
    assert set(net._cached_op._operations.values()) == found
    assert len(found) == 2


@pytest.mark.parametrize("flags", [{}, STATIC])
def test_values_and_gradients_over_turns_are_those_without_amp(flags):
    def results():
        net = made(**flags)
        trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        found = []
        for turn in (1, 18, 2, 1):
            for _ in range(turn):
                with autograd.record():
                    loss = (net(X) ** 2).sum()
                found.append(net(X).asnumpy())  # between forward and backward
                loss.backward()
                trainer.step(40)
            found += [net(X).asnumpy() for _ in range(turn)]
        return [*found, *(each.data().asnumpy() for each in net.collect_params().values())]

    expected = results()
    amp.init("float32")
    for one, other in zip(results(), expected):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
