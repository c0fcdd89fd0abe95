"""The drift monitor's numbers against gradients set by hand, and where rows go."""
from __future__ import annotations

import gc
import math
import weakref

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp


@pytest.fixture(autouse=True)
def _amp_on(_amp_off):
    amp.init("float16")  # imitated without a GPU: loss scaling is the same


def make(scale=64.0):
    net = nn.Dense(1, in_units=4, use_bias=False)
    net.initialize(mx.init.Constant(0.5))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    if scale:
        amp.init_trainer(trainer, amp.DynamicLossScaler(scale))
    return net, trainer


def step(net, trainer, *values, unscale=False):
    """Run a step whose gradients are `values`, times the loss scale."""
    with autograd.record():
        loss = (net.weight.data() * mx.nd.array([values])).sum()
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    if unscale:
        amp.unscale(trainer)
    trainer.step(1)


def test_numbers_by_hand():
    net, trainer = make()
    with amp.DriftMonitor(trainer, every=1) as monitor:
        step(net, trainer, 3.0, -4.0, 0.0, 1e-10)
    (number, row), = monitor.rows
    assert number == 1
    assert (row.loss_scale, row.skipped, row.num_skipped) == (64.0, 0, 0)
    assert row.gradient_norm == pytest.approx(5.0)
    assert row.gradient_max == 4.0
    assert row.float16_headroom == pytest.approx(math.log2(65504 / (4 * 64)))
    assert row.bfloat16_headroom == pytest.approx(math.log2(3.3895314e38 / (4 * 64)))
    assert row.float16_flushed == 0.25  # 64e-10 is below 2**-25
    assert row.weight_max == 0.5
    assert row.weight_float16_headroom == pytest.approx(math.log2(65504 / 0.5))


def test_gradients_that_were_unscaled_before_the_step():
    net, trainer = make()
    monitor = amp.DriftMonitor(trainer, every=1)
    step(net, trainer, 3.0, -4.0, 0.0, 0.0, unscale=True)
    (_, row), = monitor.rows
    assert (row.loss_scale, row.gradient_max) == (1.0, 4.0)
    assert row.gradient_norm == pytest.approx(5.0)


def test_skipped_steps_are_logged_always():
    net, trainer = make()
    monitor = amp.DriftMonitor(trainer, every=3)
    for value in (1.0, np.inf, 1.0, 1.0, np.nan, 1.0):
        step(net, trainer, value, 0.0, 0.0, 0.0)
    assert [(number, row.skipped, row.num_skipped, row.loss_scale) for number, row in monitor.rows] == [
        (2, 1, 1, 64.0), (3, 0, 1, 32.0), (5, 1, 2, 32.0), (6, 0, 2, 16.0)]
    assert math.isnan(monitor.rows[2][1].gradient_max)
    assert monitor.rows[0][1].float16_headroom == -math.inf


@pytest.mark.parametrize("options", [{"opt_level": "O0"}, {"enabled": False}], ids=["O0", "disabled"])
def test_training_in_plain_fp32_is_logged_too(options):
    amp.deinit()
    net, trainer = make(scale=None)
    amp.initialize(net, trainer, verbosity=0, **options)
    with amp.DriftMonitor(trainer, every=1) as monitor:
        for value in (3.0, np.inf):
            step(net, trainer, value, 0.0, 0.0, 0.0)
    assert [(row.loss_scale, row.skipped, row.gradient_max) for _, row in monitor.rows] == [
        (1.0, 0, 3.0), (1.0, 0, np.inf)]


def test_rows_go_to_the_callback_at_once():
    net, trainer = make()
    written = []
    with amp.DriftMonitor(trainer, lambda number, row: written.append((number, row.gradient_max)), every=2):
        for value in range(4):
            step(net, trainer, 1.0 + value, 0.0, 0.0, 0.0)
            assert len(written) == (value + 1) // 2
    with amp.DriftMonitor(trainer, callback=lambda *row: written.append(row), every=2, first_step=5) as monitor:
        for _ in range(2):
            step(net, trainer, 2.0, 0.0, 0.0, 0.0)
    assert written == [(2, 2.0), (4, 4.0), *monitor.rows]
    assert monitor.rows[0][0] == 6


def test_a_closed_monitor_hears_nothing():
    net, trainer = make()
    monitor = amp.DriftMonitor(trainer, every=1)
    monitor.close()
    monitor.close()
    step(net, trainer, 1.0, 0.0, 0.0, 0.0)
    assert not monitor.rows


def test_it_lives_as_long_as_its_trainer():
    net, trainer = make()
    monitor = weakref.ref(amp.DriftMonitor(trainer, every=1))
    step(net, trainer, 1.0, 0.0, 0.0, 0.0)
    assert monitor() is not None
    del trainer, net
    gc.collect()
    assert monitor() is None


def test_wrong_arguments():
    _, trainer = make()
    with pytest.raises(ValueError, match="a whole number from 1 on, received every=0"):
        amp.DriftMonitor(trainer, every=0)
    with pytest.raises(TypeError, match=r"a gluon\.Trainer"):
        amp.DriftMonitor("trainer")
    with pytest.raises(TypeError, match=r"a function of a step's number and its row, received callback=.*drift"):
        amp.DriftMonitor(trainer, "drift")
    for gone in ("csv", "tensorboard"):
        with pytest.raises(TypeError, match=rf"amp\.DriftMonitor has no argument '{gone}': give callback="):
            amp.DriftMonitor(trainer, **{gone: "path"})
    net = nn.Dense(1, in_units=1)
    net.initialize()
    with pytest.raises(amp.StateError, match="no loss scaler"):
        amp.DriftMonitor(gluon.Trainer(net.collect_params(), "sgd"))
