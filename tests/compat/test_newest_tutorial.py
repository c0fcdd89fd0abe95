"""MXNet 2's AMP tutorial, and what MXNet 2's own tests say of its AMP, on MXNet 1.9.1 behind ``install()``."""
import json
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp._mxnet import blocks

TUTORIAL = Path(__file__).parent / "newest_tutorial.py"


@pytest.mark.parametrize("how", [
    ["-m", "gluon_amp", "run", "--no-init", TUTORIAL],
    pytest.param(["-c", "import gluon_amp, runpy, sys; gluon_amp.install(); runpy.run_path(sys.argv[1])", TUTORIAL],
                 marks=pytest.mark.slow)], ids=["run", "install"])
def test_the_tutorial_runs_as_it_is_written(how):
    done = subprocess.run([sys.executable, "-W", "ignore", *how], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Conversion and Inference completed successfully\n")
    losses = [list(map(float, found)) for found in re.findall(r"CrossEntropy=([\d.]+), SmoothL1=([\d.]+)", done.stderr)]
    assert len(losses) == 1
    assert np.isfinite(losses).all()


@pytest.fixture
def installed():
    amp.install()
    yield
    amp.uninstall()


def test_networks_of_1_9_1_take_numpys_arrays_and_give_them(installed):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(3))
    net.initialize()
    data = mx.np.random.uniform(size=(2, 3, 8, 8))
    for hybridized in (False, True):
        net.hybridize(hybridized)
        expected = net(data.as_nd_ndarray())
        found = net(data)
        assert type(found) is mx.np.ndarray
        np.testing.assert_array_equal(found.asnumpy(), expected.asnumpy())
    with mx.autograd.record():
        loss = net(data).sum()
    loss.backward()
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
        with mx.autograd.record():
            found = net(data)
        found.backward()
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


class Dense2(nn.HybridBlock):
    """Two dense layers and a reshape."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.fc1, self.fc2 = nn.Dense(4), nn.Dense(4)

    def hybrid_forward(self, F, x):
        return self.fc2(self.fc1(x)).reshape((-1, 2, 2))


class Shared(nn.HybridBlock):
    """Layers that share a weight and a bias, of which one stays in FP32."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.first = nn.Dense(4, in_units=4)
            self.second = nn.Dense(4, in_units=4, params=self.first.params)
            self.fp32 = nn.Dense(4, in_units=4)

    def hybrid_forward(self, F, x):
        x = self.first(x)
        return F.concat(self.second(x), self.fp32(x), dim=1)


class Ordered(nn.HybridBlock):
    """A dense layer and one that follows its data read the same tensor, in either order."""

    def __init__(self, flatten_first):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4)
        self.flatten_first = flatten_first

    def hybrid_forward(self, F, x):
        x = 2 ** x
        return (F.flatten(x), self.dense(x)) if self.flatten_first else (self.dense(x), F.flatten(x))


def counted(net, dtype, data, **options):
    """Convert as MXNet 2 does, data second; return the numbers of tensors in low precision, casts to it, and others."""
    net.initialize()
    made = amp.convert_hybrid_block(net, data, dtype, optimize=[], **options)
    inside = blocks.graph_of(made)[1].get_internals()
    given = {"data": "float32", **{name: value.data().dtype for name, value in made.collect_params().items()}}
    types = dict(zip(inside.list_outputs(), inside.infer_type(**given)[1]))
    ops = {node["name"]: node["op"] for node in json.loads(inside.tojson())["nodes"]}
    is_low = {name.rsplit("_output", 1)[0]: kind not in (np.float32, np.int32) for name, kind in types.items()
              if ops.get(name.rsplit("_output", 1)[0], "null") != "null"}
    casts = [is_low[name] for name in is_low if ops[name] == "amp_cast"]
    return made, (sum(is_low.values()), sum(casts), len(casts) - sum(casts))


@pytest.mark.bf16
@pytest.mark.filterwarnings("ignore:the (bfloat16|converted) network")
class TestCounts:
    """The counts that MXNet 2's own tests have (tests/python/amp/common.py), where 1.9.1 can trace the network."""

    def test_a_cast_for_the_input_and_each_parameter(self):
        _, counts = counted(Dense2(), "bfloat16", mx.nd.random.uniform(-1, 1, (4, 4)))
        assert counts == (1 + 3 + 3, 1 + 2 + 2, 1)  # the result is cast before it is reshaped, in MXNet 2 behind that

    def test_shared_parameters_are_cast_offline_where_nobody_reads_fp32(self):
        net = Shared()
        made, counts = counted(net, "bfloat16", mx.nd.random.uniform(-1, 1, (4, 4)), cast_params_offline=True,
                               exclude=[net.fp32])
        assert counts == (3, 1, 2)
        kept = {name: array.data().dtype for name, array in made.collect_params().items()}
        assert {name for name, dtype in kept.items() if dtype == np.float32} == {net.fp32.weight.name,
                                                                                 net.fp32.bias.name}

    def test_the_order_of_readers_does_not_matter(self):
        data = mx.nd.random.uniform(-1, 1, (4, 16))
        first, second = (counted(Ordered(flag), "bfloat16", data, cast_params_offline=True)[1] for flag in (0, 1))
        assert first == second

    def test_excluded_operators(self):
        data = mx.sym.var("data")
        weight, bias = mx.sym.var("weights"), mx.sym.var("bias")
        heads = [mx.sym.FullyConnected(data, weight, bias, num_hidden=4, name=name) for name in ("fc1", "fc2")]
        example = mx.nd.random.uniform(-1, 1, (4, 16))

        def counts(names):
            block = mx.gluon.SymbolBlock(mx.sym.Group(heads), [data])
            return counted(block, "bfloat16", example, excluded_sym_names=names)[1]

        assert counts(["fc1"]) == (4, 3, 1)
        assert counts(["fc1", "fc2"]) == (0, 0, 0)
