"""Gradients of single operators that MXNet gets wrong are right under AMP, wherever the operators stand."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from gradient_sweep import environment
from mxnet import autograd, nd
from mxnet.gluon import HybridBlock, nn
from networks import differentiate

import gluon_amp as amp

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore:(AMP|the b?float16 network) will be slow")]
DTYPES = ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.bf16)]
BOUNDS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}  # relative, in the 2-norm; a wrong slope is off by 1
ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"


def by_hand(F, x, alpha):
    """PReLU, without MXNet's operator."""
    return F.maximum(x, 0) + F.broadcast_mul(F.reshape(alpha, (1, -1, 1, 1)), F.minimum(x, 0))


def by_operator(F, x, alpha):
    return F.LeakyReLU(x, gamma=alpha, act_type="prelu")


BEHIND = {
    "nothing": lambda F, y, w, v: y,
    "convolution": lambda F, y, w, v: F.Convolution(y, w, kernel=(3, 3), pad=(1, 1), num_filter=16, no_bias=True),
    "dense": lambda F, y, w, v: F.FullyConnected(F.Pooling(y, global_pool=True, pool_type="avg", kernel=(1, 1)), v,
                                                 num_hidden=16, no_bias=True),
    "pooling": lambda F, y, w, v: F.Pooling(y, kernel=(2, 2), stride=(2, 2), pool_type="max"),
    "product": lambda F, y, w, v: y * y,
    "norm": lambda F, y, w, v: F.broadcast_div(y, F.sqrt(F.mean(y * y, axis=(0, 2, 3), keepdims=True))),
    "copy": lambda F, y, w, v: F.identity(y) + F.BlockGrad(y),
    "sum": lambda F, y, w, v: y + F.sigmoid(y)}


class Network(HybridBlock):
    """A convolution, PReLU, and what is behind."""

    def __init__(self, rectify, behind, slopes):
        super().__init__(prefix="net_")
        self.rectify, self.behind = rectify, BEHIND[behind]
        with self.name_scope():
            self.first = self.params.get("first", shape=(16, 16, 3, 3))
            self.alpha = self.params.get("alpha", shape=(slopes,))
            self.second = self.params.get("second", shape=(16, 16, 3, 3))
            self.last = self.params.get("last", shape=(16, 16))

    def hybrid_forward(self, F, x, first, alpha, second, last):
        y = F.Convolution(x, first, kernel=(3, 3), pad=(1, 1), num_filter=16, no_bias=True)
        return self.behind(F, self.rectify(F, y, alpha), second, last)


def made(rectify, behind, slopes):
    net = Network(rectify, behind, slopes)
    net.initialize()
    random = np.random.RandomState(3)
    for parameter in net.collect_params().values():
        parameter.set_data(nd.array(random.normal(size=parameter.shape) * 0.2))
    net.alpha.set_data(nd.array(np.resize([0.25, -0.5, -1.5, 0.0], slopes)))
    return net


def gradients(net, way):
    data = nd.array(np.random.RandomState(4).normal(size=(4, 16, 8, 8)))
    weights = [name for name in net(mx.sym.var("data")).list_arguments() if name != "data"]
    if way == "executor":
        symbol = net(mx.sym.var("data"))
        names = symbol.list_arguments()
        values = {name: one.data() for name, one in net.collect_params().items() if name in names}
        slopes = {name: nd.zeros(one.shape) for name, one in values.items()}
        executor = symbol.bind(mx.cpu(), {**values, "data": data}, slopes)
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward([_cotangent(executor.outputs[0])])
        return {name: slopes[name].asnumpy() for name in weights}
    net.hybridize(way != "eager", static_alloc=way == "static", static_shape=way == "static")
    for _ in range(2):
        with autograd.record():
            result = net(data)
        result.backward(_cotangent(result))
    return {name: net.collect_params()[name].grad().asnumpy() for name in weights}


def _cotangent(result):
    return nd.array(np.random.RandomState(5).normal(size=result.shape))


