"""Mixed precision in code that is not hybridized."""
from __future__ import annotations

import collections
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import RUNS_BFLOAT16, prefer
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn
from mxnet.ndarray import (
    FullyConnected,  # before init, on purpose
    register,
)
from networks import (
    BF16_EPS,
    NETWORKS,
    accumulated,
    differentiate,
    gradients,
    outputs_of,
    ready,
    relative,
    sequential,
    worst,
)

import gluon_amp as amp
from gluon_amp._mxnet.invoke import handle_of
from gluon_amp.machine.dtypes import BFLOAT16_DTYPE
from gluon_amp.state.in_force import frame

pytestmark = pytest.mark.machine


@pytest.mark.parametrize("name", NETWORKS)
class TestNetworks:
    @pytest.mark.parametrize(("dtype", "eps", "of_outputs", "of_gradients", "of_graphs"), [
        pytest.param("bfloat16", BF16_EPS, 6, 16, 2, marks=pytest.mark.bf16), ("float16", 2.0 ** -11, 16, 32, 4)])
    def test_eager_and_hybridized_agree_with_each_other_and_with_fp32(self, name, dtype, eps, of_outputs, of_gradients,
                                                                      of_graphs, monkeypatch):
        prefer(monkeypatch, nhwc=False)  # in graphs, as in calls
        make, shape = NETWORKS[name]
        net, data = ready(make(), shape, active=False)
        scale = 1024 if dtype == "float16" else 1
        if (name, dtype) == ("conv", "float16"):
            of_gradients = 160  # max-pooling may pick another of two values that round alike: its gradient moves
        plain = outputs_of(net, data)
        amp.init(dtype)
        eager = outputs_of(net, data)
        assert all(output.dtype == np.float32 for output in eager)
        assert max(map(relative, plain, eager)) < of_outputs * eps
        amp.deinit()
        plain_gradients = gradients(net, data, scale=scale)
        amp.init(dtype)
        eager_gradients = gradients(net, data, scale=scale)
        net.hybridize()
        graph_gradients = gradients(net, data, scale=scale)
        assert worst(plain_gradients, eager_gradients)[0] < of_gradients * eps
        # Rounding happens in the same places; sums of gradients may differ in order.
        assert worst(graph_gradients, eager_gradients)[0] < of_graphs * eps
        assert any((plain_gradients[key] != eager_gradients[key]).any() for key in plain_gradients)

    @pytest.mark.bf16
    def test_gradients_accumulate(self, name):
        make, shape = NETWORKS[name]
        net, data = ready(make(), shape, active=False)
        amp.init("bfloat16")
        single = gradients(net, data)
        tripled = accumulated(net, data, passes=3)
        assert worst({key: 3 * value for key, value in single.items()}, tripled)[0] < 2 * BF16_EPS


