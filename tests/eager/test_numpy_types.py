"""NumPy-style arrays that take another type inside of a block."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import HybridBlock, nn

import gluon_amp as amp

WAYS = {"eager": None, "hybridized": {}, "static": {"static_alloc": True}}
ways = pytest.mark.parametrize("way", WAYS)
dtypes = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])


class Widened(HybridBlock):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(8, in_units=16)

    def hybrid_forward(self, F, x):
        value = self.layer(x)
        return value.astype("float64"), value.astype("float32"), value


@mx.util.use_np
@dtypes
@ways
def test_numpy_arrays_take_other_types_inside_of_blocks(way, dtype):
    amp.init(dtype)
    net = Widened()
    net.initialize(mx.init.One())
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    found = net(mx.np.ones((2, 16)))
    assert [one.dtype for one in found] == [np.float64, np.float32, np.float32]
    assert all(one.asnumpy().tolist() == np.full((2, 8), 16.0).tolist() for one in found)
