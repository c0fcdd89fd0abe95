"""Operators in C++ in the place of MXNet's: graphs written by hand, and networks against MXNet's own operators."""
from __future__ import annotations

import threading
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from graphs import batch_norm, conv, describe, graph, op, rewrite, variable
from mxnet import autograd
from mxnet.gluon import HybridBlock, SymbolBlock, nn, rnn
from native_cases import assert_close, kinds, requires_core, results_of_batches

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.graph import Entry, Role
from gluon_amp.plan.cached_op import prepared_operations
from gluon_amp.rules import ANY_DEVICE, Cause, Device, Policy, Rule

ALL = frozenset({"_gluon_amp_layer_norm", "_gluon_amp_clip", "_gluon_amp_batch_dot", "_gluon_amp_rnn"})
BIG = (4, 128, 64)


def rewritten(*heads, target="float32", guarded=(), available=ALL, device=ANY_DEVICE, **policy):
    result = graph(*heads)
    rewrite(result, replace(Policy(target), **policy), device, accumulated=frozenset(guarded), native=available,
            check=True)
    return result


def lines(*heads, **settings):
    return describe(rewritten(*heads, **settings))


def layer_norm(data, **attrs):
    width = data.shapes[0][-1] if data.shapes[0] else 64
    inputs = [data, variable("gamma", (width,)), variable("beta", (width,))]
    return op("LayerNorm", "ln", *inputs, outputs=3, shape=data.shapes[0], **attrs)


def product(a=(8, 64, 64), b=(8, 64, 64), **attrs):
    out = (a[0], a[1], b[2])
    return op("batch_dot", "dot", variable("a", a), variable("b", b), shape=out, **attrs)


def limited(data, shape=BIG, name="limit"):
    return op("clip", name, data, shape=shape, a_min=0.0, a_max=6.0)


def recurrent(mode="lstm", layers=2, p=0.0, joined=True, **attrs):
    """A recurrent layer as Gluon traces it."""
    units, gates = 16, {"lstm": 4, "gru": 3}[mode]
    shapes = [(gates * units, 32), (gates * units, units)] + [(gates * units, units)] * 2 * (layers - 1)
    shapes += [(gates * units,)] * len(shapes)
    parts = [op("Reshape", f"flat{i}", variable(f"w{i}", shape)) for i, shape in enumerate(shapes)]
    for part, shape in zip(parts, shapes):
        part.attrs, part.shapes = {"shape": "(-1,)"}, [(int(np.prod(shape)),)]
    total = (sum(int(np.prod(shape)) for shape in shapes),)
    parameters = op("_rnn_param_concat", "joined", *parts, shape=total) if joined else variable("vector", total)
    states = [variable(f"state{i}", (layers, 4, units)) for i in range(2 if mode == "lstm" else 1)]
    return op("RNN", "rnn", variable("data", (5, 4, 32)), parameters, *states, shape=(5, 4, units), mode=mode, p=p,
              state_size=units, num_layers=layers, **attrs)