class Loop(HybridBlock):
    """A dense layer, and a loop over its output."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, in_units=8, flatten=False)

    def hybrid_forward(self, F, x):  # (length, batch, 8)
        def body(step, state):
            return step + state, step * 2 + state

        return F.contrib.foreach(body, self.dense(x), F.zeros((2, 8)))[0]


@pytest.mark.bf16
class TestMixtures:
    """Hybridized and plain code inside each other."""

    @pytest.mark.parametrize("flags", [{}, {"static_alloc": True}], ids=str)
    def test_a_hybridized_child_of_a_parent_that_is_not(self, flags):
        make, shape = NETWORKS["residual"]
        net, data = ready(make(), shape, active=False)
        expected = gradients(net, data)
        amp.init("bfloat16")
        eager = gradients(net, data)
        net.again.hybridize(**flags)
        net.norm.hybridize(**flags)
        found = gradients(net, data)
        assert worst(expected, found)[0] < 16 * BF16_EPS
        assert worst(eager, found)[0] < 4 * BF16_EPS

    @pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])
    def test_loops(self, hybridize):
        net, data = ready(Loop(), (3, 2, 8), active=hybridize)
        expected, plain = outputs_of(net, data), gradients(net, data)
        amp.init("bfloat16")
        assert 0 < relative(expected[0], outputs_of(net, data)[0]) < 4 * BF16_EPS
        assert worst(plain, gradients(net, data))[0] < 8 * BF16_EPS

    def test_an_imported_symbol_block(self, tmp_path):
        make, shape = NETWORKS["conv"]
        net, data = ready(make(), shape)
        expected = net(data).asnumpy()
        path = str(tmp_path / "net")
        net.export(path)
        block = gluon.SymbolBlock.imports(f"{path}-symbol.json", ["data"], f"{path}-0000.params")
        amp.init("bfloat16")
        found = block(data).asnumpy()
        block.hybridize()
        assert 0 < relative(expected, found) < 4 * BF16_EPS
        assert relative(found, block(data).asnumpy()) < BF16_EPS
        assert relative(found, net(data).asnumpy()) < BF16_EPS


class Widened(HybridBlock):
    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(8, in_units=16)

    def hybrid_forward(self, F, x):
        value = self.layer(x)
        return value.astype("float64"), value.astype("float32"), value


@mx.util.use_np
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("flags", [{"active": False}, {}, {"static_alloc": True}], ids=str)
def test_numpy_arrays_take_other_types_inside_of_blocks(flags, dtype):
    amp.init(dtype)
    net = Widened()
    net.initialize(mx.init.One())
    net.hybridize(**flags)
    found = net(mx.np.ones((2, 16)))
    assert [one.dtype for one in found] == [np.float64, np.float32, np.float32]
    assert all(one.asnumpy().tolist() == np.full((2, 8), 16.0).tolist() for one in found)


class TestArraysThatStayAsTheyAre:
    @pytest.mark.parametrize("dtype", ["float64", "int32"])
    def test_other_types(self, dtype):
        x, w = mx.nd.ones((2, 3), dtype="float64"), mx.nd.ones((4, 3), dtype="float64")
        index = mx.nd.array([0, 1], dtype=dtype)
        amp.init()
        assert FullyConnected(x, w, no_bias=True, num_hidden=4).dtype == np.float64
        assert mx.nd.concat(index, index, dim=0).dtype == np.dtype(dtype)

    def test_seven_dimensions(self):
        x, w = mx.nd.random.normal(shape=(2, 1, 1, 1, 1, 1, 8)), mx.nd.random.normal(shape=(4, 8))
        expected = FullyConnected(x, w, no_bias=True, num_hidden=4, flatten=False).asnumpy()
        amp.init()
        assert (FullyConnected(x, w, no_bias=True, num_hidden=4, flatten=False).asnumpy() == expected).all()

    def test_nothing_at_all(self):
        with mx.util.np_shape(True), mx.util.np_array(True):
            empty = mx.np.zeros((0, 4))
            amp.init()
            assert mx.np.concatenate([empty, empty]).shape == (0, 4)
            assert mx.npx.relu(empty).shape == (0, 4)

    def test_sparse(self):
        csr = mx.nd.array([[0, 1], [2, 0]]).tostype("csr")
        amp.init()
        assert (mx.nd.sparse.dot(csr, mx.nd.ones((2, 3))).asnumpy() == [[1, 1, 1], [2, 2, 2]]).all()


class TestOut:
    @pytest.mark.bf16
    def test_a_result_lands_in_the_callers_array_in_its_type(self):
        x, w, out = mx.nd.random.normal(shape=(4, 32)), mx.nd.random.normal(shape=(8, 32)), mx.nd.zeros((4, 8))
        expected = FullyConnected(x, w, no_bias=True, num_hidden=8).asnumpy()
        amp.init("bfloat16")
        result = FullyConnected(x, w, no_bias=True, num_hidden=8, out=out)
        assert result is out
        assert out.dtype == np.float32
        assert 0 < relative(expected, out.asnumpy()) < 2 * BF16_EPS

    def test_in_place_operators(self):
        amp.init()
        x = mx.nd.ones((2, 2))
        same = x
        x += 1
        x *= mx.nd.ones((2, 2)) * 3
        assert x is same
        assert (same.asnumpy() == 6).all()


class Twice(HybridBlock):
    """Uses one weight three times."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, in_units=8)

    def hybrid_forward(self, F, x):
        return self.dense(self.dense(self.dense(x)))


