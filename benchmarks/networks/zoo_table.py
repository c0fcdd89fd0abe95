"""Which networks of the model zoos are measured: one or more of every family, at small sizes. Data only."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple


class Member(NamedTuple):
    """A network of a zoo."""

    family: str  # ``'classification'``, ``'detection'``, ``'segmentation'``, ``'pose'``, ``'action'``, ``'text'``
    size: tuple[int, ...] = (3, 224, 224)  # of a sample
    source: str = "gluoncv"
    model: str = ""  # its name there, where that is another one
    peer: str = ""  # ``module:name`` of the same architecture in torchvision or timm
    peer_options: Mapping[str, Any] = {}  # those that the peer is made with
    trains: bool = True  # whether it trains without targets, and MXNet FP32 does not fail: it does in three dimensions

    def shape(self, batch_size: int) -> tuple[int, ...]:
        """Return the shape of a batch."""
        return (batch_size, *self.size)


def _side(pixels: int) -> tuple[int, ...]:
    return 3, pixels, pixels


def _classifier(source: str, peer: str = "", pixels: int = 224, model: str = "") -> Member:
    return Member("classification", _side(pixels), source, model, peer)


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
    "resnest50": _classifier("gluoncv", "timm:resnest50d"),
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
