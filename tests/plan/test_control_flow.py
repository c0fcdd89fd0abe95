"""Training networks with loops and branches: in graphs MXNet leaves some of their gradients unwritten."""
from __future__ import annotations

import gc

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import HybridBlock
from native_cases import script
from networks import differentiate

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet import engine
from gluon_amp._mxnet.engine import Program, wait_for
from gluon_amp.errors import StateError
from gluon_amp.passes import native_operators

SIZE = 8
SHAPES = ((4, 5, SIZE), (2, 5, SIZE), (4, 5, SIZE))
WAYS = {"hybridized": {}, "static_alloc": {"static_alloc": True},
        "static_shape": {"static_alloc": True, "static_shape": True}}
DTYPES = [("float32", 1e-5), ("float16", 0.02), pytest.param("bfloat16", 0.1, marks=pytest.mark.bf16)]


class Cell(HybridBlock):
    """A dense layer, and weights for what follows it."""

    def __init__(self):
        super().__init__(prefix="cell_")
        with self.name_scope():
            for name in ("first", "second", "third"):
                setattr(self, name, self.params.get(name, shape=(SIZE, SIZE)))

    def hybrid_forward(self, F, data, first, second, third):
        return self.body(F, dense(F, data, first), second, third)


def dense(F, data, weight):
    return F.FullyConnected(data, weight, no_bias=True, num_hidden=SIZE, flatten=False)


def cond(F, value, bound, then, other):
    return F.contrib.cond(F.max(value) > bound, then, other)


class Foreach(Cell):
    def body(self, F, data, second, third):
        def step(one, state):
            return F.Activation(dense(F, one, second), act_type="relu") + state, F.LeakyReLU(dense(F, one, third))
        outputs, state = F.contrib.foreach(step, F.swapaxes(data, 0, 1), F.sum(data, axis=1) * 0)
        return F.broadcast_add(outputs, F.expand_dims(state, axis=0))


class WhileLoop(Cell):
    def body(self, F, data, second, third):
        def step(count, one):
            return one, [count + 1, F.tanh(dense(F, dense(F, one, second), third)) + one]
        return F.contrib.while_loop(lambda count, one: count < 2, step, [F.zeros(shape=(1,)), data],
                                    max_iterations=3)[1][1]


class BoundedLoop(Cell):
    """The bound of the loop is computed in the graph, and read by its condition alone."""

    def body(self, F, data, second, third):
        bound = F.sum(dense(F, data, third)) * 0 + 2

        def step(count, one):
            return one, [count + 1, F.tanh(dense(F, one, second)) + one]
        return F.contrib.while_loop(lambda count, one: count < bound, step, [F.zeros(shape=(1,)), data],
                                    max_iterations=3)[1][1]


class Deeper(WhileLoop):
    """The loop reads what runs in C++ elsewhere."""

    def body(self, F, data, second, third):
        return super().body(F, dense(F, data, third), second, third)


class Plain(Cell):
    def body(self, F, data, second, third):
        return dense(F, dense(F, data, second), third)


class SameReads(Cell):
    """Both branches read the same tensors."""

    def body(self, F, data, second, third):
        return data + dense(F, cond(F, data, -1000, lambda: F.tanh(dense(F, data, second)),
                                    lambda: dense(F, F.sigmoid(data), second)), third)


class OtherReads(Cell):
    """Each branch has a tensor and a weight of its own."""

    def body(self, F, data, second, third):
        one, two = F.tanh(data), F.sigmoid(data)
        return cond(F, data, 1000, lambda: dense(F, one, second), lambda: dense(F, two, third)) * data


class Passed(Cell):
    """A branch returns what it is given."""

    def body(self, F, data, second, third):
        one = dense(F, F.tanh(data), second)
        return cond(F, data, -1000, lambda: one, lambda: dense(F, one, third))


NETWORKS = [Foreach, WhileLoop, Deeper, BoundedLoop, SameReads, OtherReads, Passed]


def ready(network):
    net = network()
    net.initialize()
    for seed, parameter in enumerate(net.collect_params().values()):
        parameter.set_data(mx.nd.array(np.random.RandomState(seed).normal(scale=0.4, size=(SIZE, SIZE))))
    return net


