"""Names and arrays of MXNet 2, on MXNet 1.9.1 behind ``install()``: a notebook runs its AMP tutorial."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn
from networks import differentiate, sequential

import gluon_amp as amp


@pytest.fixture
def installed():
    amp.install()
    yield
    amp.uninstall()


def test_networks_of_1_9_1_take_numpys_arrays_and_give_them(installed):
    net = sequential([nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(3)], active=False)
    data = mx.np.random.uniform(size=(2, 3, 8, 8))
    for hybridized in (False, True):
        net.hybridize(hybridized)
        expected = net(data.as_nd_ndarray())
        found = net(data)
        assert type(found) is mx.np.ndarray
        np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy())
    differentiate(lambda: net(data).sum())
    assert np.abs(net[0].weight.grad().asnumpy()).max() > 0


class OfNumpy(nn.HybridBlock):
    """A network of NumPy's operators, which MXNet 1.9.1 runs without `set_np`, too."""

    def hybrid_forward(self, F, x):
        return F.np.tanh(F.npx.reshape(x, (-2, -1)))


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_networks_of_numpys_operators_take_numpys_arrays(installed, hybridize, dtype):
    if dtype:
        amp.init(dtype)
    net = OfNumpy()
    if hybridize:
        net.hybridize()
    data = mx.np.random.uniform(size=(2, 3, 4))
    for _ in range(2):
        data.attach_grad()
        found = differentiate(net, data)
        expected = np.tanh(data.asnumpy().reshape(2, 12))
        assert type(found) is mx.np.ndarray
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-5)
        np.testing.assert_allclose(data.grad.asnumpy(), 1 - expected.reshape(2, 3, 4) ** 2, rtol=1e-4)


def test_arrays_are_split_for_networks_of_1_9_1(installed):
    data, devices = mx.np.arange(8).reshape(4, 2), [mx.cpu(0), mx.cpu(1)]
    for parts in (mx.gluon.utils.split_and_load(data, ctx_list=devices),
                  mx.gluon.utils.split_and_load(data, device_list=devices)):
        assert [type(part) for part in parts] == [mx.nd.NDArray] * 2
        assert [part.context for part in parts] == devices
        np.testing.assert_array_equal(np.concatenate([part.asnumpy() for part in parts]), data.asnumpy())
    with mx.util.np_array(True):
        assert type(mx.gluon.utils.split_and_load(data, devices)[0]) is mx.np.ndarray


def test_names_of_devices(installed):
    assert mx.device.Device is mx.Device is mx.Context
    assert mx.device.current_device() == mx.current_device() == mx.cpu()
    assert mx.gluon.metric is mx.metric