class TestGraphs:
    def test_layer_norm(self):
        result = rewritten(layer_norm(variable("x", BIG)))
        assert describe(result) == ["ln: _gluon_amp_layer_norm(x, gamma, beta) -> float32", "out: ln"]
        (node,) = result.operators()
        assert (node.num_outputs, node.replaced, node.kind, node.role) == (1, "LayerNorm", "LayerNorm", Role.OWN)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_other_axes_stay_also_where_they_are_the_last_today(self, axis):
        assert "ln: LayerNorm(x, gamma, beta) -> float32" in lines(layer_norm(variable("x", BIG), axis=axis))

    @pytest.mark.parametrize("output", [1, 2])
    def test_statistics_that_are_read_keep_it(self, output):
        node = layer_norm(variable("x", BIG))
        assert lines(node, Entry(node, output))[0].startswith("ln: LayerNorm")
        reader = op("relu", "reader", Entry(layer_norm(variable("x", BIG)), output))
        assert lines(reader)[0].startswith("ln: LayerNorm")

    @pytest.mark.parametrize("data", [
        variable("x", None), variable("x", (2, 64)), variable("x", (9000, 4)), variable("x", BIG, "float64")],
        ids=["unknown", "small", "narrow", "float64"])
    def test_others_stay(self, data):
        node = layer_norm(data)
        node.dtypes = data.dtypes * 3
        assert lines(node)[0].startswith("ln: LayerNorm")

    def test_unknown_shapes_of_parameters(self):
        node = layer_norm(variable("x", BIG))
        node.inputs[1].node.shapes = [None]
        assert lines(node)[0].startswith("ln: LayerNorm")

    def test_clip(self):
        assert lines(limited(variable("x", BIG))) == ["limit: _gluon_amp_clip(x) -> float32", "out: limit"]
        assert lines(limited(variable("x", (9,)), (9,)))[0] == "limit: clip(x) -> float32"

    def test_clip_in_bfloat16_runs_between_convolutions_without_casts(self):
        norm = batch_norm("bn", conv("c", variable("data", (2, 16, 8, 8)), 256, 16))
        norm.shapes = [(2, 256, 8, 8)] * 3
        result = lines(conv("d", limited(Entry(norm), (2, 256, 8, 8)), 32, 256), target="bfloat16")
        assert "limit: _gluon_amp_clip(bn) -> bfloat16" in result
        assert "d: Convolution(limit, d_weight_bfloat16) -> bfloat16" in result

    def test_products(self):
        assert lines(product())[0] == "dot: _gluon_amp_batch_dot(a, b) -> float32"
        assert lines(product((8, 48, 64), (8, 64, 48)))[0] == "dot: batch_dot(a, b) -> float32"

    @pytest.mark.parametrize("mode", ["lstm", "gru"])
    def test_recurrent_layers_read_weights_where_they_are(self, mode):
        node = recurrent(mode)
        states = "state0, state1" if mode == "lstm" else "state0"
        assert lines(node) == [f"rnn: _gluon_amp_rnn(data, w0, w1, w2, w3, w4, w5, w6, w7, {states}) -> float32",
                               "out: rnn"]
        assert (node.attrs["separate"], node.attrs["masks"]) == ("True", "False")
        assert node.num_outputs == len(node.dtypes) == len(node.shapes) == (4 if mode == "lstm" else 3)

    def test_recurrent_layers_take_a_vector(self):
        assert lines(recurrent(joined=False))[0] == "rnn: _gluon_amp_rnn(data, vector, state0, state1) -> float32"

    def test_recurrent_layers_with_dropout_between_them_read_masks(self):
        node = recurrent(p=0.5, layers=3)
        result = lines(node)
        assert [line for line in result if "rnn_" in line] == [
            "rnn_slice_axis: slice_axis(data) -> float32", "rnn_ones_like: ones_like(rnn_slice_axis) -> float32",
            "rnn_broadcast_axis: broadcast_axis(rnn_ones_like) -> float32",
            "rnn_dropout: Dropout(rnn_broadcast_axis) -> float32", "rnn_blockgrad: BlockGrad(rnn_dropout) -> float32",
            "rnn_dropout1: Dropout(rnn_broadcast_axis) -> float32",
            "rnn_blockgrad1: BlockGrad(rnn_dropout1) -> float32", result[-2]]
        assert result[-2].endswith("state0, state1, rnn_blockgrad, rnn_blockgrad1) -> float32")
        assert node.attrs["masks"] == "True"
        assert not any("Dropout" in line for line in lines(recurrent(p=0.5, layers=1)))

    def test_recurrent_layers_in_bfloat16(self):
        node = recurrent()
        result = rewritten(op("FullyConnected", "dense", node, variable("w", (16, 16)), shape=(5, 4, 16)),
                           target="bfloat16")
        assert (node.op, node.attrs["dtype"], Entry(node).dtype) == ("_gluon_amp_rnn", "bfloat16", "bfloat16")
        assert [entry.dtype for entry in node.inputs] == ["bfloat16"] + ["float32"] * (len(node.inputs) - 1)
        assert "dense: FullyConnected(rnn, w_bfloat16) -> bfloat16" in describe(result)

    @pytest.mark.parametrize("settings", [
        {"excluded": frozenset({"rnn"})}, {"overrides": {"RNN": (Rule("FP32", cause=Cause.USER_LIST),)}}],
        ids=["excluded", "listed"])
    def test_recurrent_layers_stay_where_users_say_so(self, settings):
        node = recurrent()
        rewritten(node, target="bfloat16", **settings)
        assert (node.op, Entry(node).dtype) == ("_gluon_amp_rnn", "float32")
        assert "dtype" not in node.attrs

    @pytest.mark.parametrize("attrs", [{"projection_size": 8}, {"lstm_state_clip_min": -1.0},
                                       {"use_sequence_length": True}])
    def test_what_recurrent_layers_do_not_know(self, attrs):
        assert any(line.startswith("rnn: RNN") for line in lines(recurrent(**attrs)))

    def test_a_barrier_where_gradients_accumulate(self):
        result = lines(layer_norm(variable("x", BIG)), guarded=["gamma", "x"])
        assert result == ["x_guard: _mul_scalar(x) -> float32", "gamma_guard: _mul_scalar(gamma) -> float32",
                          "ln: _gluon_amp_layer_norm(x_guard, gamma_guard, beta) -> float32", "out: ln"]

    @pytest.mark.parametrize(("readers", "read"), [(2, "r"), (7, "r"), (8, "r_guard")])
    def test_a_barrier_where_more_gradients_meet_than_mxnet_adds_itself(self, readers, read):
        x = op("relu", "r", variable("x", BIG), shape=BIG)
        result = lines(limited(x), *(op("sin", f"s{i}", x, shape=BIG) for i in range(readers - 1)))
        assert f"limit: _gluon_amp_clip({read}) -> float32" in result

    @pytest.mark.parametrize(("cap", "expected"), [(None, 3), ("3", 8), ("1", 16), ("nonsense", 16), ("100", 3)])
    def test_operators_share_barriers_as_far_as_mxnet_adds_gradients_itself(self, cap, expected, monkeypatch):
        if cap is not None:
            monkeypatch.setenv("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", cap)
        weight, data = variable("w", (512, 512)), [op("relu", f"r{i}", variable(f"x{i}", (16, 512)), shape=(16, 512))
                                                   for i in range(16)]
        layers = [op("FullyConnected", f"fc{i}", each, weight, shape=(16, 512), num_hidden=512, no_bias=True)
                  for i, each in enumerate(data)]
        result = lines(*layers, available=frozenset({"_gluon_amp_dense"}))
        assert sum(line.startswith("w_guard") for line in result) == expected
        assert sum("_gluon_amp_dense" in line for line in result) == 16

    def test_barriers_where_mxnet_makes_one_of_equal_operators(self):
        x = variable("x", BIG)
        halves = [op("_mul_scalar", f"half{i}", x, shape=BIG, scalar=0.5) for i in range(8)]
        result = lines(*(limited(half, name=f"limit{i}") for i, half in enumerate(halves)))
        assert all(f"limit{i}: _gluon_amp_clip(half{i}_guard) -> float32" in result for i in range(8))

    def test_only_what_is_there(self):
        assert lines(layer_norm(variable("x", BIG)), available=frozenset())[0].startswith("ln: LayerNorm")
        assert lines(product(), available=ALL - {"_gluon_amp_batch_dot"})[0].startswith("dot: batch_dot")

    def test_can_be_switched_off(self):
        off = frozenset({"native_operators"})
        assert lines(limited(variable("x", BIG)), disabled_passes=off)[0] == "limit: clip(x) -> float32"

    def test_conversions_and_imitations_do_without(self):
        for settings in ({"training": False}, {"target": "float16", "device": Device(imitated=True)}):
            assert not any("_gluon_amp" in line for line in lines(limited(variable("x", BIG)), **settings))