@pytest.mark.bf16
class TestCasts:
    @pytest.fixture
    def count(self, monkeypatch):
        counts = Counter()
        original = register._imperative_invoke

        def counted(handle, *args):
            counts[handle] += 1
            return original(handle, *args)

        monkeypatch.setattr(register, "_imperative_invoke", counted)
        amp.init("bfloat16")
        yield lambda: counts[handle_of("amp_cast")]
        amp.deinit()

    def run(self, net):
        return differentiate(lambda: net(mx.nd.ones((2, 8))).sum())

    def test_a_weight_is_cast_once_per_recorded_pass(self, count):
        net = Twice()
        net.initialize()
        self.run(net)
        # data, weight, bias, and the result back to FP32
        assert count() == 4
        self.run(net)
        assert count() == 8
        assert frame.casts is None

    def test_two_losses_of_one_network_are_both_differentiated(self, count):
        net = Twice()
        net.initialize()
        weight = net.dense.weight
        weight.grad_req = "add"
        with autograd.record():
            first, second = net(mx.nd.ones((2, 8))).sum(), net(mx.nd.ones((2, 8)) * 2).sum()
        first.backward()
        once = weight.grad().asnumpy()
        second.backward()
        assert np.abs(weight.grad().asnumpy() - once).max() > 0.1

    def test_a_failed_call_leaves_nothing_behind(self, count):
        net = Twice()
        net.initialize()
        with pytest.raises(mx.MXNetError), autograd.record():
            net(mx.nd.ones((2, 9))).wait_to_read()
        assert (frame.blocks, frame.hybrid_blocks, frame.casts) == (0, 0, None)


class Reader(HybridBlock):
    """A network whose code looks at values as it goes."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(64, in_units=64)
        self.seen = []

    def hybrid_forward(self, F, x):
        x = self.dense(x)
        self.seen += [x.asnumpy(), np.array(x[0, 0].asscalar()), str(x[0])]
        return x


@pytest.mark.bf16
def test_code_of_a_network_reads_fp32_values():
    net, data = Reader(), mx.nd.random.uniform(shape=(8, 64))
    net.initialize(mx.init.Xavier())
    net(data)
    amp.init("bfloat16")
    low = mx.nd.amp_cast(data, dtype=BFLOAT16_DTYPE)
    differentiate(lambda: net(data).sum())
    values, first, _, low_values, low_first, text = net.seen
    assert relative(values, low_values) < 4 * BF16_EPS
    assert low_first == pytest.approx(float(first), rel=0.05, abs=0.05)
    assert str(low_values[0]) in text
    assert low.asnumpy().dtype == BFLOAT16_DTYPE  # outside of networks as in MXNet


@pytest.mark.bf16
class TestForwardHooks:
    @staticmethod
    def network():
        return sequential([nn.Dense(64, in_units=64), nn.Activation("relu"),
                           nn.Dense(4, in_units=64)], mx.init.Xavier(), active=False)

    def test_they_read_fp32_inside_of_networks(self):
        net, data, seen = self.network(), mx.nd.random.uniform(shape=(8, 64)), []
        expected = [net[0](data), net[1](net[0](data))]
        net[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].asnumpy()))
        net[1].register_forward_hook(lambda _, __, output: seen.append(output.asnumpy()))
        amp.init("bfloat16")
        result = net(data)
        assert [each.dtype for each in seen] == [np.float32, np.float32]
        assert all(relative(one.asnumpy(), other) < 4 * BF16_EPS for one, other in zip(expected, seen))
        net[1]._forward_hooks.clear()
        net[1]._forward_pre_hooks.clear()
        assert (result == net(data)).asnumpy().all()

    def test_a_penalty_on_what_they_read_has_gradients(self):
        net, data, seen = self.network(), mx.nd.random.uniform(shape=(8, 64)), []
        net[0].register_forward_hook(lambda _, __, output: seen.append(output))

        def gradient():
            with autograd.record():
                net(data)
                (seen.pop() ** 2).sum().backward()
            return net[0].weight.grad().asnumpy()
        plain = gradient()
        amp.init("bfloat16")
        assert relative(plain, gradient()) < 4 * BF16_EPS


@pytest.mark.bf16
def test_an_error_names_the_operator_the_rule_and_the_way_out():
    amp.init("bfloat16")
    with pytest.raises(mx.MXNetError, match=
                       r"(?s)FullyConnected \(rule LOWER.*bfloat16.*fp32_ops=\['FullyConnected'\]"):
        FullyConnected(mx.nd.ones((2, 3)), mx.nd.ones((4, 5)), no_bias=True, num_hidden=4).wait_to_read()


class TestThreads:
    def test_threads_train_as_one_does(self):
        amp.init()
        make, shape = NETWORKS["residual"]
        ready_nets = [ready(make(), shape, active=False) for _ in range(4)]
        expected = [gradients(*pair) for pair in ready_nets]
        with ThreadPoolExecutor(4) as pool:
            for value, found in zip(expected, pool.map(lambda pair: gradients(*pair), ready_nets)):
                assert worst(value, found)[0] < 1e-5

    def test_gluoncvs_parallel(self):
        from gluoncv.utils.parallel import Parallel, Parallelizable

        class Task(Parallelizable):
            def forward_backward(self, x):
                return differentiate(lambda: net(x).sum())

        amp.init()
        contexts = [mx.cpu(0), mx.cpu(1)]
        net = nn.Dense(4, in_units=8)
        net.initialize(ctx=contexts)
        workers = Parallel(2, Task())
        for context in contexts:
            workers.put(mx.nd.ones((2, 8), ctx=context))
        assert len([workers.get() for _ in contexts]) == 2
        assert (net.weight.grad(contexts[0]).asnumpy() == 2).all()
        assert (net.weight.grad(contexts[1]).asnumpy() == 2).all()

    @pytest.mark.parametrize("thread_pool", [True, False], ids=["threads", "processes"])
    def test_data_loaders_preprocess_as_before(self, thread_pool):
        amp.init()
        dataset = gluon.data.ArrayDataset(mx.nd.arange(24).reshape((8, 3)), mx.nd.arange(8))
        loader = gluon.data.DataLoader(dataset.transform_first(lambda x: x * 2), batch_size=4, num_workers=2,
                                       thread_pool=thread_pool, timeout=60)
        total = sum(batch.asnumpy().sum() for batch, _ in loader)
        assert total == 2 * 276


@pytest.mark.parametrize(("conv", "transposed", "shape"), [
    (nn.Conv1D, nn.Conv1DTranspose, (2, 16, 4)), (nn.Conv2D, nn.Conv2DTranspose, (2, 16, 4, 4)),
    (nn.Conv3D, nn.Conv3DTranspose, (2, 16, 4, 4, 4))])
def test_an_imitated_deconvolution_has_gradients(conv, transposed, shape):
    """The backward of oneDNN's kernel ends the process where the weight is cast, and volumes have no other."""
    found = {}
    net, data = ready(nn.HybridSequential(), shape)
    net.add(conv(16, 3, padding=1, in_channels=16), transposed(24, 2, strides=2, in_channels=16),
            conv(8, 1, in_channels=24))
    net.initialize(mx.init.Xavier())
    expected = gradients(net, data)
    amp.init("float16")
    for way, flags in (("eager", {"active": False}), ("graph", {}), ("static", {"static_alloc": True})):
        net.hybridize(**flags)
        found[way] = gradients(net, data)
        assert worst(expected, found[way])[0] < 5e-3
    assert worst(found["eager"], found["graph"])[0] < 1e-3
    assert worst(found["graph"], found["static"])[0] == 0
    graph = net._cached_op.graph([data, *(net.collect_params()[name].data() for name in net._cached_op.names[1:])])
    weight = next(node for node in graph.operators() if node.op == "Deconvolution").inputs[1]
    assert weight.node.is_variable or weight.dtype == "float64"  # oneDNN does not run it then


