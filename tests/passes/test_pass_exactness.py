"""Every optional pass acts on a network made for it, and changes neither its values nor its gradients.

Results of small integers, whose sums are exact in FP32 and fit bfloat16, are equal bit by bit; those of random numbers
are some roundings off. A new pass needs a case here: a test says so.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LACKING, prefer
from graphs import rewrite
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn
from networks import Computed, masked, outputs_of

import gluon_amp as amp
from gluon_amp import native, passes
from gluon_amp._mxnet import blocks
from gluon_amp._mxnet.symbols import analyse, from_graph, to_graph
from gluon_amp.machine.costs import Kernel, preferring
from gluon_amp.machine.dtypes import cpu_support
from gluon_amp.plan.cached_op import prepared_operations
from gluon_amp.rules import Device, Policy

BOUNDS = {"float32": 1e-5, "bfloat16": 0.03, "float16": 0.004}  # of random numbers, relative, in the 2-norm
BF16 = pytest.param("bfloat16", marks=pytest.mark.bf16)
AMX = pytest.param("bfloat16", marks=[pytest.mark.bf16, pytest.mark.skipif(
    not cpu_support().amx, reason=f"{LACKING} AMX, which the pass is for")])
_CORE, _ONEDNN = native.load()
NEEDS_CORE = pytest.mark.skipif(bool(_CORE.missing), reason=_CORE.missing)
NEEDS_ONEDNN = pytest.mark.skipif(bool(_ONEDNN.missing), reason=_ONEDNN.missing)
CORE, ONEDNN = (pytest.param("float32", marks=mark) for mark in (NEEDS_CORE, NEEDS_ONEDNN))
LOW_ONEDNN = pytest.param("bfloat16", marks=[pytest.mark.bf16, NEEDS_ONEDNN])
EVERYWHERE = ("float32", "float16", BF16)


class Anchors(HybridBlock):
    """Anchors cut to the size of a feature map, as GluonCV's detectors do it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.feature = nn.Conv2D(32, 3, in_channels=16)
            self.anchors = self.params.get("anchors", shape=(1, 1, 8, 8))

    def hybrid_forward(self, F, x, anchors):
        y = self.feature(x)
        return F.broadcast_mul(y, F.slice_like(anchors, y * 0, axes=(2, 3)))