def spoil_memory():
    arrays = [mx.nd.full(size, 1e30) for size in (4, 8, 16, 32, 64, 80, 160, 256) for _ in range(12)]
    mx.nd.waitall()
    del arrays


def trained(net):
    """Return outputs, and gradients of weights and data, of several batches."""
    found = {}
    for call, shape in enumerate(SHAPES):
        data = mx.nd.array(np.random.RandomState(call).normal(size=shape))
        data.attach_grad()
        spoil_memory()
        with autograd.record():
            out = net(data)
            loss = (out * out).sum()
        loss.backward()
        found.update({f"{call} {name}": one.grad().asnumpy() for name, one in net.collect_params().items()})
        found.update({f"{call} data": data.grad.asnumpy(), f"{call} out": out.asnumpy(),
                      f"{call} inference": net(data).asnumpy()})
    return found


def wrong(expected, found, bound):
    errors = {name: np.abs(one - found[name]).max() / max(np.abs(one).max(), 1.0) for name, one in expected.items()}
    return {name: error for name, error in errors.items() if not error <= bound}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_are_those_outside_of_graphs(network, dtype, bound, way):
    expected = trained(ready(network))
    net = ready(network)
    net.hybridize(**WAYS[way])
    amp.init(dtype)
    assert wrong(expected, trained(net), bound) == {}


@pytest.mark.skipif(not native.is_available("_gluon_amp_dense"), reason=native.load()[1].missing)
def test_no_operator_is_in_cpp_beside_a_while_loop(monkeypatch):
    """Wrong gradients come of it now and then, as threads happen to run."""
    monkeypatch.setattr(native_operators, "REPLACEMENTS", {
        name: one._replace(least=0) for name, one in native_operators.REPLACEMENTS.items()})
    amp.init("float32")
    for network, is_native in ((Deeper, False), (Plain, True)):
        net = ready(network)
        net.hybridize()
        with autograd.record():
            net(mx.nd.ones(SHAPES[0]))
        assert net._cached_op.latest.is_native == is_native


FIRST_STATES = {
    "data": lambda F, data: data, "zeros": lambda F, data: F.zeros(shape=(4, SIZE)),
    "ones": lambda F, data: F.ones(shape=(4, SIZE)), "zeros_like": lambda F, data: F.zeros_like(data),
    "blocked": lambda F, data: F.BlockGrad(data * 2)}


class Decoder(HybridBlock):
    """A loop whose first states have no gradient: alone, in the body of another loop, or in a branch."""

    def __init__(self, state, steps, place):
        super().__init__(prefix="decoder_")
        self.state, self.steps, self.place = state, steps, place
        with self.name_scope():
            for name in ("first", "second", "third"):
                setattr(self, name, self.params.get(name, shape=(SIZE, SIZE)))
            self.bias = self.params.get("bias", shape=(SIZE,))

    def hybrid_forward(self, F, data, **weights):
        state = FIRST_STATES[self.state](F, data)
        return getattr(self, self.place)(F, state, weights) + dense(F, data, weights["third"])

    def alone(self, F, state, weights):
        bound = F.sum(weights["third"]) * 0 + self.steps
        computed = F.tanh(weights["second"])

        def step(count, one, other):
            new = F.tanh(dense(F, one, weights["first"]) + F.FullyConnected(
                other, computed, weights["bias"], num_hidden=SIZE))
            return [], [count + 1, new, new + other]
        made = F.contrib.while_loop(lambda count, *_: count < bound, step, [F.zeros(shape=(1,)), state, state * 0.5],
                                    max_iterations=4)[1]
        return made[1] + made[2]

    def in_while_loop(self, F, state, weights):
        def step(count, one):
            return [], [count + 1, self.alone(F, one, weights)]
        return F.contrib.while_loop(lambda count, _: count < 2, step, [F.zeros(shape=(1,)), state],
                                    max_iterations=2)[1][1]

    def in_branch(self, F, state, weights):
        return cond(F, state, -1e4, lambda: self.alone(F, state, weights), lambda: dense(F, state, weights["second"]))

    def counted(self, F, state, weights):
        """Count in whole numbers."""
        made = F.contrib.while_loop(lambda count, _: count < self.steps,
                                    lambda count, one: ([], [count + 1, F.tanh(dense(F, one, weights["first"]))]),
                                    [F.zeros(shape=(1,), dtype="int32"), state], max_iterations=4)[1][1]
        return F.broadcast_add(dense(F, made, weights["second"]), weights["bias"])


