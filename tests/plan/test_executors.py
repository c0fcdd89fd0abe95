"""Executors: other shapes get graphs of their own, and monitors see the user's symbol."""
from __future__ import annotations

import ctypes
import gc
import re
import warnings
import weakref
from contextlib import nullcontext

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LOW
from mxnet import autograd
from mxnet.gluon import nn
from networks import BF16_EPS, relative, sequential

import gluon_amp as amp
from gluon_amp._mxnet.symbols import dtype_name
from gluon_amp.plan.planner import Planner

pytestmark = pytest.mark.machine


def small_maps():
    """A convolution some of whose filters meet padding only where the map has one pixel."""
    data = mx.sym.Convolution(mx.sym.var("data"), num_filter=32, kernel=(3, 3), pad=(1, 1), no_bias=True, name="conv")
    data = mx.sym.BatchNorm(data, fix_gamma=False, use_global_stats=True, name="norm")
    return mx.sym.FullyConnected(mx.sym.Pooling(data, global_pool=True, kernel=(1, 1), pool_type="avg", name="pool"),
                                 num_hidden=4, name="fc")


def bound(symbol, shape, grad_req="write", how="simple_bind"):
    generator = np.random.RandomState(5)
    shapes, _, aux_shapes = symbol.infer_shape(data=shape)
    arrays = {name: mx.nd.array(generator.normal(scale=0.3, size=size))
              for name, size in zip(symbol.list_arguments(), shapes)}
    aux = {name: mx.nd.ones(size) for name, size in zip(symbol.list_auxiliary_states(), aux_shapes)}
    if how == "bind":
        grads = {name: mx.nd.zeros_like(array) for name, array in arrays.items()}
        return symbol.bind(mx.cpu(), arrays, grads, grad_req, aux)
    executor = symbol.simple_bind(mx.cpu(), grad_req, data=shape)
    executor.copy_params_from(arrays, aux)
    return executor


def trained(executor, size, seed=7):
    shape = executor.arg_dict["data"].shape
    executor.arg_dict["data"][:] = mx.nd.array(np.random.RandomState(seed).normal(size=shape))
    output = executor.forward(is_train=True)[0].copy()
    executor.backward(mx.nd.ones_like(output))
    return {"output": output.asnumpy(), **{name: array.asnumpy() for name, array in executor.grad_dict.items()}}


def low_layers(executor):
    """Name the layers that read a cast."""
    reads = re.findall(r"Op:(Convolution|FullyConnected), Name=(\w+)\nInputs:\n((?:\targ.*\n)+)", executor.debug_str())
    return {name for _, name, inputs in reads if "bfloat16" in inputs}


@pytest.mark.bf16
@pytest.mark.parametrize("how", ["simple_bind", "bind"])
class TestReshape:
    def test_another_shape_gets_the_graph_that_its_kernels_are_sound_in(self, how):
        amp.init("bfloat16")
        wide = bound(small_maps(), (2, 32, 8, 8), how=how)
        narrow = wide.reshape(data=(2, 32, 1, 1))
        assert low_layers(wide) == {"conv", "fc"}
        assert low_layers(narrow) == {"fc"}
        assert low_layers(narrow.reshape(allow_up_sizing=True, data=(4, 32, 8, 8))) == {"conv", "fc"}

    def test_values_and_gradients_are_those_of_fp32(self, how):
        found = {}
        for on in (False, True):
            if on:
                amp.init("bfloat16")
            executor = bound(small_maps(), (4, 32, 8, 8), how=how)
            found[on] = [trained(executor.reshape(allow_up_sizing=True, data=shape), shape)
                         for shape in [(2, 32, 1, 1), (4, 32, 8, 8), (6, 32, 5, 5)]]
        for plain, mixed in zip(found[False], found[True]):
            for name, value in plain.items():
                assert relative(value, mixed[name]) < 8 * BF16_EPS, name

    def test_arrays_are_shared_as_mxnet_shares_them(self, how):
        def shared(executor):
            narrow = executor.reshape(data=(2, 32, 1, 1))
            narrow.arg_dict["fc_weight"][:] = 3
            narrow.arg_dict["data"][:] = 5
            grown = executor.reshape(allow_up_sizing=True, data=(8, 32, 9, 9))
            grown.arg_dict["data"][:] = 7
            narrow.aux_dict["norm_moving_mean"][:] = 2
            names = ("fc_weight", "data")
            return ([executor.arg_dict[name].asnumpy().ravel()[:3].tolist() for name in names],
                    executor.aux_dict["norm_moving_mean"].asnumpy().tolist(), narrow.grad_dict["data"].shape,
                    list(narrow.output_dict), [array is None for array in narrow.grad_arrays])
        expected = shared(bound(small_maps(), (4, 32, 8, 8), how=how))
        amp.init("bfloat16")
        assert shared(bound(small_maps(), (4, 32, 8, 8), how=how)) == expected

    def test_what_mxnet_refuses_is_refused(self, how):
        amp.init("bfloat16")
        executor = bound(small_maps(), (2, 32, 4, 4), how=how)
        with pytest.raises(mx.MXNetError, match="allow_up_sizing"):
            executor.reshape(data=(2, 32, 8, 8))
        with pytest.raises(mx.MXNetError, match="changed"):
            executor.reshape(data=(2, 16, 4, 4))

    def test_after_deinit_an_executor_still_plans(self, how):
        amp.init("bfloat16")
        executor = bound(small_maps(), (2, 32, 8, 8), how=how)
        amp.deinit()
        assert low_layers(executor.reshape(data=(2, 32, 1, 1))) == {"fc"}


