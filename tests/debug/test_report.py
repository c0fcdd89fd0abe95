"""The report of a run, against casts, arithmetic and types worked out by hand, and against MXNet's own monitor."""
from __future__ import annotations

import ctypes
import os
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, nn
from mxnet.ndarray import NDArray, register
from networks import NETWORKS, Attention, Residual, conv_net, gradients, ready, sequential

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet import engine
from gluon_amp._mxnet.engine import Stopwatch
from gluon_amp._mxnet.symbols import dtype_name
from gluon_amp.debug import recording
from gluon_amp.debug.records import MATRIX_OPERATORS
from gluon_amp.machine.dtypes import LOW_PRECISION
from gluon_amp.plan.cached_op import RewritingCachedOp


@pytest.fixture(params=[pytest.param("bfloat16", marks=pytest.mark.bf16), "float16"])
def low(request):
    amp.init(request.param)
    return request.param


def two_layers():
    """A dense layer on both sides of a softmax, which stays in FP32."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(8, in_units=4, use_bias=False), nn.HybridLambda("softmax"),
                nn.Dense(2, in_units=8, use_bias=False))
    return net


@pytest.mark.parametrize("active", [True, False])
def test_two_layers_by_hand(low, active):
    net, data = ready(two_layers(), (3, 4), active=active)
    found = amp.report(net, data)
    first, middle, last = found.operators
    assert [row.op for row in found.operators] == ["FullyConnected", "softmax", "FullyConnected"]
    assert [row.planned for row in found.operators] == [low, "float32", low]
    assert [row.observed for row in found.operators] == [low, "float32", low]
    assert [row.flops for row in found.operators] == [2 * 3 * 8 * 4, 3 * 8, 2 * 3 * 2 * 8]
    # Data and weight for the first; its result for the softmax; weight and softmax for the last, and its result.
    assert [row.casts for row in found.operators] == [2, 1, 3]
    assert [row.bytes_converted for row in found.operators] == [6 * (3 * 4 + 8 * 4), 6 * 3 * 8,
                                                               6 * (2 * 8 + 3 * 8 + 3 * 2)]
    assert [row.path for row in found.operators] == ["0", "1", "2"]
    assert (first.rule, middle.rule, last.rule) == ("LOWER", "FP32", "LOWER")
    assert middle.reason == "probabilities and losses need FP32's resolution"
    assert found.arithmetic_share() == pytest.approx((192 + 96) / (192 + 24 + 96))
    assert found.summary.startswith(f"2 of 3 operators in {low}, 92% of the arithmetic, 6 casts (")
    assert found.mismatches == ()
    assert found.target_dtypes == (low,)


def test_casts_of_the_program_in_a_region_without_amp_run_as_planned():
    class Rounded(Block):
        def forward(self, x):
            with amp.autocast(enabled=False):
                return mx.nd.relu(mx.nd.Cast(x, dtype="float16"))

    amp.init("float16")
    found = amp.report(Rounded(), mx.nd.ones((2, 3)))
    assert [(row.op, row.rule, row.planned, row.observed) for row in found.operators] == [
        ("Cast", "KEEP", "float16", "float16"), ("relu", "FP32", "float32", "float32")]
    assert found.mismatches == ()


def test_inputs_tell_where_they_come_from(low):
    net, data = ready(two_layers(), (3, 4))
    read = amp.report(net, data).operators[2].inputs
    assert read == (("net_hybridlambda0_softmax0", "float32", low, False), (net[2].weight.name, "float32", low, True))


@pytest.mark.bf16
@pytest.mark.parametrize("name", NETWORKS)
def test_observed_types_are_those_of_mxnets_monitor(name):
    amp.init("bfloat16")
    make, shape = NETWORKS[name]
    net, data = ready(make(), shape)
    found = amp.report(net, data)
    symbol, heard = net._cached_op.latest.symbol, {}
    amp.deinit()  # then MXNet runs the rewritten graph as any other, and reports it as it is
    arrays = {**{name: parameter.data() for name, parameter in net.collect_params().items()}, "data": data}

    def listen(output, op, handle):
        array = NDArray(ctypes.cast(handle, mx.base.NDArrayHandle), writable=False)
        heard.setdefault(output.decode(), dtype_name(array.dtype))
    operation = mx.nd.CachedOp(symbol)
    operation._register_op_hook(listen)
    operation(*(arrays[name] for name in symbol.list_inputs()))
    mx.nd.waitall()
    for row in found.operators:
        outputs = [dtype for output, dtype in heard.items() if output.rpartition("_")[0] == row.name]
        assert row.observed == outputs[0], row.name
    assert len(found.operators) == sum(row.observed is not None for row in found.operators)


@pytest.mark.parametrize("name", NETWORKS)
def test_code_that_is_not_hybridized_has_the_same_operators(low, name):
    make, shape = NETWORKS[name]
    net, data = ready(make(), shape, active=False)
    plain = amp.report(net, data)
    net.hybridize()
    graph = amp.report(net, data)
    assert plain.mismatches == graph.mismatches == ()
    # Recurrent layers run bfloat16 in C++, which only graphs have.
    graph_only = ["RNN"] if (name, low) == ("recurrent", "bfloat16") and native.is_available("_gluon_amp_rnn") else []
    if graph_only:
        assert graph.arithmetic_share() > plain.arithmetic_share()
    else:
        assert plain.arithmetic_share() == pytest.approx(graph.arithmetic_share(), abs=0.02)
    counted = ("Convolution", "FullyConnected", "batch_dot", "RNN")
    for op in counted:
        assert ({row.precision for row in graph.operators if row.op == op} == {"bfloat16"} if op in graph_only else
                [row.precision for row in plain.operators if row.op == op]
                == [row.precision for row in graph.operators if row.op == op])
        assert ([row.flops for row in plain.operators if row.op == op]
                == [row.flops for row in graph.operators if row.op == op])
    assert "outside of graphs" in plain.summary
    assert "outside of graphs" not in graph.summary


def test_blocks_that_are_hybridized_inside_plain_ones(low):
    class Mixed(Block):
        def __init__(self):
            super().__init__(prefix="mixed_")
            with self.name_scope():
                self.body, self.head = nn.Dense(8, in_units=4), nn.Dense(2, in_units=8)

        def forward(self, x):
            return self.head(mx.nd.tanh(self.body(x)))
    net = Mixed()
    net.initialize()
    net.body.hybridize()
    found = amp.report(net, mx.nd.ones((3, 4)))
    assert [(row.op, row.path, row.in_graph) for row in found.operators] == [
        ("FullyConnected", "body", True), ("tanh", "", False), ("FullyConnected", "head", False)]
    assert [row.observed for row in found.operators] == [low, "float32", low]
    assert found.operators[1].inputs[0].name == found.operators[0].name


def test_without_amp_everything_is_fp32():
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    found = amp.report(net, data)
    assert {row.observed for row in found.operators} == {"float32"}
    assert found.casts == ()
    assert "0 of 11 operators in low precision, 0% of the arithmetic, 0 casts" in found.summary
    assert "AMP is off\nNext: call amp.init() for training" in found.summary


@pytest.mark.bf16
def test_padding_of_channels_does_not_count_as_the_networks_arithmetic():
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    plain = amp.report(net, data)
    amp.init("bfloat16")
    found = amp.report(net, data)
    assert [row.flops for row in found.operators] == [row.flops for row in plain.operators]
    assert [row.shape for row in found.operators] == [row.shape for row in plain.operators]
    assert any(row.op == "slice_axis" for row in found.inserted)


@pytest.mark.bf16
@pytest.mark.parametrize("optimize", ["none", "all"])
def test_a_converted_network_is_reported_as_it_is(optimize):
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    converted = amp.convert_hybrid_block(net, "bfloat16", data_example=data, optimize=optimize)
    found = amp.report(converted, data)
    layers = [row for row in found.operators if row.op in MATRIX_OPERATORS]
    assert [row.observed for row in layers[1:]] == ["bfloat16"] * 3  # the first has few channels: it depends on the CPU
    assert {row.rule for row in found.operators} == {""}
    assert found.mismatches == ()
    assert found.casts
    amp.init("bfloat16")
    assert [(row.name, row.observed) for row in amp.report(converted, data).operators] == [
        (row.name, row.observed) for row in found.operators]
    if optimize == "none":  # otherwise channels are padded, and the padding is part of the network
        expected = [row.flops for row in amp.report(net, data).operators if row.op in MATRIX_OPERATORS]
        assert [row.flops for row in layers] == expected


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("head", [
    lambda F, x: x.argmax(axis=1).astype("int32"), lambda F, x: x.argmax(axis=1), lambda F, x: F.BlockGrad(x)],
    ids=["integers", "argmax", "BlockGrad"])
def test_times_of_networks_without_a_gradient(hybridize, head):
    class Net(mx.gluon.HybridBlock):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def hybrid_forward(self, F, x):
            return head(F, self.layer(x))

    for layer in (mx.gluon.nn.Dense(3, in_units=4), mx.gluon.nn.Activation("relu")):
        net = Net(layer)
        net.initialize()
        net.hybridize(hybridize)
        found = amp.report(net, mx.nd.ones((2, 4)), train=True, time=True)
        assert found.operators[0].milliseconds > 0


def test_an_operator_that_runs_in_another_type_than_planned_is_named(monkeypatch):
    amp.init("float16")
    net, data = ready(two_layers(), (3, 4))
    call = recording.Recording.call
    monkeypatch.setattr(recording.Recording, "call", lambda self, op, inputs, attrs: call(
        self, op, [array.astype("float16") for array in inputs] if op == "softmax" else inputs, attrs))
    found = amp.report(net, data)
    middle = found.operators[1]
    assert (middle.planned, middle.observed) == ("float32", "float16")
    assert found.mismatches[0] is middle
    assert "Not as planned: net_hybridlambda0_softmax0" in found.summary


def test_operators_of_one_name_are_told_apart():
    data = mx.sym.var("x")
    first = mx.sym.Cast(data, dtype="float16", name="same")
    net = mx.gluon.SymbolBlock(mx.sym.Cast(first, dtype="float32", name="same"), [data])
    found = amp.report(net, mx.nd.ones((2,)))
    assert [(row.name, row.observed) for row in found.operators] == [("same", "float16"), ("same", "float32")]


def test_times_are_those_of_all_operators(low):
    net, data = ready(Attention(), NETWORKS["attention"][1])
    forward = amp.report(net, data, time=True)
    both = amp.report(net, data, train=True, time=True)
    for found in (forward, both):
        assert found.timed
        assert all(row.milliseconds > 0 for row in found.operators if row.flops)
        assert found.milliseconds == pytest.approx(sum(row.milliseconds for row in (*found.operators, *found.inserted))
                                                   + found.other_milliseconds)
    assert amp.report(net, data).milliseconds == 0
    assert (forward.step_milliseconds, both.step_milliseconds > 0) == (0, True)


@pytest.mark.parametrize(("hybridized", "grad_req", "parts"), [
    (True, "write", ["A step takes", "by the rates of"]), (True, "null", []), (False, "write", ["A step takes"])])
def test_the_time_of_a_step_beside_the_one_by_rates(hybridized, grad_req, parts):
    """Rates tell of graphs; without parameters to train there is no step."""
    amp.init("float32")
    net, data = ready(conv_net(), NETWORKS["conv"][1])
    net.hybridize(hybridized)
    net.collect_params().setattr("grad_req", grad_req)
    found = amp.report(net, data, train=True, time=True)
    assert [part for part in ("A step takes", "by the rates of") if part in found.summary] == parts


class Both(mx.gluon.nn.Dense):
    def forward(self, x):
        return super().forward(x), x  # which has no gradient


def looped(F, x):
    return F.contrib.while_loop(lambda y: y.sum() < 100, lambda y: ([], [y + x]), [x], max_iterations=2)[1][0]


def test_times_where_shapes_are_unknown_and_outputs_have_no_gradient():
    amp.init("float32")
    behind_a_loop = sequential([mx.gluon.nn.HybridLambda(looped), mx.gluon.nn.Dense(3, in_units=4)])
    for net in (behind_a_loop, Both(3, in_units=4)):
        net.initialize()
        assert "A step takes" in amp.report(net, mx.nd.ones((2, 4)), train=True, time=True).summary


def test_times_leave_no_file_and_remove_none(monkeypatch):
    """MXNet removes the file that its profiler is to write: as root /dev/null, too."""
    names, original = [], engine.profiler.set_config

    def set_config(**options):
        names.append(options["filename"])
        assert not os.path.exists(names[-1])
        original(**options)

    monkeypatch.setattr(engine.profiler, "set_config", set_config)
    with Stopwatch() as stopwatch:
        mx.nd.ones((64, 64)).wait_to_read()
        assert stopwatch.lap() > 0
    assert names[1:] == [""]
    directory = os.path.dirname(names[0])
    assert not os.path.exists(directory)
    os.mkdir(directory)
    time.sleep(2.2)  # MXNet's thread writes once a second
    os.rmdir(directory)


@pytest.mark.parametrize("active", [True, False])
def test_the_network_is_left_as_it_was(low, active):
    net, data = ready(conv_net(), NETWORKS["conv"][1], active=active)
    gradients(net, data)
    before = {name: [array.asnumpy() for array in (*parameter.list_data(), *(parameter.list_grad()
                     if parameter.grad_req != "null" else ()))] for name, parameter in net.collect_params().items()}
    amp.report(net, data * 3, train=True, time=True)
    for name, parameter in net.collect_params().items():
        arrays = [*parameter.list_data(), *(parameter.list_grad() if parameter.grad_req != "null" else ())]
        for array, expected in zip(arrays, before[name]):
            np.testing.assert_array_equal(array.asnumpy(), expected, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", None])
@pytest.mark.parametrize("ranges", [False, True])
def test_nothing_stays_in_place(dtype, ranges):
    if dtype:
        amp.init(dtype)
    names = [(Block, "__call__"), (register, "_imperative_invoke"), (RewritingCachedOp, "__call__"),
             (HybridBlock, "_call_cached_op"), (NDArray, "reshape")]
    before = [getattr(*name) for name in names]
    net, data = ready(Residual(), NETWORKS["residual"][1])
    net(data)
    amp.report(net, data, train=True, ranges=ranges)
    assert [getattr(*name) for name in names] == before
    assert all(operation._monitor_callback is None for operation in net._cached_op._operations.values())


def test_the_callers_own_recording_goes_on(low):
    net, data = ready(two_layers(), (3, 4))
    with autograd.record():
        amp.report(net, data)
        loss = net(data).sum()
    loss.backward()
    assert np.isfinite(net[0].weight.grad().asnumpy()).all()


class Decoding(HybridBlock):
    """A block that does more in inference, as detection networks, and whose trace holds one of the two."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.layer = nn.Dense(4)

    def hybrid_forward(self, F, x):
        y = self.layer(x)
        return y if autograd.is_training() else F.tanh(F.exp(y))


