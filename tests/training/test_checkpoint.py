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
from networks import sequential

import gluon_amp as amp

pytestmark = pytest.mark.machine


@pytest.fixture(autouse=True)
def _amp_on(_amp_off):
    amp.init()


def make(scaler="dynamic"):
    mx.random.seed(9)
    net = sequential(lambda: [nn.Dense(16, in_units=8, activation="relu"), nn.BatchNorm(in_channels=16),
                              nn.Dense(2, in_units=16)], mx.init.Xavier(), "net_")
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


def test_the_state_of_scalers_survives_json_and_pickle_and_that_of_others_is_refused():
    _, trainer = make()
    state = amp.state_dict()
    assert state == {"loss_scaler0": amp.get_loss_scaler(trainer).state_dict()}
    amp.get_loss_scaler(trainer).update(found_inf=True)
    changed = amp.state_dict()
    assert changed != state
    amp.load_state_dict(json.loads(json.dumps(state)))
    assert amp.state_dict() == state
    amp.load_state_dict(pickle.loads(pickle.dumps(changed)))
    with pytest.raises(amp.StateError, match="the state holds 0 loss scalers"):
        amp.load_state_dict({})
    for wrong in (None, 3, "text", ["loss_scaler0"], {"loss_scale": 2.0}, {"a": 1}):
        with pytest.raises(ValueError, match=r"expected what amp\.state_dict"):
            amp.load_state_dict(wrong)
    assert amp.state_dict() == changed


def test_files_of_the_plain_trainer_and_of_one_without_a_scaler(tmp_path):
    net, trainer = make()
    train(net, trainer, range(3))
    trainer.save_states(str(tmp_path / "plain"))
    amp.save_states(trainer, tmp_path / "ours")
    net.save_parameters(str(tmp_path / "net.params"))
    again, resumed = make()
    again.load_parameters(str(tmp_path / "net.params"))
    amp.load_states(resumed, tmp_path / "plain")
    late = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    with pytest.raises(amp.StateError, match=r"was written by amp\.save_states: expected amp\.load_states"):
        late.load_states(str(tmp_path / "ours"))
    late.load_states(str(tmp_path / "plain"))
    amp.save_states(late, tmp_path / "bare")
    amp.load_states(late, tmp_path / "ours")
    amp.init_trainer(late)
    amp.load_states(late, tmp_path / "bare")
    assert late.optimizer.num_update == trainer.optimizer.num_update == 3
    content = (tmp_path / "plain").read_bytes()
    for header in (json.dumps([GOOD]), json.dumps(GOOD)):  # as earlier versions wrote it
        (tmp_path / "old").write_bytes(b"gluon_amp trainer states 1\n" + header.encode() + b"\n" + content)
        amp.load_states(late, tmp_path / "old")
        assert (late.amp_loss_scale, late.optimizer.num_update) == (8.0, 3)
    assert train(again, resumed, range(3, 4)) == train(net, trainer, range(3, 4))


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


GOOD = {"scale": 8.0, "good_steps": 0, "bad_steps": 0, "num_skipped": 0}
MALFORMED = [None, 3, "text", [], {}, *({**GOOD, name: value} for name, values in {
    "scale": (None, float("inf"), -1, 1e-320, 1e39, 10 ** 400), "good_steps": (-1e9, None),
    "bad_steps": (float("nan"), 0.5), "num_skipped": (float("inf"),)}.items() for value in values)]


@pytest.mark.parametrize("state", MALFORMED, ids=repr)
def test_malformed_states_of_scalers_change_nothing(state, tmp_path):
    net, trainer = make()
    train(net, trainer, range(2))
    amp.save_states(trainer, tmp_path / "states")
    _, second = make()
    first = amp.state_dict()
    with pytest.raises(ValueError, match="expected"):
        amp.load_state_dict({**first, "loss_scaler1": state})
    content = (tmp_path / "states").read_bytes()
    magic, _, rest = content.partition(b"\n")
    (tmp_path / "states").write_bytes(magic + b"\n" + json.dumps([state]).encode() + b"\n" + rest.partition(b"\n")[2])
    with pytest.raises(ValueError, match="holds no trainer states"):
        amp.load_states(second, tmp_path / "states")
    assert amp.state_dict() == first
    assert second.optimizer.num_update == 0
    assert not second._updaters[0].states


