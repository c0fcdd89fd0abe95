"""What both scripts share: their options, scikit-learn's handwritten digits, and a network for them."""
from __future__ import annotations

import argparse

import gluon_amp  # noqa: F401  before mxnet

# isort: split
import mxnet as mx
import numpy as np
from mxnet.gluon import data, nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    options.add_argument("--batch-size", type=int, default=64, help="(default: %(default)s)")
    options.add_argument("--lr", type=float, default=0.1, help="learning rate (default: %(default)s)")
    options.add_argument("--no-amp", action="store_true", help="train in FP32")
    return options


def loaders(batch_size: int) -> tuple[data.DataLoader, data.DataLoader]:
    """Return batches of (image, label) to train on and to validate on; images are (1, 16, 16), FP32."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 1, 8, 8) / 16, np.ones((2, 2))).astype("float32")
    parts = train_test_split(images, labels.astype("float32"), test_size=360, random_state=0, stratify=labels)
    train, validation = (data.ArrayDataset(*pair) for pair in (parts[::2], parts[1::2]))
    return (data.DataLoader(train, batch_size, shuffle=True, last_batch="discard"),
            data.DataLoader(validation, batch_size))


def network() -> nn.HybridSequential:
    """Make the network, always with the same weights, and the same order of samples to come."""
    np.random.seed(0)  # DataLoader shuffles with it
    mx.random.seed(0)
    net = nn.HybridSequential(prefix="digits_")
    with net.name_scope():
        for channels, strides in ((32, 1), (64, 2), (64, 2)):
            net.add(nn.Conv2D(channels, 3, strides, padding=1, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    return net