def decoder_gradients(net, data, before=None):
    spoil_memory()
    for one in net.collect_params().values() if before is not None else ():
        one.grad()[:] = before
    differentiate(lambda: (net(data) ** 2).sum())
    return {name: one.grad().asnumpy() for name, one in net.collect_params().items()}


def new_decoder(*arguments):
    return filled(Decoder(*arguments), np.random.RandomState(1))


DECODERS = [*((state, 3, "alone") for state in FIRST_STATES), ("data", 1, "alone"), ("data", 0, "alone"),
            ("zeros", 0, "alone"), ("data", 3, "counted"), ("data", 0, "counted"),
            *(("data", steps, place) for place in ("in_while_loop", "in_branch") for steps in (0, 3))]


@pytest.mark.parametrize(("state", "steps", "place"), DECODERS)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_states_without_a_gradient_leave_no_other_unwritten(dtype, bound, state, steps, place):
    """The data has none, as in a decoder; with no step at all that of weights is zero."""
    data = mx.nd.array(np.random.RandomState(0).normal(size=(4, SIZE)))
    expected = decoder_gradients(new_decoder(state, steps, place), data)  # operator by operator
    net = new_decoder(state, steps, place)
    amp.init(dtype)
    net.hybridize()
    for _ in range(3):
        assert wrong(expected, decoder_gradients(net, data, before=7), bound) == {}


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_executors_write_the_gradients_of_loops(dtype, bound, steps):
    random = np.random.RandomState(0)
    arrays = {name: mx.nd.array(random.normal(size=shape))
              for name, shape in {"data": (4, SIZE), "weight": (SIZE, SIZE), "bias": (SIZE,)}.items()}

    def loop(F, data, weight, bias):
        return F.contrib.while_loop(
            lambda count, _: count < steps, lambda count, one: (one, [count + 1, F.tanh(F.FullyConnected(
                one, weight, bias, num_hidden=SIZE))]), [F.zeros(shape=(1,)), data], max_iterations=4)[1][1]

    expected = {name: mx.nd.zeros_like(arrays[name]) for name in ("weight", "bias")}
    mx.autograd.mark_variables([arrays[name] for name in expected], list(expected.values()))
    with autograd.record():
        made = loop(mx.nd, **arrays)
    if steps:
        made.backward(2 * made)
    amp.init(dtype)
    slopes = {name: mx.nd.full(one.shape, 7) for name, one in expected.items()}
    executor = loop(mx.sym, *map(mx.sym.var, arrays)).bind(mx.cpu(), arrays, slopes)
    for _ in range(2):
        spoil_memory()
        executor.backward(2 * executor.forward(is_train=True)[0])
        assert wrong({name: one.asnumpy() for name, one in expected.items()},
                     {name: one.asnumpy() for name, one in slopes.items()}, bound) == {}


@pytest.mark.parametrize("steps", [0, 3])
def test_gradients_of_loops_accumulate(steps):
    data = mx.nd.array(np.random.RandomState(0).normal(size=(4, SIZE)))
    net = new_decoder("data", steps, "alone")
    expected = {name: 2 * one for name, one in decoder_gradients(net, data).items()}
    net.collect_params().setattr("grad_req", "add")
    amp.init("float32")
    net.hybridize()
    decoder_gradients(net, data)
    assert wrong(expected, decoder_gradients(net, data), 1e-5) == {}


def test_a_state_that_is_infinite_spoils_no_gradient():
    """Nothing is multiplied by what a state or weight holds."""
    class Kept(HybridBlock):
        def hybrid_forward(self, F, data, other):
            return F.contrib.while_loop(lambda count, *_: count < 2,
                                        lambda count, one, two: ([], [count + 1, one * 2, two]),
                                        [F.zeros(shape=(1,)), data, other], max_iterations=2)[1][1]

    net, data, other = Kept(), mx.nd.ones((2,)), mx.nd.array([np.inf, np.nan])
    data.attach_grad()
    amp.init("float32")
    net.hybridize()
    out = differentiate(net, data, other)
    assert out.asnumpy().tolist() == [4, 4]
    assert data.grad.asnumpy().tolist() == [4, 4]


