"""Operators that make their own gradient, such as SoftmaxOutput: it carries the loss scale."""
from __future__ import annotations

from contextlib import nullcontext

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import HybridBlock, nn

import gluon_amp as amp

pytestmark = pytest.mark.machine
BATCH, SIZE = 6, 4
WAYS = {"eager": None, "hybridized": {}, "inlined": {"inline_limit": 20}, "static_alloc": {"static_alloc": True},
        "static_shape": {"static_alloc": True, "static_shape": True}}
DTYPES = [("float32", 1e-5), ("float16", 0.01), pytest.param("bfloat16", 0.05, marks=pytest.mark.bf16)]


class Squared(mx.operator.CustomOp):
    """A user's own loss of two inputs: half the squared distance."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        difference = in_data[0] - in_data[1]
        self.assign(in_grad[0], req[0], difference)
        self.assign(in_grad[1], req[1], -difference)


@mx.operator.register("own_gradients_squared")
class SquaredProp(mx.operator.CustomOpProp):
    def __init__(self):
        super().__init__(need_top_grad=False)

    def list_arguments(self):
        return ["data", "label"]

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], []

    def create_operator(self, ctx, shapes, dtypes):
        return Squared()


class Passed(mx.operator.CustomOp):
    """A user's own operator that doubles, and passes its gradient on."""

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0] * 2)

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        self.assign(in_grad[0], req[0], out_grad[0] * 2)


@mx.operator.register("own_gradients_passed")
class PassedProp(mx.operator.CustomOpProp):
    def create_operator(self, ctx, shapes, dtypes):
        return Passed()


HEADS = {
    "SoftmaxOutput": lambda F, x, y: F.SoftmaxOutput(x, F.argmax(y, axis=1)),
    "Softmax": lambda F, x, y: F.Softmax(x, F.argmax(y, axis=1), grad_scale=0.5, normalization="batch"),
    "out_grad": lambda F, x, y: F.SoftmaxOutput(x, F.argmax(y, axis=1), out_grad=True),
    "LinearRegressionOutput": lambda F, x, y: F.LinearRegressionOutput(x, y),
    "MAERegressionOutput": lambda F, x, y: F.MAERegressionOutput(x, y, grad_scale=2),
    "LogisticRegressionOutput": lambda F, x, y: F.LogisticRegressionOutput(x, y),
    "SVMOutput": lambda F, x, y: F.SVMOutput(x, F.argmax(y, axis=1)),
    "MakeLoss": lambda F, x, y: F.MakeLoss(F.square(x - y), grad_scale=0.5),
    "make_loss": lambda F, x, y: F.make_loss(F.square(x - y)),
    "Custom": lambda F, x, y: F.Custom(x, y, op_type="own_gradients_squared"),
    "Custom that passes on": lambda F, x, y: F.Custom(x, op_type="own_gradients_passed")}


class Net(HybridBlock):
    """A dense layer, and heads behind it."""

    def __init__(self, *heads):
        super().__init__(prefix="net_")
        self.heads = heads
        with self.name_scope():
            self.dense = nn.Dense(SIZE, in_units=SIZE, use_bias=False)

    def hybrid_forward(self, F, x, y):
        x = self.dense(x)
        outputs = [head(F, x, y) for head in self.heads]
        return outputs if len(outputs) > 1 else outputs[0]


def draw(context=None):
    random = np.random.RandomState(3)
    return (mx.nd.array(random.normal(size=(BATCH, SIZE)), ctx=context),
            mx.nd.array(random.uniform(size=(BATCH, SIZE)), ctx=context))


def made(way, *heads, contexts=None):
    """Return a network whose weights are the same each time, and its trainer."""
    net = Net(*map(HEADS.get, heads))
    net.initialize(ctx=contexts)
    net.dense.weight.set_data(mx.nd.array(np.random.RandomState(4).normal(size=(SIZE, SIZE))))
    if WAYS[way] is not None:
        net.hybridize(**WAYS[way])
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)


