"""Convolutions take over the padding with zeros before them: graphs written by hand, and a network of GluonCV's."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from graphs import conv, op, rewritten, variable

import gluon_amp as amp

SHAPE, PADDED = (2, 16, 8, 8), (2, 16, 12, 10)
EVEN = (0, 0, 0, 0, 2, 2, 1, 1)


def padded(widths=EVEN, shape=PADDED, **attrs):
    node = op("Pad", "p", variable("data", SHAPE), **{"mode": "constant", "pad_width": widths, **attrs})
    node.shapes = [shape]
    return node


def reader(node, name="c", **attrs):
    made = conv(name, node, 16, 16, 3, **attrs)
    made.shapes = [(2, 16, 10, 8)]
    return made


def pads(*nodes):
    return "Pad" in str(rewritten("float32", *nodes))


def test_the_convolution_pads():
    assert not pads(reader(padded()))
    assert pads(reader(op("Pad", "p", variable("data", SHAPE), mode="edge", pad_width=EVEN)))


def test_each_of_several_convolutions_pads():
    node = padded()
    assert not pads(reader(node), reader(node, "d"))


@pytest.mark.parametrize("heads", [
    lambda: [reader(padded((0, 0, 0, 0, 0, 1, 0, 1), (2, 16, 9, 9)))],
    lambda: [reader(padded((0, 0, 1, 1, 0, 0, 0, 0), (2, 18, 8, 8)))],
    lambda: [reader(padded(constant_value=1.0))],
    lambda: [reader(padded(), layout="NHWC")],
    lambda: (lambda node: [reader(node), node])(padded()),
    lambda: (lambda node: [reader(node), op("relu", "r", node)])(padded()),
], ids=["one side", "channels", "not with zeros", "channels last", "an output", "another reader"])
def test_others_are_left_alone(heads):
    assert pads(*heads())


@pytest.mark.parametrize("dilation", [1, 2])
def test_a_separable_convolution_of_xception_gives_the_same(dilation):
    xception = pytest.importorskip("gluoncv.model_zoo.xception")

    def run(under_amp):
        mx.random.seed(5)
        net = xception.SeparableConv2d(16, 32, dilation=dilation, norm_layer=mx.gluon.nn.BatchNorm, norm_kwargs={})
        net.initialize(mx.init.Xavier())
        net.hybridize()
        data = mx.nd.array(np.random.RandomState(1).normal(size=(2, 16, 9, 9)))
        data.attach_grad()
        if under_amp:
            amp.init("float32")
        with mx.autograd.record():
            out = net(data)
        out.backward()
        amp.deinit()
        return [out, data.grad, *(each.grad() for each in net.collect_params().values() if each.grad_req != "null")]

    for one, other in zip(run(True), run(False)):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-4, atol=1e-5)
