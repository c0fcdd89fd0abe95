"""initialize: what each level runs in, what the optimizer updates, and what is refused."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import FASTEST
from mxnet import autograd, gluon
from mxnet.gluon import nn
from networks import relative

import gluon_amp as amp
from gluon_amp.errors import AmpError

pytestmark = pytest.mark.machine
O2 = pytest.param("O2", marks=pytest.mark.bf16, id="O2")


@pytest.fixture(autouse=True)
def _off():
    yield
    amp.deinit()


def net():
    mx.random.seed(6)
    made = nn.HybridSequential(prefix="net_")
    with made.name_scope():
        made.add(nn.Conv2D(32, 3, padding=1, in_channels=16), nn.BatchNorm(), nn.Activation("relu"),
                 nn.GlobalAvgPool2D(), nn.Dense(8, in_units=32))
    made.initialize(mx.init.Xavier(), force_reinit=True)
    return made


def data():
    return mx.nd.array(np.random.RandomState(2).normal(size=(4, 16, 8, 8)))


def trainer_of(made, rate=0.1):
    return gluon.Trainer(made.collect_params(), "sgd", {"learning_rate": rate}, update_on_kvstore=False)


def step(made, trainer, **options):
    with autograd.record():
        loss = (made(data()) ** 2).mean()
        with amp.scale_loss(loss, trainer, **options) as scaled:
            autograd.backward(scaled)
    trainer.step(1)
    return float(loss.asscalar())


def in_bfloat16(level):
    """Name the type to the levels that take one; O1 takes the machine's, O0 none."""
    return {"cast_model_type": "bfloat16"} if level == "O2" else {}


def bits_that_bfloat16_drops(array):
    return int((array.asnumpy().view(np.uint32) & 0xFFFF).astype(bool).sum())


@pytest.mark.parametrize("hybridized", [False, True])
@pytest.mark.parametrize("level", ["O0", "O1", O2])
def test_levels_compute_what_they_say(level, hybridized):
    made = net()
    expected = made(data()).asnumpy()
    made.hybridize(hybridized)
    amp.initialize(made, trainer_of(made), opt_level=level, verbosity=0, **in_bfloat16(level))
    found = made(data())
    assert found.dtype == np.float32
    in_fp32 = level == "O0" or (level == "O1" and FASTEST == "float32")
    least, most = (0, 0) if in_fp32 else (1e-5, 0.03)
    assert least <= relative(expected, found.asnumpy()) <= most


class Iterating(nn.HybridBlock):
    """A block that calls the layers of a container, and not the container."""

    def __init__(self, container):
        super().__init__(prefix="iterating_")
        self.container = container

    def hybrid_forward(self, F, x):
        for layer in self.container:
            x = layer(x)
        return x * 1


@pytest.mark.bf16
@pytest.mark.parametrize("hybridized", [False, True])
def test_the_layers_of_a_container_run_as_it_would_when_they_are_called_instead(hybridized):
    made = net()
    around = Iterating(made)
    plain = around(data()).asnumpy()
    around.hybridize(hybridized)
    amp.initialize(made, opt_level="O2", cast_model_type="bfloat16", verbosity=0)
    called, iterated = made(data()), around(data())
    looped = data()
    for layer in made:
        looped = layer(looped)
    assert called.dtype == iterated.dtype == looped.dtype == np.float32
    for found in (iterated, looped):
        assert 1e-5 <= relative(plain, found.asnumpy()) <= 0.03
    assert relative(called.asnumpy(), iterated.asnumpy()) < 5e-3
    with amp.autocast(enabled=False):
        assert relative(plain, around(data()).asnumpy()) < 1e-5
    made.add(nn.Dense(16, in_units=8))
    made[-1].initialize(mx.init.Xavier())
    x = mx.nd.array(np.random.RandomState(3).normal(size=(4, 8)))
    with amp.autocast(enabled=False):
        expected = made[-1](x).asnumpy()
    assert 1e-5 <= relative(expected, made[-1](x).asnumpy()) <= 0.03


