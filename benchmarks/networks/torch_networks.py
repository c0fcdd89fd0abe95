"""The benchmarked networks in PyTorch, layer by layer as Gluon and GluonCV build them."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import nn

from ..harness.errors import UsageError

# (channels, blocks, stride) of ResNet-50's stages
_RESNET50 = ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2))
# (expansion, channels, blocks, stride) of MobileNet v2's groups
_MOBILENET_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
_COCO_CLASSES = 81  # with the background
_BOXES = (4, 6, 6, 6, 4, 4)  # of a place, by scale


class Bottleneck(nn.Module):
    """A block of ResNet v1: the stride is in its first convolution, the 1x1 convolutions have biases."""

    def __init__(self, before: int, channels: int, stride: int, downsample: bool):
        super().__init__()
        inner = channels // 4
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, stride), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, channels, 1), nn.BatchNorm2d(channels),
        )  # fmt: skip
        shortcut = (nn.Conv2d(before, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
        self.shortcut = nn.Sequential(*shortcut) if downsample else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def resnet50_stages() -> list[nn.Sequential]:
    """Return ResNet-50 v1's four stages, the stem in front of the first."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages, before = [], 64
    for channels, blocks, stride in _RESNET50:
        first = Bottleneck(before, channels, stride, downsample=True)
        rest = (Bottleneck(channels, channels, 1, downsample=False) for _ in range(blocks - 1))
        stages.append(nn.Sequential(*(() if stages else stem), first, *rest))
        before = channels
    return stages


def resnet50() -> nn.Module:
    """ResNet-50 v1 with 1,000 classes."""
    return nn.Sequential(*resnet50_stages(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _norm_relu6(before: int, channels: int, active: bool = True, **options: int) -> list[nn.Module]:
    size = options.pop("kernel_size", 1)
    layers = [nn.Conv2d(before, channels, size, bias=False, **options), nn.BatchNorm2d(channels)]
    return [*layers, nn.ReLU6(inplace=True)] if active else layers


class InvertedResidual(nn.Module):
    """A block of MobileNet v2."""

    def __init__(self, before: int, channels: int, expansion: int, stride: int):
        super().__init__()
        inner = before * expansion
        self.is_residual = stride == 1 and before == channels
        self.body = nn.Sequential(
            *_norm_relu6(before, inner),
            *_norm_relu6(inner, inner, kernel_size=3, stride=stride, padding=1, groups=inner),
            *_norm_relu6(inner, channels, active=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


def mobilenet_v2() -> nn.Module:
    """MobileNet v2 with 1,000 classes."""
    layers, before = _norm_relu6(3, 32, kernel_size=3, stride=2, padding=1), 32
    for expansion, channels, blocks, stride in _MOBILENET_V2:
        for number in range(blocks):
            layers.append(InvertedResidual(before, channels, expansion, 1 if number else stride))
            before = channels
    last = (*_norm_relu6(before, 1280), nn.AdaptiveAvgPool2d(1), nn.Conv2d(1280, 1000, 1, bias=False), nn.Flatten())
    return nn.Sequential(*layers, *last)


def _expansion(before: int, channels: int) -> nn.Sequential:
    """One more scale of SSD: half as wide and high."""
    return nn.Sequential(
        nn.Conv2d(before, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
    )  # fmt: skip


class SSD(nn.Module):
    """GluonCV's ssd_512_resnet50_v1_coco as it is in training: class and box predictions, before any loss."""

    def __init__(self) -> None:
        super().__init__()
        *stages, last = resnet50_stages()
        channels = (1024, 2048, 512, 512, 256, 256)
        expansions = [_expansion(before, after) for before, after in zip(channels[1:], channels[2:])]
        self.scales = nn.ModuleList([nn.Sequential(*stages), last, *expansions])
        self.classes = nn.ModuleList(self._predictors(channels, _COCO_CLASSES))
        self.boxes = nn.ModuleList(self._predictors(channels, 4))

    @staticmethod
    def _predictors(channels: Sequence[int], values: int) -> list[nn.Module]:
        return [nn.Conv2d(before, count * values, 3, padding=1) for before, count in zip(channels, _BOXES)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = []
        for scale in self.scales:
            x = scale(x)
            features.append(x)
        return _rows(self.classes, features, _COCO_CLASSES), _rows(self.boxes, features, 4)


def _rows(predictors: nn.ModuleList, features: Sequence[torch.Tensor], values: int) -> torch.Tensor:
    maps = (predictor(feature) for predictor, feature in zip(predictors, features))
    return torch.cat([each.permute(0, 2, 3, 1).flatten(1) for each in maps], 1).unflatten(1, (-1, values))


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

    def __init__(self, layers: int, units: int, heads: int, hidden: int, length: int, vocabulary: int, classes: int,
                 masked: bool):
        super().__init__()
        self.words, self.segments = nn.Embedding(vocabulary, units), nn.Embedding(2, units)
        self.positions = nn.Parameter(torch.randn(1, length, units) * 0.02)
        self.norm = nn.LayerNorm(units)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(units, heads, hidden, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.pooler, self.classifier = nn.Linear(units, units), nn.Linear(units, classes)

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens) + self.segments(segments) + self.positions)
        ignored = mask[0] == 0 if mask else None
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=ignored)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


_CREATE: Mapping[str, Callable[..., nn.Module]] = {
    "resnet50": lambda side, classes: resnet50(),
    "mobilenet_v2": lambda side, classes: mobilenet_v2(),
    "lstm": LanguageModel,
    "encoder": Encoder,
    "encoder_masked": Encoder,
}


def create(network: str, numbers: Mapping[str, Any]) -> nn.Module:
    """Return a network of `tasks` with random weights.

    Raises
    ------
    UsageError
        If it is not written in PyTorch here.
    """
    if network not in _CREATE:
        raise UsageError(f"{network} is not written in PyTorch here; known: {', '.join(_CREATE)}")
    return _CREATE[network](**numbers)
