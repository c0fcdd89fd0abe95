"""Dropout in C++: what it keeps, how much, and that backward drops the same."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import bfloat16, float32, normal, requires_core, run, shapes_of_empty, with_gradients

import gluon_amp as amp

pytestmark = requires_core

COUNT = 200_003


def bits(seed=0, count=64):
    return nd.array(np.random.RandomState(seed).randint(2, size=count) * 2)


def dropped(data, key, p=0.3):
    return run("_gluon_amp_dropout", [data, key], p=p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_size_of_what_is_kept(p):
    out = dropped(nd.ones(COUNT), bits(), p).asnumpy()
    assert set(np.unique(out)) == {0, np.float32(1 / (1 - p))}
    kept = (out != 0).mean()
    assert abs(kept - (1 - p)) < 4 * np.sqrt(p * (1 - p) / COUNT)


@pytest.mark.parametrize("hybridized", [True, False])
def test_the_probability_is_a_half_unless_it_is_given(hybridized):
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


def test_neighbours_and_rows_are_independent():
    kept = (dropped(nd.ones(COUNT), bits(), 0.5).asnumpy() != 0)[:195 * 1024].reshape(195, 1024) - 0.5
    for other in (np.roll(kept, 1, axis=1), np.roll(kept, 1, axis=0), np.roll(kept, 64, axis=1)):
        assert abs((kept * other).mean()) < 4 * 0.25 / np.sqrt(kept.size)
    assert abs(kept.mean(axis=0)).max() < 5.5 * 0.5 / np.sqrt(195)
    assert abs(kept.mean(axis=1)).max() < 5.5 * 0.5 / np.sqrt(1024)


def test_every_bit_gives_other_choices():
    reference, key = dropped(nd.ones(2048), bits(), 0.5).asnumpy(), bits().asnumpy()
    for position in range(64):
        other = key.copy()
        other[position] = 2 - other[position]
        assert 0.4 < (dropped(nd.ones(2048), nd.array(other), 0.5).asnumpy() != reference).mean() < 0.6


def test_backward_drops_the_same():
    data, out_grad = normal(3, 70, 501), normal(3, 70, 501, seed=1)
    out, grad, of_bits = with_gradients(dropped, [data, bits()], out_grad)
    factors = dropped(nd.ones((3, 70, 501)), bits()).asnumpy()
    np.testing.assert_array_equal(out, data.asnumpy() * factors)
    np.testing.assert_array_equal(grad, out_grad.asnumpy() * factors)
    assert not of_bits.any()


def test_in_bfloat16():
    data = normal(5, 3001)
    out = float32(dropped(bfloat16(data), bits())).asnumpy()
    wanted = float32(bfloat16(float32(bfloat16(data)) * dropped(nd.ones((5, 3001)), bits()))).asnumpy()
    np.testing.assert_array_equal(out, wanted)


def test_ones_drop_nothing():
    data = normal(33, 1025)
    out, grad, _ = with_gradients(dropped, [data, nd.ones(64)], data)
    np.testing.assert_array_equal(out, data.asnumpy())
    np.testing.assert_array_equal(grad, data.asnumpy())


def test_a_row_does_not_depend_on_how_many_there_are():
    """Ranges are given to threads by their place alone."""
    many = dropped(nd.ones(COUNT), bits()).asnumpy()
    np.testing.assert_array_equal(dropped(nd.ones(1500), bits()).asnumpy(), many[:1500])


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1023)])
def test_few_values(shape):
    out, grad, _ = with_gradients(dropped, [nd.ones(shape), bits()], nd.ones(shape))
    np.testing.assert_array_equal(grad, out)
    assert out.shape == shape


def test_no_values():
    with mx.util.np_shape(True):
        assert shapes_of_empty(dropped, [nd.zeros((0, 3)), bits()], nd.zeros((0, 3))) == [(0, 3), (0, 3), (64,)]


def test_errors_say_what_was_expected():
    with pytest.raises(mx.MXNetError, match="expected a probability below 1, received p=1"):
        dropped(nd.ones(3), bits(), 1.0)
    with pytest.raises(mx.MXNetError, match="the random bits"):
        dropped(nd.ones(3), bits(count=3))