@pytest.mark.parametrize("active", [True, False])
def test_what_gives_parameters_their_shape_leaves_no_trace(low, active):
    net = Decoding()
    net.initialize()
    net.hybridize(active)
    found = amp.report(net, mx.nd.ones((2, 3)), train=True)
    assert [row.op for row in found.operators] == ["FullyConnected"]


def test_tables(low):
    net, data = ready(Attention(), NETWORKS["attention"][1])
    found = amp.report(net, data, time=True)
    assert found.summary == str(found)
    assert found.table().row_count == len(found.operators)
    kinds = found.table("op")
    assert kinds.row_count == len({row.op for row in found.operators})
    assert [column.header for column in kinds.columns][-1] == "time"
    assert found.table("block").row_count == len({row.path for row in found.operators})
    with pytest.raises(ValueError, match="expected 'operator', 'block' or 'op', received by='layer'"):
        found.table("layer")


class TestSummary:
    """At most six lines, each of which has a cause that is brought about here."""

    @pytest.fixture
    def dense(self):
        def make(active=True):
            net = nn.HybridSequential(prefix="net_")
            with net.name_scope():
                net.add(nn.Dense(64, in_units=64))
            return ready(net, (32, 64), active=active)
        return make

    def test_what_is_expensive_in_fp32(self, low):
        found = amp.report(*ready(Attention(), NETWORKS["attention"][1]), train=True)
        wide = max((row for row in found.operators if row.observed == "float32"), key=lambda row: row.flops)
        first, second, *others = found.summary.splitlines()
        count = sum(row.observed == low for row in found.operators)
        assert first.startswith(f"{count} of {len(found.operators)} operators in {low}")
        assert second.startswith("In float32: ")
        assert f"of the arithmetic, most of it {wide.name} (" in second
        assert wide.reason in second
        assert len(others) <= 4

    @pytest.mark.parametrize("lists", [{"fp32_ops": ["FullyConnected"]}, {"target_precision_ops": ["Convolution"]}])
    def test_lists_of_the_user(self, dense, lists):
        amp.init("float16", **lists)
        found = amp.report(*dense(), train=True)
        assert "Next: operator lists, exclusions and regions of the program keep 100%" in found.summary

    def test_code_that_is_not_hybridized(self, low, dense):
        found = amp.report(*dense(active=False), train=True)
        assert "Next: net.hybridize(static_alloc=True, static_shape=True)" in found.summary

    @pytest.mark.bf16
    def test_casts_of_parameters_in_inference(self, dense):
        amp.init("bfloat16")
        assert "Next: for inference amp.convert_hybrid_block(net) casts 2 parameters" in amp.report(*dense()).summary
        assert "Next" not in amp.report(*dense(), train=True).summary

    def test_values_near_the_limit_and_beyond(self, dense):
        amp.init("float16")
        net, data = dense()
        net[0].weight.set_data(mx.nd.eye(64) * 1000)
        found = amp.report(net, mx.nd.ones((2, 64)) * 8, ranges=True)
        assert found.operators[0].largest == 8000
        assert "Values: at most 8e+03 in float16, of net_dense0_fwd, which can double 3.0 times" in found.summary
        assert "Values that overflow float16: net_dense0_fwd\n" in amp.report(net, data * 1e3, ranges=True).summary
        net[0].weight.set_data(mx.nd.eye(64) * 1e5)
        found = amp.report(net, data, ranges=True)
        assert "Values that overflow float16: net_dense0_weight" in found.summary
        assert "Next: keep the operators whose values overflow in FP32" in found.summary

    @pytest.mark.parametrize("active", [True, False])
    def test_a_loss_scale_for_the_gradients(self, dense, active):
        amp.init("float16")
        net, data = dense(active)
        found = amp.report(net, data, train=True, ranges=True, loss=lambda output: output.sum() * 4)
        assert found.operators[0].largest_gradient == 32 * 4  # of the bias
        assert "Loss scale: the gradients of the loss reach 128; 16 leaves them room" in found.summary  # 65504 / 2048
        assert "the sum of the outputs" in amp.report(net, data, train=True, ranges=True).summary

    def test_masks_overflow_nothing(self):
        class Masked(HybridBlock):
            def hybrid_forward(self, F, x):
                return F.where(x > 0.5, x, F.ones_like(x) * -np.inf) * 1

        amp.init("float16")
        assert "overflow" not in amp.report(*ready(Masked(), (4, 8)), ranges=True).summary


