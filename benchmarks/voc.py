"""Train an SSD on a directory in Pascal VOC's format, in FP32 or with gluon_amp, and report its mAP.

All but the loop and the light network is GluonCV's: dataset, transforms, targets, networks, loss and metric.
``ssd_synthetic.py --data DIR`` and ``digits.py`` are the command lines for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import re
import statistics
import time
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import gluon_amp  # first: it lets MXNet 1.9.1 import under newer NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from .harness import UsageError, peak_memory, unknown
from .implementations import context
from .networks import side_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gluoncv.data import VOCDetection
    from gluoncv.data.batchify import Pad, Stack, Tuple
    from gluoncv.data.transforms.presets.ssd import SSDDefaultTrainTransform, SSDDefaultValTransform
    from gluoncv.loss import SSDMultiBoxLoss
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.model_zoo import get_model_list
    from gluoncv.model_zoo.ssd.ssd import SSD
    from gluoncv.model_zoo.ssd.target import SSDTargetGenerator
    from gluoncv.utils.metrics.voc_detection import VOCMApMetric

DIGITS, STEPS, BATCH_SIZE = "digits", 600, 16
_SIDE = 128
_LEARNING_RATE, _FINAL_SHARE = 0.05, 0.01  # the highest, and the last as a share of it
_WARM_UP = 0.08  # of all steps
_EVALUATED = 32  # images at a time
_STRIDES = (8, 16, 32)
# Sides of the anchors as shares of the image's; each level has its own size and the mean with the next.
_ANCHOR_SIZES, _ANCHOR_RATIOS = (0.17, 0.28, 0.44, 0.66), (1, 2, 0.5)
_LAYOUT = "JPEGImages/*.jpg, Annotations/*.xml and ImageSets/Main/*.txt"


# The directory, checked before anything is trained on it


class Directory(NamedTuple):
    """A directory that was checked: every image and annotation of its sets can be used."""

    root: Path  # that holds JPEGImages, Annotations and ImageSets
    classes: tuple[str, ...]  # lower-case

    def open(self, name: str) -> VOCDetection:
        """Return the set ``'train'`` or ``'val'`` as GluonCV's dataset: (image, label)."""
        kind = type("VOCDirectoryDetection", (VOCDetection,), {"CLASSES": self.classes})
        return kind(root=str(self.root), splits=(("", name),))


def check_directory(data_dir: str | Path) -> Directory:
    """Check a directory with JPEGImages, Annotations and ImageSets, or one with such a ``VOC2007`` inside.

    The classes are the lines of ``labels.txt`` beside or above JPEGImages; without that file they are the names in the
    annotations, sorted.
    """
    given = Path(data_dir)
    root = next((each for each in (given, given / "VOC2007") if (each / "ImageSets" / "Main").is_dir()), None)
    if root is None:
        raise UsageError(f"there is no directory {given} in Pascal VOC's format: expected {_LAYOUT} in it or in "
                         f"{given / 'VOC2007'}; `python benchmarks/make_digits_voc.py OUT_DIR` makes one")
    found: dict[str, Path] = {}
    for identifier in dict.fromkeys(each for name in ("train", "val") for each in _read_set(root, name)):
        path = root / "Annotations" / f"{identifier}.xml"
        names, size = _read_annotation(path)
        _check_image(root / "JPEGImages" / f"{identifier}.jpg", size)
        for name in names:
            found.setdefault(name, path)
    labels = next((path for path in (root / "labels.txt", root.parent / "labels.txt") if path.is_file()), None)
    classes = tuple(sorted(found)) if labels is None else tuple(
        line.strip().lower() for line in labels.read_text(encoding="utf-8").splitlines() if line.strip())
    for name, path in found.items():
        if name not in classes:
            raise UsageError(f"{path}: {unknown('class', name, classes)} ({labels})")
    if len(set(classes)) < len(classes) or not all(name.islower() for name in classes):
        raise UsageError(f"{labels or root}: expected different class names, each with a letter, found {classes}")
    return Directory(root, classes)


def _read_set(root: Path, name: str) -> list[str]:
    path = root / "ImageSets" / "Main" / f"{name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not lines or any(len(line.split()) != 1 for line in lines):  # GluonCV takes the whole line as the name
        raise UsageError(f"{path}: expected the names of the {name} images without .jpg, one a line, found "
                         + (f"{next(line for line in lines if len(line.split()) != 1)!r}" if lines else "nothing"))
    return [line.strip() for line in lines]


