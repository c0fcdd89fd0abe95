"""Saving and resuming."""
from __future__ import annotations

import json
import os
import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp

pytestmark = pytest.mark.machine


@pytest.fixture(autouse=True)
def _amp_on(_amp_off):
    amp.init()


def make(scaler="dynamic"):
    mx.random.seed(9)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(16, in_units=8, activation="relu"), nn.BatchNorm(in_channels=16), nn.Dense(2, in_units=16))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    if scaler == "dynamic":
        scaler = amp.DynamicLossScaler(init_scale=256, growth_interval=3)
    amp.init_trainer(trainer, scaler)
    return net, trainer


def train(net, trainer, steps):
    losses = []
    for number in steps:
        data = mx.nd.array(np.random.RandomState(number).randn(4, 8))
        if number == 4:
            data[0, 0] = np.inf  # one overflow, before or after the interruption
        with autograd.record():
            loss = (net(data) ** 2).mean()
            with amp.scale_loss(loss, trainer) as scaled:
                scaled.backward()
        trainer.step(1)
        losses.append(loss.asscalar())
    return losses


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
def test_a_resumed_run_repeats_the_losses_bit_for_bit(stop, tmp_path):
    expected = train(*make(), range(9))
    net, trainer = make()
    train(net, trainer, range(stop))
    net.save_parameters(str(tmp_path / "net.params"))
    amp.save_states(trainer, tmp_path / "trainer.states")
    scale = trainer._amp_loss_scaler.loss_scale
    again, resumed = make()
    again.load_parameters(str(tmp_path / "net.params"))
    amp.load_states(resumed, tmp_path / "trainer.states")
    assert resumed._amp_loss_scaler.loss_scale == scale
    assert train(again, resumed, range(stop, 9)) == pytest.approx(expected[stop:], rel=0, abs=0, nan_ok=True)


def test_the_state_of_scalers_survives_json_and_pickle():
    _, trainer = make()
    train(*make(), range(1))
    state = amp.state_dict()
    trainer._amp_loss_scaler.scaler.update(found_inf=True)
    changed = amp.state_dict()
    assert changed != state
    amp.load_state_dict(json.loads(json.dumps(state)))
    assert amp.state_dict() == state
    amp.load_state_dict(pickle.loads(pickle.dumps(changed)))
    assert amp.state_dict() == changed


def test_a_state_of_other_scalers_is_refused_and_changes_nothing():
    _, trainer = make()
    before = amp.state_dict()
    with pytest.raises(amp.StateError, match="the state holds 0 loss scalers"):
        amp.load_state_dict({})
    broken = {name: {**state, "scale": -1} for name, state in before.items()}
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        amp.load_state_dict(broken)
    with pytest.raises(ValueError, match="expected a dict with scale"):
        amp.load_state_dict({name: {} for name in before})
    assert amp.state_dict() == before == {"loss_scaler0": trainer._amp_loss_scaler.scaler.state_dict()}


def test_a_file_of_the_plain_trainer_loads(tmp_path):
    net, trainer = make()
    train(net, trainer, range(3))
    trainer.save_states(str(tmp_path / "plain.states"))
    net.save_parameters(str(tmp_path / "net.params"))
    again, resumed = make()
    again.load_parameters(str(tmp_path / "net.params"))
    amp.load_states(resumed, tmp_path / "plain.states")
    assert train(again, resumed, range(3, 4)) == train(net, trainer, range(3, 4))


def test_trainer_states_may_be_loaded_before_init_trainer(tmp_path):
    net, trainer = make()
    train(net, trainer, range(3))
    trainer.save_states(str(tmp_path / "states"))
    late = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    late.load_states(str(tmp_path / "states"))
    amp.init_trainer(late)
    assert late.optimizer.num_update == trainer.optimizer.num_update


def test_a_trainer_without_a_scaler_is_saved_too(tmp_path):
    net, trainer = make()
    train(net, trainer, range(2))
    plain = gluon.Trainer(net.collect_params(), "adam")
    amp.save_states(plain, tmp_path / "states")
    amp.load_states(trainer, tmp_path / "states")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"gluon_amp trainer states 1\nnull\nnonsense"])
def test_a_file_of_another_kind_is_refused(content, tmp_path):
    (tmp_path / "states").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no trainer states.*Expected a file written by amp\.save_states"):
        amp.load_states(make()[1], tmp_path / "states")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    net, trainer = make()
    train(net, trainer, range(1))
    path = tmp_path / "trainer.states"
    amp.save_states(trainer, path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        amp.save_states(trainer, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["trainer.states"]


def test_wrong_trainers_are_refused(tmp_path):
    for function in (amp.save_states, amp.load_states):
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer"):
            function("trainer", tmp_path / "states")
