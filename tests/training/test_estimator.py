"""Mixed precision in ``gluon.contrib.estimator``: the same training as a loop written by hand."""
from __future__ import annotations

import logging

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon.contrib.estimator import CheckpointHandler, Estimator
from mxnet.gluon.contrib.estimator.batch_processor import BatchProcessor
from networks import conv_net

import gluon_amp as amp

BATCH, BATCHES = 8, 3
ONE = (mx.cpu(),)
RNG = np.random.RandomState(0)
IMAGES, LABELS = RNG.rand(BATCH * BATCHES, 3, 16, 16).astype("float32"), RNG.randint(0, 10, BATCH * BATCHES)
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def loader():
    return gluon.data.DataLoader(gluon.data.ArrayDataset(IMAGES, LABELS.astype("float32")), BATCH)


def made(contexts):
    net = conv_net()
    mx.random.seed(1)
    net.initialize(mx.init.Xavier(), ctx=list(contexts))
    net(mx.nd.zeros((1, 3, 16, 16), ctx=contexts[0]))
    net.hybridize()
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})


def estimator(contexts=ONE, **arguments):
    net, trainer = made(contexts)
    metrics = [mx.metric.Accuracy(), mx.metric.Loss()]
    found = Estimator(net, LOSS, train_metrics=metrics, trainer=trainer, context=list(contexts), **arguments)
    found.logger.setLevel(logging.WARNING)
    return found


def weights(net):
    return [value.data(value.list_ctx()[0]).asnumpy() for value in net.collect_params().values()]


def trained_by_hand(scaler, epochs, max_norm, dtype):
    """Return the weights after the loop that the handler stands for."""
    net, trainer = made(ONE)
    with amp.autocast(dtype=dtype):
        amp.init_trainer(trainer, scaler)
        for _ in range(epochs):
            for data, label in loader():
                with autograd.record():
                    loss = LOSS(net(data), label)
                    with amp.scale_loss(loss, trainer) as scaled:
                        autograd.backward(scaled)
                trainer.allreduce_grads()
                if max_norm:
                    amp.clip_global_norm(trainer, max_norm * len(data))
                trainer.update(len(data))
    return weights(net)


def assert_equal(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


class Infinite(gluon.loss.Loss):
    """A loss whose first batch has infinite gradients."""

    def __init__(self):
        super().__init__(None, 0)
        self.calls = 0

    def forward(self, prediction, label):
        self.calls += 1
        return LOSS(prediction, label) * (np.inf if self.calls == 1 else 1.0)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_trains_as_a_loop_by_hand(dtype, max_norm):
    expected = trained_by_hand(amp.StaticLossScaler(128), 2, max_norm, dtype)
    trained = estimator()
    trained.fit(loader(), epochs=2, event_handlers=[amp.AmpHandler(dtype, 128, max_norm)])
    assert_equal(weights(trained.net), expected)


def test_leaves_the_estimator_as_it_was():
    trained = estimator()
    processor = trained.batch_processor
    trained.fit(loader(), val_data=loader(), epochs=1, event_handlers=[amp.AmpHandler()])
    assert trained.batch_processor is processor
    assert not amp.is_active()


def test_metrics_are_those_of_unscaled_losses():
    trained, plain = estimator(), estimator()
    trained.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=1024)])
    plain.fit(loader(), epochs=1)
    loss, expected = (each.train_metrics[1].get()[1] for each in (trained, plain))
    assert loss == pytest.approx(expected, rel=0.05)


def test_a_step_with_infinite_gradients_is_skipped():
    trained = estimator()
    trained.loss = Infinite()
    trained.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler="dynamic")])
    scaler = trained.trainer._amp_loss_scaler
    assert (scaler.num_skipped, scaler.loss_scale) == (1, 2.0 ** 15)
    assert all(np.isfinite(value).all() for value in weights(trained.net))


