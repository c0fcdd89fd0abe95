"""Plans and settings: each made once, none kept for longer than it can be asked for, and cheap for new shapes."""
from __future__ import annotations

import gc

import mxnet as mx
import numpy as np
import pytest
from graphs import plans_of
from mxnet import gluon
from mxnet.gluon import nn
from networks import sequential

import gluon_amp as amp
from gluon_amp.plan import planner
from gluon_amp.plan.planner import Planner, Traced
from gluon_amp.rules import Policy
from gluon_amp.state.in_force import in_force
from gluon_amp.state.state import State

pytestmark = pytest.mark.filterwarnings("ignore:AMP will be slow")
CPU = "bfloat16"


def network(channels=32):
    return sequential(lambda: [nn.Conv2D(channels, 3, padding=1, in_channels=channels),
                               nn.Conv2D(channels, 1, in_channels=channels), nn.GlobalAvgPool2D(),
                               nn.Dense(4, in_units=channels)], prefix="net_")


def images(batch=2, side=8, channels=32):
    return mx.nd.ones((batch, channels, side, side))


class TestStates:
    def test_many_settings_are_not_kept(self):
        for number in range(100):
            in_force.remembered(number, lambda: State({"cpu": Policy(CPU)}))
        assert len(in_force.states) <= 16
        amp.deinit()
        assert not in_force.states


@pytest.mark.bf16
class TestVariants:
    def test_a_region_in_a_loop_makes_one(self):
        net = network()
        for _ in range(20):
            with amp.autocast():
                net(images())
        assert len(plans_of(net)) == 1

    def test_a_region_with_another_type_makes_one_more(self):
        amp.init(CPU)
        net = network()
        for _ in range(5):
            net(images())
            with amp.autocast(dtype="float16"):
                net(images())
        assert len(plans_of(net)) == 2

    def test_deinit_drops_what_nothing_can_reach(self):
        net = network()
        for _ in range(4):
            amp.init(CPU)
            net(images())
            assert len(plans_of(net)) == 1
            amp.deinit()
            gc.collect()
            assert not plans_of(net)


@pytest.mark.bf16
class TestShapes:
    def test_other_sizes_are_planned_again_only_where_another_operator_is_kept(self, monkeypatch):
        made, make = [], Planner._make
        monkeypatch.setattr(Planner, "_make", lambda *args: made.append(args) or make(*args))
        amp.init(CPU)
        net = network()
        for batch, side in [(2, 8), (3, 8), (2, 9), (1, 16), (5, 12)]:
            assert net(images(batch, side)).shape == (batch, 4)
        first = len(made)
        net(images(2, 1))  # the filters of the first convolution meet padding only
        net(images(4, 1))
        assert len(made) == first + 1
        (latest,) = [node for node in net._cached_op.latest.graph.operators() if node.name == "net_conv0_fwd"]
        assert latest.decision.rule == "FP32"

    def test_a_shape_that_was_seen_asks_nothing(self, monkeypatch):
        amp.init(CPU)
        net = network()
        net(images())
        monkeypatch.setattr(Traced, "shaped", None)
        monkeypatch.setattr(Planner, "_make", None)
        net(images())

    def test_a_network_is_fed_many_lengths(self):
        amp.init(CPU)
        net = sequential(lambda: [nn.Conv1D(16, 3, padding=1, in_channels=16)], prefix="net_")
        for length in range(1, 300):
            assert net(mx.nd.ones((1, 16, length))).shape == (1, 16, length)
        ((shaped, plans),) = net._cached_op.planner._made.values()
        assert len(shaped) == planner.MOST_SHAPES
        assert len(plans) == 2  # one element, at which parts of the filters meet padding only, and more

    def test_a_report_of_another_shape_shows_the_plan_that_runs(self):
        amp.init(CPU)
        net = network()
        net(images(2, 8))
        plan = net._cached_op.latest
        found = amp.report(net, images(3, 12))
        assert net._cached_op.latest is plan
        assert {row.name: row.shape for row in found.operators}["net_conv0_fwd"] == (3, 32, 12, 12)
        assert all(row.observed == row.planned for row in found.operators)


@pytest.mark.bf16
def test_results_do_not_depend_on_the_shape_that_came_first():
    random = np.random.RandomState(2)
    data = [mx.nd.array(random.normal(size=(2, 32, side, side))) for side in (8, 12, 1)]
    net = network()
    amp.init(CPU)
    forwards = [net(x).asnumpy() for x in data]
    net.hybridize()
    backwards = [net(x).asnumpy() for x in reversed(data)]
    for a, b in zip(forwards, reversed(backwards)):
        np.testing.assert_array_equal(a, b)


class TestTypesOfArguments:
    """Parameters are asked for their types once, data at every call."""

    def test_a_block_without_parameters(self):
        class Twice(gluon.HybridBlock):
            def hybrid_forward(self, F, x):
                return x * 2

        amp.init("float32")
        net = Twice()
        net.hybridize()
        assert [net(mx.nd.ones(3, dtype=dtype)).dtype for dtype in ("float32", "float64", "int32")] == [
            np.float32, np.float64, np.int32]

    def test_parameters_that_are_cast_or_set_anew(self):
        amp.init("float32")
        net = network()
        net.hybridize()
        x = images()
        expected = net(x).asnumpy()
        for dtype in ("float64", "float32"):
            net.cast(dtype)
            assert net(x.astype(dtype)).dtype == np.dtype(dtype)
        for parameter in net.collect_params().values():
            parameter._load_init(parameter.data() * 2, mx.cpu())
        assert not np.allclose(net(x).asnumpy(), expected)
