"""Dropout between recurrent layers in C++: masks of MXNet's Dropout, against layers of MXNet's with the same ones."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import nn, rnn
from native_cases import normal
from networks import differentiate

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.plan.cached_op import prepared_operations

pytestmark = pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)

LAYERS, UNITS, P = 3, 24, 0.4
FLAGS = [{}, {"static_alloc": True, "static_shape": True}]
TARGETS = ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)]
KINDS = {"LSTM": rnn.LSTM, "GRU": rnn.GRU}


def network(kind, p=P, **flags):
    mx.random.seed(2)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16, flatten=False, in_units=12),
                KINDS[kind](UNITS, LAYERS, input_size=16, dropout=p, bidirectional=True))
    net.initialize(mx.init.Uniform(0.3))
    net.hybridize(**flags)
    return net


def trained(net, batches=(7, 9), seed=4, train_mode=True):
    """Return values, and gradients of data and parameters, for some batches."""
    mx.random.seed(seed)
    found = []
    for batch in batches:
        x = normal(5, batch, 12, seed=batch)
        x.attach_grad()
        with autograd.record(train_mode):
            out = net(x)
        out.backward(normal(*out.shape, seed=1))
        found += [out.asnumpy(), x.grad.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())]
    return found


def distance(received, expected):
    return max(np.linalg.norm(one - other) / np.linalg.norm(other) for one, other in zip(received, expected))


def unfused(net, kind):
    """Make single layers of MXNet's with the same weights, and masks that are drawn as those of the pass."""
    fused, layers = net[1], []
    for index in range(LAYERS):
        layer = KINDS[kind](UNITS, 1, input_size=2 * UNITS if index else 16, bidirectional=True)
        layer.initialize()
        for name, parameter in layer._reg_params.items():
            parameter.set_data(fused._reg_params[name.replace("0_", f"{index}_", 1)].data())
        layers.append(layer)

    def run(x):
        values = net[0](x)
        masks = [mx.nd.Dropout(mx.nd.ones((*x.shape[:2], 2 * UNITS)), p=P) for _ in layers[1:]]
        for layer, mask in zip(layers, [*masks, None]):
            values = layer(values)
            values = values if mask is None else values * mask
        return values

    def gradients(index, name):
        return layers[index]._reg_params[name].grad().asnumpy()
    return run, gradients


@pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
class TestSeeds:
    def test_a_seed_gives_the_same_and_another_does_not(self, kind, target, flags):
        amp.init(target)
        first, again, other = (trained(network(kind, **flags), seed=seed) for seed in (4, 4, 5))
        assert distance(first, again) == 0
        assert distance(first[:1], other[:1]) > 0.05

    def test_without_dropout_and_in_inference_it_is_mxnets(self, kind, target, flags):
        bound = 1e-5 if target == "float32" else 0.05
        plain = trained(network(kind, p=0, **flags))
        amp.init(target)
        assert distance(trained(network(kind, p=0, **flags)), plain) < bound
        assert distance(trained(network(kind, **flags), train_mode=False), plain) < bound
        net = network(kind, **flags)
        x = normal(5, 7, 12, seed=7)
        assert distance([net(x).asnumpy()], plain[:1]) < bound
        with autograd.train_mode():
            assert distance([net(x).asnumpy()], plain[:1]) > 0.05


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_with_the_same_masks(kind, target):
    reference = network(kind)
    reference.hybridize(False)
    run, gradients = unfused(reference, kind)
    mx.random.seed(4)
    x = normal(5, 7, 12, seed=7)
    x.attach_grad()
    with autograd.record():
        out = run(x)
    out.backward(normal(*out.shape, seed=1))
    amp.init(target)
    net = network(kind)
    received = trained(net, batches=(7,))
    assert any(node.op == "_gluon_amp_rnn" for _, operation in prepared_operations(net)
               for node in operation.latest.graph.operators())
    bound = 1e-5 if target == "float32" else 0.05
    assert distance(received[:2], [out.asnumpy(), x.grad.asnumpy()]) < bound
    for index in range(LAYERS):
        for name in ("l0_i2h_weight", "r0_h2h_weight", "l0_h2h_bias"):
            own = net[1]._reg_params[name.replace("0_", f"{index}_", 1)].grad().asnumpy()
            assert distance([own], [gradients(index, name)]) < bound


def test_gradients_that_accumulate():
    """Masks do not add to the data's gradient, and neither is lost."""
    def gradients():
        mx.random.seed(4)
        net = network("LSTM")
        net.collect_params().setattr("grad_req", "add")
        x = normal(5, 7, 12)
        x.attach_grad("add")
        found = []
        for _ in range(2):
            mx.random.seed(4)
            differentiate(net, x)
            found.append([x.grad.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())])
        return found

    amp.init("float32")
    once, twice = gradients()
    assert distance(twice, [2 * grad for grad in once]) < 1e-5