def _read_annotation(path: Path) -> tuple[list[str], tuple[int, int]]:
    """Return the class names of one annotation, and its image's (width, height)."""
    try:
        root = ET.parse(path).getroot()
        width, height = (int(root.findtext(f"size/{tag}") or "") for tag in ("width", "height"))
        names = []
        for entry in root.iter("object"):
            left, top, right, bottom = (float(entry.findtext(f"bndbox/{tag}") or "")
                                        for tag in ("xmin", "ymin", "xmax", "ymax"))
            int(entry.findtext("difficult") or "")
            # VOC counts pixels from 1; GluonCV allows the far edge to lie one pixel beyond the image
            if not (1 <= left < right <= width + 1 and 1 <= top < bottom <= height + 1):
                raise ValueError(f"the box ({left:g}, {top:g}, {right:g}, {bottom:g}) is not inside of the image of "
                                 f"{width}x{height} pixels")
            names.append((entry.findtext("name") or "").strip().lower())
    except (OSError, ET.ParseError, ValueError) as error:
        raise UsageError(f"{path}: expected an annotation in Pascal VOC's format, with the size of the image, and for "
                         f"each object name, difficult and bndbox: {error}") from error
    if not names or "" in names:
        raise UsageError(f"{path}: expected an <object> with a <name> at least; take the image out of ImageSets/Main")
    return names, (width, height)


def _check_image(path: Path, size: tuple[int, int]) -> None:
    """Look at the image's header only: to decode every image would take long."""
    try:
        with Image.open(path) as image:
            if image.size != size:
                raise UsageError(f"{path} has {image.size[0]}x{image.size[1]} pixels, its annotation says "
                                 f"{size[0]}x{size[1]}")
    except (UnidentifiedImageError, OSError) as error:
        raise UsageError(f"{path} is not a readable image: {error}") from error


# The networks


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
        return F.Activation(self.body(x) + self.shortcut(x), act_type="relu")


