"""A language model with recurrent layers in C++ learns as with MXNet's in FP32."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn, rnn

import gluon_amp as amp
from gluon_amp import native

WORDS, LENGTH, BATCH, STEPS = 40, 20, 16, 300


def text(seed):
    """Every word is followed by one of three, by chances that stay."""
    random = np.random.RandomState(7)
    followers = random.randint(0, WORDS, (WORDS, 3))
    random = np.random.RandomState(seed)
    words = [random.randint(0, WORDS, BATCH)]
    for _ in range(LENGTH):
        words.append(followers[words[-1], random.choice(3, BATCH, p=[0.7, 0.2, 0.1])])
    return mx.nd.array(np.array(words), dtype="int32")


def losses(target, kind, dropout):
    mx.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Embedding(WORDS, 48), kind(64, 2, input_size=48, dropout=dropout),
            nn.Dense(WORDS, flatten=False, in_units=64))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 3e-3})
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    if target:
        amp.init(target)
        amp.init_trainer(trainer)
    found = []
    for step in range(STEPS):
        words = text(step)
        with autograd.record():
            loss = cross_entropy(net(words[:-1]), words[1:]).mean()
        loss.backward()
        trainer.step(1)
        found.append(float(loss.asscalar()))
    amp.deinit()
    return np.array(found).reshape(-1, 50).mean(axis=1)


@pytest.mark.slow
@pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)
@pytest.mark.parametrize("target", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
@pytest.mark.parametrize("dropout", [0, 0.2])
@pytest.mark.parametrize("kind", [rnn.LSTM, rnn.GRU])
def test_the_loss_falls_as_in_fp32(target, kind, dropout):
    expected, received = losses(None, kind, dropout), losses(target, kind, dropout)
    assert expected[-1] < 0.5 * expected[0]
    np.testing.assert_allclose(received, expected, rtol=0.05)
