"""Weights that do not fit, and static scales, against NumPy's own float16 and numbers worked out by hand."""
from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import NETWORKS, conv_net, ready

import gluon_amp as amp
from gluon_amp.debug.formats import losses
from gluon_amp.dtypes import FORMATS

FLOAT16 = FORMATS["float16"]


@given(st.floats(min_value=-1e6, max_value=1e6, width=32))
def test_float16_as_numpy_rounds_it(value):
    found = losses(np.array([value], np.float32), FLOAT16)
    with np.errstate(over="ignore"):
        rounded = np.float16(np.float32(value))
    assert found.overflowed == np.isinf(rounded)
    assert found.flushed == (rounded == 0 and value != 0)
    assert found.largest == abs(np.float32(value))


@pytest.mark.parametrize(("value", "kind"), [
    (65504.0, None), (65519.0, None), (65520.0, "overflowed"), (2.0 ** -14, None), (2.0 ** -15, "subnormal"),
    (2.0 ** -24, "subnormal"), (2.0 ** -25, "flushed"), (0.0, None), (np.inf, "not_finite"), (np.nan, "not_finite")])
def test_float16_at_its_limits(value, kind):
    found = losses(np.array([value]), FLOAT16)
    counts = {name: getattr(found, name) for name in ("overflowed", "flushed", "subnormal", "not_finite")}
    assert counts == {name: int(name == kind) for name in counts}


def test_bfloat16_has_the_range_of_fp32():
    form = FORMATS["bfloat16"]
    assert form.largest == pytest.approx(3.3895314e38)
    assert form.normal == np.finfo(np.float32).tiny
    found = losses(np.array([3.4e38, 1e38, 1e-38, 1e-41]), form)
    assert (found.overflowed, found.subnormal, found.flushed) == (1, 1, 1)
    assert form.headroom(form.largest / 4) == pytest.approx(2.0)


@pytest.fixture
def net():
    found, _ = ready(conv_net(), NETWORKS["conv"][1])
    weight = found[4].weight.data()
    weight[0, 0, 0, 0], weight[0, 0, 0, 1], weight[0, 0, 0, 2] = 1e6, 1e-9, 0.0
    found[1].running_var.data()[:] = 1e-9
    return found


def test_a_network_by_hand(net):
    found = amp.preflight(net, target_dtype="float16")
    rows = {row.name: row for row in found.parameters}
    weight = rows["net_conv1_weight"].losses
    assert (weight.count, weight.largest, weight.overflowed, weight.flushed) == (32 * 8 * 9, 1e6, 1, 1)
    assert rows["net_batchnorm0_running_var"].losses.flushed == 32
    assert [row.name for row in found.problems] == ["net_conv1_weight", "net_batchnorm0_running_var"]
    assert "net_conv1_weight (of 2304 values 1 overflows, 1 becomes zero)" in found.summary
    assert found.table().row_count >= 2
    assert json.loads(json.dumps(found.to_dict()))["target_dtype"] == "float16"


def test_with_data_what_stays_fp32_is_no_problem(net):
    amp.init("float16")
    found = amp.preflight(net, mx.nd.ones(NETWORKS["conv"][1]))
    assert [row.name for row in found.problems] == ["net_conv1_weight"]
    assert found.target_dtype == "float16"
    lowered = {row.name for row in found.parameters if row.is_lowered}
    assert "net_dense0_weight" in lowered
    assert "net_batchnorm0_gamma" not in lowered
    assert found.summary.startswith(f"1 of {len(lowered)} parameters read in low precision do not fit in float16: ")


def test_the_summary_is_of_what_is_read_in_low_precision(net):
    net[4].weight.set_data(mx.nd.ones(net[4].weight.shape))
    amp.init("float16")
    found = amp.preflight(net, mx.nd.ones(NETWORKS["conv"][1]))
    assert not all(row.fits for row in found.parameters)  # the running variance, which stays FP32
    count = sum(row.is_lowered for row in found.parameters)
    assert found.summary == f"all {count} parameters read in low precision fit in float16"
    amp.deinit()
    assert amp.preflight(net, mx.nd.ones(NETWORKS["conv"][1])).summary == "no parameter is read in low precision"