def sums(outputs):
    """Return losses of a network's outputs; the factor does not reach gradients that operators make on their own."""
    return [output.sum() * 0.5 for output in (outputs if isinstance(outputs, list) else [outputs])]


def moved(net):
    return net.dense.weight.data().asnumpy() - np.random.RandomState(4).normal(size=(SIZE, SIZE)).astype("float32")


def stock(*heads, steps=2):
    """Return how far MXNet's own steps without AMP move the weight."""
    net, trainer = made("hybridized", *heads)
    for _ in range(steps):
        with autograd.record():
            losses = sums(net(*draw()))
        autograd.backward(losses)
        trainer.step(BATCH)
    return moved(net)


def close(got, want, tolerance):
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def trained(way, *heads, scaler=None, region=nullcontext, contexts=(None,), parts=(slice(None),), steps=2):
    """Return how far steps move the weight: with a GradScaler, or a trainer's own scaler of 1,024."""
    net, trainer = made(way, *heads, contexts=contexts if len(contexts) > 1 else None)
    net.dense.weight.grad_req = "write" if len(parts) == 1 else "add"
    if scaler is None:
        amp.init_trainer(trainer, 1024)
    for _ in range(steps):
        for part in parts:
            with autograd.record(), region():
                losses = [loss for context in contexts for loss in sums(net(*(array[part] for array in draw(context))))]
            if scaler is not None:
                autograd.backward(scaler.scale(losses))
                continue
            with amp.scale_loss(losses, trainer) as scaled:
                autograd.backward(scaled)
        if scaler is None:
            trainer.step(BATCH * len(contexts))
        else:
            scaler.step(trainer, BATCH)
            scaler.update()
    return moved(net)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("head", HEADS)
