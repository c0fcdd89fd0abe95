"""Arrays that users cast to float16 themselves, among FP32 ones: widened, as MXNet's own AMP does."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import HybridBlock, nn
from networks import BF16_EPS, differentiate, relative, sequential

import gluon_amp as amp

pytestmark = pytest.mark.machine

OPERATORS = {
    "plus": lambda F, a, b: a + b,
    "broadcast": lambda F, a, b: F.broadcast_mul(a, F.slice_axis(b, axis=0, begin=0, end=1)),
    "concat": lambda F, a, b: F.concat(a, b, dim=1),
    "stack": lambda F, a, b: F.stack(a, b),
    "where": lambda F, a, b: F.where(a > 0, a, b),
    "add_n": lambda F, a, b: F.add_n(a, b),
    "box_iou": lambda F, a, b: F.contrib.box_iou(F.abs(a), F.abs(b)),
    "batch_dot": lambda F, a, b: F.batch_dot(F.expand_dims(a, 0), F.expand_dims(b, 0), transpose_b=True),
    "maximum": lambda F, a, b: F.broadcast_maximum(a, b),
    "smooth_l1": lambda F, a, b: F.smooth_l1(a - b, scalar=1.0), "equal": lambda F, a, b: F.broadcast_equal(a, b)}


class Apply(HybridBlock):
    """One operator."""

    def __init__(self, name):
        super().__init__()
        self.function = OPERATORS[name]

    def hybrid_forward(self, F, a, b):
        return self.function(F, a, b)


@pytest.fixture
def arrays():
    random = np.random.RandomState(3)
    one, other = (mx.nd.array(random.normal(size=(6, 4))).astype("float16") for _ in range(2))
    return one, other.astype("float32"), one.astype("float32")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("way", ["outside", "block", "hybridized"])
def test_operators(arrays, name, swapped, way):
    half, single, wide = arrays
    given, plain = ((single, half), (single, wide)) if swapped else ((half, single), (wide, single))
    expected = OPERATORS[name](mx.nd, *plain)
    net = Apply(name)
    if way == "hybridized":
        net.hybridize()
    amp.init()
    found = OPERATORS[name](mx.nd, *given) if way == "outside" else net(*given)
    assert found.dtype == np.float32
    assert relative(expected.asnumpy(), found.asnumpy()) <= 4 * BF16_EPS


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("numpy_style", [False, True])
def test_gradients_of_half_arrays(dtype, numpy_style):
    amp.init(dtype)
    half, single = mx.nd.array([[1.0, 2.0]], dtype="float16"), mx.nd.array([[3.0, 4.0]])
    if numpy_style:
        half, single = half.as_np_ndarray(), single.as_np_ndarray()
    half.attach_grad()
    single.attach_grad()
    differentiate(lambda: half * single)
    assert (half.grad.dtype, single.grad.dtype) == (np.float16, np.float32)
    np.testing.assert_array_equal(half.grad.asnumpy(), [[3, 4]])
    np.testing.assert_array_equal(single.grad.asnumpy(), [[1, 2]])
    assert mx.nd.ones_like(half.as_nd_ndarray()).dtype == np.float16


LAYERS = {
    "norm": lambda: [nn.Conv2D(16, 3, in_channels=16, use_bias=False), nn.BatchNorm(in_channels=16),
                     nn.Activation("relu"), nn.Dense(4, in_units=16 * 36)],
    "deconvolution": lambda: [nn.Activation("relu"), nn.Conv2DTranspose(16, 2, 2, in_channels=16),
                              nn.Conv2D(16, 1, in_channels=16)],
    "deconvolution behind a layer": lambda: [nn.Conv2D(16, 3, padding=1, in_channels=16),
                                             nn.Conv2DTranspose(16, 2, 2, in_channels=16),
                                             nn.Conv2D(16, 1, in_channels=16)]}


@pytest.mark.bf16
@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
class TestNetworks:
    @pytest.mark.parametrize("layers", LAYERS)
    def test_half_weights_and_single_data(self, layers, hybridize):
        mx.random.seed(2)
        net = sequential([*LAYERS[layers]()], mx.init.Xavier(), active=False)
        data = mx.nd.random.normal(shape=(2, 16, 8, 8))
        found = {}
        for half in (False, True):
            if half:
                net.cast("float16")
                net.hybridize(hybridize)
                amp.init("bfloat16")
            for parameter in net.collect_params().values():
                if parameter.grad_req != "null":
                    parameter.grad_req = "write"
            with mx.autograd.record():
                out = net(data)
                loss = (out * out).sum()
            loss.backward()
            found[half] = [out.asnumpy(), *(one.grad().asnumpy().astype("float32")
                                            for one in net.collect_params().values() if one.grad_req != "null")]
        assert net[-1].weight.dtype == "float16"
        assert out.dtype == np.float32
        assert max(map(relative, found[False], found[True])) < (0.1 if layers == "norm" else 0.05)

    def test_gradients_accumulate(self, hybridize):
        net = nn.Dense(8, in_units=32)
        net.initialize()
        net.cast("float16")
        net.weight.grad_req = "add"
        net.hybridize(hybridize)
        amp.init("bfloat16")
        data = mx.nd.ones((4, 32))
        for _ in range(3):
            differentiate(lambda: net(data).sum())
        assert (net.weight.grad().asnumpy() == 12).all()

    def test_a_cast_within(self, hybridize):
        class Net(HybridBlock):
            def hybrid_forward(self, F, x):
                return F.concat(F.cast(x, "float16"), x, dim=1), F.cast(x, "float16") * 2 + x
        net = Net()
        data = mx.nd.array([[1.0, 2.5], [3.0, 0.1]])
        net.hybridize(hybridize)
        amp.init("bfloat16")
        one, other = net(data)
        half = data.astype("float16").astype("float32")
        assert (one.asnumpy() == np.concatenate([half.asnumpy(), data.asnumpy()], 1)).all()
        assert relative((half * 2 + data).asnumpy(), other.asnumpy()) < 2 * BF16_EPS

    def test_what_is_float16_alone_stays_so(self, hybridize):
        class Net(HybridBlock):
            def hybrid_forward(self, F, x, y):
                return F.concat(x, y, dim=1) + 1
        net = Net()
        net.hybridize(hybridize)
        amp.init("bfloat16")
        half = mx.nd.ones((2, 2), dtype="float16")
        assert net(half, half).dtype == np.float16
