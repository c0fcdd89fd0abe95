"""Regions, exclusions and users' own functions."""
from __future__ import annotations

import contextlib
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from mxnet.ndarray import register
from networks import BF16_EPS, differentiate, relative

import gluon_amp as amp
from gluon_amp._mxnet.invoke import handle_of
from gluon_amp.state.in_force import frame

pytestmark = pytest.mark.machine


class Two(HybridBlock):
    """Two dense layers, the second inside a region of the test's choice."""

    def __init__(self, region=None):
        super().__init__(prefix="two_")
        self.region = region
        with self.name_scope():
            self.first, self.second = nn.Dense(32, in_units=32), nn.Dense(8, in_units=32)

    def hybrid_forward(self, F, x):
        y = self.first(x)
        if self.region is None:
            return self.second(y)
        with self.region():
            return self.second(y)


@pytest.fixture
def data():
    mx.random.seed(6)
    return mx.nd.random.normal(shape=(4, 32))


def make(region=None, hybridize=False):
    mx.random.seed(7)
    net = Two(region)
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize()
    return net


def dense(net, layer, x, low):
    """NumPy's view of a layer: inputs rounded to bfloat16 or not, sums in FP32."""
    def rounded(value):
        return mx.nd.amp_cast(mx.nd.amp_cast(value, dtype=BF16), dtype="float32") if low else value
    x, weight = rounded(x).asnumpy().astype("float64"), rounded(layer.weight.data()).asnumpy().astype("float64")
    return mx.nd.array(x @ weight.T)


BF16 = np.dtype([("bfloat16", np.uint16)])


@pytest.mark.bf16
@pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
class TestRegions:
    def test_a_region_switches_off(self, data, hybridize):
        net = make(hybridize=hybridize)
        expected = net(data).asnumpy()
        amp.init("bfloat16")
        low = net(data).asnumpy()
        with amp.autocast(enabled=False):
            assert (net(data).asnumpy() == expected).all()
            with amp.autocast():
                assert (net(data).asnumpy() == low).all()
        assert (net(data).asnumpy() == low).all()
        assert (low != expected).any()

    def test_a_region_switches_on_without_init(self, data, hybridize):
        net = make(hybridize=hybridize)
        expected = net(data).asnumpy()
        with amp.autocast(dtype="bfloat16"):
            assert amp.active_dtype() == "bfloat16"
            low = net(data).asnumpy()
        assert not amp.is_active()
        assert 0 < relative(expected, low) < 4 * BF16_EPS
        assert (net(data).asnumpy() == expected).all()

    def test_a_region_inside_the_network_holds_whenever_it_runs(self, data, hybridize):
        net = make(lambda: amp.autocast(enabled=False), hybridize)
        amp.init("bfloat16")
        net(data)
        hidden = dense(net, net.first, data, low=True)
        hidden = mx.nd.amp_cast(mx.nd.amp_cast(hidden, dtype=BF16), dtype="float32")
        expected = dense(net, net.second, hidden, low=False).asnumpy()
        for _ in range(2):
            assert relative(expected, net(data).asnumpy()) < 1e-3 * BF16_EPS * 256
        every = make(hybridize=hybridize)(data).asnumpy()
        assert relative(expected, every) > relative(expected, net(data).asnumpy())

    def test_a_region_inside_the_network_lowers_only_its_part(self, data, hybridize):
        net = make(lambda: amp.autocast(dtype="bfloat16"), hybridize)
        net(data)
        hidden = dense(net, net.first, data, low=False)
        expected = dense(net, net.second, hidden, low=True).asnumpy()
        found = net(data).asnumpy()
        assert relative(expected, found) < 2 * BF16_EPS
        assert (found != make()(data).asnumpy()).any()

    def test_excluded_blocks_stay_in_fp32(self, data, hybridize):
        net = make(hybridize=hybridize)
        plain = net(data).asnumpy()
        amp.init("bfloat16")
        low = net(data).asnumpy()
        for target in (net, nn.Dense, "two_dense*", Two):
            amp.exclude(target)
            assert (net(data).asnumpy() == plain).all()
            amp.deinit()
            amp.init("bfloat16")
            assert (net(data).asnumpy() == low).all()
        amp.exclude(net.second)
        partly = net(data).asnumpy()
        assert (partly != plain).any()
        assert (partly != low).any()


@pytest.mark.bf16
def test_decorated_functions_and_threads(data):
    net = make()
    expected = net(data).asnumpy()
    barrier = threading.Barrier(2)

    def plain():
        barrier.wait()
        return net(data).asnumpy()

    with amp.autocast(dtype="bfloat16"), ThreadPoolExecutor(2) as pool:  # threads begin outside of all regions
        low, found = pool.map(lambda run: run(), (amp.autocast(dtype="bfloat16")(plain), plain))
    assert (found == expected).all()
    assert (low != expected).any()