def test_steps_are_those_without_a_scale(head, dtype, tolerance, way):
    expected = stock(head)
    amp.init(dtype)
    close(trained(way, head), expected, tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", HEADS)
def test_steps_of_a_grad_scaler(head, way):
    close(trained(way, head, scaler=amp.GradScaler()), stock(head), 1e-5)


@pytest.mark.parametrize("region", [amp.autocast, lambda: amp.autocast(enabled=False)], ids=["on", "off"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_a_grad_scaler_in_a_region(way, region):
    heads = "SoftmaxOutput", "MakeLoss"
    close(trained(way, *heads, scaler=amp.GradScaler(init_scale=4096), region=region), stock(*heads), 0.05)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [
    {"heads": ("SoftmaxOutput", "Custom that passes on", "make_loss")}, {"parts": (slice(0, 3), slice(3, 6))},
    {"contexts": (mx.cpu(0), mx.cpu(1))}], ids=["beside ordinary losses", "micro-batches", "several devices"])
def test_steps_of_several_gradients(options, way):
    heads = options.get("heads", ("SoftmaxOutput",))
    expected = stock(*heads, steps=1)
    amp.init("float32")
    rest = {name: value for name, value in options.items() if name != "heads"}
    close(trained(way, *heads, steps=1, **rest), expected, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_may_be_computed_on_after_it_was_scaled(way):
    expected = stock("SoftmaxOutput", "LinearRegressionOutput", steps=1)
    net, trainer = made(way, "SoftmaxOutput", "LinearRegressionOutput")
    scaler = amp.GradScaler()
    with autograd.record():
        first, second = map(scaler.scale, sums(net(*draw())))
        total = (first + second * 2).mean()
    total.backward()
    scaler.step(trainer, BATCH)
    close(moved(net), expected, 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_only_backward_passes_of_scaled_losses_are_scaled(way):
    expected = stock("SoftmaxOutput", steps=1)
    amp.init("float32")
    net, trainer = made(way, "SoftmaxOutput")
    other, plain = made(way, "SoftmaxOutput")
    amp.init_trainer(trainer, 1024)
    with autograd.record():
        loss, its = net(*draw()), other(*draw())
        with amp.scale_loss(loss, trainer) as scaled:
            its.backward()  # of a trainer without a scaler, and in the midst of it
            scaled.backward()
    with autograd.record():
        for _ in range(2):  # as in an evaluation of input gradients
            x, y = draw()
            x.attach_grad()
            evaluated = net(x, y)
    gradient = autograd.grad(evaluated, x)[0].asnumpy()
    trainer.step(BATCH)
    plain.step(BATCH)
    close(moved(net), expected, 1e-5)
    close(moved(other), expected, 1e-5)
    assert 0 < np.abs(gradient).max() < 10


def test_gradients_that_autograd_grad_returns_are_scaled():
    amp.init("float32")
    net, trainer = made("eager", "SoftmaxOutput")
    amp.init_trainer(trainer, 1024)
    with autograd.record():
        loss = net(*draw())
    weight = net.dense.weight.data()
    plain = autograd.grad(loss, weight, retain_graph=True)[0].asnumpy()
    with amp.scale_loss(loss, trainer) as scaled:
        np.testing.assert_array_equal(autograd.grad(scaled, weight)[0].asnumpy(), plain * 1024)


@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_the_program(way):
    amp.init("float32")
    net, trainer = made(way, "MakeLoss")
    x, y = draw()
    x[0, 0] = np.inf
    amp.init_trainer(trainer, 1024)
    plain = net(x, y).asnumpy()
    with autograd.record():
        recorded = net(x, y)
        with amp.scale_loss(recorded, trainer) as scaled:
            inside = net(x, y)
            scaled.backward()
    for values in (recorded, inside, net(x, y)):
        np.testing.assert_array_equal(values.asnumpy(), plain)


def test_a_module_has_no_scale():
    """Executors have no trainer that would divide by it."""
    def gradient():
        data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=SIZE, no_bias=True, name="dense")
        module = mx.mod.Module(mx.sym.SoftmaxOutput(data, name="softmax"))
        module.bind([("data", (BATCH, SIZE))], [("softmax_label", (BATCH,))])
        module.init_params(mx.init.One())
        x, y = draw()
        module.forward_backward(mx.io.DataBatch([x], [y.argmax(axis=1)]))
        assert module._exec_group.execs[0].arg_dict.keys() == {"data", "dense_weight", "softmax_label"}
        return module._exec_group.grad_arrays[0][0].asnumpy()
    expected = gradient()
    amp.init("float32")
    np.testing.assert_allclose(gradient(), expected, rtol=1e-5)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "eager"])
def test_a_penalty_that_is_added_to_the_gradient(way):
    """IdentityAttachKLSparseReg passes the gradient on, which carries the scale, and adds one of its own."""
    def trained(scale):
        x, y = mx.sym.var("data"), mx.sym.var("factor")
        dense = mx.sym.FullyConnected(x, num_hidden=SIZE, no_bias=True, name="dense")
        penalized = mx.sym.IdentityAttachKLSparseReg(mx.sym.sigmoid(dense), penalty=0.1, name="penalized")
        net = gluon.SymbolBlock(penalized * y, [x, y])
        net.initialize(mx.init.One())
        net.collect_params()["penalized_moving_avg"].set_data(mx.nd.ones(SIZE) * 0.5)
        net.hybridize(**WAYS[way])
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
        if scale:
            amp.init_trainer(trainer, scale)
        with autograd.record():
            loss = net(*draw())
            with amp.scale_loss(loss, trainer) if scale else nullcontext(loss) as scaled:
                scaled.backward()
        trainer.step(BATCH)
        return net.collect_params()["dense_weight"].data().asnumpy()

    expected = trained(None)
    amp.init("float32")
    np.testing.assert_allclose(trained(1024), expected, rtol=1e-5)


@pytest.mark.parametrize("hybridize", [False, True])
def test_float16_heads_of_the_users_own(hybridize):
    """The scale is beyond float16, which gradients of zero must not turn into NaN, nor small ones into infinity."""
    class Scaled(HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=(3,), dtype="float16", init=mx.init.One())

        def hybrid_forward(self, F, x, weight):
            values = F.broadcast_mul(x, weight)
            return F.LinearRegressionOutput(values, F.BlockGrad(values) - x)

    net = Scaled()
    net.initialize()
    net.hybridize(hybridize)
    amp.init("float32")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125, "multi_precision": True},
                            update_on_kvstore=False)
    amp.init_trainer(trainer, 131072)
    with autograd.record():
        loss = net(mx.nd.array([[0, 0.25, 0.5]], dtype="float16"))
        assert loss.dtype == np.float16
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(1)
    assert not amp.get_loss_scaler(trainer).step_was_skipped
    # The gradient is the data squared, divided by the three outputs.
    np.testing.assert_allclose(net.weight.data().asnumpy(), 1 - 0.125 * np.array([0, 0.0625, 0.25]) / 3, rtol=1e-3)


