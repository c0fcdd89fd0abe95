"""The child of tools/gluoncv_scripts.py makes stock runs that runs with AMP can be compared with."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

pytest.importorskip("gluoncv", reason="GluonCV is not installed")

import gluoncv_child


def drawn(dtype):
    mx.random.seed(3)
    weight = mx.gluon.Parameter("weight", shape=(4, 5), dtype=dtype)
    weight.initialize(mx.init.Xavier())
    return weight.data().asnumpy()


def test_float16_weights_are_the_fp32_ones_rounded(monkeypatch):
    monkeypatch.setattr(mx.init.Initializer, "__call__", mx.init.Initializer.__call__)
    gluoncv_child.draw_in_fp32()
    np.testing.assert_array_equal(drawn("float16"), drawn("float32").astype("float16"))


@pytest.mark.parametrize("hybrid", [False, True])
def test_masked_regions_pool_to_zeros(monkeypatch, hybrid):
    for namespace in (mx.nd.contrib, mx.sym.contrib):
        monkeypatch.setattr(namespace, "ROIAlign", namespace.ROIAlign)
    gluoncv_child.zero_masked_regions()

    class Pool(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, features, regions):
            return F.contrib.ROIAlign(features, regions, (2, 2), 1.0, sample_ratio=2)

    pool = Pool()
    pool.hybridize(hybrid)
    features = mx.nd.ones((1, 3, 8, 8))
    regions = mx.nd.array([[0, 1, 1, 5, 5], [-1] * 5, [-1] * 5, [0, 2, 2, 6, 6]])
    for _ in range(3):  # memory that is freed between the runs holds other numbers
        mx.nd.full((4, 3, 2, 2), 1e30).wait_to_read()
        expected = np.ones((4, 3, 2, 2)) * np.array([1, 0, 0, 1]).reshape(4, 1, 1, 1)
        np.testing.assert_array_equal(pool(features, regions).asnumpy(), expected)
