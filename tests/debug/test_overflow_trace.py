"""trace_overflow: faults planted at known places are found there, hybridized or not, and tracing changes nothing."""
from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn
from networks import NETWORKS, gradients, ready

import gluon_amp as amp

hybridized_or_not = pytest.mark.parametrize("hybridize", [False, True], ids=["eager", "hybridized"])


@mx.init.register
class Diagonal(mx.init.Initializer):
    def _init_weight(self, name, array):
        array[:] = np.eye(*array.shape)


class Times(HybridBlock):
    """Multiplies by a factor, then by the identity: values and gradients are known by heart."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        with self.name_scope():
            self.dense = nn.Dense(8, in_units=8, use_bias=False)

    def hybrid_forward(self, F, x):
        return self.dense(x * self.factor)


def chain(*factors, hybridize=True, prefix="net_"):
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        for position, factor in enumerate(factors):
            net.add(Times(factor, prefix=f"times{position}_"))
    net.initialize(Diagonal())
    net.hybridize(hybridize)
    return net


def step(net, data, scale=1.0, loss=lambda output: output.sum(), traced=True, calls=1, **options):
    """Take one training step; return what was reported."""
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, scale)
    tracer = amp.trace_overflow(net, trainer, **options) if traced else None
    with autograd.record():
        for _ in range(calls):
            with amp.scale_loss(loss(net(data)), trainer) as scaled:
                scaled.backward()
    trainer.step(1)
    assert trainer._amp_loss_scaler.step_was_skipped == (not traced or bool(tracer.reports))
    if traced:
        tracer.close()
    return tracer.reports if traced else []


ONES = mx.nd.ones((2, 8))
SMALL = mx.nd.full((2, 8), 1e-4)  # of which a forward pass by 300 and 300 makes 9
FAULTS = {  # factors, data, what else the step gets, and attributes of the report
    "forward": ((1, 300, 300, 1e-5), ONES, {}, {
        "phase": "forward", "op": "_mul_scalar", "block": "net_times2", "rounded_to": "float16", "overflows": True,
        "inputs": [300], "in_fp32": [90000]}),
    "backward": ((1, 300, 300, 1), SMALL, {}, {  # the gradient goes 1, 300 and would be 90000 before the second block
        "phase": "backward", "op": "_mul_scalar", "block": "net_times1", "rounded_to": "float16", "overflows": True,
        "gradients": [300], "input_gradients": [90000], "in_fp32": [90000]}),
    "data": ((1,), ONES * np.inf, {}, {"phase": "data", "tensor": "argument 0", "operator": "", "inputs": [0]}),
    "loss": ((1,), ONES, {"loss": lambda y: (y / (y - y)).sum()}, {
        "phase": "loss", "tensor": "output 0", "rounded_to": ""}),
    "scale": ((1,), ONES, {"scale": 2.0 ** 20}, {
        "phase": "loss", "tensor": "output 0", "rounded_to": "float16", "gradients": [2.0 ** 20],
        "loss_scale": 2.0 ** 20})}


@hybridized_or_not
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is(fault, hybridize):
    amp.init("float16")
    factors, data, options, expected = FAULTS[fault]
    report, = step(chain(*factors, hybridize=hybridize), data, **options)
    found = {name: getattr(report, name) for name in expected}
    assert {name: [item.largest for item in value] if isinstance(value, tuple) else value
            for name, value in found.items()} == expected
    names = {item.name for item in report.parameter_gradients}
    if fault == "forward":
        assert names <= {f"net_times{i}_dense0_weight" for i in range(4)}
        assert "amp.exclude('net_times2')" in report.advice
    if fault == "backward":
        assert names == {"net_times0_dense0_weight"}


@hybridized_or_not
@pytest.mark.parametrize("value", [np.nan, 70000])
def test_a_weight_that_is_not_finite_or_too_large_for_float16(value, hybridize):
    amp.init("float16")
    net = chain(1, 1, hybridize=hybridize)
    net[1].dense.weight.data()[2, 2] = value
    report, = step(net, ONES)
    weight = next(item for item in report.inputs if "weight" in item.name)
    assert (report.op, report.block) == ("FullyConnected", "net_times1_dense0")
    assert (report.phase, report.tensor, report.rounded_to, report.overflows, weight.nan, weight.inf) == (
        ("parameter", "net_times1_dense0_weight", "", False, 1, 0) if np.isnan(value) else
        ("forward", "", "float16", True, 0, 1))


class Net(HybridBlock):
    """A function of data and of a layer that changes nothing."""

    def __init__(self, function, hybridize, **kwargs):
        super().__init__(**kwargs)
        self.function = function
        with self.name_scope():
            self.dense = nn.Dense(8, in_units=8, use_bias=False)
        self.initialize(Diagonal())
        self.hybridize(hybridize)

    def hybrid_forward(self, F, x):
        return self.function(F, self.dense, x)


def many_outputs(F, dense, x):
    y = dense(x)
    return [y * 2, (y * 3, F.argmax(y, axis=1))], F.broadcast_add(F.zeros((1000, 1000)), y.sum())


@hybridized_or_not
def test_outputs_that_the_loss_does_not_use(hybridize):
    amp.init("float16")
    net = Net(many_outputs, hybridize)
    for _ in range(5):
        assert step(net, mx.nd.ones((2, 8)), loss=lambda outputs: outputs[0][1][0].sum()) == []
        np.testing.assert_array_equal(net.dense.weight.grad().asnumpy(), np.full((8, 8), 6.0))
        net.dense.weight.set_data(mx.nd.array(np.eye(8)))


class Masked(HybridBlock):
    """Has infinite values on purpose, and swallows those that it does not have on purpose."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        with self.name_scope():
            self.first = Times(300, prefix="first_")
            self.second = Times(factor, prefix="second_")
            self.last = nn.Dense(8, in_units=8, use_bias=False)

    def hybrid_forward(self, F, x):
        y = F.relu(F.softmax(F.where(x > 0.5, x, F.ones_like(x) * -np.inf)) * 0 + self.second(self.first(x)))
        return self.last(F.clip(y, 0, 1))


