"""The SSD networks that `training` trains: a light one of its own, or any of GluonCV's for custom classes."""

from __future__ import annotations

import difflib
import hashlib
import re
import warnings
from typing import Any, Sequence

import gluon_amp  # noqa: F401  first: it lets MXNet 1.9.1 import under newer NumPy

# isort: split
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.model_zoo import get_model_list
    from gluoncv.model_zoo.ssd.ssd import SSD

DIGITS = "digits"

DIGITS_SHAPE = 128
_STRIDES = (8, 16, 32)
# sides of the anchors as shares of the image's; each level has its own size and the mean with the next
_ANCHOR_SIZES = (0.17, 0.28, 0.44, 0.66)
_ANCHOR_RATIOS = (1, 2, 0.5)


class _Residual(gluon.HybridBlock):
    """Two 3x3 convolutions beside a 1x1 one, at half the resolution."""

    def __init__(self, channels: int, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.body = nn.HybridSequential()
            self.body.add(*_conv_norm(channels, 3, 2), nn.Activation("relu"), *_conv_norm(channels, 3, 1))
            self.shortcut = nn.HybridSequential()
            self.shortcut.add(*_conv_norm(channels, 1, 2))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        # not F.relu, which has no oneDNN kernel and is slow, in bfloat16 above all
        return F.Activation(self.body(x) + self.shortcut(x), act_type="relu")


def _conv_norm(channels: int, kernel: int, stride: int) -> tuple[gluon.HybridBlock, gluon.HybridBlock]:
    return nn.Conv2D(channels, kernel, stride, kernel // 2, use_bias=False), nn.BatchNorm()


class LightBackbone(gluon.HybridBlock):
    """Features at strides 8, 16 and 32; every channel count is a multiple of 16.

    oneDNN and cuDNN have their fast low-precision kernels for such counts only.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(*_conv_norm(32, 3, 2), nn.Activation("relu"), _Residual(64))
            self.level0 = _Residual(128)
            self.level1 = _Residual(128)
            self.level2 = _Residual(128)

    def hybrid_forward(self, F: Any, x: Any) -> list[Any]:
        features = [self.level0(self.stem(x))]
        for level in (self.level1, self.level2):
            features.append(level(features[-1]))
        return features


def _light_features(**_: Any) -> LightBackbone:
    """Build the backbone; GluonCV's SSD passes arguments about pretrained weights, which it has none of."""
    return LightBackbone()


def _light_ssd(classes: Sequence[str], data_shape: int) -> SSD:
    return SSD(
        network=None,
        base_size=data_shape,
        features=_light_features,
        num_filters=None,
        sizes=[share * data_shape for share in _ANCHOR_SIZES],
        ratios=[list(_ANCHOR_RATIOS) for _ in _STRIDES],
        steps=list(_STRIDES),
        classes=classes,
    )


def network_names() -> list[str]:
    """Return what `create_network` accepts, ``'digits'`` first."""
    return [DIGITS, *sorted(name for name in get_model_list() if re.match(r"ssd_.*_custom$", name))]


def create_network(name: str, classes: Sequence[str], data_shape: int) -> SSD:
    """Create an SSD for the given classes, not yet initialized.

    Parameters
    ----------
    name : str
        ``'digits'``, or an SSD of GluonCV's model zoo; ``_coco`` and ``_voc`` at its end stand for
        ``_custom``.
    classes : sequence of str
        The names of what it detects.
    data_shape : int
        Side length of its square input in pixels.

    Raises
    ------
    ValueError
        There is no such network.
    """
    if name == DIGITS:
        return _light_ssd(classes, data_shape)
    custom = re.sub("_(coco|voc)$", "_custom", name)
    names = network_names()
    if custom not in names:
        close = difflib.get_close_matches(custom, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(names)}"
        raise ValueError(f"unknown network {name!r}; {hint}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_model(custom, classes=list(classes), pretrained_base=False)


@mx.init.register
class _Xavier(mx.init.Xavier):
    """Xavier for matrices; for vectors what their name asks for.

    GluonCV's networks leave the BatchNorm vectors of their added layers to the default initializer, and
    MXNet's Xavier refuses vectors.
    """

    def _init_weight(self, name: str, arr: mx.nd.NDArray) -> None:
        if arr.ndim >= 2:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1.0 if name.endswith(("gamma", "var")) else 0.0


def initialize(net: gluon.HybridBlock, device: mx.Context) -> None:
    """Give a network that is trained from scratch its first weights."""
    net.initialize(_Xavier(), ctx=device)


def weights_digest(net: gluon.HybridBlock) -> str:
    """Return a short digest of the trainable parameters' values."""
    digest = hashlib.sha256()
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            digest.update(parameter.list_data()[0].asnumpy().tobytes())
    return digest.hexdigest()[:16]
