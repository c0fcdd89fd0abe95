"""Updates on CPUs: those of MXNet's own trainer, state by state."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import sequential

import gluon_amp as amp
from gluon_amp import native

STEPS, BATCH = 4, 3
CONTEXTS = [mx.cpu(0), mx.cpu(1)]


@pytest.fixture(autouse=True)
def _amp_on(_amp_off):
    amp.init("float16")


def network(contexts, layers=1):
    """Weights on both sides of the size from which MXNet is called for one alone, and more small ones than one call."""
    mx.random.seed(5)
    np.random.seed(5)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(128, in_units=64, activation="relu"))
        for _ in range(layers):
            net.add(nn.Dense(16, in_units=128), nn.Dense(128, in_units=16))
        net.add(nn.Dense(1, in_units=128))
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net[0].bias.wd_mult, net[1].weight.lr_mult = 0.0, 2.0
    return net


def gradients(net, step):
    """Write gradients instead of computing them: what counts is what the update makes of them."""
    random = np.random.RandomState(step)
    for parameter in net.collect_params().values():
        for data, gradient in zip(parameter.list_data(), parameter.list_grad()):
            gradient[:] = random.normal(size=gradient.shape)
            data._fresh_grad = True


def trainer_of(net, options, ours, name="sgd"):
    options = dict(options)
    if options.pop("decays", False):
        options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=0.2)
    made = gluon.Trainer(net.collect_params(), name, options, update_on_kvstore=False)
    if ours:
        amp.init_trainer(made, 1.0)
    return made


def train(net, trainer, steps=range(STEPS)):
    for step in steps:
        gradients(net, step)
        trainer.step(BATCH)
    return [data.asnumpy() for parameter in net.collect_params().values() for data in parameter.list_data()]


def assert_same(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)


PLAIN = [{"learning_rate": 0.01}, {"learning_rate": 0.1, "wd": 0.01, "clip_gradient": 0.2},
         {"decays": True, "wd": 0.001}]
OPTIONS = {
    "sgd": [{"learning_rate": 0.1}, {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
            {"learning_rate": 0.1, "wd": 0.01, "clip_gradient": 0.2},
            {"momentum": 0.9, "clip_gradient": 0.2, "decays": True},
            {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}],
    "adam": PLAIN, "nag": [{**options, "momentum": 0.9} for options in PLAIN], "bertadam": PLAIN,
    "lamb": [*PLAIN, {"learning_rate": 0.01, "bias_correction": False, "lower_bound": 0.5},
             {"learning_rate": 0.01, "lower_bound": 0.0, "upper_bound": 2.0}, {"upper_bound": 0.0}],
    "signum": PLAIN[:1], "rmsprop": PLAIN[:1], "adamax": PLAIN[:1]}


@pytest.mark.parametrize("contexts", [CONTEXTS[:1], CONTEXTS], ids=["one", "two"])
@pytest.mark.parametrize(("name", "options"), [(name, each) for name, several in OPTIONS.items() for each in several])
def test_the_result_is_that_of_mxnets_trainer(name, options, contexts):
    if name == "bertadam":
        pytest.importorskip("gluonnlp.optimizer", reason="GluonNLP is not installed")

    def run(ours):
        net = network(contexts, layers=30)
        trainer = trainer_of(net, options, ours, name)
        if name == "bertadam":
            trainer.optimizer.aggregate_num = 1  # MXNet's operator for several weights loses digits of the variance
        return train(net, trainer)
    for one, other in zip(run(True), run(False)):  # LAMB's norms are added up in another order
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6 if name == "lamb" else 1e-7)


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "lamb", "bertadam"])
def test_all_weights_are_updated_in_one_call(name, monkeypatch):
    if name == "bertadam":
        pytest.importorskip("gluonnlp.optimizer", reason="GluonNLP is not installed")
    if not native.is_available("_gluon_amp_adam"):
        pytest.skip("without the operators in C++")
    calls = []
    original = native.update
    monkeypatch.setattr(native, "update", lambda kind, *args, **options: (
        calls.append(kind), original(kind, *args, **options)))
    net = network(CONTEXTS[:1], layers=5)
    train(net, trainer_of(net, {"learning_rate": 0.1}, True, name), range(2))
    assert calls == 2 * [{"bertadam": "adamw", "nag": "sgd"}.get(name, name)]


@pytest.fixture(params=[True, False], ids=["native", "mxnet"], autouse=True)
def _operators(request, monkeypatch):
    """Run everything with the operators in C++, where they were built, and without."""
    if not request.param:
        monkeypatch.setattr(native, "is_available", lambda op: False)
    elif not native.is_available("_gluon_amp_adam"):
        pytest.skip(f"no operators in C++: {native.load()[0].missing}")


@pytest.mark.parametrize("off", [False, True])
def test_momentum_from_before_is_kept_and_may_be_switched_off_for_some_steps(off):
    def run(ours):
        net = network(CONTEXTS[:1])
        trainer = trainer_of(net, {"learning_rate": 0.1, "momentum": 0.9}, ours and off)
        train(net, trainer)
        if ours and not off:
            amp.init_trainer(trainer, 1.0)
        trainer.optimizer.momentum = 0.0 if off else 0.9
        train(net, trainer)
        trainer.optimizer.momentum = 0.9
        return train(net, trainer)
    assert_same(run(True), run(False))


def test_a_users_own_sgd_is_called():
    class Recording(mx.optimizer.SGD):
        seen = 0

        def update(self, index, weight, grad, state):
            Recording.seen += len(index)
            super().update(index, weight, grad, state)

        def update_multi_precision(self, index, weight, grad, state):
            self.update(index, weight, grad, state)

    net = network(CONTEXTS[:1])
    trainer = gluon.Trainer(net.collect_params(), Recording(learning_rate=0.1), update_on_kvstore=False)
    amp.init_trainer(trainer, 1.0)
    train(net, trainer, range(1))
    assert Recording.seen == len(net.collect_params().values())


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(True, False), (False, True), (True, True)])
def test_saved_states_are_mxnets(tmp_path, saved_by, loaded_by):
    options, path = {"learning_rate": 0.1, "momentum": 0.9}, str(tmp_path / "states")
    net = network(CONTEXTS)
    expected = train(net, trainer_of(net, options, ours=False), range(2 * STEPS))
    net = network(CONTEXTS)
    trainer = trainer_of(net, options, saved_by)
    train(net, trainer)
    trainer.save_states(path)
    trainer = trainer_of(net, {"learning_rate": 7}, loaded_by)
    trainer.load_states(path)
    assert_same(train(net, trainer, range(STEPS, 2 * STEPS)), expected)


def test_sparse_gradients_and_float16_weights_are_updated_as_by_mxnet():
    def run(ours):
        mx.random.seed(5)
        net = sequential(lambda: [nn.Embedding(100, 64, sparse_grad=True),
                                  nn.Dense(128, in_units=64, flatten=False)], mx.init.Xavier(), "net_")
        trainer = trainer_of(net, {"learning_rate": 0.1, "momentum": 0.9}, ours)
        half = gluon.Parameter("half", shape=(5000,), dtype="float16", init="ones")
        half.initialize()
        other = gluon.Trainer([half], "sgd", {"learning_rate": 0.1, "multi_precision": True}, update_on_kvstore=False)
        if ours:
            amp.init_trainer(other, 1.0)
        with amp.autocast(enabled=False):
            for _ in range(STEPS):
                with autograd.record():
                    loss = net(mx.nd.array([3, 50])).sum()
                    low = (half.data() * half.data()).sum()
                with amp.scale_loss(loss, trainer) if ours else autograd.record():
                    loss.backward()
                with amp.scale_loss(low, other) if ours else autograd.record():
                    low.backward()
                trainer.step(BATCH)
                other.step(BATCH)
        return [*(parameter.data().asnumpy() for parameter in net.collect_params().values()), half.data().asnumpy()]
    assert_same(run(True), run(False))


class Two(mx.init.Initializer):
    def _init_weight(self, _, array):
        array[()] = 2  # MXNet's own initializers write to array[:], which an array without axes does not have


@pytest.mark.parametrize("optimizer", ["sgd", "nag", "adam", "lamb"])
def test_a_weight_without_axes(optimizer):
    """NumPy's scalars have a gradient, a check of it and an update as every other array."""
    def run(ours):
        with mx.util.np_shape(True), mx.util.np_array(True):
            scale = gluon.Parameter("scale", shape=(), init=Two())
            scale.initialize()
            trainer = gluon.Trainer([scale], optimizer, {"learning_rate": 0.1}, update_on_kvstore=False)
            if ours:
                amp.init_trainer(trainer, 1.0)
            for value in (1.0, -2.0, float("inf") if ours else 0, 3.0):
                with autograd.record():
                    loss = scale.data() ** 2 * value
                loss.backward()
                if value:
                    trainer.step(BATCH)
            return [scale.data().asnumpy()]
    assert_same(run(True), run(False))