class Biased(HybridBlock):
    """A dense layer in the body of a loop, whose weight is frozen."""

    def __init__(self, kind):
        super().__init__(prefix="biased_")
        self.kind = kind
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(SIZE, SIZE), grad_req="null")
            self.bias = self.params.get("bias", shape=(SIZE,))

    def hybrid_forward(self, F, data, weight, bias):
        def layer(one):
            return F.tanh(F.FullyConnected(one, weight, bias, num_hidden=SIZE))
        if self.kind == "foreach":
            return F.contrib.foreach(lambda one, state: (layer(one) + state, one), data, F.zeros((4, SIZE)))[0]
        if self.kind == "cond":
            return cond(F, data, -1e4, lambda: layer(F.reshape(data, (-1, SIZE))), lambda: F.reshape(data, (-1, SIZE)))
        first = F.reshape(F.slice_axis(data, axis=0, begin=0, end=1), (-1, SIZE))
        return F.contrib.while_loop(lambda count, _: count < 2, lambda count, one: ([], [count + 1, layer(one)]),
                                    [F.zeros(shape=(1,)), first], max_iterations=2)[1][1]


@pytest.mark.parametrize("kind", ["foreach", "while_loop", "cond"])
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_biases_beside_frozen_weights_in_bodies_get_their_gradients(dtype, bound, kind):
    data = mx.nd.array(np.random.RandomState(0).normal(size=(3, 4, SIZE)))

    def gradient(net):
        net.bias.grad()[:] = 7
        spoil_memory()
        differentiate(lambda: (net(data) ** 2).sum())
        return {"bias": net.bias.grad().asnumpy()}

    whole = filled(Biased(kind), np.random.RandomState(1))
    whole.weight.grad_req = "write"  # without it MXNet's gradient is wrong outside of graphs, too
    expected = gradient(whole)
    net = filled(Biased(kind), np.random.RandomState(1))
    amp.init(dtype)
    net.hybridize()
    for _ in range(2):
        assert wrong(expected, gradient(net), bound) == {}


class Convolutions(HybridBlock):
    """A loop over images between two convolutions, of which its body is, or begins or ends with, another one.

    A branch that runs one may stand in front of the loop.
    """

    def __init__(self, inner):
        super().__init__(prefix="convolutions_")
        self.inner = inner
        with self.name_scope():
            self.first = self.params.get("first", shape=(16, 16, 3, 3))
            self.middle = self.params.get("middle", shape=(16, 16, 1, 1))
            self.last = self.params.get("last", shape=(16, 16, 3, 3))

    def hybrid_forward(self, F, data, first, middle, last):
        def step(one, state):
            whole = F.expand_dims(one, axis=0)
            made = {"alone": lambda: convolved(F, whole, middle, 1),
                    "first": lambda: F.sigmoid(convolved(F, whole, middle, 1)),
                    "last": lambda: convolved(F, F.sigmoid(whole), middle, 1)}[self.inner.split()[0]]()
            return F.squeeze(made, axis=0), state * 0.5
        value = convolved(F, data, first, 3)
        if self.inner.endswith("branch"):
            value = cond(F, value, 1e4, lambda: F.tanh(value), lambda: F.sigmoid(convolved(F, value, middle, 1)))
        value, state = F.contrib.foreach(step, value, F.sum(value, axis=0) * 0)
        return F.broadcast_add(convolved(F, value, last, 3), F.expand_dims(state, axis=0))


def filled(net, random):
    """Give a network weights at random."""
    net.initialize()
    for one in net.collect_params().values():
        one.set_data(mx.nd.array(random.normal(scale=0.2, size=one.shape)))
    return net


