"""Which networks are measured: families of the model zoos at small sizes, and three jobs of our own. Data only."""

from __future__ import annotations

import re
from typing import Any, Mapping, NamedTuple

import numpy as np


class Member(NamedTuple):
    """A network of a zoo."""

    family: str  # ``'classification'``, ``'detection'``, ``'segmentation'``, ``'pose'``, ``'action'``, ``'text'``
    size: tuple[int, ...] = (3, 224, 224)  # of a sample
    source: str = "gluoncv"
    peer: str = ""  # ``module:name`` of the same architecture in torchvision or timm
    peer_options: Mapping[str, Any] = {}  # the peer is made with
    trains: bool = True  # without targets; three dimensions fail in MXNet FP32

    def shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of a batch."""
        return (batch_size, *self.size)


class Job(NamedTuple):
    """A network with its own data and loss."""

    numbers: Mapping[str, int]  # that the network is built from
    peer: str = "own"
    trains: bool = True


def _side(pixels: int) -> tuple[int, ...]:
    return 3, pixels, pixels


def _classifier(source: str, peer: str = "", pixels: int = 224) -> Member:
    return Member("classification", _side(pixels), source, peer)


TUTORIAL = "ssd_512_resnet50_v1_coco"
JOBS: Mapping[str, Job] = {
    "ssd512": Job({}),  # the training of MXNet's AMP tutorial, `TUTORIAL` at 512 pixels
    "lstm": Job({"layers": 2, "units": 650, "length": 35, "vocabulary": 10000}),
    "encoder": Job({"layers": 12, "units": 768, "heads": 12, "hidden": 3072, "length": 128, "vocabulary": 30522,
                    "classes": 2}),
}
MEMBERS: Mapping[str, Member] = {
    "alexnet": _classifier("mxnet", "torchvision:alexnet"),
    "vgg16": _classifier("mxnet", "torchvision:vgg16"),
    "vgg16_bn": _classifier("mxnet", "torchvision:vgg16_bn"),
    "squeezenet1.1": _classifier("mxnet", "torchvision:squeezenet1_1"),
    "densenet121": _classifier("mxnet", "torchvision:densenet121"),
    "inceptionv3": _classifier("mxnet", "torchvision:inception_v3", 299),
    "resnet18_v1": _classifier("mxnet", "torchvision:resnet18"),
    "resnet18_v2": _classifier("mxnet"),
    "resnet50_v1": _classifier("mxnet"),
    "mobilenet1.0": _classifier("mxnet"),
    "mobilenetv2_1.0": _classifier("mxnet", "torchvision:mobilenet_v2"),
    "resnet50_v1b": _classifier("gluoncv", "torchvision:resnet50"),
    "resnext50_32x4d": _classifier("gluoncv", "torchvision:resnext50_32x4d"),
    "se_resnext50_32x4d": _classifier("gluoncv", "timm:seresnext50_32x4d"),
    "resnest50": Member("classification", peer="timm:resnest50d", peer_options={"drop_block_rate": 0.1}),
    "mobilenetv3_small": _classifier("gluoncv", "torchvision:mobilenet_v3_small"),
    "mobilenetv3_large": _classifier("gluoncv", "torchvision:mobilenet_v3_large"),
    "nasnet_4_1056": _classifier("gluoncv"),
    "shufflenet_v1": _classifier("gluoncv"),
    "shufflenet_v2": _classifier("gluoncv", "torchvision:shufflenet_v2_x1_0"),
    "se_resnet50_v1": _classifier("gluoncv"),
    "dla34": _classifier("gluoncv", "timm:dla34"),
    "googlenet": _classifier("gluoncv", "torchvision:googlenet"),
    "xception": _classifier("gluoncv", "timm:xception65", 299),
    "darknet53": _classifier("gluoncv", "timm:darknet53"),
    "hrnet_w18_small_v1_c": _classifier("gluoncv", "timm:hrnet_w18_small"),
    "residualattentionnet56": _classifier("gluoncv"),
    "cifar_resnet20_v1": _classifier("gluoncv", pixels=32),
    "cifar_wideresnet16_10": _classifier("gluoncv", pixels=32),
    "cifar_resnext29_16x64d": _classifier("gluoncv", pixels=32),
    "ssd_300_vgg16_atrous_coco": Member("detection", _side(300)),
    "ssd_512_resnet50_v1_coco": Member("detection", _side(256)),
    "ssd_512_mobilenet1.0_coco": Member("detection", _side(256)),
    "yolo3_darknet53_coco": Member("detection", _side(256), trains=False),
    "yolo3_mobilenet1.0_coco": Member("detection", _side(256), trains=False),
    "center_net_resnet18_v1b_coco": Member("detection", _side(256)),
    "fcn_resnet50_voc": Member("segmentation", _side(240), peer="torchvision:segmentation.fcn_resnet50",
                               peer_options={"num_classes": 21, "aux_loss": True}),
    "psp_resnet50_ade": Member("segmentation", _side(240)),
    "deeplab_resnet50_ade": Member("segmentation", _side(240), peer="torchvision:segmentation.deeplabv3_resnet50",
                                   peer_options={"num_classes": 150, "aux_loss": True}),
    "fastscnn_citys": Member("segmentation", _side(256)),
    "icnet_resnet50_citys": Member("segmentation", _side(240)),
    "danet_resnet50_citys": Member("segmentation", _side(240)),
    "simple_pose_resnet18_v1b": Member("pose", (3, 256, 192)),
    "mobile_pose_resnet18_v1b": Member("pose", (3, 256, 192)),
    "alpha_pose_resnet101_v1b_coco": Member("pose", (3, 256, 192)),
    "slowfast_4x16_resnet50_kinetics400": Member("action", (3, 36, 112, 112), trains=False),
    "i3d_resnet50_v1_kinetics400": Member("action", (3, 8, 112, 112), trains=False),
    "bert": Member("text", (128, 256), "gluonnlp"),
    "transformer": Member("text", (64, 512), "gluonnlp"),
}
NETWORKS: Mapping[str, Member | Job] = {**JOBS, **MEMBERS}


def side_of(network: str, default: int = 512) -> int:
    """Return the side in pixels of the images of an SSD, which its name says."""
    found = re.match(r"ssd_(\d+)_", network)
    return int(found[1]) if found else default


def batch(name: str, batch_size: int, seed: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return random inputs and labels; members of the zoos have no labels, for the SSD's see `ssd_batch`.

    Tokens are int32, ``(length, batch)`` for the language model, whose labels are the next tokens, and ``(batch,
    length)`` for the encoder, which gets segments, too.
    """
    random = np.random.RandomState(seed)
    if name in MEMBERS:
        return (random.uniform(-1, 1, MEMBERS[name].shape(batch_size)).astype(np.float32),), ()
    numbers = JOBS[name].numbers
    if name == "lstm":
        tokens = random.randint(0, numbers["vocabulary"], (numbers["length"] + 1, batch_size)).astype(np.int32)
        return (tokens[:-1],), (tokens[1:],)
    shape = batch_size, numbers["length"]
    tokens, segments = (random.randint(0, end, shape).astype(np.int32) for end in (numbers["vocabulary"], 2))
    return (tokens, segments), (random.randint(0, numbers["classes"], batch_size).astype(np.int32),)


def ssd_batch(batch_size: int, side: int, anchors: int, seed: int
              ) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return the tutorial's random images, and targets of classes and boxes for each anchor."""
    random = np.random.RandomState(seed)

    def uniform(low: float, *shape: int) -> np.ndarray:
        return random.uniform(low, 1, shape).astype(np.float32)

    images = uniform(-1, batch_size, 3, side, side)
    return (images,), (uniform(0, batch_size, anchors), uniform(0, batch_size, anchors, 4))