@pytest.mark.bf16
@pytest.mark.parametrize("hybridized", [False, True])
def test_a_network_inside_fp32_code_returns_fp32(hybridized):
    class Around(nn.HybridBlock):
        def hybrid_forward(self, F, x):
            return self.inner(x) + 1e-4

    around = Around()
    around.inner = net()
    around.hybridize(hybridized)
    amp.initialize(around.inner, opt_level="O2", cast_model_type="bfloat16", verbosity=0)
    found = around(data())
    assert found.dtype == np.float32
    assert bits_that_bfloat16_drops(found)
    assert np.abs((found - around.inner(data())).asnumpy() - 1e-4).max() < 1e-6


@pytest.mark.parametrize("level", ["O1", O2])
def test_masters_keep_what_low_precision_drops(level):
    made = net()
    made.hybridize()
    trainer = trainer_of(made, rate=1e-4)
    made, trainer = amp.initialize(made, trainer, opt_level=level, verbosity=0, **in_bfloat16(level))
    for _ in range(3):
        step(made, trainer)
    assert bits_that_bfloat16_drops(made[4].weight.data())


@pytest.mark.parametrize("options", [{"opt_level": "O3"}, {"opt_level": "O3", "keep_batchnorm_fp32": "True"},
                                     {"opt_level": "O2", "master_weights": False}])
def test_o3_runs_as_o2_and_says_so(options, capsys):
    made = net()
    with pytest.warns(UserWarning, match="runs as O2 with weights and BatchNorm in FP32"):
        amp.initialize(made, trainer_of(made), **options)
    assert "gluon_amp opt_level O2: networks in low precision" in capsys.readouterr().out


@pytest.mark.bf16
def test_training_follows_fp32_at_every_level():
    losses = {}
    for level in ("O0", "O1", "O2"):
        made = net()
        made.hybridize()
        made, trainer = amp.initialize(made, trainer_of(made, rate=0.5), opt_level=level, verbosity=0,
                                       **in_bfloat16(level))
        losses[level] = [step(made, trainer) for _ in range(10)]
        amp.deinit()
    assert losses["O0"][-1] < 0.7 * losses["O0"][0]
    for level in ("O1", "O2"):
        np.testing.assert_allclose(losses[level], losses["O0"], rtol=0.1)


def test_options_of_a_command_line_and_what_is_printed(capsys):
    made = net()
    made, trainer = amp.initialize(made, trainer_of(made), opt_level="o2", keep_batchnorm_fp32="True",
                                   loss_scale="128.0", num_losses=2)
    printed = capsys.readouterr().out
    assert "gluon_amp opt_level O2: networks in low precision" in printed
    assert printed.split("In force:\n")[1].split()[-4:] == ["loss_scale", "128.0", "cast_model_outputs", "-"]
    assert trainer.amp_loss_scale == 128
    for number in (0, 1):
        step(made, trainer, loss_id=number)
    assert len(amp.state_dict()) == 2
    with pytest.raises(AmpError, match="was called already"):
        amp.initialize(made, trainer_of(made), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("options", [
    {"opt_level": "O4"}, {"opt_level": "02"}, {"opt_level": "O1", "keep_batchnorm_fp32": True},
    {"opt_level": "O1", "master_weights": True}, {"opt_level": "O2", "loss_scale": "much"},
    {"opt_level": "O2", "keep_batchnorm_fp32": "maybe"}, {"num_losses": 0}])
def test_contradictions_are_refused_and_change_nothing(options):
    made = net()
    with pytest.raises((AmpError, ValueError, TypeError)):
        amp.initialize(made, trainer_of(made), verbosity=0, **options)
    assert not amp.is_active()


def test_disabled_is_fp32_with_the_same_code(capsys):
    made = net()
    expected = made(data()).asnumpy()
    made, trainer = amp.initialize(made, trainer_of(made), opt_level="O2", enabled="False")
    assert capsys.readouterr().out == ""
    np.testing.assert_array_equal(made(data()).asnumpy(), expected)
    assert step(made, trainer) > 0


@pytest.mark.parametrize("level", ["O0", "O1", O2])
def test_scales_begin_where_init_trainer_begins_them(level):
    """Dynamic in float16, 1 in bfloat16 and FP32."""
    made = net()
    trainer = trainer_of(made)
    amp.initialize(made, trainer, opt_level=level, verbosity=0, **in_bfloat16(level))
    assert amp.get_loss_scaler(trainer).loss_scale == 1
    step(made, trainer)
    assert amp.get_loss_scaler(trainer).loss_scale == 1