def test_statistics_behind_a_cured_operator_are_asked_for_no_gradient():
    last = mx.sym.SequenceLast(mx.sym.BatchNorm(mx.sym.var("data"), name="norm"))
    symbol = mx.sym.FullyConnected(last, mx.sym.var("weight"), num_hidden=5, no_bias=True)
    requests = {"data": "null", "norm_gamma": "null", "norm_beta": "null", "weight": "write"}

    def gradient():
        executor = bound(symbol, (2, 8, 4), requests)
        executor.backward(mx.nd.ones_like(executor.forward(is_train=True)[0]))
        return executor.grad_dict["weight"].asnumpy()

    expected = gradient()
    amp.init("float32")
    np.testing.assert_allclose(gradient(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.bf16), "float16", "float32"])
def test_gradients_add_up_behind_a_while_loop(dtype):
    layer = mx.sym.Convolution(mx.sym.var("data"), num_filter=48, kernel=(1, 1), name="first")
    loop = mx.sym.contrib.while_loop(lambda i, one: i < 2, lambda i, one: (one, [i + 1, mx.sym.tanh(one) + one]),
                                     [mx.sym.zeros(shape=(1,)), layer], max_iterations=3)[1][1]
    attrs = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 48, "no_bias": True}
    layer = mx.sym.Convolution(loop, mx.sym.var("depthwise", shape=(48, 1, 3, 3)), num_group=48, **attrs)
    heads = mx.sym.Group([mx.sym.Convolution(layer, mx.sym.var("last", shape=(48, 48, 3, 3)), **attrs), layer])
    generator = np.random.RandomState(2)
    shapes = {"data": (2, 16, 8, 8), "first_weight": (48, 16, 1, 1), "first_bias": (48,), "depthwise": (48, 1, 3, 3),
              "last": (48, 48, 3, 3)}
    arrays = {name: mx.nd.array(generator.normal(scale=0.3, size=shape)) for name, shape in shapes.items()}

    def gradients():
        slopes = {name: mx.nd.zeros_like(array) for name, array in arrays.items()}
        executor = heads.bind(mx.cpu(), arrays, slopes)
        executor.backward([mx.nd.ones_like(output) for output in executor.forward(is_train=True)])
        return {name: slope.asnumpy() for name, slope in slopes.items()}

    expected = gradients()
    amp.init(dtype)
    for name, found in gradients().items():
        assert np.linalg.norm(found - expected[name]) <= 0.02 * np.linalg.norm(expected[name]), name