def test_the_users_aggregation_size_is_respected(monkeypatch):
    calls = []
    monkeypatch.setenv("MXNET_OPTIMIZER_AGGREGATION_SIZE", "3")
    original = mx.optimizer.SGD.update_multi_precision
    monkeypatch.setattr(mx.optimizer.SGD, "update_multi_precision", lambda self, index, *args: (
        calls.append(len(index)), original(self, index, *args))[1])
    net = network(CONTEXTS[:1])
    train(net, trainer_of(net, {"learning_rate": 0.1}, ours=True), range(1))
    assert calls == [3, 3, 2]


def _counts(trainer):
    return dict(trainer._optimizer._index_update_count), trainer._optimizer.num_update


@pytest.mark.parametrize("contexts", [CONTEXTS[:1], CONTEXTS])
@pytest.mark.parametrize("name", ["sgd", "adam", "rmsprop"])
def test_a_skipped_step_counts_nothing_and_changes_nothing(name, contexts):
    net = network(contexts)
    trainer = trainer_of(net, {"learning_rate": 0.1}, ours=True, name=name)
    before = train(net, trainer, range(2))
    counts = _counts(trainer)
    gradients(net, 2)
    net[1].bias.list_grad()[-1][:] = float("inf")
    trainer.step(BATCH)
    after = [data.asnumpy() for parameter in net.collect_params().values() for data in parameter.list_data()]
    for found, expected in zip(after, before):
        np.testing.assert_array_equal(found, expected)
    assert _counts(trainer) == counts
    assert amp.get_loss_scaler(trainer).num_skipped == 1
    assert not any(gradient.asnumpy().any() for parameter in net.collect_params().values()
                   for gradient in parameter.list_grad())


