"""Networks train, infer and convert on the null GPU; what they send there. Dispatch is verified, numbers never."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from device import Trace
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import gluon_amp as amp
from gluon_amp._mxnet.arrays import are_finite

GPU = mx.gpu(0)
MODES = [{"active": False}, {"active": True}, {"active": True, "static_alloc": True, "static_shape": True}]


def conv_net(contexts=(GPU,)):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(60, 3, in_channels=3), nn.BatchNorm(in_channels=60), nn.Activation("relu"), nn.GlobalAvgPool2D(),
            nn.Dense(8, in_units=60))
    net.initialize(ctx=list(contexts))
    net.hybridize(static_alloc=True, static_shape=True)
    return net, mx.nd.ones((4, 3, 16, 16))


class Run:
    """A network that trains."""

    def __init__(self, net, data, contexts=(GPU,), optimizer="sgd", mixed=True):
        self.net, self.mixed = net, mixed
        self.data = gluon.utils.split_and_load(data, list(contexts))
        self.labels = gluon.utils.split_and_load(mx.nd.arange(data.shape[0]) % 4, list(contexts))
        self.loss = gluon.loss.SoftmaxCrossEntropyLoss()
        self.trainer = gluon.Trainer(net.collect_params(), optimizer, {"learning_rate": 0.1})
        if mixed:
            amp.init()
            amp.init_trainer(self.trainer)

    def backward(self):
        with autograd.record():
            losses = [self.loss(self.net(x), y) for x, y in zip(self.data, self.labels)]
            if self.mixed:
                with amp.scale_loss(losses, self.trainer) as scaled:
                    autograd.backward(scaled)
        if not self.mixed:
            autograd.backward(losses)

    def step(self):
        self.backward()
        self.trainer.step(4)


@pytest.fixture
def overflow():
    """Return a function that makes a gradient infinite; no kernel would clear that memory for those who get it next."""
    changed = []

    def fill(array, value=np.inf):
        changed.append(array)
        mx.nd.full(array.shape, value).copyto(array)
    yield fill
    for array in changed:
        mx.nd.zeros(array.shape).copyto(array)
    mx.nd.waitall()


def updates(trace):
    """Return the kernels that change weights."""
    return [name for name in trace.kernels() if "sgd" in name.lower()]


@pytest.fixture
def run():
    return Run(*conv_net())


class TestTrace:
    def test_convolutions_and_dense_layers_add_up_in_fp32_on_tensor_cores(self, run):
        run.step()
        with Trace() as trace:
            run.step()
        convolutions = trace.of("CUDNN Convolution")
        assert len(convolutions) == 2  # forward, and of the weight; the data needs no gradient
        assert all("data=float16 compute=float32 tensor_cores=1" in line for line in convolutions)
        products = trace.of("CUBLAS")
        assert len(products) == 3
        assert all("GemmEx data=float16 compute=float32" in line for line in products)
        assert {line.split(" ", 2)[2] for line in trace.of("CUDNN BatchNorm")} == {"data=float16 parameters=float32"}
        assert trace.of("CUDNN ConvolutionForward")[0].endswith("in=3 out=60")  # not padded
        # The overflow check is one read a step.
        assert trace.bytes_to_host() == [4]
        assert len(trace.kernels("MultiAllFiniteGPUKernel")) == 1

    def test_amp_waits_as_often_as_fp32_but_for_the_check(self):
        waits = {}
        for mixed in (False, True):
            run = Run(*conv_net(), mixed=mixed)
            run.step()
            with Trace() as trace:
                run.step()
            waits[mixed] = len(trace.of("WAIT"))
            amp.deinit()
        # The scaled loss and its gradient, the check, and the two ends of its read.
        assert waits[True] <= waits[False] + 8

    def test_recurrent_layers_run_in_fp32(self):
        net = rnn.LSTM(16, input_size=8)
        net.initialize(ctx=GPU)
        net.hybridize()
        amp.init()
        with Trace() as trace:
            net(mx.nd.ones((3, 2, 8), ctx=GPU))
        assert {line.split()[2] for line in trace.of("CUDNN RNN")} == {"data=float32"}

    def test_fused_operators_compile(self):
        class Chain(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, x):
                return F.relu(x * 3 - 1) * (x + 2)

        net = Chain()
        net.hybridize(static_alloc=True, static_shape=True)
        amp.init()
        with Trace() as trace:
            net(mx.nd.ones((2, 3), ctx=GPU))
        assert len(trace.of("FUSED_KERNEL_LOADED")) == 1
        assert len(trace.of("FUSED_KERNEL ")) == 1


class TestLossScaling:
    """The same decisions as on a CPU, from arrays on the device: the check for inf and NaN is imitated."""

    def test_one_infinite_gradient_skips_the_step_and_halves_the_scale(self, run, overflow):
        run.step()
        run.backward()
        overflow(run.net[0].weight.grad())
        with Trace() as trace:
            run.trainer.step(4)
        assert not updates(trace)
        assert run.trainer.amp_loss_scale == 2 ** 15

    def test_two_devices_decide_as_one(self, overflow):
        both = [mx.gpu(0), mx.gpu(1)]
        run = Run(*conv_net(both), contexts=both)
        run.step()
        with Trace() as trace:
            run.step()
        assert trace.bytes_to_host().count(4) == 2  # one read for each
        run.backward()
        run.trainer.allreduce_grads()
        overflow(run.net[0].weight.grad(mx.gpu(1)))
        with Trace() as trace:
            run.trainer.update(4)
        assert not updates(trace)
        assert run.trainer.amp_loss_scale == 2 ** 15

    def test_more_arrays_than_fit_one_call_are_still_one_read(self, overflow):
        arrays = [mx.nd.ones((3,)).as_in_context(GPU) for _ in range(450)]
        with Trace() as trace:
            assert are_finite(arrays)
        assert (trace.bytes_to_host(), len(trace.kernels("MultiAllFinite"))) == ([4], 3)
        overflow(arrays[430], np.nan)
        assert not are_finite(arrays)


@pytest.mark.parametrize("flags", MODES, ids=["eager", "hybrid", "static"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nag"])
def test_every_way_of_running_trains(flags, optimizer):
    net, data = conv_net()
    net.hybridize(**flags)
    run = Run(net, data, optimizer=optimizer)
    for _ in range(2):
        run.step()
    mx.nd.waitall()


def test_conversions_run():
    net, data = conv_net()
    made = amp.convert_hybrid_block(net, "float16", device=GPU)
    with Trace() as trace:
        made(data.as_in_context(GPU)).asnumpy()
    assert trace.of("CUDNN ConvolutionForward data=float16 compute=float32 tensor_cores=1")
