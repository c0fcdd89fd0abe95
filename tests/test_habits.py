"""What scripts do that nobody planned for: cells that run again, copies of networks, calls at the wrong place."""
from __future__ import annotations

import copy
import pickle

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import FASTEST
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import sequential

import gluon_amp as amp

pytestmark = pytest.mark.machine
DATA = np.random.RandomState(0).randn(4, 8).astype("float32")


def make(hybridize=True):
    mx.random.seed(1)
    net = sequential([nn.Dense(16, activation="relu", in_units=8),
                      nn.Dense(2, in_units=16)], mx.init.Xavier(), active=False)
    if hybridize:
        net.hybridize()
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})


def train(net, trainer, steps=2):
    for _ in range(steps):
        with autograd.record():
            loss = (net(mx.nd.array(DATA)) ** 2).mean()
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(1)
    return loss.asscalar()


class TestAnotherInit:
    def test_naming_what_is_on_is_no_other_setting(self):
        amp.init()
        amp.init(FASTEST)
        amp.init(FASTEST, fp32_ops=None)
        amp.deinit()
        amp.init(FASTEST)
        amp.init(FASTEST.upper())
        amp.init()

    def test_other_settings_are_told_beside_those_in_force(self):
        amp.init("float16")
        with pytest.raises(amp.StateError, match=r"on already: float16 on the cpu.*received fp32_ops=\['dot'\]"):
            amp.init(fp32_ops=["dot"])
        with pytest.raises(amp.StateError, match=r"received target_dtype='float32'"):
            amp.init("float32")
        assert amp.active_dtype("cpu") == "float16"

    def test_networks_at_a_level_are_what_is_on(self, caplog):
        net, trainer = make()
        amp.initialize(net, trainer, opt_level="O2", cast_model_type="float16", verbosity=0)
        with caplog.at_level("INFO", logger="gluon_amp"):
            amp.init()
        assert "keeps" in caplog.text
        with pytest.raises(amp.StateError, match=r"amp\.initialize"):
            amp.init("float16")
        assert not amp.is_active()  # outside of the network


class TestLosses:
    @pytest.mark.parametrize("loss", [None, 3.0, "loss", np.ones(2), {}, mx.sym.var("loss"), [None], [],
                                      [mx.nd.ones(1), [mx.nd.ones(1)]], mx.nd.ones(2, dtype="int32")], ids=str)
    def test_what_is_no_loss_changes_nothing(self, loss):
        amp.init("float16")
        net, trainer = make()
        amp.init_trainer(trainer, 128.0)
        with pytest.raises(TypeError, match=r"expected a(n NDArray or a list of them| floating-point loss), "), \
                amp.scale_loss(loss, trainer):
            pass
        assert trainer._amp_loss_scaler.state == "READY"
        assert np.isfinite(train(net, trainer))


class TestArguments:
    def test_the_errors_name_the_argument(self):
        amp.init()
        _, trainer = make()
        with pytest.raises(ValueError, match="received loss_scaler=0"):
            amp.init_trainer(trainer, 0)
        with pytest.raises(ValueError, match="received warn_after=-1"):
            amp.init_trainer(trainer, warn_after=-1)
        assert not hasattr(trainer, "_amp_loss_scaler")

    def test_a_large_value_is_shortened(self):
        net = nn.HybridSequential()
        net.add(*[nn.Dense(8) for _ in range(100)])
        for value in (net, net.collect_params()):
            with pytest.raises(TypeError, match=r"expected a gluon\.Trainer, received trainer=") as raised:
                amp.master_params(value)
            assert len(str(raised.value)) < 400
            assert "\n" not in str(raised.value)

    def test_torchs_step_lacks_the_batch_size(self):
        net, trainer = make()
        scaler = amp.GradScaler()
        with autograd.record():
            loss = net(mx.nd.array(DATA)).mean()
        scaler.scale(loss).backward()
        with pytest.raises(TypeError, match=r"scaler.step\(trainer, batch_size\).*1 where the loss is a mean"):
            scaler.step(trainer)
        scaler.step(trainer, 1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))],
                         ids=["deepcopy", "pickle"])
class TestCopies:
    def test_of_a_network_that_ran(self, copied):
        amp.init()
        net, _ = make()
        data = mx.nd.array(DATA)
        net(data)
        again = copied(net)
        assert (again(data).asnumpy() == net(data).asnumpy()).all()
        again[0].weight.set_data(again[0].weight.data() * 2)
        assert (again(data).asnumpy() != net(data).asnumpy()).any()
        amp.deinit()
        assert (copied(net)(data).asnumpy() == net(data).asnumpy()).all()

    def test_of_a_converted_network(self, copied):
        net, _ = make()
        data = mx.nd.array(DATA)
        converted = amp.convert_hybrid_block(net, data_example=data)
        expected = converted(data).asnumpy()
        assert (copied(converted)(data).asnumpy() == expected).all()


class TestCellsThatRunAgain:
    def test_scalers_of_an_earlier_init_are_not_in_the_state(self):
        amp.init()
        _, earlier = make()
        amp.init_trainer(earlier, "dynamic")
        state = amp.state_dict()
        amp.deinit()
        assert amp.state_dict() == state  # to be saved at the end
        amp.init()
        _, trainer = make()
        amp.init_trainer(trainer, "dynamic")
        amp.load_state_dict(state)
        assert list(amp.state_dict()) == ["loss_scaler0"]
        with amp.scale_loss(mx.nd.ones(1), earlier):  # in use again
            pass
        assert len(amp.state_dict()) == 2

    def test_a_trainer_gets_the_scaler_of_another_type(self):
        amp.init("float32")
        net, trainer = make()
        amp.init_trainer(trainer)
        assert amp.get_loss_scaler(trainer).loss_scale == 1.0
        amp.deinit()
        amp.init("float16")
        amp.init_trainer(trainer)
        assert amp.get_loss_scaler(trainer).loss_scale == 2.0 ** 16
        train(net, trainer)
        with pytest.raises(amp.StateError, match="loss scaler already"):
            amp.init_trainer(trainer, 64.0)
        amp.deinit()
        amp.init("float16")
        amp.init_trainer(trainer, 64.0)
        assert amp.get_loss_scaler(trainer).loss_scale == 64.0
        amp.init_trainer(trainer)
        assert amp.get_loss_scaler(trainer).loss_scale == 64.0

    def test_a_trainer_of_a_run_without_amp(self):
        net, trainer = make()
        net, trainer = amp.initialize(net, trainer, enabled=False)
        train(net, trainer)
        amp.deinit()
        amp.init("float16")
        amp.init_trainer(trainer, 64.0)
        assert amp.get_loss_scaler(trainer).loss_scale == 64.0
        train(net, trainer)