class Moved(HybridBlock):
    """Moves the axes of what it is given, in a region inside the region around it."""

    def hybrid_forward(self, F, x):
        with amp.autocast(enabled=True):
            return F.transpose(x, axes=(0, 2, 3, 1))


class HalfOff(HybridBlock):
    """A convolution in low precision, and :class:`Moved` in FP32: in a region, or excluded."""

    def __init__(self, off):
        super().__init__(prefix="half_off_")
        self.off = off
        with self.name_scope():
            self.layer, self.moved = nn.Conv2D(32, 1, in_channels=32), Moved(prefix="moved_")

    def hybrid_forward(self, F, x):
        x = self.layer(x)
        with self.off():
            return self.moved(x)


@pytest.mark.bf16
@pytest.mark.parametrize("exclude", [False, True], ids=["region", "excluded"])
def test_a_region_in_one_that_is_off_knows_the_low_precision_around(exclude, monkeypatch):
    """MXNet's transpose of bfloat16 arrays writes past the end of its result."""
    given, original, transpose = [], register._imperative_invoke, handle_of("transpose")

    def noted(handle, inputs, *others):
        if handle == transpose:
            given.extend(array.dtype for array in inputs)
        return original(handle, inputs, *others)

    monkeypatch.setattr(register, "_imperative_invoke", noted)
    net = HalfOff(contextlib.nullcontext if exclude else lambda: amp.autocast(enabled=False))
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.normal(shape=(2, 32, 4, 4))
    expected = net(x).asnumpy()
    amp.init("bfloat16")
    if exclude:
        amp.exclude(net.moved)
    found = net(x)
    assert given == [np.float32, np.float32]
    assert found.dtype == np.float32
    assert relative(expected, found.asnumpy()) < 2 * BF16_EPS


def test_a_region_ends_with_an_exception():
    with pytest.raises(KeyError), amp.autocast():
        raise KeyError
    assert not amp.is_active()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"enabled": "yes"}, TypeError, "expected True or False, received enabled='yes'"),
    ({"dtype": "int8"}, amp.DTypeError, "received dtype='int8'")])
def test_wrong_regions_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        amp.autocast(**arguments)


def test_wrong_exclusions_are_refused():
    with pytest.raises(TypeError, match="expected a Block, a class of blocks or a name"):
        amp.exclude(3)


class Square(autograd.Function):
    seen = None

    def forward(self, x):
        Square.seen = (x.dtype, amp.is_active())
        self.save_for_backward(x)
        return x * x

    def backward(self, gradient):
        return 2 * self.saved_tensors[0] * gradient