def _conv_norm(channels: int, kernel: int, stride: int) -> tuple[gluon.HybridBlock, gluon.HybridBlock]:
    return nn.Conv2D(channels, kernel, stride, kernel // 2, use_bias=False), nn.BatchNorm()


class LightBackbone(gluon.HybridBlock):
    """Features at strides 8, 16 and 32, for an SSD that trains from scratch in minutes."""

    def __init__(self, **_: Any):  # GluonCV's SSD passes arguments about pretrained weights
        super().__init__()
        with self.name_scope():
            self.stem = nn.HybridSequential()
            self.stem.add(*_conv_norm(32, 3, 2), nn.Activation("relu"), _Residual(64))
            self.level0, self.level1, self.level2 = _Residual(128), _Residual(128), _Residual(128)

    def hybrid_forward(self, F: Any, x: Any) -> list[Any]:
        features = [self.level0(self.stem(x))]
        for level in (self.level1, self.level2):
            features.append(level(features[-1]))
        return features


def create_network(name: str, classes: Sequence[str], side: int) -> SSD:
    """Create an SSD for these classes: ``'digits'``, or one of GluonCV's, with ``_coco`` or ``_voc`` at its end."""
    if name == DIGITS:
        return SSD(network=None, base_size=side, features=LightBackbone, num_filters=None,
                   sizes=[share * side for share in _ANCHOR_SIZES], ratios=[list(_ANCHOR_RATIOS) for _ in _STRIDES],
                   steps=list(_STRIDES), classes=classes)
    custom = re.sub("_(coco|voc)$", "_custom", name)
    known = [DIGITS, *sorted(each for each in get_model_list() if re.match(r"ssd_.*_custom$", each))]
    if custom not in known:
        raise unknown("network", name, known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_model(custom, classes=list(classes), pretrained_base=False)


@mx.init.register
class _Xavier(mx.init.Xavier):
    """Xavier for matrices, which it refuses for vectors: BatchNorm's in GluonCV's added layers get theirs by name."""

    def _init_weight(self, name: str, arr: mx.nd.NDArray) -> None:
        if arr.ndim >= 2:
            super()._init_weight(name, arr)
        else:
            arr[:] = 1.0 if name.endswith(("gamma", "var")) else 0.0


# The samples


class PlainTransform:
    """Resize, normalize and make targets as GluonCV's training transform does, without augmentation."""

    def __init__(self, width: int, height: int, anchors: mx.nd.NDArray):
        self._resize, self._anchors = SSDDefaultValTransform(width, height), anchors
        self._targets = SSDTargetGenerator(negative_mining_ratio=-1)  # the loss mines hard negatives itself

    def __call__(self, image: mx.nd.NDArray, label: np.ndarray) -> tuple[mx.nd.NDArray, ...]:
        image, boxes = self._resize(image, label)
        corners, ids = mx.nd.array(boxes[None, :, :4]), mx.nd.array(boxes[None, :, 4:5])
        classes, offsets, _ = self._targets(self._anchors, None, corners, ids)
        return image, classes[0], offsets[0]


class Samples(gluon.data.Dataset):
    """Samples in shuffled epochs; each depends on the seed and its number alone, not on other random numbers."""

    def __init__(self, dataset: Any, transform: Callable[..., Any], count: int, seed: int):
        self._dataset, self._transform, self._seed = dataset, transform, seed
        order = np.random.default_rng(seed)
        epochs = -(-count // len(dataset))
        self._order = np.concatenate([order.permutation(len(dataset)) for _ in range(epochs)])[:count]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> Any:
        _seed(int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]))
        return self._transform(*self._dataset[int(self._order[number])])


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


# The training


@contextlib.contextmanager
def precision(amp: bool, dtype: str | None, device: mx.Context) -> Iterator[str]:
    """Switch AMP on where it is asked for, and off again; gives the type in use."""
    if not amp:
        yield "float32"
        return
    try:
        with device:
            gluon_amp.init(target_dtype=dtype)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    try:
        yield gluon_amp.active_dtype(device.device_type) or "float32"
    finally:
        gluon_amp.deinit()


def learning_rate_share(passed: float) -> float:
    """Return the learning rate as a share of the highest, after a share of all steps: it warms up, then falls.

    Examples
    --------
    >>> learning_rate_share(0.04), learning_rate_share(0.08), round(learning_rate_share(1.0), 3)
    (0.5, 1.0, 0.01)
    """
    if passed < _WARM_UP:
        return passed / _WARM_UP
    fallen = (1 + math.cos(math.pi * (passed - _WARM_UP) / (1 - _WARM_UP))) / 2
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * fallen


class Training:
    """One run, in the precision that is in force: equal seeds give equal first weights, order and augmentation.

    Parameters
    ----------
    directory : Directory
        The data.
    network : str
        As `create_network` takes it. GluonCV's are trained with its augmentation: colour, expansion, crop, mirror.
    amp : bool
        Whether AMP is on.
    device : mx.Context
        Where to train.
    steps, batch_size, seed : int
        Of the whole run.
    side : int, optional
        Of the images in pixels; the one in the network's name by default.
    """

    def __init__(self, directory: Directory, network: str, amp: bool, device: mx.Context, steps: int, batch_size: int,
                 seed: int, side: int | None):
        self.amp, self.device, self.batch_size = amp, device, batch_size
        self.side, self.classes = side or side_of(network, _SIDE), directory.classes
        self.val = directory.open("val")
        _seed(seed)
        mx.random.seed(seed)
        self.net = create_network(network, directory.classes, self.side)
        self.net.initialize(_Xavier(), ctx=device)
        anchors = self._anchors(network)
        digest = hashlib.sha256()
        for parameter in self.net.collect_params().values():
            digest.update(parameter.list_data()[0].asnumpy().tobytes())
        self.initial_weights = digest.hexdigest()[:16]
        self.net.hybridize(static_alloc=True, static_shape=True)
        options = {"learning_rate": _LEARNING_RATE, "momentum": 0.9, "wd": 0.0005}
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", options, update_on_kvstore=False)
        if amp:
            gluon_amp.init_trainer(self.trainer)
        transform = (PlainTransform if network == DIGITS else SSDDefaultTrainTransform)(self.side, self.side, anchors)
        samples = Samples(directory.open("train"), transform, steps * batch_size, seed)
        self.data = iter(gluon.data.DataLoader(samples, batch_size, batchify_fn=Tuple(Stack(), Stack(), Stack())))
        self.loss = SSDMultiBoxLoss()
        self.losses: dict[str, list[float]] = {"cls": [], "box": [], "total": []}
        self.step_seconds: list[float] = []

    def _anchors(self, network: str) -> mx.nd.NDArray:
        """Give parameters their shapes, and return the anchors, on the CPU, where targets are made."""
        try:
            with autograd.train_mode():
                return self.net(mx.nd.zeros((1, 3, self.side, self.side), ctx=self.device))[2].as_in_context(mx.cpu())
        except mx.base.MXNetError as error:
            raise UsageError(f"data shape {self.side} is not possible for {network}: {str(error).splitlines()[-1]}"
                             ) from error

    def run(self, steps: int, begin: float = 0.0, end: float = 1.0, hidden: bool | None = True) -> float:
        """Train while the learning rate goes between two shares of the whole run; return the seconds of steps."""
        for number in tqdm(range(steps), unit="step", disable=hidden):
            passed = begin + (end - begin) * (number + 0.5) / steps
            self.trainer.set_learning_rate(_LEARNING_RATE * learning_rate_share(passed))
            batch = [part.as_in_context(self.device) for part in next(self.data)]
            mx.nd.waitall()
            loaded = time.perf_counter()
            self._step(*batch)
            self.step_seconds.append(time.perf_counter() - loaded)
        return sum(self.step_seconds[-steps:])

    def _step(self, images: mx.nd.NDArray, classes: mx.nd.NDArray, boxes: mx.nd.NDArray) -> None:
        with autograd.record():
            cls_pred, box_pred, _ = self.net(images)
            total, cls, box = self.loss(cls_pred, box_pred, classes, boxes)
            scaled = gluon_amp.scale_loss(total, self.trainer) if self.amp else contextlib.nullcontext(total)
            with scaled as loss:
                autograd.backward(loss)
        self.trainer.step(1)  # the loss is divided by the number of matched anchors already
        mx.nd.waitall()
        for name, part in (("cls", cls), ("box", box), ("total", total)):
            self.losses[name].append(float(part[0].asnumpy().sum()))

    def evaluate(self, net: gluon.HybridBlock, images: int | None) -> tuple[float, dict[str, float]]:
        """Return the mean average precision on so many images, or on all, and that of each class that they show."""
        if isinstance(net, SSD):
            net.set_nms(nms_thresh=0.45, nms_topk=400)
        net.hybridize(static_alloc=True, static_shape=True)
        # the area metric: the eleven-point one of VOC07 jumps by 0.09 a class when one detection changes
        metric = VOCMApMetric(iou_thresh=0.5, class_names=list(self.classes))
        data = self.val if images is None else self.val.take(images)
        loader = gluon.data.DataLoader(data.transform(SSDDefaultValTransform(self.side, self.side)), _EVALUATED,
                                       last_batch="keep", batchify_fn=Tuple(Stack(), Pad(pad_val=-1)))
        for batch, labels in loader:
            ids, scores, boxes = net(batch.as_in_context(self.device))
            truth = labels.asnumpy()
            metric.update(boxes.clip(0, self.side), ids, scores, truth[..., :4], truth[..., 4:5], truth[..., 5:6])
        found = {name: float(value) for name, value in zip(*metric.get())}
        mean_ap = found.pop("mAP")
        return mean_ap, {name: value for name, value in found.items() if not math.isnan(value)}

    def result(self, images: int | None = None) -> dict[str, Any]:
        """Return everything that the training gave, with the mAP before and after conversion."""
        mean_ap, precisions = self.evaluate(self.net, images)
        converted = gluon_amp.convert_hybrid_block(self.net)
        return {"steps": len(self.step_seconds), "losses": self.losses, "initial_weights": self.initial_weights,
                "mean_ap": mean_ap, "average_precision": precisions, "side": self.side,
                "converted_mean_ap": self.evaluate(converted, images)[0], "converted_dtype": converted.conversion.types,
                "samples_per_second": self.batch_size / statistics.median(self.step_seconds),
                "peak_memory": peak_memory()}


def train(data_dir: str, amp: bool, dtype: str | None, device: str, network: str, steps: int, batch_size: int,
          seed: int, data_shape: int | None) -> dict[str, Any]:
    """Train on the ``train`` set of a directory and evaluate on its ``val`` set."""
    directory, place = check_directory(data_dir), context(device)
    with precision(amp, dtype, place) as active:
        training = Training(directory, network, amp, place, steps, batch_size, seed, data_shape)
        training.run(steps, hidden=None)
        return {"dtype": active, **training.result()}


class Half:
    """One precision's training in a process of its own; its methods are the commands of `digits.py`."""

    def __init__(self, data_dir: str, amp: bool, dtype: str | None, steps: int, batch_size: int, seed: int,
                 side: int | None):
        self.active = contextlib.ExitStack()  # as long as this process
        self.dtype = self.active.enter_context(precision(amp, dtype, mx.cpu()))
        self.training = Training(check_directory(data_dir), DIGITS, amp, mx.cpu(), steps, batch_size, seed, side)

    def run(self, steps: int, begin: float, end: float) -> float:
        return self.training.run(steps, begin, end) / steps

    def finish(self, images: int | None) -> dict[str, Any]:
        return {"dtype": self.dtype, **self.training.result(images)}
