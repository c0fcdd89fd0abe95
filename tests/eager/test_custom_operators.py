"""Operators written in Python compute in FP32, whatever thread MXNet runs them in."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from mxnet import autograd
from mxnet.gluon import HybridBlock
from networks import differentiate

import gluon_amp as amp

pytestmark = pytest.mark.machine
LARGE = 1e6  # beyond float16


class Product(mx.operator.CustomOp):
    """A dense layer."""

    def forward(self, is_train, req, in_data, out_data, aux):
        data, weight = in_data
        result = mx.nd.FullyConnected(data, weight, num_hidden=weight.shape[0], no_bias=True)
        self.assign(out_data[0], req[0], result)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], mx.nd.dot(out_grad[0], in_data[1]))
        self.assign(in_grad[1], req[1], mx.nd.dot(out_grad[0], in_data[0], transpose_a=True))


@mx.operator.register("custom_operators_product")
class ProductProp(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ["data", "weight"]

    def infer_shape(self, in_shape):
        return in_shape, [[in_shape[0][0], in_shape[1][0]]], []

    def create_operator(self, ctx, shapes, dtypes):
        return Product()


class Layer(HybridBlock):
    def hybrid_forward(self, F, data, weight):
        return F.Custom(data, weight, op_type="custom_operators_product")


def arrays():
    generator = np.random.RandomState(3)
    return [mx.nd.array(generator.normal(size=shape)) for shape in ((4, 32), (16, 32))]


def eager(data, weight):
    return mx.nd.Custom(data, weight, op_type="custom_operators_product")


def layer(hybridize):
    net = Layer()
    net.hybridize(hybridize)
    return net


def run(function):
    data, weight = arrays()
    data.attach_grad()
    weight.attach_grad()
    with autograd.record():
        result = function(data, weight)
    result.backward(mx.nd.full(result.shape, LARGE))
    return [array.asnumpy() for array in (result, data.grad, weight.grad)]


def run_bound():
    symbol = mx.sym.Custom(mx.sym.var("data"), mx.sym.var("weight"), op_type="custom_operators_product")
    executor = symbol.simple_bind(mx.cpu(), data=(4, 32), weight=(16, 32))
    for array, values in zip(executor.arg_arrays, arrays()):
        array[:] = values
    (result,) = executor.forward(is_train=True)
    executor.backward([mx.nd.full(result.shape, LARGE)])
    return [array.asnumpy() for array in (result, *executor.grad_arrays)]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("how", [lambda: run(eager), lambda: run(layer(False)), lambda: run(layer(True)), run_bound],
                         ids=["eager", "block", "hybridized", "symbol"])
def test_what_it_calls_runs_in_fp32_forward_and_backward(how, dtype):
    expected = how()
    amp.init(dtype)
    for one, other in zip(expected, how()):
        assert (one == other).all()


def test_one_that_is_registered_for_low_precision_gets_it_and_computes_in_it():
    data, weight = arrays()
    expected = eager(data, weight).asnumpy()
    amp.register_op("custom_operators_product", "LOWER")
    amp.init("float16")
    found = eager(data, weight).asnumpy()
    assert 0 < np.abs(found - expected).max() < 0.1


def test_an_operator_that_is_returned_again_and_again():
    one = Product()

    @mx.operator.register("custom_operators_single")
    class SingleProp(ProductProp):
        def create_operator(self, ctx, shapes, dtypes):
            return one
    amp.init(LOW)
    for _ in range(3):
        mx.nd.Custom(*arrays(), op_type="custom_operators_single").wait_to_read()
    assert not hasattr(one.forward.__wrapped__, "__wrapped__")


def test_mxnets_registry_is_restored_and_operators_of_before_go_on():
    before, references = mx.operator._registry, mx.operator._registry.ref_holder
    made = before.counter
    data, weight = arrays()
    expected = eager(data, weight).asnumpy()
    amp.init(LOW)
    net = layer(True)
    net(data, weight).wait_to_read()
    assert before.ref_holder is not references
    assert before.counter > made
    amp.deinit()
    assert before.ref_holder is references
    assert (net(data, weight).asnumpy() == expected).all()


class OwnGradient(mx.operator.CustomOp):
    """A product that makes a gradient of its own."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * in_data[1])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], in_data[1])
        self.assign(in_grad[1], req[1], in_data[0])


@mx.operator.register("custom_operators_storage")
class StorageProp(mx.operator.CustomOpProp):
    """Leaves storage as it finds it, that of gradients too."""

    def __init__(self):
        super().__init__(need_top_grad=False)

    def list_arguments(self):
        return ["data", "factor"]

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], []

    def infer_storage_type_backward(self, ograd_stype, in_stype, out_stype, igrad_stype, aux_stype):
        return ograd_stype, in_stype, out_stype, igrad_stype, aux_stype

    def create_operator(self, ctx, shapes, dtypes):
        return OwnGradient()


class Storage(HybridBlock):
    def hybrid_forward(self, F, data, factor):
        return F.Custom(data, factor, op_type="custom_operators_storage")


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", LOW])
def test_storage_that_a_user_leaves_open_is_dense(dtype, hybridize):
    net = Storage()
    net.hybridize(hybridize)
    data, factor = mx.nd.full((2, 3), 5), mx.nd.full((2, 3), 7)
    data.attach_grad(), factor.attach_grad()
    amp.init(dtype)
    result = differentiate(net, data, factor)
    assert (result.asnumpy() == 35).all()
    assert (data.grad.asnumpy() == 7).all()
    assert (factor.grad.asnumpy() == 5).all()