def test_a_sound_network():
    found, _ = ready(conv_net(), NETWORKS["conv"][1])
    result = amp.preflight(found, target_dtype="bfloat16")
    assert result.problems == ()
    assert str(result) == f"all {len(result.parameters)} parameters fit in bfloat16"


def test_wrong_arguments():
    with pytest.raises(amp.DTypeError, match="received target_dtype='int8'"):
        amp.preflight({}, target_dtype="int8")
    with pytest.raises(TypeError, match="no data beside a dict"):
        amp.preflight({}, mx.nd.ones(1), target_dtype="float16")
    with pytest.raises(TypeError, match="a Gluon block, or a dict"):
        amp.preflight(3, target_dtype="float16")
    with pytest.raises(TypeError, match=r"expected an NDArray, received net\['w'\]="):
        amp.preflight({"w": np.ones(3, np.float32)})
    with pytest.raises(amp.StateError, match=r"preflight: .*initialized"):
        amp.preflight(nn.Dense(2, in_units=2), target_dtype="float16")


class TestScale:
    @pytest.mark.parametrize(("norms", "headroom", "scale"), [
        ([3.0, 5.0], 8, 1024.0),  # 65504 / (8 * 5) = 1637.6
        ([1.0], 1, 32768.0),
        ([1e-9, float("inf"), float("nan")], 16, 2.0 ** 24),  # no more than what a dynamic scale grows to
        ([1e6], 1, 2.0 ** -4)])  # 0.0655
    def test_of_norms(self, norms, headroom, scale):
        found = amp.suggest_scale(norms, target_dtype="float16", headroom=headroom)
        assert found.scale == scale
        assert found.flushed is None

    def test_bfloat16_needs_none(self):
        assert amp.suggest_scale([1e-9], target_dtype="bfloat16").scale == 1.0

    def weights_with_gradients(self, *values):
        net = nn.Dense(1, in_units=len(values), use_bias=False)
        net.initialize()
        with autograd.record():
            loss = net(mx.nd.array([values])).sum()
        return net, loss

    def test_of_a_network(self):
        net, loss = self.weights_with_gradients(2.0, 1e-8, 1e-6, 0.0)
        loss.backward()
        found = amp.suggest_scale(net, target_dtype="float16", headroom=16)
        assert found.scale == 1024.0  # 65504 / 32 = 2047
        assert found.largest == 2.0
        assert (found.flushed_without, found.flushed) == (0.25, 0.0)
        assert "1024" in str(found)

    def test_of_a_trainer_without_the_scale_that_its_gradients_carry(self):
        amp.init("float16")
        net, loss = self.weights_with_gradients(2.0, 1.0)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        amp.init_trainer(trainer, 64.0)
        with autograd.record():
            loss = net(mx.nd.array([[2.0, 1.0]])).sum()
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        found = amp.suggest_scale(trainer)
        assert found.largest == 2.0
        assert found.scale == 1024.0
        trainer.step(1)

    def test_errors(self):
        with pytest.raises(amp.StateError, match="all gradients are zero or not finite"):
            amp.suggest_scale([float("nan")])
        with pytest.raises(ValueError, match="a number from 1 on, received headroom=0"):
            amp.suggest_scale([1.0], headroom=0)
        with pytest.raises(TypeError, match="norms of gradients"):
            amp.suggest_scale("abc")
        with pytest.raises(amp.StateError, match=r"suggest_scale: .*initialized"):
            amp.suggest_scale(nn.Dense(2, in_units=2))


def test_a_type_is_asked_for_while_amp_is_off_or_runs_another():
    net = mx.gluon.nn.Dense(3, in_units=2)
    net.initialize()
    net.weight.set_data(mx.nd.ones((3, 2)) * 1e6)
    data = mx.nd.ones((1, 2))
    wanted = f"1 of 2 parameters do not fit in float16: {net.weight.name} (of 6 values 6 overflow)"
    assert amp.preflight(net, data, target_dtype="float16").summary == wanted
    amp.init("float16")
    assert amp.preflight(net, data, target_dtype="float16").summary == wanted
    assert amp.preflight(net, data, target_dtype="bfloat16").summary == "all 2 parameters fit in bfloat16"
