"""Large imperative calls run in C++: values and gradients of MXNet's operators, and which calls are left alone."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from native_cases import assert_close, normal, requires_core
from networks import differentiate

import gluon_amp as amp
from gluon_amp.eager import native
from gluon_amp.machine import dtypes

pytestmark = requires_core

LARGE = (256, 1024)


def network(x, gamma, beta):
    y = nd.LayerNorm(x, gamma, beta)
    for _ in range(9):  # gradients of many readers of one array meet
        y = y + nd.clip(nd.LayerNorm(x, gamma, beta), -0.5, 1.0)
    return y


def run(grad_req):
    arrays = [normal(*LARGE), normal(LARGE[1], seed=1), normal(LARGE[1], seed=2)]
    for array in arrays:
        array.attach_grad(grad_req)
    for _ in range(2):
        out = differentiate(network, *arrays, head=normal(*LARGE, seed=3))
    return [network(*arrays).asnumpy(), out.asnumpy(), *(array.grad.asnumpy() for array in arrays)]


@pytest.fixture
def served(monkeypatch):
    """What was asked for, and whether it ran in C++."""
    seen = []
    original = native._fits
    monkeypatch.setattr(native, "_fits", lambda *args: seen.append(original(*args)) or seen[-1])
    return seen


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_values_and_gradients_are_mxnets(grad_req, served):
    expected = run(grad_req)
    assert not served
    amp.init("float32")
    for one, other in zip(run(grad_req), expected):
        assert_close(one, other, 2e-6)
    assert served
    assert all(served)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(("attrs", "runs"), [
    ({}, True), ({"axis": None, "keepdims": True}, True), ({"axis": ()}, True), ({"axis": 0}, True),
    ({"axis": (-2,)}, True), ({"axis": 0, "keepdims": True}, True), ({"axis": 1}, False), ({"axis": (0, 1)}, False),
    ({"axis": 1, "exclude": True}, False)])
def test_sums_and_means_of_all_values_or_out_of_order(op, attrs, runs, served):
    data, call = normal(*LARGE), getattr(nd, op)

    def results(grad_req):
        data.attach_grad(grad_req)
        for _ in range(2):
            with autograd.record():
                out = call(data, **attrs)
            out.backward(nd.arange(out.size).reshape(out.shape) - 3)
        return out.asnumpy(), data.grad.asnumpy()

    value, grad = results("write")  # MXNet adds a mean's gradient wrongly
    amp.init("float32")
    found, received = results("add" if runs else "write")
    assert found.shape == value.shape
    assert_close(found, value, 2e-6)
    assert_close(received, 2 * grad if runs else grad, 2e-6)
    assert served == [runs] * 2


@pytest.mark.parametrize("kind", [nd, mx.np], ids=["nd", "np"])
@pytest.mark.parametrize(("power", "runs"), [(2, True), (2.0, True), (3, False), (-2, False)])
def test_squares(kind, power, runs, served):
    data, head = normal(*LARGE), normal(*LARGE, seed=1)

    def results():
        x = data.as_np_ndarray() if kind is mx.np else data
        x.attach_grad("add")
        for _ in range(2):
            out = differentiate(lambda: x ** power, head=head.as_np_ndarray() if kind is mx.np else head)
        return out.asnumpy(), x.grad.asnumpy()

    expected = results()
    amp.init("float32")
    for one, other in zip(results(), expected):
        assert_close(one, other, 1e-6)
    assert served == [runs] * 2


def test_a_gradient_is_added_behind_a_sum(served):
    """MXNet hands the gradient of a sum to its inputs as it is: the last operator before it adds it to theirs."""
    x, constant = normal(*LARGE), normal(*LARGE, seed=1)
    x.attach_grad("add")
    amp.init("float32")
    for _ in range(2):
        with autograd.record():
            total = nd.elemwise_add(x, constant)
            out = nd.clip(total, -0.5, 1.0)
        out.backward(constant)
    inside = (total.asnumpy() >= -0.5) & (total.asnumpy() <= 1.0)  # MXNet's own clip writes its gradient only
    np.testing.assert_array_equal(x.grad.asnumpy(), 2 * constant.asnumpy() * inside)
    assert served == [True, True]


@pytest.fixture(params=["AVX2", "AVX512_CORE"])
def isa(request, monkeypatch):
    """A CPU whose instruction set is this one."""
    monkeypatch.setattr(native, "cpu_support", lambda: dtypes.cpu_support(request.param))
    native._has_avx512.cache_clear()
    yield request.param
    native._has_avx512.cache_clear()


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize(("columns", "recorded"), [(256, True), (256, False), (2, True)])
def test_a_loss_without_a_kernel_for_its_gradient(grad_req, columns, recorded, isa, served):
    """MXNet's oneDNN has none for log_softmax on CPUs with AVX2."""
    data, labels = normal(2 * LARGE[0] * LARGE[1] // columns, columns), nd.array(np.arange(1 << 19) // 3 % columns)
    labels = labels[:len(data)]
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def results():
        data.attach_grad(grad_req)
        for _ in range(2):
            with autograd.record() if recorded else autograd.pause():
                out = loss(data, labels)
            if recorded:
                out.backward()
        return out.asnumpy(), data.grad.asnumpy()

    expected = results()
    amp.init("float32")
    for one, other in zip(results(), expected):
        assert_close(one, other, 1e-5)
    assert any(served) == (isa == "AVX2" and recorded and columns > 2)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: nd.clip(nd.ones((8, 8)), 0, 1), "small"),
    (lambda: nd.clip(nd.ones(LARGE, dtype="float64"), 0, 1), "float64"),
    (lambda: nd.LayerNorm(nd.ones(LARGE), nd.ones(256), nd.ones(256), axis=0), "another axis"),
    (lambda: nd.LayerNorm(nd.ones(LARGE), nd.ones(1024), nd.ones(1024), output_mean_var=True)[1], "statistics"),
    (lambda: nd.clip(nd.ones(LARGE).tostype("row_sparse"), 0, 1), "sparse")])
def test_others_are_left_alone(call, message, served):
    expected = call().asnumpy()
    amp.init("float32")
    np.testing.assert_array_equal(call().asnumpy(), expected)
    assert served == [False], message


def test_results_of_numpy_style_calls_stay_arrays_of_that_style(served):
    amp.init("float32")
    out = mx.np.clip(mx.np.ones(LARGE) * 3, 0, 2)
    assert isinstance(out, mx.np.ndarray)
    assert out.asnumpy().max() == 2
    assert served == [True]


def test_out_is_written_by_mxnet(served):
    amp.init("float32")
    x = nd.ones(LARGE) * 3
    nd.clip(x, 0, 2, out=x)
    assert x.asnumpy().max() == 2
    assert not served


def test_switched_off_with_the_pass(served):
    amp.init("float32", disable_passes=["native_operators"])
    nd.clip(nd.ones(LARGE), 0, 1).wait_to_read()
    assert not served


@pytest.mark.bf16
def test_under_bfloat16(served):
    x, gamma, beta = normal(*LARGE), nd.ones(1024), nd.zeros(1024)
    expected = nd.LayerNorm(x, gamma, beta).asnumpy()
    amp.init("bfloat16")
    assert_close(nd.LayerNorm(x, gamma, beta).asnumpy(), expected, 1e-6)
    assert served == [True]
