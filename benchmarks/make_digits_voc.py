"""Make a directory in Pascal VOC's format, of handwritten digits placed on textured canvases.

    python benchmarks/make_digits_voc.py OUT_DIR

The digits are the 1,797 real 8x8 scans that scikit-learn bundles (Alpaydin and Kaynak, UCI "Optical Recognition of
Handwritten Digits"), so nothing is downloaded. Training and validation images use disjoint sets of scans.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from PIL import Image
from tqdm import tqdm

from benchmarks import harness
from benchmarks.harness import UsageError

CLASSES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IMAGES, VAL, SIZE = 3000, 600, 128
_TRAIN_SHARE, _MOST_DIGITS, _INK, _MOST_OVERLAP, _TRIES = 0.6, 5, 0.3, 0.02, 40
_SETTINGS = "settings.json"


class Scan(NamedTuple):
    """One scanned digit, and its ink's opacity, 0 to 1, (8, 8)."""

    label: int
    opacity: np.ndarray


class Box(NamedTuple):
    """Pixels, zero-based, right and bottom exclusive."""

    left: int
    top: int
    right: int
    bottom: int


def make(out_dir: str | os.PathLike[str], images: int = IMAGES, val: int = VAL, size: int = SIZE, seed: int = 0
         ) -> Path:
    """Make the directory, complete or not at all, or reuse one that was made with the same settings."""
    settings, target = {"images": images, "val": val, "size": size, "seed": seed, "format": 2}, Path(out_dir)
    if _is_reusable(target, settings):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        built = Path(scratch) / "data"  # ordinary permissions, where the temporary one has 0700
        _write_all(built, images, val, size, seed)
        (built / _SETTINGS).write_text(json.dumps(settings) + "\n", encoding="utf-8")
        os.rename(built, target)
    return target


def _is_reusable(target: Path, settings: dict[str, int]) -> bool:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    try:
        found = json.loads((target / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != settings:
        raise UsageError(f"{target} exists and was not made with these settings: expected {settings}, found {found}; "
                         "choose another directory, or remove it")
    return True


def _write_all(root: Path, images: int, val: int, size: int, seed: int) -> None:
    from sklearn.datasets import load_digits  # slow to import, and needed for making only

    digits = load_digits()
    order = np.random.default_rng([seed, 0]).permutation(len(digits.target))
    cut = int(len(order) * _TRAIN_SHARE)
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / "VOC2007" / part).mkdir(parents=True)
    for number, (name, count, samples) in enumerate((("train", images, order[:cut]), ("val", val, order[cut:]))):
        rng = np.random.default_rng([seed, 1 + number])
        _write_set(root / "VOC2007", name, count, size, _scans(digits, samples, rng), rng)
    (root / "labels.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")


def _scans(digits: object, samples: np.ndarray, rng: np.random.Generator) -> Iterator[Scan]:
    """Yield scans for ever, each as often as any other, shuffled."""
    while True:
        for sample in rng.permutation(samples).tolist():
            yield Scan(int(digits.target[sample]), digits.images[sample] / 16.0)  # type: ignore[attr-defined]


def _write_set(year: Path, name: str, count: int, size: int, scans: Iterator[Scan], rng: np.random.Generator) -> None:
    identifiers = [f"{name}_{number:05d}" for number in range(count)]
    for identifier in tqdm(identifiers, desc=f"digits, {name}", unit="image", disable=None):
        canvas, placed = compose(size, scans, rng)
        Image.fromarray(canvas).save(year / "JPEGImages" / f"{identifier}.jpg", quality=92)
        _annotation(identifier, size, placed).write(year / "Annotations" / f"{identifier}.xml", encoding="utf-8")
    (year / "ImageSets" / "Main" / f"{name}.txt").write_text("\n".join(identifiers) + "\n", encoding="utf-8")


def compose(size: int, scans: Iterator[Scan], rng: np.random.Generator) -> tuple[np.ndarray, list[tuple[int, Box]]]:
    """Draw one canvas (size, size, 3) with up to five digits on it, at least one; return it, and each label and box."""
    canvas = np.empty((size, size, 3))
    canvas[:] = rng.uniform(40.0, 215.0, 3)
    for cells, strength in ((4, 16.0), (16, 8.0)):  # a smooth random texture
        coarse = rng.normal(0.0, strength, (3, cells, cells)).astype(np.float32)
        for channel in range(3):
            canvas[..., channel] += _resize(coarse[channel], size, size)
    placed: list[tuple[int, Box]] = []
    for _ in range(int(rng.integers(1, _MOST_DIGITS + 1))):
        scan = next(scans)
        ink = _scale(scan.opacity, size, rng)
        box = _free_place(ink, size, [other for _, other in placed], rng)
        if box is not None:
            _blend(canvas, ink, box, rng)
            placed.append((scan.label, box))
    canvas += rng.normal(0.0, rng.uniform(2.0, 10.0), canvas.shape)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8), placed


