"""Make a Pascal-VOC-format directory of handwritten digits placed on textured canvases.

The digits are the 1,797 real 8x8 scans that scikit-learn bundles (Alpaydin and Kaynak, UCI
"Optical Recognition of Handwritten Digits"), so nothing is downloaded. Training and validation
images use disjoint sets of scans. The directory has the layout of VOC2007::

    OUT_DIR/settings.json
    OUT_DIR/labels.txt
    OUT_DIR/VOC2007/JPEGImages/train_00000.jpg, Annotations/train_00000.xml, ...
    OUT_DIR/VOC2007/ImageSets/Main/train.txt, val.txt
"""

from __future__ import annotations

import json
import os
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SETTINGS_FILE = "settings.json"
YEAR_DIR = "VOC2007"

_FORMAT = 1
_MIN_SIZE = 64
_TRAIN_FRACTION = 0.6
_MAX_DIGITS = 5
_INK_THRESHOLD = 0.3
_MAX_OVERLAP = 0.02
_PLACEMENT_TRIES = 40


@dataclass(frozen=True)
class Settings:
    """What decides the content: image counts, width and height in pixels (64 or more), seed."""

    images: int = 2000
    val: int = 400
    size: int = 128
    seed: int = 0
    format: int = _FORMAT

    def check(self) -> None:
        """Raise ValueError for a value that cannot be used."""
        limits = {"images": 1, "val": 1, "size": _MIN_SIZE, "seed": 0}
        for name, lowest in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < lowest:
                raise ValueError(f"expected {name} >= {lowest} (an integer), received {value!r}")


class Box(NamedTuple):
    """Pixel rectangle, zero-based, right and bottom exclusive."""

    left: int
    top: int
    right: int
    bottom: int


class Placed(NamedTuple):
    """One digit on a canvas: its class, its scan's index in ``load_digits`` and its ink's box."""

    label: int
    sample: int
    box: Box


class Scan(NamedTuple):
    """One scanned digit: index in ``load_digits``, digit, ink opacity 0 to 1 of shape (8, 8)."""

    sample: int
    label: int
    opacity: np.ndarray


def scan_order(digits: Any, samples: np.ndarray, rng: np.random.Generator) -> Iterator[Scan]:
    """Yield the scans of the given indices for ever, each as often as any other, shuffled."""
    while True:
        for sample in rng.permutation(samples).tolist():
            yield Scan(sample, int(digits.target[sample]), digits.images[sample] / 16.0)


def split_samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the indices 0 to ``count - 1`` into disjoint ones for training and validation."""
    order = np.random.default_rng([seed, 0]).permutation(count)
    cut = int(count * _TRAIN_FRACTION)
    return order[:cut], order[cut:]


def make(
    out_dir: str | os.PathLike[str],
    images: int = 2000,
    val: int = 400,
    size: int = 128,
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Make the directory, or reuse one that was made with the same settings.

    Parameters
    ----------
    out_dir : path
        Directory to create. It appears complete or not at all.
    images, val : int
        Number of training and of validation images.
    size : int
        Width and height of every image in pixels, at least 64.
    seed : int
        Seed of every random choice.
    progress : bool
        Show a progress bar on standard error.

    Returns
    -------
    pathlib.Path
        ``out_dir``; ``VOC2007`` is below it.

    Raises
    ------
    ValueError
        A setting is out of range.
    FileExistsError
        ``out_dir`` holds something else, or digits made with other settings.

    Examples
    --------
    >>> root = make("build/digits", images=100, val=20)
    >>> sorted(path.name for path in (root / "VOC2007").iterdir())
    ['Annotations', 'ImageSets', 'JPEGImages']
    """
    settings = Settings(images=images, val=val, size=size, seed=seed)
    settings.check()
    target = Path(out_dir)
    if _is_reusable(target, settings):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        # A directory inside the temporary one gets ordinary permissions instead of 0700.
        built = Path(scratch) / "data"
        try:
            _write_all(built, settings, progress)
            os.rename(built, target)
        except OSError:
            # Another process may have finished the same directory in the meantime.
            if not _is_reusable(target, settings):
                raise
    return target