def test_a_file_cut_off_changes_nothing(tmp_path):
    net, trainer = make()
    train(net, trainer, range(3))
    amp.save_states(trainer, tmp_path / "states")
    content = (tmp_path / "states").read_bytes()
    _, second = make()
    for length in range(0, len(content), max(1, len(content) // 40)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ValueError, match="holds no trainer states"):
            amp.load_states(second, tmp_path / "cut")
    for function in (amp.save_states, amp.load_states):
        with pytest.raises(TypeError, match=r"expected a gluon\.Trainer"):
            function("trainer", tmp_path / "states")
    assert (second.optimizer.num_update, second._updaters[0].states) == (0, {})


def plainly(trainer, fname):
    trainer.save_states(str(fname))


@pytest.mark.parametrize("save", [amp.save_states, plainly])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "groupadagrad"])
def test_the_states_of_another_network_change_nothing(optimizer, save, tmp_path):
    def made(units):
        net = gluon.nn.Dense(units, use_bias=False, in_units=3)
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), optimizer, {"momentum": 0.9} if optimizer == "sgd" else {})
        amp.init_trainer(trainer, 1)
        step(net, trainer)
        return net, trainer

    def step(net, trainer):
        with mx.autograd.record(), amp.scale_loss(net(mx.nd.ones((2, 3))).sum(), trainer) as loss:
            loss.backward()
        trainer.step(2)

    save(made(4)[1], tmp_path / "states")
    net, trainer = made(5)
    with pytest.raises(amp.StateError, match=r"'.*_weight' of shape \(5, 3\), a state of \(4, .\): they are of"):
        amp.load_states(trainer, tmp_path / "states")
    assert trainer.optimizer.num_update == 1
    step(net, trainer)
    _, other = made(4)
    amp.load_states(other, tmp_path / "states")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("made_by_a_pickle",)


class OwnSchedule(mx.lr_scheduler.LRScheduler):
    def __call__(self, num_update):
        return self.base_lr / (1 + num_update)


class Held:
    """Something that an optimizer of the user's refers to."""

    def __init__(self):
        self.value = {"rates": (1, 2.5, [None, True]), 3: np.float32(0.1), "array": np.arange(3)}


def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, trainer = make()
    evil = pickle.dumps(({0: Malicious()}, None))
    dotted = b"\x80\x04\x8c\x0amxnet.base\x8c\x08os.mkdir\x93\x8c\x10made_by_a_pickle\x85R."
    for content in (evil, b"gluon_amp trainer states 1\n[]\n" + evil, dotted,
                    pickle.dumps(mx.nd.save), pickle.dumps(np.memmap), pickle.dumps(eval)):
        (tmp_path / "states").write_bytes(content)
        with pytest.raises(ValueError, match=r"refers to (posix\.mkdir|nt\.mkdir|mxnet|numpy|builtins)"):
            amp.load_states(trainer, tmp_path / "states")
    assert os.listdir(tmp_path) == ["states"]


def test_classes_of_the_users_own_are_named(tmp_path):
    net, trainer = make()
    trainer.optimizer.lr_scheduler = OwnSchedule(base_lr=0.5)
    trainer.optimizer.held = Held()
    train(net, trainer, range(2))
    amp.save_states(trainer, tmp_path / "ours")
    trainer.save_states(str(tmp_path / "theirs"))
    for name in ("ours", "theirs"):
        _, second = make()
        with pytest.raises(ValueError, match=r"test_checkpoint\.(OwnSchedule|Held).*classes="):
            amp.load_states(second, tmp_path / name)
        assert second.optimizer.lr_scheduler is None
        amp.load_states(second, tmp_path / name, classes=[OwnSchedule, Held])
        assert second.learning_rate == trainer.learning_rate
        assert second.optimizer.held.value["rates"] == (1, 2.5, [None, True])
        np.testing.assert_array_equal(second.optimizer.held.value["array"], np.arange(3))
    trainer.optimizer.held = None
    amp.save_states(trainer, tmp_path / "one")
    amp.load_states(second, tmp_path / "one", classes=OwnSchedule)
    with pytest.raises(TypeError, match="expected a class or a list of them, received classes="):
        amp.load_states(second, tmp_path / "one", classes=make)