@pytest.mark.parametrize(("size", "value"), [(1000, 20.0), (1000, 1e-5)])
def test_norms_of_gradients_are_not_float16(size, value):
    # gluon.utils.clip_global_norm takes dot(x, x), whose sum leaves float16's range.
    gradients = [mx.nd.full((size, 2), value) for _ in range(2)]
    norm = value * np.sqrt(4 * size)
    amp.init("float16")
    assert gluon.utils.clip_global_norm(gradients, norm / 2) == pytest.approx(norm, rel=1e-4)
    assert gradients[0].asnumpy()[0, 0] == pytest.approx(value / 2, rel=1e-4)


@pytest.mark.parametrize("hybridize", [False, True])
def test_products_of_vectors_in_networks_are_not_float16(hybridize):
    class Squares(HybridBlock):
        def hybrid_forward(self, F, data):
            return F.dot(data, data)
    net = Squares()
    net.hybridize(hybridize)
    amp.init("float16")
    assert net(mx.nd.full((100,), 30)).asscalar() == 90000


def test_mappings_keep_their_class():
    class Named(collections.OrderedDict):
        pass

    class Net(HybridBlock):
        def __init__(self):
            super().__init__()
            self.fc = nn.Dense(16, in_units=16)

        def forward(self, x):
            return Named(first=self.fc(x), rest=collections.defaultdict(list, parts=[self.fc(x)]))
    net = Net()
    net.initialize()
    amp.init("bfloat16" if RUNS_BFLOAT16 else "float16")
    result = net(mx.nd.ones((2, 16)))
    assert type(result) is Named
    assert isinstance(result["rest"], collections.defaultdict)
    assert result["first"].dtype == result["rest"]["parts"][0].dtype == np.float32
    assert result["rest"]["more"] == []