class TestPReLU:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("way", ["eager", "graph", "static", "executor"])
    @pytest.mark.parametrize("slopes", [1, 16])
    @pytest.mark.parametrize("behind", list(BEHIND))
    def test_its_gradients(self, behind, slopes, way, dtype):
        expected = gradients(made(by_hand, behind, slopes), "eager")
        amp.init(dtype)
        found = gradients(made(by_operator, behind, slopes), way)
        for name, one in found.items():
            assert np.linalg.norm(one - expected[name]) <= BOUNDS[dtype] * np.linalg.norm(expected[name]), name

    @pytest.mark.parametrize("way", ["eager", "graph"])
    @pytest.mark.parametrize("how", ["excluded", "region"])
    def test_where_amp_is_kept_away(self, how, way):
        expected = gradients(made(by_hand, "product", 16), "eager")
        amp.init("float16")
        net = made(by_operator, "product", 16)
        if how == "excluded":
            amp.exclude(net)
        with amp.autocast(enabled=how == "excluded"):
            found = gradients(net, way)
        for name, one in found.items():
            assert np.linalg.norm(one - expected[name]) <= 1e-4 * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize(("size", "stride", "pad"), [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_gradients_of_the_largest_in_inference(size, stride, pad, hybridize, dtype):
    values = np.random.RandomState(0).permutation(2 * 16 * 12 * 12).reshape(2, 16, 12, 12) / 4096
    net = nn.HybridSequential()
    net.add(nn.MaxPool2D(size, stride, pad))
    net.hybridize(hybridize)
    amp.init(dtype)
    data = nd.array(values)
    data.attach_grad()
    with autograd.record(train_mode=False):
        result = net(data)
    result.backward(_cotangent(result))
    amp.deinit()
    expected, slope = np.zeros((2, 16, 12 + 2 * pad, 12 + 2 * pad)), _cotangent(result).asnumpy()
    rounded = nd.array(values).astype(dtype).astype("float32").asnumpy() if dtype == "float16" else values
    padded = np.pad(rounded, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=-np.inf)
    for n, c, i, j in np.ndindex(*result.shape):
        window = padded[n, c, i * stride:i * stride + size, j * stride:j * stride + size]
        y, x = np.unravel_index(window.argmax(), window.shape)
        expected[n, c, i * stride + y, j * stride + x] += slope[n, c, i, j]
    expected = expected[:, :, pad:12 + pad, pad:12 + pad]
    error = np.linalg.norm(data.grad.asnumpy() - expected) / np.linalg.norm(expected)
    assert error <= (0.5 if dtype == "bfloat16" else 1e-3)  # in bfloat16 many values of a window are equal


class TestLargestOfViews:
    """Max pooling of a part of an array, or of one in another shape: its positions of maxima are not written then."""

    def check(self, run, values, dtype="float32"):
        """Compare the gradient by ``run``, of data and cotangent, with that of a copy of the data without AMP."""
        def pooled(data, slope):
            data.attach_grad()
            with autograd.record():
                nd.Pooling(data, pool_type="max", kernel=(2, 2), stride=(2, 2)).backward(slope)
            return data.grad.asnumpy()

        slope = nd.array(np.random.RandomState(6).normal(size=(*values.shape[:2], 4, 4)))
        expected = [(each, pooled(nd.array(each), slope)) for each in (values, values[::-1])]
        amp.init(dtype)
        for each, right in expected:
            error = np.linalg.norm(run(each, slope) - right) / np.linalg.norm(right)
            assert error <= (0.3 if dtype == "bfloat16" else 0.05)  # in low precision some of a window are equal

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("way", ["eager", "graph", "static"])
    @pytest.mark.parametrize("view", ["part", "shape", "inside"])
    def test_networks(self, view, way, dtype):
        class Pooled(HybridBlock):
            def hybrid_forward(self, F, x):
                return F.Pooling(x.reshape((0, 0, 8, 8)) if view == "inside" else x, pool_type="max", kernel=(2, 2),
                                 stride=(2, 2))

        def run(values, slope):
            data = {"part": lambda: nd.array(np.concatenate([values, values]))[2:],
                    "shape": lambda: nd.array(values.reshape(2, -1)).reshape(values.shape),
                    "inside": lambda: nd.array(values.reshape(2, 16, 64))}[view]()
            data.attach_grad()
            differentiate(net, data, head=slope)
            return data.grad.asnumpy().reshape(values.shape)

        net = Pooled()
        net.hybridize(way != "eager", static_alloc=way == "static")
        self.check(run, np.random.RandomState(0).normal(size=(2, 16, 8, 8)), dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_executors_of_fewer_images_again(self, dtype):
        def run(values, slope):
            data = mx.sym.var("data")
            pooled = mx.sym.Pooling(data, pool_type="max", kernel=(2, 2), stride=(2, 2))
            executor = mx.sym.Group([data * 2, pooled]).simple_bind(mx.cpu(), data=(4, 16, 8, 8))
            executor = executor.reshape(data=values.shape)
            executor.forward(is_train=True, data=nd.array(values))
            executor.backward([nd.zeros(values.shape), slope])
            return executor.grad_dict["data"].asnumpy()

        self.check(run, np.random.RandomState(0).normal(size=(2, 16, 8, 8)), dtype)

    @pytest.mark.parametrize("hybridize", [False, True])
    @pytest.mark.parametrize("rank", [1, 3])
    def test_sequences_and_volumes(self, rank, hybridize):
        net = [nn.MaxPool1D, nn.MaxPool3D][rank == 3]()
        net.hybridize(hybridize)
        values = np.random.RandomState(0).normal(size=(4, 16, *(8,) * rank))

        def gradient(data):
            data.attach_grad()
            with autograd.record():
                result = net(data)
            result.backward(_cotangent(result))
            return data.grad.asnumpy()

        expected = gradient(nd.array(values[2:]))
        amp.init("float32")
        np.testing.assert_array_equal(gradient(nd.array(values)[2:]), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_operator_leaves_a_gradient_unwritten(dtype):
    found = []
    command = [sys.executable, str(HELPERS / "gradient_sweep.py"), "--dtype", dtype]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tools", HELPERS)))
    children = [subprocess.Popen([*command, "--part", str(part), "--parts", "2"], stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True, env={**environment(), "PYTHONPATH": paths})
                for part in range(2)]
    for child in children:
        out, error = child.communicate(timeout=600)
        assert child.returncode == 0, error[-2000:]
        found += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert found == []
