"""Where FP32 is chosen: training is stock MXNet's bit by bit, and the tools say what they see, or what they need."""
from __future__ import annotations

import functools

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import prefer, take_for
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import NETWORKS, conv_net, gradients, outputs_of, ready

import gluon_amp as amp

pytestmark = pytest.mark.machine


def trained(mode, level=None):
    """Weights and losses of five steps, under AMP if it is on or at a level."""
    mx.random.seed(3)
    np.random.seed(3)
    net = conv_net()
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize(**mode)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-3},
                            update_on_kvstore=False)
    if level:
        net, trainer = amp.initialize(net, trainer, opt_level=level, verbosity=0)
    elif amp.is_active():
        amp.init_trainer(trainer)
    random, losses, skipped = np.random.RandomState(0), [], []
    for _ in range(5):
        data = mx.nd.array(random.normal(size=NETWORKS["conv"][1]))
        with autograd.record():
            loss = (net(data) ** 2).mean()
            with amp.scale_loss(loss, trainer, enabled=amp.is_active() or bool(level)) as scaled:
                autograd.backward(scaled)
        trainer.step(1)
        losses.append(float(loss.asscalar()))
        skipped.append(amp.is_active() and trainer._amp_loss_scaler.step_was_skipped)
    weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()
               if parameter.grad_req != "null"]
    return weights, losses, skipped, trainer


class TestTraining:
    """In FP32 training is stock MXNet's, bit by bit, where MXNet's operators run."""

    @pytest.fixture(autouse=True)
    def without_chains(self, monkeypatch, lesser):
        """Convolutions of odd channels add in another order in C++, with tests of their own."""
        prefer(monkeypatch, nhwc=False)

    @pytest.mark.parametrize("mode", [{"active": False}, {}, {"static_alloc": True},
                                      {"static_alloc": True, "static_shape": True}], ids=str)
    def test_weights_and_losses_are_those_of_fp32(self, lesser, mode):
        weights, losses, *_ = trained(mode)
        amp.init()
        found, found_losses, skipped, trainer = trained(mode)
        assert found_losses == losses
        for one, other in zip(weights, found):
            np.testing.assert_array_equal(one, other)
        assert skipped == [False] * 5
        assert trainer._amp_loss_scaler.loss_scale == 1

    @pytest.mark.parametrize("name", NETWORKS)
    def test_every_kind_of_network(self, lesser, name):
        make, shape = NETWORKS[name]
        net, data = ready(make(), shape, static_alloc=True)
        outputs = outputs_of(net, data)
        amp.init()
        close = np.testing.assert_array_equal
        if name == "recurrent":  # sums in another order
            close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
        for one, other in zip(outputs, outputs_of(net, data)):
            close(one, other)
        found = gradients(net, data)
        amp.deinit()
        expected = gradients(net, data)
        for key in expected:
            close(expected[key], found[key])

    @pytest.mark.parametrize("level", ["O0", "O1", "O2"])
    def test_levels_stay_in_fp32_without_a_scale(self, lesser, level):
        _, losses, *_ = trained({})
        _, found, _, trainer = trained({}, level=level)
        assert found == losses
        assert amp.active_dtype() is None
        assert getattr(trainer, "_amp_loss_scaler", None) is None or trainer._amp_loss_scaler.loss_scale == 1

    def test_a_type_named_to_a_level_is_refused(self, monkeypatch):
        take_for(monkeypatch, "AVX2")
        net = nn.Dense(2, in_units=2)
        net.initialize()
        with pytest.raises(amp.DTypeError, match="needs a CPU with AVX512"):
            amp.initialize(net, opt_level="O2", cast_model_type="bfloat16", verbosity=0)
        assert not amp.is_active()


class TestTools:
    @pytest.fixture
    def network(self, lesser):
        amp.init()
        return ready(conv_net(), NETWORKS["conv"][1])

    def test_report(self, network, lesser):
        found = amp.report(*network)
        assert found.reason == f"this CPU has no BF16 instructions ({lesser})"
        assert f"float32: {found.reason}" in found.summary
        assert "AMP is off" not in found.summary
        assert found.casts == found.target_dtypes == ()
        assert {row.observed for row in found.operators} == {"float32"}

    def test_explain(self, network, lesser):
        (item,) = amp.explain(network[0], "net_conv2_fwd", network[1]).operators
        assert f"float32: this CPU has no BF16 instructions ({lesser})" in item.why
        (remedy,) = item.remedies
        assert remedy.startswith("FP32 is fastest here. To run low precision all the same, name a type")

    def test_the_summary_where_a_slow_type_was_named(self, monkeypatch):
        take_for(monkeypatch, "AVX512_CORE")
        amp.init("float16")
        found = amp.report(*ready(conv_net(), NETWORKS["conv"][1]), train=True)
        assert "Next: float16 is imitated on this CPU" in found.summary

    @pytest.mark.parametrize("tool", ["compare", "search_exclusions"])
    def test_what_looks_at_low_precision_asks_for_a_type(self, network, tool):
        options = {"max_error": 0.1} if tool == "search_exclusions" else {}
        with pytest.raises(amp.DTypeError, match=r"nothing runs in low precision: .*float32 on the cpu.*'float16'"):
            getattr(amp, tool)(*network, **options)

    def test_the_policy_of_a_file_is_refused_where_nothing_runs_its_type(self, monkeypatch):
        take_for(monkeypatch, "AVX2")
        with pytest.raises(amp.DTypeError, match="received 'bfloat16', which needs a CPU with AVX512"):
            amp.init(policy=amp.Policy("bfloat16"))
        amp.init(policy=amp.Policy("float32"))
        assert amp.is_active()
        assert amp.active_dtype() is None
