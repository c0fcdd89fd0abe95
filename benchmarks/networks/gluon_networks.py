"""The benchmarked networks in Gluon. MXNet must be importable: start a backend first."""

from __future__ import annotations

from typing import Any, Callable, Mapping

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock, nn, rnn
from mxnet.gluon.model_zoo import vision

from .encoder import Encoder

_SETTLING_SIDE, _SETTLING_PASSES = 128, 10


class LanguageModel(HybridBlock):
    """Word embedding, LSTM layers, and a score for each word.

    Parameters
    ----------
    layers, units, vocabulary : int
        LSTM layers, their width and that of the embedding, and different words.
    """

    def __init__(self, layers: int, units: int, vocabulary: int, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.embedding = nn.Embedding(vocabulary, units)
            self.lstm = rnn.LSTM(units, layers, input_size=units)
            self.decoder = nn.Dense(vocabulary, flatten=False, in_units=units)

    def hybrid_forward(self, F: Any, tokens: Any) -> Any:
        """Return scores ``(length, batch, vocabulary)`` for tokens ``(length, batch)``."""
        return self.decoder(self.lstm(self.embedding(tokens)))


def _ssd(**_: int) -> HybridBlock:
    from .ssd import create_network  # GluonCV with it, which takes seconds to import

    return create_network("ssd_512_resnet50_v1_coco")


_CREATE: Mapping[str, Callable[..., HybridBlock]] = {
    "ssd512": _ssd,
    "resnet50": lambda side, classes: vision.resnet50_v1(classes=classes),
    "mobilenet_v2": lambda side, classes: vision.mobilenet_v2_1_0(classes=classes),
    "densenet121": lambda side, classes: vision.densenet121(classes=classes),
    "vgg16": lambda side, classes: vision.vgg16(classes=classes),
    "lstm": lambda layers, units, length, vocabulary: LanguageModel(layers, units, vocabulary),
    "encoder": Encoder,
    "encoder_masked": Encoder,
}


def _initializer(network: str) -> mx.init.Initializer:
    if network == "ssd512":  # the default, because others refuse the symbol's BatchNorm
        return mx.init.Uniform()
    return mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)


def _settle(net: HybridBlock, seed: int) -> None:
    """Let BatchNorm's statistics become those of random images: activations grow out of hand with the initial ones."""
    images = np.random.RandomState(seed).uniform(-1, 1, (2, 3, _SETTLING_SIDE, _SETTLING_SIDE))
    data = mx.nd.array(images, dtype="float32")
    net(data)  # parameters get their shapes
    for parameter in net.collect_params(".*moving_var").values():  # of the symbol's: half of them would be negative
        parameter.set_data(mx.nd.ones(parameter.shape))
    for _ in range(_SETTLING_PASSES):
        with autograd.record():
            outputs = net(data)
        autograd.backward(outputs[:2])  # statistics are updated there


def create(network: str, numbers: Mapping[str, Any], seed: int) -> HybridBlock:
    """Return an initialized network, hybridized with static allocation.

    Parameters
    ----------
    network : str
        A key of `tasks.SIZES`.
    numbers : mapping
        What `tasks.size` returned for it.
    seed : int
        Of the weights: equal seeds give equal weights.
    """
    mx.random.seed(seed)
    net = _CREATE[network](**numbers)
    net.initialize(_initializer(network))
    if network == "ssd512":  # before it is hybridized: a cached graph would stay that of training
        _settle(net, seed)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def parameter_count(net: HybridBlock) -> int:
    """Return the number of trainable values of a network that has run once."""
    parameters = net.collect_params().values()
    return sum(parameter.data().size for parameter in parameters if parameter.grad_req != "null")