def test_what_cannot_be_written_without_code_is_refused(tmp_path):
    _, trainer = make()
    trainer.optimizer.hook = lambda: None
    with pytest.raises(TypeError, match=r"Adam.*hook.*function"):
        amp.save_states(trainer, tmp_path / "states")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "adagrad", "rmsprop", "adadelta", "ftrl", "adamax", "nadam",
                                  "signum", "ftml", "lamb", "lars", "dcasgd", "sgld", "lbsgd"])
def test_every_optimizer_continues_bit_for_bit(name, tmp_path):
    def begin():
        mx.random.seed(4)
        net = nn.Dense(3, in_units=2, prefix="net_")
        net.initialize(mx.init.Normal(1))
        net.cast("float16" if name == "sgd" else "float32")
        schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.05)
        options = {"lr_scheduler": schedule, **({"multi_precision": True} if name == "sgd" else {})}
        return net, gluon.Trainer(net.collect_params(), name, options, update_on_kvstore=False)

    def run(net, trainer, count):
        for number in range(count):
            mx.random.seed(number)
            for parameter in net.collect_params().values():
                parameter.grad()[:] = 0.1 * (number + 1)
                parameter.data()._fresh_grad = True
            trainer.step(1)
        return [parameter.data().asnumpy() for parameter in net.collect_params().values()]

    net, trainer = begin()
    run(net, trainer, 3)
    amp.save_states(trainer, tmp_path / "states")
    net.save_parameters(str(tmp_path / "net"))
    again, resumed = begin()
    again.load_parameters(str(tmp_path / "net"))
    amp.load_states(resumed, tmp_path / "states")
    assert (tmp_path / "states").read_bytes().startswith(b"gluon_amp trainer states 2\n")
    for one, other in zip(run(net, trainer, 3), run(again, resumed, 3)):
        np.testing.assert_array_equal(one, other)
    assert resumed.learning_rate == trainer.learning_rate


@pytest.mark.parametrize("name", ["adam", "lamb", "nag"])
@pytest.mark.parametrize("saved_by", ["amp", "mxnet"])
def test_more_devices_than_were_saved_keep_copies_of_a_weight_equal(name, saved_by, tmp_path):
    def trained(net, trainer, devices, steps):
        for _ in range(steps):
            with autograd.record():
                losses = [(net(mx.nd.ones((2, 4), ctx=device)) ** 2).mean() for device in devices]
                with amp.scale_loss(losses, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(len(devices))
        return [net.weight.data(device).asnumpy() for device in devices]

    def made(devices):
        net = gluon.nn.Dense(4, in_units=4)
        net.initialize(mx.init.One(), ctx=devices)
        trainer = gluon.Trainer(net.collect_params(), name, {"learning_rate": 0.01}, update_on_kvstore=False)
        amp.init_trainer(trainer)
        return net, trainer

    one, two = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
    net, trainer = made(one)
    trained(net, trainer, one, 5)
    net.save_parameters(str(tmp_path / "net"))
    (amp.save_states if saved_by == "amp" else gluon.Trainer.save_states)(trainer, str(tmp_path / "states"))
    other, its = made(two)
    other.load_parameters(str(tmp_path / "net"), ctx=two)
    amp.load_states(its, str(tmp_path / "states"))
    expected = trained(net, trainer, one, 3)[0]
    first, second = trained(other, its, two, 3)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, expected, rtol=1e-6)