@pytest.mark.parametrize("bad", [False, True])
def test_old_gradients_are_told_of_unless_the_step_is_skipped(bad):
    net = network(CONTEXTS)
    trainer = trainer_of(net, {"learning_rate": 0.1}, ours=True)
    before = train(net, trainer, range(1))
    gradients(net, 1)
    net[2].weight.list_data()[0]._fresh_grad = False
    if bad:
        net[1].bias.list_grad()[-1][:] = float("nan")
        trainer.step(BATCH)
    else:
        with pytest.raises(UserWarning, match=net[2].weight.name):
            trainer.step(BATCH)
    for data, expected in zip((data for each in net.collect_params().values() for data in each.list_data()), before):
        np.testing.assert_array_equal(data.asnumpy(), expected)
    assert amp.get_loss_scaler(trainer).num_skipped == bad
    reference = network(CONTEXTS)  # nothing of that step is left for the next
    wanted = train(reference, trainer_of(reference, {"learning_rate": 0.1}, ours=True), [0, 2, 3])
    for found, expected in zip(train(net, trainer, [2, 3]), wanted):
        np.testing.assert_array_equal(found, expected)


def test_an_update_without_any_gradient_decides_all_the_same():
    net = network(CONTEXTS[:1])
    trainer = trainer_of(net, {"learning_rate": 0.1}, ours=True)
    before = train(net, trainer, range(1))
    net[1].bias.list_grad()[-1][:] = float("inf")
    trainer.step(BATCH, ignore_stale_grad=True)
    assert amp.get_loss_scaler(trainer).num_skipped == 1
    np.testing.assert_array_equal(net[1].bias.data().asnumpy(), before[3])
