import time

import mxnet as mx
from mxnet import autograd, gluon

images, labels = mx.nd.random.uniform(shape=(16, 3, 224, 224)), mx.nd.arange(16)
net = gluon.model_zoo.vision.resnet50_v1()
net.initialize()
net.hybridize(static_alloc=True, static_shape=True)
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})

for step in range(5):
    mx.nd.waitall()
    start = time.time()
    with autograd.record():
        loss = loss_function(net(images), labels)
        loss.backward()
    trainer.step(16)
    mx.nd.waitall()
    print(f"step {step}: {16 / (time.time() - start):.1f} images a second")