@pytest.mark.parametrize(("arguments", "message"), [
    (("net", mx.nd.ones(1)), "a Gluon block"), ((conv_net(), "data"), "an array"), ((conv_net(), None), "an array")])
def test_wrong_arguments(arguments, message):
    with pytest.raises(TypeError, match=message):
        amp.report(*arguments)
    with pytest.raises(TypeError, match="True or False, received time=1"):
        amp.report(*arguments, time=1)


def test_a_network_that_is_not_initialized():
    with pytest.raises(amp.StateError, match="parameters are not initialized"):
        amp.report(conv_net(), mx.nd.ones((1, 3, 16, 16)))


ZOO = ["ssd_512_mobilenet1.0", "yolo3_mobilenet0.25", "transformer",
       *(pytest.param(name, marks=pytest.mark.slow) for name in ("faster_rcnn", "faster_rcnn_fpn", "mask_rcnn"))]


@pytest.mark.bf16
@pytest.mark.parametrize("name", ZOO)
def test_networks_of_the_zoo(name):
    from zoo_networks import make_task

    amp.init("bfloat16")
    task = make_task(name)
    task.net.hybridize()
    data = mx.nd.ones((4, 12)) if task.data is None else task.data[:1]
    found = amp.report(task.net, data)
    assert found.mismatches == ()
    assert found.arithmetic_share() > (0.8 if name == "transformer" else 0.9)
    assert all(row.precision in ("float32", "int32", "int64", "bool", *LOW_PRECISION) for row in found.operators)
    assert found.table("block").row_count > 3


def test_blocks_of_an_exported_network_have_the_names_that_they_had(tmp_path):
    net = sequential(lambda: [nn.Dense(4, in_units=4, activation="relu"), nn.Dense(2, in_units=4)], prefix="mine_")
    net(mx.nd.ones((1, 4)))
    net.export(str(tmp_path / "net"))
    read = mx.gluon.SymbolBlock.imports(str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params"))
    found = amp.report(read, mx.nd.ones((1, 4)))
    assert [row.block for row in found.operators] == ["mine_dense0", "mine_dense0_relu", "mine_dense1"]
