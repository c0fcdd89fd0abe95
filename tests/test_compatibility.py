"""Scripts and libraries written for mxnet.contrib.amp."""
from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

import gluon_amp as amp

pytestmark = pytest.mark.machine


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


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_gluoncvs_faster_rcnn_task_trains_through_this_package():
    import gluoncv
    from gluoncv.data.batchify import FasterRCNNTrainBatchify
    from gluoncv.data.transforms.presets.rcnn import FasterRCNNDefaultTrainTransform
    from gluoncv.model_zoo.rcnn.faster_rcnn.data_parallel import ForwardBackwardTask

    amp.init()
    mx.random.seed(10)
    net = gluoncv.model_zoo.get_model("faster_rcnn_resnet50_v1b_voc", pretrained_base=False, per_device_batch_size=1)
    net.initialize()
    image = mx.nd.random.uniform(0, 255, shape=(256, 256, 3))
    boxes = np.array([[40.0, 40, 180, 200, 3, 0]])
    sample = FasterRCNNDefaultTrainTransform(256, 256, net)(image, boxes)
    images, labels, *targets = FasterRCNNTrainBatchify(net)([sample])
    batch = [item.as_in_context(mx.cpu()) for item in (images, labels, *(shards[0] for shards in targets))]
    trainer = gluon.Trainer(net.collect_train_params(), "sgd", {"learning_rate": 1e-3}, update_on_kvstore=False)
    amp.init_trainer(trainer)
    task = ForwardBackwardTask(net, trainer, gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=False),
                               gluon.loss.HuberLoss(rho=1 / 9.0), gluon.loss.SoftmaxCrossEntropyLoss(),
                               gluon.loss.HuberLoss(rho=1), 1.0, amp_enabled=True)
    losses = []
    for _ in range(3):
        losses.append([value.asscalar() for value in task.forward_backward(batch)[:4]])
        trainer.step(1, ignore_stale_grad=True)
    assert np.isfinite(losses).all()
    assert trainer._amp_loss_scaler.num_skipped == 0
