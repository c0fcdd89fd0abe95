"""Scripts and libraries written for mxnet.contrib.amp."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp

pytestmark = pytest.mark.bf16


@pytest.fixture
def _installed():
    amp.install()
    yield
    amp.uninstall()


def test_install_and_uninstall():
    from mxnet.contrib import amp as theirs
    amp.install()
    amp.install()
    from mxnet.contrib import amp as ours
    assert ours is amp
    assert theirs is not amp
    amp.uninstall()
    amp.uninstall()
    from mxnet.contrib import amp as again
    assert again is theirs


@pytest.mark.usefixtures("_installed")
def test_a_published_training_script_runs_unchanged():
    from mxnet.contrib import amp
    amp.init()
    net = nn.Dense(2, in_units=4)
    net.initialize()
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    amp.init_trainer(trainer)
    before = net.weight.data().asnumpy()
    with autograd.record():
        losses = [net(mx.nd.ones((2, 4))).sum()]
        with amp.scale_loss(losses, trainer) as scaled_losses:
            autograd.backward(scaled_losses)
    trainer.step(1)
    assert np.allclose(net.weight.data().asnumpy(), before - 0.1 * 2)