@pytest.mark.bf16
def test_executors_of_equal_symbols_share_plans(monkeypatch):
    made, make = [], Planner._make
    monkeypatch.setattr(Planner, "_make", lambda *given: made.append(given) or make(*given))
    amp.init("bfloat16")
    module = mx.mod.Module(small_maps(), label_names=None, context=[mx.cpu(0), mx.cpu(1)])
    module.bind([("data", (4, 32, 8, 8))])
    assert len(made) == 1
    first, second = (bound(small_maps(), (2, 32, 8, 8)) for _ in range(2))
    assert len(made) == 2  # of another request for the data's gradient
    assert low_layers(first) == low_layers(second) == {"conv", "fc"}
    assert low_layers(bound(small_maps(), (2, 32, 1, 1))) == {"fc"}
    amp.deinit()
    amp.init("bfloat16", fp32_ops=["FullyConnected"])
    assert low_layers(bound(small_maps(), (2, 32, 8, 8))) == {"conv"}
    assert len(made) == 4


@pytest.mark.bf16
def test_plans_are_gone_with_their_executors():
    amp.init("bfloat16")
    executor = bound(small_maps(), (2, 32, 8, 8))
    binding = weakref.ref(executor.binding)
    del executor
    gc.collect()
    assert binding() is None


@pytest.mark.bf16
@pytest.mark.parametrize("count", [3, 12])
def test_a_cast_among_many_readers_of_a_tensor_keeps_their_gradients(count):
    # Of more than seven readers MXNet asks for additions to what is there, which its casts do not do.
    tensor = mx.sym.var("data") * 2
    dense = mx.sym.FullyConnected(tensor, num_hidden=32, name="fc")
    others = [mx.sym.sum(mx.sym.exp(tensor * (0.01 * i)), axis=1) for i in range(2 * count)]
    symbol = mx.sym.add_n(*others[:count], mx.sym.sum(dense, axis=1), *others[count:])
    expected = trained(bound(symbol, (4, 32)), None)
    amp.init("bfloat16")
    executor = bound(symbol, (4, 32))
    assert low_layers(executor) == {"fc"}
    for name, value in trained(executor, None).items():
        assert relative(expected[name], value) < 4 * BF16_EPS, name


def rewritten():
    """A network in which passes insert casts and rectifiers, and change operators."""
    x = mx.sym.Convolution(mx.sym.var("data"), num_filter=32, kernel=(3, 3), name="conv")
    x = mx.sym.clip(mx.sym.BatchNorm(x, name="norm"), 0, 6, name="six")
    x = mx.sym.split(mx.sym.relu(x, name="rect"), num_outputs=2, name="split")
    return mx.sym.FullyConnected(mx.sym.elemwise_add(x[0], x[1], name="sum"), num_hidden=3, name="fc")


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.bf16), "float16", "float32"])
class TestMonitor:
    def test_mxnets_monitor_reads_fp32(self, dtype):
        amp.init(dtype)
        monitor = mx.monitor.Monitor(1, sort=True, pattern=".*output|.*weight")
        module = mx.mod.Module(rewritten(), label_names=None)
        module.bind([("data", (2, 16, 8, 8))])
        module.init_params(mx.init.One())
        module.install_monitor(monitor)
        for shape in ((2, 16, 8, 8), (1, 16, 8, 8)):
            monitor.tic()
            module.forward(mx.io.DataBatch([mx.nd.ones(shape)]), is_train=True)
            rows = {name: value for _, name, value in monitor.toc()}
            assert float(rows["conv_output"]) == 144
        assert {"conv_weight", "norm_output", "rect_output", "fc_output"} <= set(rows)


@pytest.mark.bf16
@pytest.mark.parametrize("flags", [{}, {"static_alloc": True}])
def test_hooks_of_blocks_read_bfloat16_as_fp32(flags):
    net = sequential(lambda: [nn.Conv2D(32, 3, in_channels=16), nn.BatchNorm(), nn.Activation("relu"),
                              nn.Dense(4)], prefix="net_", **flags)
    amp.init("bfloat16")
    seen = {}

    def note(name, op, handle):
        array = mx.nd.NDArray(ctypes.cast(handle, mx.base.NDArrayHandle), writable=False)
        seen[name.decode()] = array.asnumpy()
    net.register_op_hook(note)
    with autograd.record():
        output = net(mx.nd.random.normal(shape=(2, 16, 6, 6)))
    assert "net_conv0_fwd_output" in seen
    assert {array.dtype for array in seen.values()} == {np.dtype("float32")}
    np.testing.assert_array_equal(seen["net_dense0_fwd_output"], output.asnumpy())


