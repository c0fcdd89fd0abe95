"""Weights that change while a block's call is under way, and backward passes inside of one."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, nn
from networks import BF16_EPS, relative

import gluon_amp as amp

pytestmark = pytest.mark.machine


def dense(units=16):
    mx.random.seed(4)
    net = nn.Dense(units, in_units=16)
    net.initialize(mx.init.Xavier())
    return net


@pytest.fixture
def data():
    mx.random.seed(5)
    return mx.nd.random.normal(shape=(4, 16))


class Adapting(Block):
    """Takes a few steps on its inner network before it answers, as in MAML."""

    def __init__(self, inner, write):
        super().__init__()
        self.inner, self.write = inner, write

    def forward(self, x):
        answers = []
        for _ in range(3):
            with autograd.record():
                y = self.inner(x)
                loss = (y * y).mean()
            loss.backward()
            answers.append(y)
            weight = self.inner.weight
            self.write(weight, weight.data() - 0.5 * weight.grad())
        return [*answers, self.inner(x)]


def write_slice(parameter, value):
    parameter.data()[:] = value


def write_out(parameter, value):
    mx.nd.identity(value, out=parameter.data())


def write_in_place(parameter, value):
    array = parameter.data()
    array -= array - value


def write_rows(parameter, value):
    for row in range(value.shape[0]):
        parameter.data()[row] = value[row]


@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
@pytest.mark.parametrize("write", [mx.gluon.Parameter.set_data, write_slice, write_out, write_in_place, write_rows])
class TestWrites:
    def test_the_next_call_sees_them(self, data, hybridize, write):
        expected = Adapting(dense(), write)(data)
        net = Adapting(dense(), write)
        net.inner.hybridize(hybridize)
        amp.init(LOW)
        found = net(data)
        assert relative(expected[0].asnumpy(), expected[-1].asnumpy()) > 0.1
        for one, other in zip(expected, found):
            assert relative(one.asnumpy(), other.asnumpy()) < 10 * BF16_EPS

    def test_within_a_hybrid_block(self, data, hybridize, write):
        class Changing(HybridBlock):
            def __init__(self):
                super().__init__()
                self.inner = dense()

            def forward(self, x):
                before = self.inner(x)
                with autograd.pause():
                    write(self.inner.weight, -self.inner.weight.data())
                return before, self.inner(x)
        net = Changing()
        net.inner.hybridize(hybridize)
        amp.init(LOW)
        with autograd.record():
            before, after = net(data)
        assert (before.asnumpy() == -after.asnumpy()).all()


@pytest.mark.parametrize("kind", [Block, HybridBlock])
def test_two_losses_and_two_backward_passes_in_a_call(data, kind):
    class Net(kind):
        def __init__(self):
            super().__init__()
            self.inner = dense()
            self.inner.weight.grad_req = "add"

        def forward(self, x):
            with autograd.record():
                one, other = self.inner(x).sum(), self.inner(2 * x).sum()
            one.backward()
            other.backward()
            return one + other
    amp.init(LOW)
    net = Net()
    net(data)
    expected = 3 * np.tile(data.asnumpy().sum(0), (16, 1))
    assert relative(expected, net.inner.weight.grad().asnumpy()) < 4 * BF16_EPS