@hybridized_or_not
@pytest.mark.parametrize("factor", [1, 300])
def test_values_that_are_infinite_on_purpose_are_no_fault_and_swallowed_ones_are(factor, hybridize):
    amp.init("float16")
    net = Masked(factor, prefix="masked_")
    net.initialize(Diagonal())
    net.hybridize(hybridize)
    data = mx.nd.array([[1.0, 0.0] * 4])
    report, = step(net, data, loss=lambda output: (output / 0).sum())
    expected = ("loss", "") if factor == 1 else ("forward", "masked_second")
    assert (report.phase, report.block) == expected


@pytest.mark.bf16
@hybridized_or_not
def test_bfloat16_overflows_where_fp32_does(hybridize):
    amp.init("bfloat16")
    report, = step(chain(1, 1e20, 1e20, hybridize=hybridize), mx.nd.ones((2, 8)))
    assert (report.phase, report.op, report.block) == ("forward", "_mul_scalar", "net_times2")
    assert not report.overflows
    assert "not finite in FP32 either" in report.advice


class Halves(gluon.Block):
    """A plain block: slices, views, a hybridized part and one that is not."""

    def __init__(self, hybridize):
        super().__init__(prefix="halves_")
        with self.name_scope():
            self.first = chain(1, prefix="first_")
            self.second = chain(300, 300, hybridize=hybridize, prefix="second_")

    def forward(self, x):
        y = self.first(x).reshape((2, 2, 4))
        return self.second(y[:, 0].reshape((1, 8))) + self.first(x[:1])


@hybridized_or_not
def test_plain_blocks_with_slices_between_parts(hybridize):
    amp.init("float16")
    net = Halves(hybridize)
    report, = step(net, mx.nd.full((2, 8), 1e-4))
    # Between hybrid blocks it is still 90000, in FP32: it overflows where it enters the first one's result.
    assert (report.phase, report.op, report.block) == ("backward", "reshape", "halves")
    assert report.rounded_to == "float16"
    assert [item.largest for item in report.in_fp32] == [90000]
    assert report.overflows
    assert {item.name for item in report.parameter_gradients} == {"halves_first_times0_dense0_weight"}