def test_one_backward_pass_with_two_scales_is_refused():
    amp.init("float32")
    (first, one), (second, two) = made("eager", "SoftmaxOutput"), made("eager", "SoftmaxOutput")
    amp.init_trainer(one, 8)
    amp.init_trainer(two, 16)
    with autograd.record():
        losses = first(*draw()), second(*draw())
        with amp.scale_loss(losses[0], one) as mine, amp.scale_loss(losses[1], two) as other:
            with pytest.raises(amp.StateError, match="different scales"):
                autograd.backward([mine, other])
            mine.backward()
            other.backward()
    one.step(BATCH)
    two.step(BATCH)
    np.testing.assert_allclose(moved(first), moved(second), rtol=1e-6)


def branch(F, x, y):
    return F.contrib.cond(F.sum(y) > 0, lambda: F.make_loss(x * x) * y, lambda: x * y)


def loop(F, x, y):
    def step(count, one):
        return F.make_loss(one) * one, [count + 1, one * 2]
    return F.contrib.while_loop(lambda count, one: count < 2, step, [F.zeros(shape=(1,)), x * y], max_iterations=2)[0]


@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("body", [branch, loop])
def test_heads_inside_of_loops_are_refused_when_there_is_a_scale(body, scale):
    class Inside(HybridBlock):
        def hybrid_forward(self, F, x, y):
            return body(F, x, y)

    amp.init("float32")
    net, inside = nn.Dense(SIZE, in_units=SIZE, use_bias=False), Inside()
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    amp.init_trainer(trainer, scale)
    x, y = draw()

    def backward():
        with autograd.record():
            loss = inside(net(x), y)
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        gradient = net.weight.grad().asnumpy()
        trainer.step(1)
        return gradient

    before = net.weight.data().copy()
    expected = backward()
    net.weight.set_data(before)
    inside.hybridize()
    with autograd.record():
        inside(net(x), y).backward()  # of a loss without a scale
    if scale == 1:
        np.testing.assert_allclose(backward(), expected, rtol=1e-5)
        return
    with pytest.raises(amp.StateError, match="cannot carry the loss scale: the operator makes it on its own"):
        backward()


def test_the_tools_show_the_program_and_know_the_scale():
    amp.init("float16")
    net, _ = made("hybridized", "SoftmaxOutput")
    names = [record.name for record in amp.report(net, draw(), train=True).operators]
    assert any("softmaxoutput" in name for name in names)
    assert not any("scaled" in name for name in names)
    for way in ("eager", "hybridized"):
        net, _ = made(way, "SoftmaxOutput")
        errors = [amp.compare(net, draw(), gradients=True, loss_scale=scale).parameters for scale in (1, 1024)]
        assert all(0 < error["net_dense0_weight"] < 0.01 for error in errors)


@pytest.mark.parametrize("way", ["eager", "hybridized"])
def test_an_overflow_of_a_scaled_gradient_is_found(way):
    """A gradient of at most 1 that the scale brings beyond float16, where it is rounded for the layer before."""
    amp.init("float16")
    net, trainer = made(way, "SoftmaxOutput")
    amp.init_trainer(trainer, amp.DynamicLossScaler(init_scale=2.0 ** 20))
    tracer = amp.trace_overflow(net, trainer)
    with autograd.record():
        loss = net(*draw())
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(BATCH)
    assert amp.get_loss_scaler(trainer).step_was_skipped
    assert [(report.phase, report.op) for report in tracer.reports] == [("backward", "SoftmaxOutput")]
