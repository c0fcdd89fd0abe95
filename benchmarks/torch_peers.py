"""PyTorch at its fastest on a CPU, and the networks in it, layer by layer as Gluon and GluonCV build them.

It runs in an interpreter of its own: GluonCV refuses to be imported where PyTorch 2 is installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Callable, ContextManager, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from .harness import UsageError
from .networks import JOBS, MEMBERS, TUTORIAL, batch, ssd_batch

# (channels, blocks, stride) of ResNet-50's stages
_RESNET50 = ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2))
_COCO_CLASSES = 81  # with the background
_BOXES = (4, 6, 6, 6, 4, 4)  # of a place, by scale
_HARD_NEGATIVES = 3  # for each positive anchor
# Operators that torchvision compiles, which its wheel lacks beside a build of torch for CPUs: the networks need none.
_COMPILED = ("nms(Tensor dets, Tensor scores, float threshold) -> Tensor",
             "qnms(Tensor dets, Tensor scores, float threshold) -> Tensor",
             "roi_align(Tensor input, Tensor rois, float scale, SymInt height, SymInt width, int ratio, bool aligned)"
             " -> Tensor")
_declared: list[Any] = []  # the declarations live as long as these

Losses = Mapping[str, torch.Tensor]


class Torch:
    """PyTorch with channels last and fused updates, in FP32 or with autocast, eager or compiled."""

    def __init__(self, device: str, dtype: str | None, training: bool, autocast: bool = False, compiled: bool = False):
        if device != "cpu" or dtype not in (None, "bfloat16"):
            raise UsageError("the PyTorch peers run on the CPU in FP32 or bfloat16, received "
                             f"--device {device}, --dtype {dtype}")
        self.autocast, self.compiled = autocast, compiled
        self.dtype = "bfloat16" if autocast else "float32"

    def precision(self) -> ContextManager[Any]:
        """Return the context that the forward pass belongs into."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def placed(self, thing: Any) -> Any:
        """Return a network or a batch of images in the fastest layout; anything else as it is."""
        is_image = isinstance(thing, torch.Tensor) and thing.dim() == 4
        return thing.to(memory_format=torch.channels_last) if is_image or hasattr(thing, "modules") else thing

    def prepared(self, net: nn.Module) -> Any:
        """Return the network that trains; a compiled one is compiled in its first step, which needs g++."""
        if not self.compiled:
            return net
        if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
            import torch._inductor.config as inductor

            inductor.cpp.simdlen = 256
        return torch.compile(net)


class Training:
    """Training steps on one random batch, as `gluon_networks.Training` takes them."""

    def __init__(self, backend: Torch, settings: Mapping[str, Any]):
        self.backend, name, size = backend, settings["network"], int(settings["batch_size"])
        torch.manual_seed(settings["seed"])
        net, self.losses = _made(name, settings)
        net = backend.placed(net).train()
        inputs, labels = _ssd_data(net, size, settings) if isinstance(net, SSD) else batch(name, size, settings["seed"])
        self.optimizer = _optimizer(name, net)
        self.net = backend.prepared(net)
        self.inputs = [backend.placed(torch.from_numpy(each)) for each in inputs]
        self.labels = [torch.from_numpy(each) for each in labels]
        self.about = {"dtype": backend.dtype, "notes": [], "samples": size}

    def step(self) -> dict[str, float]:
        """Train on the batch and return its losses."""
        self.optimizer.zero_grad()
        with self.backend.precision():
            outputs = self.net(*self.inputs)
        losses = self.losses(outputs, *self.labels)
        sum(losses.values()).backward()  # type: ignore[union-attr]
        self.optimizer.step()
        return {name: loss.item() for name, loss in losses.items()}


def _optimizer(name: str, net: nn.Module) -> torch.optim.Optimizer:
    if name == "encoder":
        return torch.optim.Adam(net.parameters(), lr=2e-5, fused=True)
    rate = 1e-4 if name in MEMBERS else 1e-3
    return torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, fused=True)


def _made(name: str, settings: Mapping[str, Any]) -> tuple[nn.Module, Callable[..., Losses]]:
    """Return a network with random weights and its loss."""
    if name == "ssd512" or (name == TUTORIAL and "data_shape" in settings):
        return SSD(), multibox
    if name in JOBS:
        return {"lstm": LanguageModel, "encoder": Encoder}[name](**JOBS[name].numbers), cross_entropy
    if name in MEMBERS and MEMBERS[name].peer and "data_shape" not in settings:
        return _of_a_zoo(MEMBERS[name].peer, MEMBERS[name].peer_options), mean_square
    raise UsageError(f"{name} has no peer in PyTorch here; known: ssd512 and `peer` in benchmarks/networks.py")


def _of_a_zoo(peer: str, options: Mapping[str, Any]) -> nn.Module:
    """Return an architecture ``module:name`` of torchvision or timm."""
    package, _, name = peer.partition(":")
    try:
        if package == "timm":
            return _imported("timm").create_model(name, pretrained=False, **options)
        models = _imported("torchvision.models")
    except ImportError as error:
        raise UsageError(f"{package} cannot be imported: {error}: install it where torch is") from error
    for part in name.split("."):
        models = getattr(models, part)
    without = {"weights": None, "weights_backbone": None} if "." in name else {"weights": None}
    return models(**without, **options)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except RuntimeError:  # of a wheel without compiled operators
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _COMPILED:
            library.define(schema)
        _declared.append(library)
        return importlib.import_module(module)