def _scale(opacity: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Enlarge a scan and crop it to its ink."""
    height = int(np.exp(rng.uniform(np.log(0.19 * size), np.log(0.5 * size))))
    width = int(height * rng.uniform(0.8, 1.15))
    ink = np.clip(_resize(opacity.astype(np.float32), width, height), 0.0, 1.0)
    rows, columns = np.nonzero(ink > _INK)
    return ink[rows.min():rows.max() + 1, columns.min():columns.max() + 1]


def _resize(plane: np.ndarray, width: int, height: int) -> np.ndarray:
    return np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC))


def _free_place(ink: np.ndarray, size: int, taken: list[Box], rng: np.random.Generator) -> Box | None:
    """Return a box that hardly overlaps the taken ones, or None when none was found."""
    height, width = ink.shape
    for _ in range(_TRIES):
        left, top = int(rng.integers(0, size - width + 1)), int(rng.integers(0, size - height + 1))
        box = Box(left, top, left + width, top + height)
        if all(_overlap(box, other) <= _MOST_OVERLAP for other in taken):
            return box
    return None


def _overlap(one: Box, other: Box) -> float:
    """Return the shared area as a share of the smaller box."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in (one, other)]
    return max(0, width) * max(0, height) / min(areas)


def _blend(canvas: np.ndarray, ink: np.ndarray, box: Box, rng: np.random.Generator) -> None:
    """Paint the ink, in a colour that stands out, into the canvas."""
    region = canvas[box.top:box.bottom, box.left:box.right]
    mean = region.mean(axis=(0, 1))
    towards = 255.0 if mean.mean() < 128.0 else 0.0
    region += ink[..., None] * (mean + (towards - mean) * rng.uniform(0.6, 1.0, 3) - region)


def _annotation(identifier: str, size: int, placed: list[tuple[int, Box]]) -> ET.ElementTree:
    root = ET.Element("annotation")
    ET.SubElement(root, "filename").text = f"{identifier}.jpg"
    dimensions = ET.SubElement(root, "size")
    for tag, value in (("width", size), ("height", size), ("depth", 3)):
        ET.SubElement(dimensions, tag).text = str(value)
    for label, (left, top, right, bottom) in placed:
        entry = ET.SubElement(root, "object")
        ET.SubElement(entry, "name").text = CLASSES[label]
        ET.SubElement(entry, "difficult").text = "0"
        bounds = ET.SubElement(entry, "bndbox")
        # VOC counts pixels from 1 and includes the last one.
        for tag, value in (("xmin", left + 1), ("ymin", top + 1), ("xmax", right), ("ymax", bottom)):
            ET.SubElement(bounds, tag).text = str(value)
    return ET.ElementTree(root)


def run(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", help="directory to create")
    parser.add_argument("--images", type=harness.integer(1), default=IMAGES, help="for training (default: %(default)s)")
    parser.add_argument("--val", type=harness.integer(1), default=VAL, help="for validation (default: %(default)s)")
    parser.add_argument("--size", type=harness.integer(64), default=SIZE, help="in pixels (default: %(default)s)")
    parser.add_argument("--seed", type=harness.integer(0), default=0)
    print(make(**vars(parser.parse_args(argv))))


if __name__ == "__main__":
    sys.exit(harness.main(run))
