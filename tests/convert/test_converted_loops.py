"""Converted networks with loops and branches."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import HybridBlock

import gluon_amp as amp
from gluon_amp.cli.files import runnable

SHAPES = ((6, 8, 8, 4), (1, 8, 8, 8), (2, 8, 8, 8), (6, 8, 8, 4))


class Scan(HybridBlock):
    """A convolution of each item, with what was there before."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(8, 8, 3, 3))

    def hybrid_forward(self, F, data, weight):
        def step(one, state):
            made = F.Convolution(F.expand_dims(one, axis=0), weight, kernel=(3, 3), pad=(1, 1), num_filter=8,
                                 no_bias=True)
            return F.Activation(F.squeeze(made, axis=0), act_type="relu") + state, F.LeakyReLU(one, act_type="leaky")

        first = F.squeeze(F.slice_axis(data, axis=0, begin=0, end=1), axis=0)
        outputs, state = F.contrib.foreach(step, data * 2, first)
        return F.broadcast_add(outputs, F.expand_dims(state, axis=0))


STATIC = {"static_alloc": True, "static_shape": True}


@pytest.mark.parametrize("flags", [None, {}, STATIC])
@pytest.mark.parametrize(("dtype", "bound"), [
    ("float32", 1e-5), pytest.param("bfloat16", 0.03, marks=pytest.mark.bf16)])
@pytest.mark.filterwarnings("ignore:the converted network stays in FP32")
def test_a_loop_gives_what_it_gives_outside_of_graphs(dtype, bound, flags, tmp_path):
    net = Scan()
    net.initialize(mx.init.Normal(0.2))
    batches = [mx.nd.random.normal(shape=shape) for shape in SHAPES]
    expected = [net(batch).asnumpy() for batch in batches]
    if flags is not None:
        net.hybridize(**flags)
    converted = amp.convert_hybrid_block(net, dtype)
    converted.hybridize(**STATIC)  # a loop takes no memory of its own, though the user asks for it
    blocks = [converted]
    if flags is not None:  # as the command line runs the files
        net(batches[0])
        net.export(str(tmp_path / "net"))
        blocks.append(runnable(mx.model.load_checkpoint(str(tmp_path / "net"), 0), ["data"]))
    for block in blocks:
        for batch, wanted in zip(batches, expected):
            assert np.abs(block(batch).asnumpy() - wanted).max() <= bound * np.abs(wanted).max()