class TestArguments:
    """Every way of passing what MXNet's bind and simple_bind take."""

    def test_simple_bind_takes_positional_arguments(self):
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
        amp.init("float16")
        types = {"data": "default", "fc_weight": "default"}
        rest = (types, None, None, None, None)
        executor = symbol.simple_bind(mx.cpu(), "write", {"data": "float32"}, *rest, data=(2, 3))
        assert executor.forward()[0].shape == (2, 4)

    def test_an_input_may_be_called_as_the_symbol_argument(self):
        amp.init("float16")
        executor = (mx.sym.var("symbol") * 2).simple_bind(mx.cpu(), symbol=(2, 3))
        assert executor.forward()[0].shape == (2, 3)

    def test_bind_takes_positional_arguments_and_surplus_arrays(self):
        symbol = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, no_bias=True, name="fc"),
                                  name="norm")
        arrays = {"data": mx.nd.ones((2, 3)), "fc_weight": mx.nd.ones((4, 3)), "norm_gamma": mx.nd.ones(4),
                  "norm_beta": mx.nd.ones(4), "nobody": mx.nd.ones(7), "untold": mx.nd.array([1], dtype="int32")}
        aux = {"norm_moving_mean": mx.nd.zeros(4), "norm_moving_var": mx.nd.ones(4), "other": mx.nd.ones(2)}
        found = []
        for on in (False, True):
            if on:
                amp.init("float16")
            first = symbol.bind(mx.cpu(), arrays, {"fc_weight": mx.nd.zeros((4, 3))}, "write", aux, {}, None)
            again = symbol.bind(mx.cpu(), arrays, None, "null", aux, None, first)
            found.append((first.forward()[0].asnumpy(), again.forward()[0].asnumpy(), list(first.arg_dict)))
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-3)
        np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-3)
        assert found[0][2] == found[1][2]

    def test_what_mxnet_refuses_is_refused_alike(self):
        symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=4, name="fc")
        for on in (False, True):
            if on:
                amp.init("float16")
            with pytest.raises(ValueError, match="Length of args"):
                symbol.bind(mx.cpu(), [mx.nd.ones((2, 3))] * 4)
            with pytest.raises(ValueError, match="key `fc_weight` is missing"):
                symbol.bind(mx.cpu(), {"data": mx.nd.ones((2, 3))})
            with pytest.raises(RuntimeError, match="simple_bind error"):
                symbol.simple_bind(mx.cpu(), data=(2, 3), fc_weight=(4, 7))
            with pytest.raises(TypeError):
                symbol.bind(mx.cpu(), [mx.nd.ones((2, 3))], None, "write", None, None, None, None)


@pytest.mark.bf16
def test_a_users_own_bfloat16_outside_of_blocks_is_read_as_mxnet_reads_it():
    dtype = np.dtype([("bfloat16", np.uint16)])
    generator = np.random.RandomState(4)
    data, weight = (mx.nd.amp_cast(mx.nd.array(generator.uniform(0.5, 2, shape)), dtype=dtype)
                    for shape in ((2, 16, 6, 6), (8, 16, 3, 3)))
    calls = [lambda: mx.nd.Convolution(data, weight, num_filter=8, kernel=(3, 3), no_bias=True),
             lambda: mx.nd.FullyConnected(data, weight.reshape((2, -1)).reshape((2, 576)), num_hidden=2, no_bias=True),
             lambda: mx.nd.relu(data), lambda: data + data, lambda: mx.nd.sum(data), lambda: data * 2]
    expected = [call().asnumpy() for call in calls]
    amp.init("bfloat16")
    for one, call in zip(expected, calls):
        found = call()
        assert found.dtype == dtype
        assert (found.asnumpy() == one).all()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_an_operand_that_is_read_for_its_shape_gets_no_gradient(dtype):
    # MXNet's executors leave the gradient that reshape_like passes to its second operand uninitialised.
    data = mx.sym.var("data")
    twice = data * 2
    like = mx.sym.LayerNorm(twice, mx.sym.var("gamma"), mx.sym.var("beta"), axis=-1)
    symbol = mx.sym.reshape_like(twice, like)
    amp.init(dtype)
    executor = symbol.simple_bind(mx.cpu(), data=(4, 32, 16))
    for _ in range(3):
        litter = [mx.nd.full((4, 32, 16), float("nan")) for _ in range(20)]
        mx.nd.waitall()
        del litter
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((4, 32, 16))])
        assert executor.grad_dict["data"].asnumpy().tolist() == (2 * np.ones((4, 32, 16))).tolist()
        assert not executor.grad_dict["gamma"].asnumpy().any()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_shapes_and_types_of_names_that_a_symbol_lacks_are_ignored(dtype):
    # As MXNet does: scripts bind an inner tensor to all that their data iterator provides.
    symbol = small_maps().get_internals()["pool_output"]
    label = {"softmax_label": (4,)}

    def run():
        executor = symbol.simple_bind(mx.cpu(), type_dict={"data": "float32", "softmax_label": "float32"},
                                      data=(4, 32, 8, 8), **label)
        for array in executor.arg_arrays:
            array[:] = 0.5
        executor.aux_dict["norm_moving_var"][:] = 1
        outputs = [executor.forward()[0].asnumpy()]
        narrow = executor.reshape(data=(2, 32, 8, 8), softmax_label=(2,))
        return [*outputs, narrow.forward()[0].asnumpy()]
    expected = run()
    amp.init(dtype)
    for one, other in zip(expected, run()):
        assert relative(one, other) < 8 * BF16_EPS