def convolved(F, data, weight, size):
    return F.Convolution(data, weight, kernel=(size, size), pad=(size // 2, size // 2), num_filter=16, no_bias=True)


@pytest.mark.parametrize("inner", ["alone", "first", "last", "first behind a branch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_convolutions_inside_of_a_loop_and_around_it_get_their_gradients(dtype, bound, way, inner):
    random = np.random.RandomState(0)
    data = mx.nd.array(random.normal(size=(3, 16, 8, 8)))
    net = filled(Convolutions(inner), random)

    def gradients():
        differentiate(lambda: (net(data) ** 2).sum())
        return {name: one.grad().asnumpy() for name, one in net.collect_params().items()}

    expected = gradients()  # operator by operator
    amp.init(dtype)
    net.hybridize(**WAYS[way])
    for _ in range(6):
        for name, found in gradients().items():
            assert np.linalg.norm(found - expected[name]) < bound * np.linalg.norm(expected[name]), name


class Sum(HybridBlock):
    """Adds a weight to data: in each step of a loop, in a branch, or to what dense layers give."""

    def __init__(self, where):
        super().__init__(prefix="sum_")
        self.where = where
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(SIZE, SIZE))
            self.other = self.params.get("other", shape=(SIZE, SIZE))

    def hybrid_forward(self, F, data, weight, other):
        return getattr(self, self.where)(F, data, weight, other)

    def foreach(self, F, data, weight, other):
        return F.contrib.foreach(lambda one, state: (one + weight, state * 0.5), data, other)[0]

    def foreach_last(self, F, data, weight, other):
        def step(one, state):
            return F.sigmoid(F.tanh(one) + weight), F.sigmoid(weight + state)
        return F.broadcast_add(*F.contrib.foreach(step, data, other))

    def foreach_state(self, F, data, weight, other):
        def step(one, state):
            made = F.tanh(one) + state
            return made * 2, made
        return F.contrib.foreach(step, data, other)[0]

    def several(self, F, data, weight, other):
        return F.contrib.foreach(lambda one, state: (F.add_n(F.tanh(one), weight, state), state), data, other)[0]

    def inner(self, F, data, weight, other):
        def step(one, state):
            rows, _ = F.contrib.foreach(lambda row, last: (row + last, last), one, F.sum(weight, axis=0))
            return rows + weight, state
        return F.contrib.foreach(step, data, other)[0]

    def while_loop(self, F, data, weight, other):
        def step(count, one):
            return F.tanh(one) + weight, [count + 1, F.sigmoid(one + weight)]
        return F.contrib.while_loop(lambda count, one: count < 2, step, [F.zeros(shape=(1,)), other],
                                    max_iterations=2)[0]

    def branch(self, F, data, weight, other):
        return cond(F, data, -1e4, lambda: (F.tanh(other) + weight) * 2, lambda: F.sigmoid(weight) + other) + weight

    def dense(self, F, data, weight, other):
        return F.sigmoid(dense(F, other, other) + weight)

    def behind_foreach(self, F, data, weight, other):
        return F.sum(F.contrib.foreach(lambda one, state: (F.sigmoid(one), state), data, other)[0], axis=0) + weight

    def behind_while_loop(self, F, data, weight, other):
        return weight + F.tanh(F.sum(self.while_loop(F, data, other, other), axis=0))

    def behind_branch(self, F, data, weight, other):
        return (cond(F, data, 1e4, lambda: F.sigmoid(other), lambda: other * 2) + weight) * 3


@pytest.mark.parametrize("request_", ["write", "add"])
@pytest.mark.parametrize("where", [
    "foreach", "foreach_last", "foreach_state", "several", "inner", "while_loop", "branch", "dense", "behind_foreach",
    "behind_while_loop", "behind_branch"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_what_is_added_to_something_gets_its_gradient(dtype, bound, way, where, request_):
    random = np.random.RandomState(0)
    data = mx.nd.array(random.normal(size=(4, SIZE, SIZE)))
    net = filled(Sum(where), random)

    def gradients(number):
        """Run a backward pass of two with other gradients."""
        with autograd.record():
            made = net(data)
        made.backward(mx.nd.array(np.random.RandomState(number).normal(size=made.shape)))
        found = {"data": data.grad, **{name: one.grad() for name, one in net.collect_params().items()}}
        return {name: one.asnumpy() for name, one in found.items()}

    data.attach_grad()
    first, expected = gradients(0), gradients(1)  # operator by operator
    if request_ == "add":
        expected = {name: first[name] + one for name, one in expected.items()}
    net.collect_params().setattr("grad_req", request_)
    data.attach_grad(request_)
    amp.init(dtype)
    net.hybridize(**WAYS[way])
    for _ in range(2):
        net.collect_params().zero_grad()
        data.grad[:] = 0
        gradients(0)
        for name, found in gradients(1).items():
            assert np.linalg.norm(found - expected[name]) <= bound * np.linalg.norm(expected[name]), name


CONVERTED = """
import mxnet as mx
import numpy as np

import gluon_amp as amp

class Images(mx.gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.small = mx.gluon.nn.Conv2D(32, 1, in_channels=32)
            self.large = mx.gluon.nn.Conv2D(32, 7, padding=3, in_channels=32)

    def hybrid_forward(self, F, data):
        def step(one, state):
            return F.squeeze(self.small(F.expand_dims(one, axis=0)), axis=0) + state, one
        for _ in range(7):
            data = self.small(data)
        data = F.erf(self.large(data) * 0.1)
        return F.contrib.foreach(step, data, F.sum(data, axis=0) * 0)[0]

mx.random.seed(0)
net = Images()
net.initialize(mx.init.Xavier())
data = mx.nd.random.normal(shape=(3, 32, 16, 16))
expected = net(data).asnumpy()
net.hybridize()
converted = amp.convert_hybrid_block(net, "bfloat16")

def note(found):
    print(np.abs(found.asnumpy() - expected).max() / np.abs(expected).max())

for _ in range(30):
    note(converted(data))
amp.init("bfloat16")
arrays = {"data": data, **{name: one.data() for name, one in net.collect_params().items()}}
for _ in range(10):
    executor = net(mx.sym.var("data")).bind(mx.cpu(), arrays, grad_req="null")
    for _ in range(20):
        note(executor.forward()[0])
"""


@pytest.mark.bf16
def test_converted_networks_and_executors_run_convolutions_in_a_loop():
    """In a process of their own: MXNet would end it."""
    errors = [float(line) for line in script(CONVERTED).split()]
    assert len(errors) == 230
    assert max(errors) < 0.03


def test_the_gradient_of_a_loop_does_not_need_the_network_any_more():
    random = np.random.RandomState(0)
    data, net = mx.nd.array(random.normal(size=(3, 16, 8, 8))), filled(Convolutions("first"), random)
    amp.init("float32")
    net.hybridize()
    weights = list(net.collect_params().values())
    with autograd.record():
        loss = (net(data) ** 2).sum()
    del net
    gc.collect()
    loss.backward()
    assert all(np.abs(one.grad().asnumpy()).max() > 0 for one in weights)


def test_errors_of_operators_are_not_lost_on_the_way():
    """MXNet's own way of waiting takes the error away from the array."""
    array = mx.nd.random.normal(0, -1, (2, 2))  # which MXNet refuses when it runs
    wait_for(array.handle)
    with pytest.raises(mx.MXNetError, match="scale"):
        array.asnumpy()


class TestMonitors:
    """MXNet fails with "_Map_base: :at" where a monitor is to see the inputs of a loop or branch."""

    @pytest.mark.parametrize("network", [Foreach, WhileLoop, SameReads])
    def test_hooks_see_outputs_and_inputs_are_refused(self, network):
        net, seen = ready(network), []
        net.hybridize()
        amp.init("float32")
        data = mx.nd.ones(SHAPES[0])
        net(data)
        net.register_op_hook(lambda name, *_: seen.append(str(name)))
        net(data).wait_to_read()
        assert seen
        net.register_op_hook(lambda *_: None, monitor_all=True)
        with pytest.raises(StateError, match="expected monitor_all=False for a network with loops or branches"):
            net(data)

    def test_so_do_monitors_of_executors(self):
        amp.init("float32")
        executor, seen = loop_symbol().simple_bind(mx.cpu(), grad_req="null", data=(5, 4, SIZE)), []
        executor.set_monitor_callback(lambda name, _: seen.append(name))
        executor.forward()
        assert seen
        with pytest.raises(StateError, match="monitor_all=False"):
            executor.set_monitor_callback(lambda *_: None, monitor_all=True)


def loop_symbol():
    data = mx.sym.var("data")
    return mx.sym.contrib.foreach(lambda one, state: (one + state, state * 0.5), data, mx.sym.sum(data, axis=0))[0]


def test_programs_with_loops_wait_for_each_operator(monkeypatch):
    """As plans do: INT8 and exports measure networks by them."""
    waited, wait = [], engine.wait_for
    monkeypatch.setattr(engine, "wait_for", lambda handle: waited.append(wait(handle)))
    for symbol, count in ((loop_symbol(), 2), (mx.sym.tanh(mx.sym.sum(mx.sym.var("data"), axis=0)), 0)):
        waited.clear()
        Program(symbol, {})({"data": mx.nd.ones((5, 4, SIZE))})
        assert (len(waited) >= count) if count else not waited


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), pytest.param("bfloat16", 0.1, marks=pytest.mark.bf16)])
def test_a_loop_behind_a_loop_trains_in_an_executor(dtype, bound):
    """It knows no shapes there, and what completes the gradients of the second loop must do without."""
    def loops(F, data, weight, other):
        for _ in range(2):
            data = F.contrib.while_loop(
                lambda count, *_: count < 2, lambda count, state, one: (state, [
                    count + 1, F.tanh(F.FullyConnected(state, weight, other, num_hidden=SIZE)), one + state]),
                [F.zeros(shape=(1,)), data * 0.5, data], max_iterations=2)[1][2]
        return data

    arrays = {name: mx.nd.array(np.random.RandomState(seed).normal(scale=0.4, size=shape)) for seed, (name, shape)
              in enumerate({"data": (3, SIZE), "weight": (SIZE, SIZE), "other": (SIZE,)}.items())}
    for array in arrays.values():
        array.attach_grad()
    out = differentiate(loops, mx.nd, *arrays.values())
    expected = {name: array.grad.asnumpy() for name, array in arrays.items()}
    amp.init(dtype)
    executor = loops(mx.sym, *map(mx.sym.var, arrays)).bind(
        mx.cpu(), arrays, {name: mx.nd.full(array.shape, 7) for name, array in arrays.items()})
    assert wrong({"out": out.asnumpy()}, {"out": executor.forward(is_train=True)[0].asnumpy()}, bound) == {}
    executor.backward(mx.nd.ones(out.shape))
    assert wrong(expected, {name: one.asnumpy() for name, one in executor.grad_dict.items()}, bound) == {}


@pytest.mark.parametrize("kind", ["foreach", "while_loop", "cond"])
@pytest.mark.parametrize("before", [(False,), (True,), (False, False, True)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), DTYPES)
def test_executors_train_by_their_last_forward_pass(dtype, bound, before, kind):
    """MXNet's loops train by the values of the first one since the backward pass before it."""
    def network(F, data, weight):
        def step(one):
            return F.tanh(F.dot(F.sin(one), weight))
        if kind == "foreach":
            return F.contrib.foreach(lambda one, state: (step(one + state),) * 2, data, F.zeros(shape=(2, SIZE)))[0]
        if kind == "while_loop":
            return F.contrib.while_loop(lambda count, _: count < 2, lambda count, one: (one, [count + 1, step(one)]), [
                F.zeros(shape=(1,)), F.reshape(data, (-1, SIZE))], max_iterations=2)[1][1]
        return F.contrib.cond(F.sum(weight) > -1000, lambda: step(F.reshape(data, (-1, SIZE))), lambda: data)

    random = np.random.RandomState(0)
    batches = random.normal(size=(4, 3, 2, SIZE))
    arrays = {"data": mx.nd.array(batches[-1]), "weight": mx.nd.array(random.normal(size=(SIZE, SIZE)))}
    for array in arrays.values():
        array.attach_grad()
    with autograd.record():
        out = network(mx.nd, *arrays.values())
    out.backward()
    amp.init(dtype)
    executor = network(mx.sym, *map(mx.sym.var, arrays)).bind(
        mx.cpu(), dict(arrays), {name: mx.nd.zeros(array.shape) for name, array in arrays.items()})
    for _ in range(2):
        for batch, is_train in zip(batches, before):
            executor.forward(is_train=is_train, data=mx.nd.array(batch))
        made, = executor.forward(is_train=True, data=mx.nd.array(batches[-1]))
        executor.backward(mx.nd.ones(out.shape))
        np.testing.assert_array_equal(next(iter(executor.output_dict.values())).asnumpy(), made.asnumpy())
        assert wrong({"out": out.asnumpy(), **{name: one.grad.asnumpy() for name, one in arrays.items()}},
                     {"out": made.asnumpy(), **{name: one.asnumpy() for name, one in executor.grad_dict.items()}},
                     bound) == {}