def _is_reusable(target: Path, settings: Settings) -> bool:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        found = json.loads((target / SETTINGS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FileExistsError(
            f"{target} exists and is no digits directory (it has no readable {SETTINGS_FILE}): "
            "choose another directory or remove it"
        ) from None
    if found != asdict(settings):
        raise FileExistsError(
            f"{target} was made with other settings: expected {asdict(settings)}, found {found}; "
            "choose another directory, pass the same settings, or remove it"
        )
    return True


def _write_all(root: Path, settings: Settings, progress: bool) -> None:
    from sklearn.datasets import load_digits  # slow to import, and needed for making only

    digits = load_digits()
    year = root / YEAR_DIR
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (year / part).mkdir(parents=True)
    counts = {"train": settings.images, "val": settings.val}
    splits = split_samples(len(digits.images), settings.seed)
    hidden = None if progress else True  # None: tqdm shows the bar on a terminal only
    with tqdm(total=sum(counts.values()), desc="digits", unit="image", disable=hidden) as bar:
        for number, (name, count) in enumerate(counts.items()):
            rng = np.random.default_rng([settings.seed, 1 + number])
            scans = scan_order(digits, splits[number], rng)
            _write_set(year, name, count, settings.size, scans, rng, bar)
    (root / "labels.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    (root / SETTINGS_FILE).write_text(json.dumps(asdict(settings)) + "\n", encoding="utf-8")


def _write_set(
    year: Path,
    name: str,
    count: int,
    size: int,
    scans: Iterator[Scan],
    rng: np.random.Generator,
    bar: tqdm,
) -> None:
    identifiers = [f"{name}_{number:05d}" for number in range(count)]
    for identifier in identifiers:
        canvas, placed = compose(size, scans, rng)
        Image.fromarray(canvas).save(year / "JPEGImages" / f"{identifier}.jpg", quality=92)
        _annotation(identifier, size, placed).write(year / "Annotations" / f"{identifier}.xml", encoding="utf-8")
        bar.update()
    listing = year / "ImageSets" / "Main" / f"{name}.txt"
    listing.write_text("\n".join(identifiers) + "\n", encoding="utf-8")


def compose(size: int, scans: Iterator[Scan], rng: np.random.Generator) -> tuple[np.ndarray, list[Placed]]:
    """Draw one canvas with up to five digits on it.

    Parameters
    ----------
    size : int
        Width and height in pixels.
    scans : iterator of Scan
        Where the digits come from.
    rng : numpy.random.Generator
        Source of sizes, places, colours and textures.

    Returns
    -------
    canvas : numpy.ndarray
        uint8, shape (size, size, 3).
    placed : list of Placed
        At least one digit.
    """
    canvas = _background(size, rng)
    placed: list[Placed] = []
    for _ in range(int(rng.integers(1, _MAX_DIGITS + 1))):
        scan = next(scans)
        ink = _scale(scan.opacity, size, rng)
        box = _free_place(ink, size, [other.box for other in placed], rng)
        if box is not None:
            _blend(canvas, ink, box, rng)
            placed.append(Placed(scan.label, scan.sample, box))
    canvas += rng.normal(0.0, rng.uniform(2.0, 10.0), canvas.shape)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8), placed


def _background(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return a smooth random texture around one mean colour, float, shape (size, size, 3)."""
    canvas = np.empty((size, size, 3))
    canvas[:] = rng.uniform(40.0, 215.0, 3)
    for cells, strength in ((4, 16.0), (16, 8.0)):
        coarse = rng.normal(0.0, strength, (3, cells, cells)).astype(np.float32)
        for channel in range(3):
            canvas[..., channel] += _resize(coarse[channel], size, size)
    return canvas


def _scale(opacity: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Enlarge an 8x8 scan and crop it to its ink; returns opacities in 0 to 1."""
    height = int(np.exp(rng.uniform(np.log(0.19 * size), np.log(0.5 * size))))
    width = int(height * rng.uniform(0.8, 1.15))
    ink = np.clip(_resize(opacity.astype(np.float32), width, height), 0.0, 1.0)
    rows, columns = np.nonzero(ink > _INK_THRESHOLD)
    return ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def _resize(plane: np.ndarray, width: int, height: int) -> np.ndarray:
    image = Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _free_place(ink: np.ndarray, size: int, taken: list[Box], rng: np.random.Generator) -> Box | None:
    """Return a box that hardly overlaps the taken ones, or None when none was found."""
    height, width = ink.shape
    for _ in range(_PLACEMENT_TRIES):
        left = int(rng.integers(0, size - width + 1))
        top = int(rng.integers(0, size - height + 1))
        box = Box(left, top, left + width, top + height)
        if all(_overlap(box, other) <= _MAX_OVERLAP for other in taken):
            return box
    return None


def _overlap(one: Box, other: Box) -> float:
    """Return the shared area as a fraction of the smaller box."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (one, other)]
    return width * height / min(areas)


def _blend(canvas: np.ndarray, ink: np.ndarray, box: Box, rng: np.random.Generator) -> None:
    """Paint the ink, in a colour that stands out from what is there, into the canvas."""
    region = canvas[box.top : box.bottom, box.left : box.right]
    mean = region.mean(axis=(0, 1))
    towards = 255.0 if mean.mean() < 128.0 else 0.0
    colour = mean + (towards - mean) * rng.uniform(0.6, 1.0, 3)
    region += ink[..., None] * (colour - region)


def _annotation(identifier: str, size: int, placed: list[Placed]) -> ET.ElementTree:
    root = ET.Element("annotation")
    ET.SubElement(root, "folder").text = YEAR_DIR
    ET.SubElement(root, "filename").text = f"{identifier}.jpg"
    dimensions = ET.SubElement(root, "size")
    for tag, value in (("width", size), ("height", size), ("depth", 3)):
        ET.SubElement(dimensions, tag).text = str(value)
    ET.SubElement(root, "segmented").text = "0"
    for digit in placed:
        entry = ET.SubElement(root, "object")
        ET.SubElement(entry, "name").text = CLASSES[digit.label]
        ET.SubElement(entry, "sample").text = str(digit.sample)
        ET.SubElement(entry, "truncated").text = "0"
        ET.SubElement(entry, "difficult").text = "0"
        bounds = ET.SubElement(entry, "bndbox")
        left, top, right, bottom = digit.box
        # VOC counts pixels from 1 and includes the last one.
        corners = (("xmin", left + 1), ("ymin", top + 1), ("xmax", right), ("ymax", bottom))
        for tag, value in corners:
            ET.SubElement(bounds, tag).text = str(value)
    return ET.ElementTree(root)
