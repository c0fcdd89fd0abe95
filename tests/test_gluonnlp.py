"""GluonNLP's networks train through the stand-in: one step each, from the same weights as FP32."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from cpu_kinds import LACKING, RUNS_BFLOAT16
from mxnet import autograd, gluon

import gluon_amp as amp

pytest.importorskip("gluonnlp", reason="GluonNLP is not installed: pip install gluonnlp==0.10.0")

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, BATCH = 60, 12, 4
MOST_SKIPPED = 3  # while the loss scale falls from where it starts to what float16 has room for
UNIT_ROUNDOFF = {"bfloat16": 2.0 ** -8, "float16": 2.0 ** -11}


@pytest.fixture
def nlp():
    amp.install()
    import gluonnlp
    yield gluonnlp
    amp.uninstall()


def tokens(*shape):
    return mx.nd.array(np.random.RandomState(len(shape)).randint(4, VOCABULARY, shape))


def lengths():
    return mx.nd.array([LENGTH, 7, 3, 1])


def bert(nlp):
    encoder = nlp.model.BERTEncoder(num_layers=2, units=64, hidden_size=128, max_length=LENGTH, num_heads=4, dropout=0)
    net = nlp.model.BERTModel(encoder, vocab_size=VOCABULARY, token_type_vocab_size=2, units=64, embed_size=64)
    cross_entropy = gluon.loss.SoftmaxCELoss()
    masked = mx.nd.array([[0, 2], [0, 2], [0, 2], [0, 0]])
    inputs = tokens(BATCH, LENGTH), mx.nd.zeros((BATCH, LENGTH)), lengths(), masked

    def loss():
        _, _, next_sentence, decoded = net(*inputs)
        words = cross_entropy(decoded.reshape((-1, VOCABULARY)), tokens(BATCH * 2))
        return words.mean() + cross_entropy(next_sentence, mx.nd.array([0, 1, 0, 1])).mean()
    return net, loss


def transformer(nlp):
    encoder, decoder, one_step = nlp.model.transformer.get_transformer_encoder_decoder(
        num_layers=2, num_heads=4, units=64, hidden_size=128, dropout=0.0, max_src_length=LENGTH, max_tgt_length=LENGTH)
    words = nlp.Vocab(nlp.data.count_tokens([f"word{number}" for number in range(VOCABULARY - 4)]))
    net = nlp.model.translation.NMTModel(src_vocab=words, tgt_vocab=words, encoder=encoder, decoder=decoder,
                             one_step_ahead_decoder=one_step, share_embed=True, embed_size=64, tie_weights=True)
    masked = nlp.loss.MaskedSoftmaxCELoss()
    source, target = tokens(BATCH, LENGTH), tokens(BATCH, LENGTH, 1).reshape((BATCH, LENGTH))

    def loss():
        output, _ = net(source, target[:, :-1], lengths(), mx.nd.array([LENGTH - 1, 6, 3, 1]))
        return masked(output, target[:, 1:], mx.nd.array([LENGTH - 1, 6, 3, 1])).mean()
    return net, loss


def language_model(network):
    cross_entropy = gluon.loss.SoftmaxCELoss()
    state = network.begin_state(batch_size=BATCH, func=mx.nd.zeros)

    def loss():
        output, *_ = network(tokens(LENGTH, BATCH), state)
        return cross_entropy(output.reshape((-1, VOCABULARY)), tokens(LENGTH * BATCH)).mean()
    return network, loss


def awd_lstm(nlp):
    return language_model(nlp.model.train.AWDRNN("lstm", VOCABULARY, embed_size=32, hidden_size=48, num_layers=2,
                                                 dropout=0, weight_drop=0, drop_h=0, drop_i=0, drop_e=0))


def standard_lstm(nlp):
    return language_model(nlp.model.train.StandardRNN("lstm", VOCABULARY, 32, 32, 2, 0.0, tie_weights=True))


def train(net, loss, scaled):
    """Take a step; return the loss, the gradients without scale, and the names of what changed."""
    parameters = {name: value for name, value in net.collect_params().items() if value.grad_req != "null"}
    trainer = gluon.Trainer(parameters, "adam", {"learning_rate": 1e-3}, update_on_kvstore=False)
    if scaled:
        amp.init_trainer(trainer)
    for _ in range(MOST_SKIPPED + 1):
        found = step(trainer, parameters, loss, scaled)
        if not (scaled and trainer._amp_loss_scaler.step_was_skipped):
            return found
    raise AssertionError(f"{MOST_SKIPPED + 1} steps were skipped in a row")


def step(trainer, parameters, loss, scaled):
    with autograd.record():
        value = loss()
        if scaled:
            with amp.scale_loss(value, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        else:
            value.backward()
    scale = trainer._amp_loss_scaler.loss_scale if scaled else 1
    gradients = {name: parameter.grad().asnumpy() / scale for name, parameter in parameters.items()}
    before = {name: parameter.data().asnumpy() for name, parameter in parameters.items()}
    trainer.step(1)
    changed = {name for name, parameter in parameters.items() if (parameter.data().asnumpy() != before[name]).any()}
    return value.asscalar(), gradients, changed


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("make", [bert, transformer, awd_lstm, standard_lstm])
def test_one_step(nlp, make, dtype, hybridize):
    if dtype == "bfloat16" and not RUNS_BFLOAT16:
        pytest.skip(f"{LACKING} bfloat16")
    mx.random.seed(5)
    net, loss = make(nlp)
    net.initialize(mx.init.Xavier())
    loss()
    weights = {name: value.data().copy() for name, value in net.collect_params().items()}
    expected, stock, _ = train(net, loss, scaled=False)
    for name, value in net.collect_params().items():
        value.set_data(weights[name])
    amp.init(dtype)
    if hybridize:
        net.hybridize()
    value, gradients, changed = train(net, loss, scaled=True)
    assert amp.active_dtype() == dtype
    assert value == pytest.approx(expected, rel=4 * UNIT_ROUNDOFF[dtype])
    difference = np.sqrt(sum(((gradients[name] - stock[name]) ** 2).sum() for name in stock))
    norm = np.sqrt(sum((gradient ** 2).sum() for gradient in stock.values()))
    assert 0 < difference < 16 * UNIT_ROUNDOFF[dtype] * norm
    assert changed >= {name for name in stock if np.abs(stock[name]).max() > 1e-6}


def test_masks_fit_float16_once_amp_is_on(nlp):
    scores = mx.nd.zeros((1, 1, 2))
    mask = mx.nd.array([[[1, 0]]])
    masked = nlp.model.attention_cell._apply_mask(mx.nd, scores, mask, np.float32)
    assert masked.asnumpy()[0, 0, 1] == np.float32(-1e18)
    amp.init("float32")
    masked = nlp.model.attention_cell._apply_mask(mx.nd, scores, mask, np.float32)
    assert masked.asnumpy()[0, 0, 1] == -1e4