class TestBoundBefore:
    """Executors that were bound before AMP was switched on run as they are: that is said."""

    def module(self):
        module = mx.mod.Module(small_maps(), label_names=None)
        module.bind([("data", (2, 32, 8, 8))])
        module.init_params(mx.init.Xavier())
        module.init_optimizer(optimizer="sgd", optimizer_params={"learning_rate": 1e-3, "momentum": 0.9})
        return module

    def step(self, module, size=2):
        module.forward(mx.io.DataBatch([mx.nd.ones((size, 32, 8, 8))]), is_train=True)
        output = module.get_outputs()[0].asnumpy()
        module.backward([mx.nd.array(output)])
        module.update()
        return output

    def test_a_module_is_told_once_and_follows_when_bound_again(self):
        module, plain = self.module(), self.module()
        plain.set_params(*module.get_params())
        expected = [self.step(plain) for _ in range(4)]
        before = self.step(module)
        amp.init(LOW)
        with pytest.warns(UserWarning, match=r"the symbol of fc_output was bound before AMP.*force_rebind=True"):
            again = self.step(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            third = self.step(module)
            assert [each.tolist() for each in (before, again, third)] == [each.tolist() for each in expected[:3]]
            module.get_params()
            module.bind([("data", (2, 32, 8, 8))], force_rebind=True)
            fourth = self.step(module)
        assert 0 < relative(expected[3], fourth) < 0.05
        assert module._exec_group.execs[0].plan.symbol is not None

    def test_an_executor_and_what_is_reshaped_from_it(self):
        executor = bound(small_maps(), (2, 32, 8, 8))
        executor.forward()
        with amp.autocast(), pytest.warns(UserWarning, match="bind it again"):
            executor.forward()
        amp.init()
        with pytest.warns(UserWarning, match="bind it again"):
            executor.reshape(data=(1, 32, 8, 8)).forward()

    def test_nobody_is_told_of_executors_that_follow_or_need_not(self):
        data = mx.nd.ones((2, 32, 8, 8))
        shapes, _, aux_shapes = small_maps().infer_shape(data=data.shape)
        values = {name: mx.nd.ones(size) for name, size in zip(small_maps().list_arguments(), shapes) if name != "data"}
        aux = {name: mx.nd.ones(size) for name, size in zip(small_maps().list_auxiliary_states(), aux_shapes)}
        symbol, arguments, auxiliary = amp.convert_model(small_maps(), values, aux)
        converted = symbol.bind(mx.cpu(), {**arguments, "data": data}, aux_states=auxiliary)
        plain = bound(small_maps(), (2, 32, 8, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            plain.forward()
            amp.init()
            converted.forward()
            with amp.autocast(enabled=False):
                plain.forward()
                off = bound(small_maps(), (2, 32, 8, 8))
            for executor in (off, bound(small_maps(), (2, 32, 8, 8))):
                executor.forward()
                executor.reshape(data=(1, 32, 8, 8)).forward()
            amp.deinit()
            plain.forward()


@pytest.mark.filterwarnings("ignore:the bfloat16 network cannot run")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_converted_symbols_with_parameters_in_bfloat16_are_bound(dtype):
    data = mx.sym.Convolution(mx.sym.var("data"), num_filter=16, kernel=(3, 3), name="conv")
    data = mx.sym.LayerNorm(mx.sym.Activation(data, act_type="relu"), mx.sym.var("gamma"), mx.sym.var("beta"))
    symbol = mx.sym.FullyConnected(data, num_hidden=4, name="fc")
    shape = (8, 16, 66, 66)
    plain = bound(symbol, shape)
    arguments = {name: array for name, array in plain.arg_dict.items() if name != "data"}
    converted, arguments, _ = amp.convert_model(symbol, arguments, {}, target_dtype="bfloat16",
                                                cast_optional_params=True)
    given, expected = plain.arg_dict["data"], plain.forward()[0].asnumpy()
    amp.init(dtype)
    executor = converted.simple_bind(mx.cpu(), "null", data=shape)
    assert {name: dtype_name(executor.arg_dict[name].dtype) for name in arguments} == {
        name: dtype_name(array.dtype) for name, array in arguments.items()}
    assert dtype_name(executor.arg_dict["fc_weight"].dtype) == "bfloat16"
    if dtype == "bfloat16":  # other CPUs cannot run it
        executor.copy_params_from(arguments)
        assert relative(expected, executor.forward(data=given)[0].asnumpy()) < 8 * BF16_EPS


class TestErrorsOfMonitors:
    """ctypes prints what a function that C calls raises, and goes on: it is raised behind the call."""

    @staticmethod
    def fails(*told):
        raise KeyboardInterrupt("stop")

    @pytest.mark.parametrize("phase", ["forward", "backward"])
    def test_executors(self, phase):
        amp.init(LOW)
        executor = bound(small_maps(), (2, 16, 6, 6))
        if phase == "backward":
            executor.forward(is_train=True)
        executor.set_monitor_callback(self.fails)
        with pytest.raises(KeyboardInterrupt, match="stop"):
            executor.forward() if phase == "forward" else executor.backward(mx.nd.ones((2, 4)))
        executor.set_monitor_callback(lambda name, array: None)
        assert executor.forward()[0].shape == (2, 4)

    def test_hybridized_blocks(self):
        net = sequential([nn.Dense(4, in_units=8)])
        net.register_op_hook(self.fails)
        amp.init(LOW)
        with pytest.raises(KeyboardInterrupt, match="stop"):
            net(mx.nd.ones((2, 8)))

    @pytest.mark.parametrize("loops", [False, True])
    @pytest.mark.parametrize("backward", ["backward", "autograd.backward", "autograd.grad"])
    def test_the_backward_pass_of_hybridized_blocks(self, backward, loops):
        """It raises what a hook raised in it, behind whole gradients, and nothing is left of the error."""
        class Net(mx.gluon.HybridBlock):
            def hybrid_forward(self, F, x, weight):
                made = F.relu(F.tanh(F.FullyConnected(x, weight, num_hidden=8, no_bias=True)))
                return F.contrib.foreach(lambda one, state: (one + state, one), made,
                                         F.sum(made, axis=0))[0] if loops else made

        def gradients(fails):
            phase.append("forward")
            with autograd.record():
                loss = net(data).sum()
            phase.append("backward")
            with pytest.raises(ValueError, match="in the backward pass") if fails else nullcontext():
                if backward == "autograd.grad":
                    autograd.grad(loss, [data])
                else:
                    loss.backward() if backward == "backward" else autograd.backward([loss])
            return net.weight.grad().asnumpy()

        def fails(*told):
            if phase[-1] == "backward":
                raise ValueError("in the backward pass")

        phase = []
        net = Net()
        net.weight = net.params.get("weight", shape=(8, 8))
        net.initialize()
        net.hybridize()
        data = mx.nd.array(np.random.RandomState(0).normal(size=(4, 8)))
        data.attach_grad()
        amp.init(LOW)
        expected = gradients(fails=False)
        net.register_op_hook(fails)
        for _ in range(2):
            net.weight.zero_grad()
            np.testing.assert_array_equal(gradients(fails=True), expected * (backward != "autograd.grad"))
        net.register_op_hook(lambda *told: None)
        np.testing.assert_array_equal(gradients(fails=False), expected)
