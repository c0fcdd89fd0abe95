"""What both scripts share: their options, scikit-learn's handwritten digits, and a network for them.

Without scikit-learn (`pip install 'gluon_amp[tutorial]'`) they train on patterns made up in place of the digits.
"""
from __future__ import annotations

import argparse

import gluon_amp  # noqa: F401  before mxnet

# isort: split
import mxnet as mx
import numpy as np
from mxnet.gluon import data, nn

try:
    from sklearn.datasets import load_digits
except ImportError:
    load_digits = None

VALIDATION = 360  # samples


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, received {number}")
    return number


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=at_least_one, default=5, help="(default: %(default)s)")
    options.add_argument("--batch-size", type=at_least_one, default=64, help="(default: %(default)s)")
    options.add_argument("--lr", type=float, default=0.1, help="learning rate (default: %(default)s)")
    options.add_argument("--no-amp", action="store_true", help="train in FP32")
    return options


def loaders(batch_size: int) -> tuple[data.DataLoader, data.DataLoader]:
    """Return batches of (image, label) to train on and to validate on; images are (1, 16, 16), FP32."""
    images, labels = load_digits(return_X_y=True) if load_digits else made_up_digits()
    images = np.kron(images.reshape(-1, 1, 8, 8) / 16, np.ones((2, 2))).astype("float32")
    order = np.random.RandomState(0).permutation(len(images))
    if batch_size > len(order) - VALIDATION:
        raise SystemExit(f"error: expected at most the {len(order) - VALIDATION} images for training in a batch, "
                         f"received --batch-size {batch_size}")
    train, validation = (data.ArrayDataset(images[part], labels[part].astype("float32"))
                         for part in (order[VALIDATION:], order[:VALIDATION]))
    return (data.DataLoader(train, batch_size, shuffle=True, last_batch="discard"),
            data.DataLoader(validation, batch_size))


def made_up_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return as many images and labels as scikit-learn has: ten random patterns, with noise."""
    print("scikit-learn is not installed: training on made-up patterns. For digits: pip install 'gluon_amp[tutorial]'")
    random = np.random.RandomState(0)
    labels = np.arange(1797) % 10
    patterns = random.uniform(0, 16, (10, 64))
    return np.clip(patterns[labels] + random.normal(0, 6, (len(labels), 64)), 0, 16), labels


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