class Fusable(HybridBlock):
    """A convolution with an activation, and one with a sum and an activation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with self.name_scope():
            self.first, self.second = nn.Conv2D(16, 1, in_channels=16), nn.Conv2D(16, 1, in_channels=16)

    def hybrid_forward(self, F, x):
        return F.relu(self.second(F.relu(self.first(x))) + x)


def chain(*layers):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(*(make() for make in layers))
    return net


def folded():
    return chain(lambda: nn.Conv2D(16, 3, in_channels=16), lambda: nn.BatchNorm(in_channels=16, epsilon=0.25))


def dropped():
    return chain(lambda: nn.Conv2D(16, 3, in_channels=16), lambda: nn.Dropout(0.5),
                 lambda: nn.HybridLambda(lambda F, x: F.identity(x)), lambda: nn.Activation("relu"))


def between(function):
    """An operator whose low-precision kernel is slow, between convolutions."""
    return lambda: chain(lambda: nn.Conv2D(64, 3, padding=1, in_channels=16), lambda: nn.HybridLambda(function),
                         lambda: nn.Conv2D(16, 1, in_channels=64))


def convolution(filters, kernel):
    return lambda: chain(lambda: nn.Conv2D(filters, kernel, in_channels=16))


@dataclass(frozen=True)
class Case:
    """A network that a pass acts on."""

    network: Callable[[], HybridBlock]  # makes it, with all shapes given
    targets: tuple  # the types in which the pass acts
    shape: tuple = (1, 16, 6, 6)  # of its data


# 20 output channels of one convolution, and 20 input channels of the next.
PADDED = Case(lambda: chain(lambda: nn.Conv2D(20, 3, in_channels=16), lambda: nn.Conv2D(32, 1, in_channels=20)),
              (BF16,))
SHAPED = Case(lambda: Anchors(prefix="net_"), ("float16", BF16))
RECTIFIED = Case(between("relu"), (BF16,))

STRIDED = Case(lambda: chain(lambda: nn.Conv2D(32, 7, 2, 3, in_channels=3)), (AMX,), shape=(1, 3, 13, 12))

LIMITED = Case(lambda: chain(lambda: nn.Conv2D(64, 1, in_channels=16),
                             lambda: nn.HybridLambda(lambda F, x: F.clip(x, -999, 999)),
                             lambda: nn.Conv2D(16, 1, in_channels=64)), (CORE,), shape=(8, 16, 6, 6))

GATED = Case(lambda: chain(lambda: nn.Conv2D(64, 1, in_channels=16),
                           lambda: nn.HybridLambda(lambda F, x: x * (F.clip(x + 4.0, 0, 8) / 4.0)),
                           lambda: nn.Conv2D(16, 1, in_channels=64)), (CORE,), shape=(8, 16, 6, 6))

# Convolutions with limits between them; the first reads the image, and stays MXNet's. Each channel apart: what it gives
# fits bfloat16.
CHAINED = Case(lambda: chain(*[lambda: nn.Conv2D(16, 1, groups=16, in_channels=16),
                               lambda: nn.HybridLambda(lambda F, x: F.clip(x, -1e4, 1e4))] * 6),
               (ONEDNN, LOW_ONEDNN), shape=(2, 16, 6, 6))

# 1 is put around each map, and 1 more by the convolution itself.
SPACED = Case(lambda: chain(
    lambda: nn.HybridLambda(lambda F, x: F.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 1, 1, 1, 1))),
    lambda: nn.Conv2D(16, 3, padding=1, in_channels=16)), EVERYWHERE)

# Passes that change parameters, or behaviour in training, or that MXNet does.
OF_WEIGHTS = {"drop_training", "fold_weights", "fold_batch_norm", "cast_params_offline", "fuse"}

TRAINING = {"hard_swish": GATED, "channels_last": CHAINED, "native_operators": LIMITED,
            "native_activations": RECTIFIED, "align_channels": PADDED, "shape_operands": SHAPED, "fold_stride": STRIDED,
            "fold_padding": SPACED}
INFERENCE = {
    "native_activations": RECTIFIED,
    "drop_training": Case(dropped, EVERYWHERE),
    "fold_weights": Case(lambda: Computed(masked, prefix="net_"), EVERYWHERE),
    "fold_batch_norm": Case(folded, EVERYWHERE),
    "shape_operands": SHAPED,
    "fold_padding": SPACED,
    "align_channels": Case(convolution(260, 3), ("float32", BF16)),
    "dilate_pointwise": Case(convolution(32, 1), (AMX,)),
    "cast_params_offline": Case(convolution(32, 3), ("float16", BF16)),
    "fuse": Case(lambda: Fusable(prefix="net_"), ("float32", BF16))}


def expand(cases):
    """Each case with each of its types, and the marks of the type."""
    return [pytest.param(name, *getattr(target, "values", (target,)), marks=getattr(target, "marks", ()))
            for name, case in cases.items() for target in case.targets]


def test_every_optional_pass_has_a_case():
    for where, cases in (("training", TRAINING), ("inference", INFERENCE)):
        assert {each.name for each in passes.PASSES if where in each.where and not each.required} == set(cases)


def draw(name, shape, random, integers):
    """Values of a parameter, such that every result is exact in bfloat16 where they are integers."""
    if name.endswith("running_var"):
        return random.choice([0.75, 3.75], shape) if integers else random.uniform(0.5, 2, shape)  # + 0.25: squares
    if name.endswith("gamma"):
        return np.full(shape, 2.0) if integers else random.uniform(0.5, 2, shape)
    return random.randint(-1, 2, shape) if integers else random.normal(size=shape)


def build(case, integers):
    """Make the network and its data."""
    random = np.random.RandomState(7)
    net = case.network()
    net.initialize()
    for name, parameter in net.collect_params().items():
        parameter.set_data(mx.nd.array(draw(name, parameter.shape, random, integers)))
    net.hybridize()
    return net, mx.nd.array(draw("data", case.shape, random, integers))


def train(net, data, grad_req):
    """Values and all gradients, for `add` of two passes. The head gradient is 1, -1 or 0."""
    net.collect_params().setattr("grad_req", grad_req)
    net.collect_params(".*running.*").setattr("grad_req", "null")
    data.attach_grad(grad_req)
    for _ in range(2 if grad_req == "add" else 1):
        with autograd.record():
            result = net(data)
        result.backward(mx.nd.array(np.random.RandomState(3).randint(-1, 2, result.shape)))
    gradients = {name: parameter.grad().asnumpy() for name, parameter in net.collect_params().items()
                 if parameter.grad_req != "null"}
    return {"output": result.asnumpy(), "data": data.grad.asnumpy(), **gradients}


def assert_equal(expected, found, bound=0):
    """Compare arrays bit by bit, or in the 2-norm."""
    for name, values in expected.items():
        assert np.linalg.norm(values - found[name]) <= bound * np.linalg.norm(values), name


def outline(graph):
    """What a graph does, without the names of what was inserted."""
    return [(node.op, sorted(node.attrs.items()), [entry.dtype for entry in node.inputs]) for node in graph.nodes()]


class TestAlone:
    """The pass by itself, on a graph that is executed in FP32: on any machine."""

    CASES = sorted({**INFERENCE, **TRAINING}.items())

    def rewritten(self, name, symbol, case, net, grad_req):
        """Apply a pass to a symbol, as for a CPU with AMX, but put no casts in."""
        where = next(each for each in passes.PASSES if each.name == name).where
        others = frozenset(each.name for each in passes.PASSES) - {"assign_dtypes", "identities", name}
        target = "float32" if case.targets[0] in (CORE, ONEDNN) else "bfloat16"
        policy = Policy(target, training="training" in where, disabled_passes=others)
        graph = to_graph(symbol)
        shapes = {"data": case.shape, **{key: value.shape for key, value in net.collect_params().items()}}
        analyse(symbol, graph, dict.fromkeys(shapes, "float32"), shapes)
        before = outline(graph)
        guarded = frozenset(shapes) if grad_req == "add" else frozenset()
        device = Device(32, amx=True, measured=preferring(Kernel(True, nhwc=name == "channels_last")))
        rewrite(graph, policy, device, accumulated=guarded, native=native.is_available, trains=True)
        assert outline(graph) != before
        return from_graph(graph, symbol)

    def execute(self, symbol, net, data, grad_req):
        arrays = {"data": data, **{key: value.data() for key, value in net.collect_params().items()}}
        gradients = {key: mx.nd.zeros(value.shape) for key, value in arrays.items()}
        executor = symbol.bind(mx.cpu(), arrays, gradients, grad_req)
        for _ in range(2 if grad_req == "add" else 1):
            (result,) = executor.forward(is_train=True)
            head = np.random.RandomState(3).randint(-1, 2, result.shape)
            executor.backward([mx.nd.array(head)])
        return {"output": result.asnumpy(), **{key: value.asnumpy() for key, value in gradients.items()}}

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    @pytest.mark.parametrize("name", [
        pytest.param(name, marks={"native_operators": NEEDS_CORE, "hard_swish": NEEDS_CORE,
                                  "channels_last": NEEDS_ONEDNN}.get(name, ()))
        for name in passes.list_passes() if name not in OF_WEIGHTS])
    def test_values_and_gradients_are_those_of_the_graph_as_traced(self, name, grad_req):
        case = TRAINING.get(name) or INFERENCE[name]
        net, data = build(case, integers=True)
        symbol = net(mx.sym.var("data"))
        assert_equal(self.execute(symbol, net, data, grad_req),
                     self.execute(self.rewritten(name, symbol, case, net, grad_req), net, data, grad_req))


class TestTraining:
    """Under ``amp.init``, with the pass and without."""

    @pytest.fixture(autouse=True)
    def in_cpp(self, monkeypatch):
        """Let operators in C++ be the fastest where there are some."""
        prefer(monkeypatch, nhwc=True)

    def run(self, case, target, off, integers, grad_req):
        amp.init(target, disable_passes=off)
        net, data = build(case, integers)
        results = train(net, data, grad_req)
        (operation,) = [operation for _, operation in prepared_operations(net)]
        plan = operation.latest
        amp.deinit()
        return results, outline(plan.graph)

    @pytest.mark.parametrize("grad_req", ["write", "add"])
    @pytest.mark.parametrize("integers", [True, False], ids=["integers", "random"])
    @pytest.mark.parametrize(("name", "target"), expand(TRAINING))
    def test_values_and_gradients(self, name, target, integers, grad_req):
        case = TRAINING[name]
        on, plan = self.run(case, target, (), integers, grad_req)
        off, plain = self.run(case, target, (name,), integers, grad_req)
        assert plan != plain
        fp32 = train(*build(case, integers), grad_req)
        for found in (on, off):
            assert_equal(fp32, found, 0 if integers else BOUNDS[target])

    @pytest.mark.parametrize(("name", "target"), expand(TRAINING))
    def test_other_numbers_and_sizes_of_images(self, name, target):
        """A graph is planned for the first ones, and serves others."""
        def in_turn():
            net, data = build(TRAINING[name], integers=True)
            batch, channels, height, width = data.shape
            train(net, data, "write")
            other = np.random.RandomState(5).randint(-1, 2, (batch + 1, channels, height - 2, width - 1))
            return train(net, mx.nd.array(other), "write")
        expected = in_turn()
        amp.init(target)
        assert_equal(expected, in_turn())


class TestConversion:
    """Converted with the pass and without; there are no gradients."""

    def run(self, case, target, off, integers):
        net, data = build(case, integers)
        converted = amp.convert_hybrid_block(net, target, data_example=data, disable_passes=off)
        _, symbol = blocks.graph_of(converted)
        return {"output": outputs_of(converted, data)[0]}, outline(to_graph(symbol))

    @pytest.mark.parametrize("integers", [True, False], ids=["integers", "random"])
    @pytest.mark.parametrize(("name", "target"), expand(INFERENCE))
    def test_values(self, name, target, integers):
        case = INFERENCE[name]
        on, graph = self.run(case, target, (), integers)
        off, plain = self.run(case, target, (name,), integers)
        assert graph != plain
        fp32 = {"output": outputs_of(*build(case, integers))[0]}
        for found in (on, off):
            assert_equal(fp32, found, 0 if integers else BOUNDS[target])