class Network(HybridBlock):
    """Everything that may be replaced; tensors with several readers."""

    def __init__(self, dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.dense = nn.Dense(64, flatten=False, in_units=16)
            self.first, self.second = nn.LayerNorm(in_channels=64), nn.LayerNorm(in_channels=64)
            self.lstm = rnn.LSTM(32, 2, input_size=64, dropout=dropout, bidirectional=True)

    def hybrid_forward(self, F, x):
        y = self.first(self.dense(x))
        y = F.clip(y + self.second(y), -0.5, 1.5)
        z = self.lstm(y)
        return F.batch_dot(F.clip(z, -0.1, 0.1), F.batch_dot(y, y, transpose_b=True), transpose_a=True)


def network(grad_req="write", **flags):
    mx.random.seed(3)
    net = Network(prefix="net_")
    net.initialize(mx.init.Xavier())
    net.collect_params().setattr("grad_req", grad_req)
    if flags:
        net.hybridize(**flags)
    return net


def data(seed, length=16, batch=40):
    return mx.nd.array(np.random.RandomState(seed).normal(size=(length, batch, 16)))


def train(net, grad_req):
    """Train on batches of several sizes."""
    return results_of_batches(net, grad_req, [data(batch, batch=batch) for batch in (40, 24)])


FLAGS = [{"static_alloc": False}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


@requires_core
class TestNetworks:
    @pytest.mark.parametrize("flags", FLAGS, ids=["dynamic", "static memory", "static"])
    @pytest.mark.parametrize("grad_req", ["write", "add"])
    def test_values_and_gradients_are_mxnets(self, flags, grad_req):
        expected = train(network(grad_req, **flags), grad_req)
        amp.init("float32")
        net = network(grad_req, **flags)
        for one, other in zip(train(net, grad_req), expected):
            assert_close(one, other, 2e-6)  # a chain of several operators, each within 1e-6
        assert {"_gluon_amp_layer_norm", "_gluon_amp_clip"} <= kinds(net)

    def test_eight_readers(self):
        """From eight gradients on MXNet lets operators add to what is there."""
        class Many(HybridBlock):
            def hybrid_forward(self, F, x):
                y = F.tanh(x)
                return sum(F.clip(y * (1 / 3), -i / 10, i / 10) + F.clip(y, -i / 10, i / 10) for i in range(1, 12))

        def gradient():
            net = Many()
            net.hybridize()
            x = data(1, 64)
            x.attach_grad()
            with autograd.record():
                out = net(x)
            out.backward()
            return x.grad.asnumpy()

        expected = gradient()
        amp.init("float32")
        assert_close(gradient(), expected, 1e-6)

    def test_frozen_parameters_and_data_without_gradient(self):
        def gradients():
            net = network(static_alloc=True)
            net.first.collect_params().setattr("grad_req", "null")
            net.lstm.collect_params(".*l0.*").setattr("grad_req", "null")
            with autograd.record():
                out = net(data(2))
            out.backward()
            return [p.grad().asnumpy() for p in net.collect_params().values() if p.grad_req != "null"]

        expected = gradients()
        amp.init("float32")
        for one, other in zip(gradients(), expected):
            assert_close(one, other, 2e-6)

    def test_threads(self):
        net = network(static_alloc=False)
        amp.init("float32")
        inputs = [data(seed) for seed in range(4)]
        expected = [net(x).asnumpy() for x in inputs]
        received = [None] * len(inputs)

        def work(index):
            for _ in range(5):
                received[index] = net(inputs[index]).asnumpy()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, other in zip(received, expected):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.bf16
    def test_under_bfloat16_they_take_the_type_of_their_data_where_they_know_it(self):
        amp.init("bfloat16")
        net = network(static_alloc=True)
        with autograd.record():
            net(data(1)).backward()
        (operation,) = [operation for _, operation in prepared_operations(net)]
        found = [(node.kind, Entry(node).dtype) for node in operation.latest.graph.operators() if node.replaced]
        assert ("LayerNorm", "bfloat16") in found
        assert {kind for kind, dtype in found if dtype == "bfloat16"} <= {"LayerNorm", "RNN", "clip"}
        assert {dtype for kind, dtype in found if kind == "RNN"} <= {"bfloat16"}

    def test_without_a_batch(self):
        net = nn.HybridSequential()
        net.add(nn.LayerNorm(in_channels=64), nn.HybridLambda(lambda F, x: F.clip(x, -1, 1)))
        net.initialize()
        net.hybridize()
        amp.init("float32")
        with mx.util.np_shape(True):
            for count in (512, 0, 512):
                x = mx.nd.ones((count, 64))
                x.attach_grad()
                with autograd.record():
                    out = net(x)
                out.backward()
                assert out.shape == x.grad.shape == (count, 64)
        assert "_gluon_amp_layer_norm" in kinds(net)

    @pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
    @pytest.mark.parametrize("how", ["executor", "block"])
    @pytest.mark.parametrize("request_", ["write", "add"])
    @pytest.mark.parametrize("turned", [False, True])
    def test_a_weight_that_many_dense_layers_share(self, dtype, how, request_, turned):
        x, weight = mx.sym.var("x"), mx.sym.var("w", shape=(512, 512))
        for step in range(17):
            used = mx.sym.transpose(weight) if turned else weight
            x = mx.sym.tanh(mx.sym.FullyConnected(x, used, num_hidden=512, no_bias=True, name=f"fc{step}"))
        generator = np.random.RandomState(3)
        values = {"x": generator.normal(size=(16, 512)), "w": generator.normal(size=(512, 512)) / 23}

        def gradients():
            if how == "executor":
                executor = x.simple_bind(mx.cpu(), request_, x=(16, 512), w=(512, 512))
                executor.copy_params_from({name: mx.nd.array(value) for name, value in values.items()})
                for _ in range(2):
                    executor.forward(is_train=True)
                    executor.backward(mx.nd.ones((16, 512)))
                return {name: executor.grad_dict[name].asnumpy() for name in values}
            net = SymbolBlock(x, [mx.sym.var("x")])
            net.initialize()
            net.collect_params()["w"].set_data(mx.nd.array(values["w"]))
            net.collect_params()["w"].grad_req = request_
            net.hybridize(static_alloc=True)
            data = mx.nd.array(values["x"])
            data.attach_grad(request_)
            for _ in range(2):
                with autograd.record():
                    out = net(data)
                out.backward()
            return {"x": data.grad.asnumpy(), "w": net.collect_params()["w"].grad().asnumpy()}
        expected = gradients()
        amp.init(dtype)
        found = gradients()
        for name, value in expected.items():
            error = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
            assert error < (1e-5 if dtype == "float32" else 0.05), name

    def test_sparse_arguments_keep_mxnets_operators(self):
        net = nn.HybridLambda(lambda F, x: F.clip(x, -1, 6))
        net.hybridize()
        dense = mx.nd.ones((300, 100)) * 9
        amp.init("float32")
        assert net(dense).asnumpy().max() == 6
        assert net(dense.tostype("row_sparse")).asnumpy().max() == 6

    def test_files_hold_mxnets_operators(self, tmp_path):
        amp.init("float32")
        net = network(static_alloc=True)
        net(data(1))
        net.export(str(tmp_path / "net"))
        text = (tmp_path / "net-symbol.json").read_text()
        assert "_gluon_amp" not in text
        assert '"LayerNorm"' in text

    @pytest.mark.parametrize("simple", [True, False])
    def test_executors_are_reshaped(self, simple):
        """Shapes of their parameters may be inferred again, which ends the process with operators of a library."""
        amp.init("float32")
        symbol = mx.sym.LayerNorm(mx.sym.var("x"), mx.sym.var("gamma"), mx.sym.var("beta"))
        if simple:
            executor = symbol.simple_bind(mx.cpu(), x=(64, 64))
        else:
            executor = symbol.bind(mx.cpu(), [mx.nd.ones((64, 64)), mx.nd.ones(64), mx.nd.ones(64)])
        executor.reshape(x=(32, 64)).forward()[0].wait_to_read()

    def test_the_variable_of_the_environment_is_read_with_the_library(self, monkeypatch):
        for name in ("_core", "_onednn"):
            monkeypatch.setattr(native.loader, name, lambda: native.Library("core", frozenset(), "switched off"))
        amp.init("float32")
        net = network(static_alloc=True)
        net(data(1))
        assert not any(kind.startswith("_gluon_amp") for kind in kinds(net))

    def test_a_report_says_which_ran(self):
        amp.init("float32")
        net = network(static_alloc=True)
        found = amp.report(net, data(1), train=True)
        rows = {row.name: row for row in found.operators if row.native}
        assert {row.op for row in rows.values()} >= {"LayerNorm", "clip"}
        assert f"{len(rows)} of the operators ran in C++" in found.summary
        assert all(row.flops and row.observed == "float32" and row.shape for row in rows.values())
        amp.deinit()
        amp.init("float32", disable_passes=["native_operators"])
        assert not any(row.native for row in amp.report(net, data(1)).operators)


def state(shape=(0, 128, 64)):
    """A first state as unrolled cells make it: MXNet finds its batch looking backward."""
    made = op("_zeros", "state", shape=BIG)
    made.attrs = {"shape": str(shape)}
    return made


@pytest.mark.parametrize("shape", [(0, 128, 64), (-1, 128, 64), ()])
def test_shapes_that_mxnet_infers_backward_keep_its_operators(shape):
    assert "_gluon_amp" not in "".join(lines(limited(state(shape))))
    sum_of_unknown = op("broadcast_add", "sum", state(shape), state(shape), shape=BIG)
    assert "_gluon_amp" not in "".join(lines(limited(sum_of_unknown)))


def test_what_is_known_of_either_operand_is_known_of_the_sum():
    known = op("elemwise_add", "sum", state(), variable("x", BIG), shape=BIG)
    assert "_gluon_amp_clip" in "".join(lines(limited(known)))
    assert "_gluon_amp_clip" in "".join(lines(limited(state(BIG))))


def test_a_recurrent_layer_takes_the_batch_from_its_data():
    layer = recurrent()
    layer.shapes = [BIG]
    for name in ("h", "c"):
        first = op("_zeros", name, shape=(2, 4, 16))
        first.attrs = {"shape": "(2, 0, 16)"}
        layer.inputs[2 + (name == "c")] = Entry(first)
    assert "_gluon_amp_clip" in "".join(lines(limited(layer), available=frozenset({"_gluon_amp_clip"})))
    layer.inputs[0] = Entry(state())
    assert "_gluon_amp_clip" not in "".join(lines(limited(layer)))


@requires_core
@pytest.mark.skipif(not native.is_available("_gluon_amp_dense"), reason=native.load()[1].missing)
@pytest.mark.parametrize("inputs", [4, 16])  # too few for a recurrent layer in C++, and enough
def test_a_dense_layer_behind_a_recurrent_one_is_in_cpp(inputs):
    net = nn.HybridSequential()
    net.add(rnn.LSTM(512, input_size=inputs), nn.Dense(512, flatten=False, in_units=512))
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.uniform(shape=(16, 1, inputs))
    expected = results_of_batches(net, "write", [x])
    net.hybridize(static_alloc=True)
    amp.init("float32")
    received = results_of_batches(net, "write", [x])
    for one, other in zip(received, expected):
        assert_close(one, other, 1e-5)
    in_cpp = {row.op for row in amp.report(net, x, train=True).operators if row.native}
    assert in_cpp == {"FullyConnected"} | ({"RNN"} if inputs > 4 else set())


@requires_core
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_an_unrolled_cell_has_a_first_state_without_a_batch(target):
    class Unrolled(HybridBlock):
        def __init__(self):
            super().__init__()
            self.cell = rnn.LSTMCell(512, input_size=32)

        def hybrid_forward(self, F, x):
            return self.cell.unroll(2, x, layout="NTC", merge_outputs=True)[0]

    net = Unrolled()
    net.initialize(mx.init.Xavier())
    x = mx.nd.random.uniform(shape=(64, 2, 32))
    expected = net(x).asnumpy()
    net.hybridize()
    amp.init(target)
    with autograd.record():
        received = net(x)
    received.backward()
    assert_close(received.asnumpy(), expected, 1e-6 if target == "float32" else 0.02)
    symbol = net(mx.sym.var("data"))
    arrays = {name: each.data() for name, each in net.collect_params().items()}
    assert_close(symbol.eval(data=x, **arrays)[0].asnumpy(), expected, 1e-6 if target == "float32" else 0.02)


@pytest.mark.parametrize(("shape", "op_name"), [((32,), "FullyConnected"), ((32, 1), "_gluon_amp_dense")])
def test_a_dense_layer_on_data_of_one_dimension_is_mxnets(shape, op_name):
    units = 512 * 512
    node = op("FullyConnected", "fc", op("relu", "data", variable("x", shape), shape=shape),
              variable("w", (units, 1)), variable("b", (units,)), shape=(32, units), num_hidden=units)
    assert f"fc: {op_name}(data, w, b) -> float32" in lines(node, available=frozenset({"_gluon_amp_dense"}))