@hybridized_or_not
@pytest.mark.parametrize("name", list(NETWORKS))
def test_tracing_changes_no_value_and_finds_nothing_in_a_good_step(name, hybridize):
    make, shape = NETWORKS[name]
    net, data = ready(make(), shape, active=hybridize)
    amp.init("float16")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0})
    amp.init_trainer(trainer, 1.0)
    expected, outputs = gradients(net, data), net(data)
    with amp.trace_overflow(net, trainer) as tracer:
        found = gradients(net, data)
        assert type(net(data)) is type(outputs)
        trainer.step(1)
    assert tracer.reports == []
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=0.02, atol=2e-3 * np.abs(value).max())


@pytest.mark.parametrize("contexts", [[mx.cpu(0), mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]], ids=["calls", "contexts"])
def test_the_call_that_overflows_is_found_among_several(contexts):
    amp.init("float16")
    net = chain(300, 300)
    net.collect_params().reset_ctx(list(dict.fromkeys(contexts)))
    net.collect_params().setattr("grad_req", "add")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, 1.0)
    with amp.trace_overflow(net, trainer) as tracer:
        for value, context in zip((1e-9, 1.0), contexts):
            data = mx.nd.full((2, 8), value, ctx=context)
            with autograd.record(), amp.scale_loss((net(data) ** 2).sum(), trainer) as scaled:
                scaled.backward()
        trainer.step(1)
    report, = tracer.reports
    assert (report.phase, report.block) == ("forward", "net_times1")
    assert report.inputs[0].largest == 300
    assert len({item.name for item in report.parameter_gradients}) == 2


def test_mistakes_are_refused():
    amp.init("float16")
    net = chain(1)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(amp.StateError, match=r"call amp.init_trainer\(trainer\) first"):
        amp.trace_overflow(net, trainer)
    amp.init_trainer(trainer)
    with pytest.raises(TypeError, match="a Gluon block, received net"):
        amp.trace_overflow("net", trainer)
    with pytest.raises(TypeError, match=r"a gluon.Trainer, received trainer"):
        amp.trace_overflow(net, None)
    with pytest.raises(ValueError, match="a number above 0, received limit=0"):
        amp.trace_overflow(net, trainer, limit=0)
    with amp.trace_overflow(net, trainer), pytest.raises(amp.StateError, match="traced already"):
        amp.trace_overflow(net, trainer)


def test_so_many_steps_are_looked_into_a_fault_is_printed_once_and_its_repetitions_in_a_line(caplog):
    amp.init("float16")
    net = chain(300, 300)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer, 1.0)
    with caplog.at_level(logging.WARNING, "gluon_amp"), amp.trace_overflow(net, trainer, limit=3) as tracer:
        for _ in range(4):
            with autograd.record(), amp.scale_loss(net(mx.nd.ones((2, 8))).sum(), trainer) as scaled:
                scaled.backward()
            trainer.step(1)
    texts = [record.getMessage() for record in caplog.records if "kipped" in record.getMessage()]
    assert len(tracer.reports) == len(texts) == 3
    assert "forward" not in vars(net)
    assert trainer._amp_loss_scaler.listeners == []
    assert [str(tracer.reports[0]) in text for text in texts] == [True, False, False]
    assert "overflows float16, whose largest number is 65504" in texts[0]
    assert all("the same fault again" in text and "\n" not in text for text in texts[1:])


@hybridized_or_not
def test_a_value_that_was_rounded_to_zero_is_blamed_on_who_rounded_it(hybridize):
    amp.init("float16")
    net = Net(lambda F, dense, x: F.log(F.relu(F.elemwise_mul(dense(x * 1e-3), dense(x * 1e-3)) + 0.0)), hybridize,
              prefix="small_")
    report, = step(net, mx.nd.full((2, 8), 0.1))
    assert (report.phase, report.op, report.block) == ("underflow", "elemwise_mul", "small")
    assert report.tensor.endswith("log0" if hybridize else "log")
    assert [item.largest for item in report.in_fp32] == [pytest.approx(1e-8, rel=0.01)]
    assert "rounded values to zero" in str(report)
    assert "fp32_ops=['elemwise_mul']" in report.advice


@hybridized_or_not
def test_zeros_of_the_program_are_no_fault_of_float16(hybridize):
    amp.init("float16")
    report, = step(Net(lambda F, dense, x: F.log(F.relu(0.0 - dense(x))), hybridize), mx.nd.ones((2, 8)))
    assert (report.phase, report.op) == ("forward", "log")
    assert "not finite in FP32 either" in report.advice