def test_a_second_fit_goes_on_with_the_scaler():
    trained, handler = estimator(), amp.AmpHandler(loss_scaler="dynamic")
    for _ in range(2):
        trained.fit(loader(), epochs=1, event_handlers=[handler])
    assert trained.trainer._amp_loss_scaler.scaler.state_dict()["good_steps"] == 2 * BATCHES


def test_several_contexts():
    contexts = (mx.cpu(0), mx.cpu(1))
    trained = estimator(contexts)
    trained.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=128)])
    for parameter in trained.net.collect_params().values():
        if parameter.grad_req != "null":
            first, second = (value.asnumpy() for value in parameter.list_data())
            np.testing.assert_array_equal(first, second)


class Own(BatchProcessor):
    """A batch processor that scales the loss, or forgets to."""

    def __init__(self, scales):
        super().__init__()
        self.scales = scales

    def fit_batch(self, estimator, train_batch, batch_axis=0):
        data, label = train_batch
        with autograd.record():
            prediction = estimator.net(data)
            loss = estimator.loss(prediction, label)
            with amp.scale_loss(loss, estimator.trainer, enabled=self.scales) as scaled:
                autograd.backward(scaled)
        return [data], [label], [prediction], [loss]


def test_batch_processors_of_the_user():
    trained = estimator(batch_processor=Own(scales=True))
    trained.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=128)])
    expected = estimator()
    expected.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=128)])
    assert_equal(weights(trained.net), weights(expected.net))


def test_a_batch_processor_that_forgets_the_scale_is_told():
    trained = estimator(batch_processor=Own(scales=False))
    with pytest.raises(amp.StateError, match="scale_loss"):
        trained.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=128)])
    trained.batch_processor.own.scales = True
    trained.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=None)])
    assert isinstance(trained.batch_processor, Own)


@pytest.mark.parametrize("max_norm", [0, -1, float("nan")])
def test_refuses_norms(max_norm):
    with pytest.raises(ValueError, match="a number above 0"):
        amp.AmpHandler(max_norm=max_norm)


def checkpoints(directory, kind=amp.AmpCheckpointHandler, **arguments):
    return kind(str(directory), "net", **arguments)


def scaler():
    return amp.DynamicLossScaler(init_scale=64, growth_interval=2)


def test_resuming_continues_exactly(tmp_path):
    whole = estimator()
    whole.fit(loader(), epochs=3, event_handlers=[amp.AmpHandler(loss_scaler=scaler())])
    begun = estimator()
    begun.fit(loader(), epochs=1, event_handlers=[amp.AmpHandler(loss_scaler=scaler()), checkpoints(tmp_path)])
    resumed, handler = estimator(), amp.AmpHandler(loss_scaler=scaler())
    resumed.fit(loader(), epochs=3, event_handlers=[handler, checkpoints(tmp_path, resume_from_checkpoint=True)])
    assert_equal(weights(resumed.net), weights(whole.net))
    assert handler.loss_scaler.state_dict() == whole.trainer._amp_loss_scaler.scaler.state_dict()


def test_resuming_from_training_without_amp(tmp_path):
    estimator().fit(loader(), epochs=1, event_handlers=[checkpoints(tmp_path, CheckpointHandler)])
    resumed, handler = estimator(), amp.AmpHandler(loss_scaler=scaler())
    resumed.fit(loader(), epochs=2, event_handlers=[handler, checkpoints(tmp_path, resume_from_checkpoint=True)])
    assert handler.loss_scaler.state_dict()["good_steps"] == BATCHES % 2


def test_old_checkpoints_go_with_their_scalers(tmp_path):
    handlers = [amp.AmpHandler(loss_scaler=8), checkpoints(tmp_path, max_checkpoints=1)]
    estimator().fit(loader(), epochs=3, event_handlers=handlers)
    assert len(list(tmp_path.glob("*.scaler"))) == len(list(tmp_path.glob("*.states"))) == 1