class Around(HybridBlock):
    """A function of the user's between two layers, as eager code has it."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.function = nn.Dense(32, in_units=32), function

    def hybrid_forward(self, F, x):
        return self.function()(self.dense(x))


class TestFunctions:
    def gradient(self, net, data):
        differentiate(lambda: net(data).sum())
        return net.dense.weight.grad().asnumpy()

    @pytest.mark.bf16
    def test_a_function_not_written_for_amp_gets_what_it_expects(self, data):
        net = Around(Square)
        net.initialize()
        expected = self.gradient(net, data)
        amp.init("bfloat16")
        found = self.gradient(net, data)
        assert Square.seen == (np.float32, False)
        assert relative(expected, found) < 8 * BF16_EPS

    @pytest.mark.parametrize(("options", "seen"), [
        ({}, (np.float32, True)), ({"cast_inputs": "float16"}, (np.float16, False))])
    def test_custom_fwd_leaves_amp_on_or_casts_inputs(self, data, options, seen):
        class Decorated(Square):
            forward = amp.custom_fwd(Square.forward, **options)
            backward = amp.custom_bwd(Square.backward)

        amp.init("float32")
        with amp.autocast():
            Decorated()(data)
        assert Square.seen == seen

    def test_float32_function(self, data):
        @amp.float32_function
        def project(x, weight):
            return mx.nd.FullyConnected(x, weight, no_bias=True, num_hidden=8)

        weight = mx.nd.random.normal(shape=(8, 32))
        expected = project(data, weight).asnumpy()
        amp.init()
        assert (project(data, weight).asnumpy() == expected).all()
        assert amp.is_active()

    @pytest.mark.bf16
    def test_low_precision_function_works_inside_a_region_that_is_off(self, data):
        @amp.low_precision_function
        def project(x, weight):
            return mx.nd.FullyConnected(x, weight, no_bias=True, num_hidden=8)

        weight = mx.nd.random.normal(shape=(8, 32))
        expected = mx.nd.FullyConnected(data, weight, no_bias=True, num_hidden=8).asnumpy()
        amp.init("bfloat16")
        with amp.autocast(enabled=False):
            assert 0 < relative(expected, project(data, weight).asnumpy()) < 2 * BF16_EPS

    def test_registered_functions_are_replaced_until_deinit(self):
        module = types.ModuleType("layers")
        module.project = original = lambda x: x
        amp.register_float32_function(module, "project")
        assert module.project is not original
        with pytest.raises(amp.StateError, match=r"layers\.project is registered already"):
            amp.register_low_precision_function(module, "project")
        amp.deinit()
        assert module.project is original


@mx.operator.register("amp_test_double")
class Double(mx.operator.CustomOpProp):
    seen = None

    def __init__(self):
        super().__init__(need_top_grad=True)

    def create_operator(self, ctx, shapes, dtypes):
        Double.seen = dtypes

        class Operator(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0] * 2)

            def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
                self.assign(in_grad[0], req[0], out_grad[0] * 2)

        return Operator()


class WithCustom(HybridBlock):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(32, in_units=32)

    def hybrid_forward(self, F, x):
        return F.Custom(self.dense(x), op_type="amp_test_double")


@pytest.mark.bf16
@pytest.mark.parametrize("enter", [lambda: amp.autocast(dtype="bfloat16"), lambda: amp.autocast(enabled=False)],
                         ids=["on", "off"])
def test_custom_operators_are_traced_in_regions(data, enter):
    net = WithCustom()
    net.initialize()
    expected = net(data).asnumpy()
    net.hybridize()
    with enter():
        found = net(data).asnumpy()
    assert relative(expected, found) < 4 * BF16_EPS
    assert Double.seen == [0]
    np.testing.assert_allclose(net(data).asnumpy(), found, rtol=4 * BF16_EPS, atol=4 * BF16_EPS)


def test_custom_operators_in_networks_that_are_cast(data):
    net = WithCustom()
    net.initialize()
    expected = net(data).asnumpy()
    net.hybridize()
    amp.initialize(net, opt_level="O2", verbosity=0)
    assert relative(expected, net(data).asnumpy()) < 4 * BF16_EPS


def test_custom_operators_are_registered_once_and_with_a_known_rule():
    amp.register_op("amp_test_double", "KEEP")
    with pytest.raises(amp.StateError, match="'amp_test_double' is registered already, with rule KEEP"):
        amp.register_op("amp_test_double")
    with pytest.raises(amp.PolicyError, match=r"expected one of LOWER, FP32, .*received rule='LOW'"):
        amp.register_op("other", "LOW")
    amp.init()
    with pytest.raises(amp.StateError, match=r"before amp\.init"):
        amp.register_op("late")


def test_custom_operators_are_not_registered_after_initialize():
    net = nn.Dense(2, in_units=3)
    net.initialize()
    amp.initialize(net, opt_level="O2", cast_model_type="float16", verbosity=0)
    with pytest.raises(amp.StateError, match=r"before amp\.init\(\) or amp\.initialize\(\)"):
        amp.register_op("late")


def test_a_region_that_cannot_be_entered_leaves_nothing_behind(monkeypatch):
    def refuse(region):
        raise UserWarning("as a warning does that is made an error")

    monkeypatch.setattr(amp.autocast, "_state", refuse)
    monkeypatch.setattr(frame, "hybrid_blocks", 1)
    with pytest.raises(UserWarning) as refused, amp.autocast():
        pass
    assert refused.tb is not None  # it holds what was entered
    assert frame.hybrid_blocks == 1


@pytest.mark.bf16
class TestRegionsAroundTheFirstCall:
    """They count for that call; the network is traced without them."""

    @staticmethod
    def network(flags):
        mx.random.seed(3)
        net = nn.Dense(16, in_units=16, prefix="net_")
        net.initialize(mx.init.Normal(1))
        if flags is not None:
            net.hybridize(**flags)
        return net, mx.nd.random.normal(shape=(4, 16))

    @pytest.mark.parametrize("flags", [None, {}, {"static_alloc": True}])
    def test_off_then_outside(self, flags, tmp_path):
        net, data = self.network(flags)
        exact = net(data).asnumpy()
        again, _ = self.network(flags)
        amp.init("bfloat16")
        with amp.autocast(enabled=False):
            np.testing.assert_array_equal(again(data).asnumpy(), exact)
        assert (again(data).asnumpy() != exact).any()
        np.testing.assert_array_equal(amp.float32_function(again)(data).asnumpy(), exact)
        if flags is not None:
            again.export(str(tmp_path / "net"))
            assert "__amp__" not in (tmp_path / "net-symbol.json").read_text()

    @pytest.mark.parametrize("flags", [None, {}, {"static_alloc": True}])
    def test_on_then_outside_without_init(self, flags):
        net, data = self.network(flags)
        exact = net(data).asnumpy()
        again, _ = self.network(flags)
        with amp.autocast(dtype="bfloat16"):
            low = again(data).asnumpy()
        assert (low != exact).any()
        np.testing.assert_array_equal(again(data).asnumpy(), exact)
        with amp.autocast(dtype="bfloat16"):
            np.testing.assert_array_equal(again(data).asnumpy(), low)
