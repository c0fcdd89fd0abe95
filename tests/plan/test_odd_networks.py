"""Unusual graphs in mixed precision against stock FP32: every way of running, gradients, other shapes, conversion."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from mxnet import autograd
from odd_networks import CASES, Case

import gluon_amp as amp

pytestmark = [pytest.mark.machine, pytest.mark.filterwarnings("ignore")]

WAYS = {"eager": None, "hybridized": {}, "static": {"static_alloc": True, "static_shape": True}}
# FP32 is rewritten too, on every machine; what is summed in another order differs in the last places.
CLOSE = {"float32": (1e-4, 1e-4), "bfloat16": (0.03, 0.06), "float16": (0.03, 0.06)}
dtypes = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
NO_STATIC_SHAPE = {"foreach", "while_loop", "cond", "foreach_outside"}


def make(name):
    function, shape, weights, blocks = CASES[name]
    mx.random.seed(8)
    net = Case(function, weights, blocks())
    net.initialize(mx.init.Uniform(0.3))
    data = mx.nd.array(np.random.RandomState(5).normal(size=shape))
    if name == "group_norm":
        net(data)  # parameters take their shapes
    random = np.random.RandomState(4)
    for one in net.collect_params().values():
        if one.grad_req != "null" and len(one.shape) > 1:
            one.set_data(mx.nd.array(random.uniform(-0.3, 0.3, one.shape)))
    return net, data


def listed(value):
    return list(value) if isinstance(value, (list, tuple)) else [value]


def run(net, data, passes=1):
    """Outputs, and gradients of their sum with fixed weights."""
    data = data.copy()
    data.attach_grad(grad_req="add" if passes > 1 else "write")
    found = {name: one for name, one in net.collect_params().items() if one.grad_req != "null"}
    for one in found.values():
        one.grad_req = "add" if passes > 1 else "write"
        one.zero_grad()
    for _ in range(passes):
        with autograd.record():
            outputs = listed(net(data))
            loss = 0
            for number, one in enumerate(outputs):
                if one.dtype == np.float32:
                    weights = np.random.RandomState(number).normal(size=one.shape)
                    loss = loss + (one * mx.nd.array(weights)).sum()
        loss.backward()
    slopes = {name: one.grad().asnumpy() for name, one in found.items()}
    return [one.asnumpy() for one in outputs], {**slopes, "data": data.grad.asnumpy()}


def check(what, expected, found, tolerance):
    assert len(expected) == len(found)
    floor = 0.05 * max(float(np.abs(one).max()) if one.size else 0.0 for one in expected)
    for number, (one, other) in enumerate(zip(expected, found)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), what
        scale = max(float(np.sqrt(np.mean(np.square(one, dtype="float64")))), floor, 1e-6) if one.size else 1
        error = float(np.sqrt(np.mean(np.square(one.astype("float64") - other)))) / scale if one.size else 0
        assert error <= tolerance, (what, number, error)


@pytest.mark.parametrize("dtype", ["float32", LOW])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_training(name, way, dtype):
    if name == "cond" and way != "eager":
        pytest.skip("MXNet's own gradients of a traced cond are garbage")
    if (name, way) == ("itself", "hybridized"):
        pytest.skip("MXNet does not differentiate a traced graph that returns its inputs as they are")
    net, data = make(name)
    outputs, slopes = run(net, data)
    _, summed = run(make(name)[0], data, passes=2)
    net, _ = make(name)
    if WAYS[way] is not None:
        net.hybridize(**({} if name in NO_STATIC_SHAPE else WAYS[way]))
    amp.init(dtype)
    near, steep = CLOSE[dtype]
    for _ in range(2):
        found, gradients = run(net, data)
    if "norm_twice" not in name:
        check("outputs", outputs, found, near)
    check("gradients", list(slopes.values()), list(gradients.values()), steep)
    _, gradients = run(net, data, passes=2)
    check("accumulated", list(summed.values()), list(gradients.values()), steep)


@dtypes
@pytest.mark.parametrize("name", CASES)
def test_conversion(name, dtype):
    net, data = make(name)
    expected = [one.asnumpy() for one in listed(net(data))]
    net.hybridize()
    net(data)
    converted = amp.convert_hybrid_block(net, dtype, data_example=data)
    for _ in range(2):
        found = [one.asnumpy() for one in listed(converted(data))]
        check(dtype, expected, found, 0.03 if dtype == "bfloat16" else 1e-5)