def mean_square(outputs: Any) -> Losses:
    """Return the sum of the mean squares of all outputs."""
    return {"loss": sum((output.float().square().mean() for output in _floats(outputs)), torch.zeros(()))}


def _floats(outputs: Any) -> Iterable[torch.Tensor]:
    if isinstance(outputs, Mapping):
        outputs = list(outputs.values())
    if isinstance(outputs, (list, tuple)):
        for each in outputs:
            yield from _floats(each)
    elif outputs is not None:
        yield outputs


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> Losses:
    """Return the mean cross entropy; classes are in the last dimension."""
    return {"CrossEntropy": functional.cross_entropy(scores.float().flatten(0, -2), labels.long().flatten())}


def multibox(predictions: tuple[torch.Tensor, torch.Tensor], classes: torch.Tensor, boxes: torch.Tensor) -> Losses:
    """Return GluonCV's SSDMultiBoxLoss: hard negatives are mined, box losses count for positive anchors only."""
    scores, offsets = (each.float() for each in predictions)
    positive = classes > 0
    count = max(1, int(positive.sum()))
    entropy = -functional.log_softmax(scores, -1).gather(-1, classes.long().unsqueeze(-1)).squeeze(-1)
    rank = (entropy * (positive.float() - 1)).argsort(1).argsort(1)
    hard = rank < (positive.sum(1, keepdim=True) * _HARD_NEGATIVES)
    entropy = torch.where(positive | hard, entropy, torch.zeros_like(entropy))
    distance = functional.smooth_l1_loss(offsets, boxes, reduction="none") * positive.unsqueeze(-1)
    return {"CrossEntropy": entropy.sum() / count, "SmoothL1": distance.sum() / count}


class Bottleneck(nn.Module):
    """A block of ResNet v1: the stride is in its first convolution, the 1x1 convolutions have biases."""

    def __init__(self, before: int, channels: int, stride: int, downsample: bool):
        super().__init__()
        inner = channels // 4
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, stride), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 1), nn.BatchNorm2d(channels))
        shortcut = (nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        self.shortcut = nn.Sequential(*shortcut) if downsample else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def _resnet50_stages() -> list[nn.Sequential]:
    """Return ResNet-50 v1's four stages, the stem in front of the first."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages, before = [], 64
    for channels, blocks, stride in _RESNET50:
        first = Bottleneck(before, channels, stride, downsample=True)
        rest = (Bottleneck(channels, channels, 1, downsample=False) for _ in range(blocks - 1))
        stages.append(nn.Sequential(*(() if stages else stem), first, *rest))
        before = channels
    return stages


class SSD(nn.Module):
    """GluonCV's ssd_512_resnet50_v1_coco as it is in training: class and box predictions, before any loss."""

    def __init__(self) -> None:
        super().__init__()
        *stages, last = _resnet50_stages()
        channels = (1024, 2048, 512, 512, 256, 256)
        expansions = [self._expansion(before, after) for before, after in zip(channels[1:], channels[2:])]
        self.scales = nn.ModuleList([nn.Sequential(*stages), last, *expansions])
        self.classes = nn.ModuleList(self._predictors(channels, _COCO_CLASSES))
        self.boxes = nn.ModuleList(self._predictors(channels, 4))

    @staticmethod
    def _expansion(before: int, channels: int) -> nn.Sequential:
        """Return one more scale: half as wide and high."""
        return nn.Sequential(
            nn.Conv2d(before, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True))

    @staticmethod
    def _predictors(channels: Sequence[int], values: int) -> list[nn.Module]:
        return [nn.Conv2d(before, count * values, 3, padding=1) for before, count in zip(channels, _BOXES)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = []
        for scale in self.scales:
            x = scale(x)
            features.append(x)
        return self._rows(self.classes, features, _COCO_CLASSES), self._rows(self.boxes, features, 4)

    @staticmethod
    def _rows(predictors: nn.ModuleList, features: Sequence[torch.Tensor], values: int) -> torch.Tensor:
        maps = (predictor(feature) for predictor, feature in zip(predictors, features))
        return torch.cat([each.permute(0, 2, 3, 1).flatten(1) for each in maps], 1).unflatten(1, (-1, values))


def _ssd_data(net: SSD, size: int, settings: Mapping[str, Any]) -> tuple[Any, Any]:
    side = settings.get("data_shape") or 512
    net.eval()
    with torch.no_grad():
        anchors = net(torch.zeros(1, 3, side, side))[1].shape[1]
    net.train()
    return ssd_batch(size, side, anchors, settings["seed"])


class LanguageModel(nn.Module):
    """Word embedding, LSTM layers, and a score for each word."""

    def __init__(self, layers: int, units: int, length: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, units)
        self.lstm = nn.LSTM(units, units, layers)
        self.decoder = nn.Linear(units, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.lstm(self.embedding(tokens))[0])


class Encoder(nn.Module):
    """A transformer encoder of BERT's shape with a classifier on the first token; no dropout."""

    def __init__(self, layers: int, units: int, heads: int, hidden: int, length: int, vocabulary: int, classes: int):
        super().__init__()
        self.words, self.segments = nn.Embedding(vocabulary, units), nn.Embedding(2, units)
        self.positions = nn.Parameter(torch.randn(1, length, units) * 0.02)
        self.norm = nn.LayerNorm(units)
        self.layers = nn.Sequential(*(
            nn.TransformerEncoderLayer(units, heads, hidden, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)))
        self.pooler, self.classifier = nn.Linear(units, units), nn.Linear(units, classes)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.norm(self.words(tokens) + self.segments(segments) + self.positions))
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))
