"""Check a Pascal-VOC-format directory before anything is trained on it. Nothing here imports MXNet."""

from __future__ import annotations

import difflib
import os
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Mapping, Sequence

from PIL import Image, UnidentifiedImageError

LABELS_FILE = "labels.txt"
SETS = ("train", "val")

_LAYOUT = "JPEGImages/*.jpg, Annotations/*.xml and ImageSets/Main/*.txt"
_MAKE_ONE = "`python benchmarks/make_digits_voc.py OUT_DIR` makes one"


@dataclass(frozen=True)
class VocDirectory:
    """A directory that was checked: every image and annotation of its sets can be used.

    Parameters
    ----------
    root : pathlib.Path
        The directory that holds JPEGImages, Annotations and ImageSets.
    classes : tuple of str
        Lower-case names of what the annotations show.
    images : mapping of str to int
        Number of images of each set.
    """

    root: Path
    classes: tuple[str, ...]
    images: Mapping[str, int]


def check_directory(data_dir: str | os.PathLike[str], sets: Sequence[str] = SETS) -> VocDirectory:
    """Check a directory and return what is in it.

    The classes are the lines of ``labels.txt`` beside or above JPEGImages; without that file they are the
    names in the annotations, sorted.

    Parameters
    ----------
    data_dir : path
        A directory with JPEGImages, Annotations and ImageSets, or one with such a ``VOC2007`` inside.
    sets : sequence of str
        The sets to check, files in ImageSets/Main without ``.txt``.

    Raises
    ------
    FileNotFoundError
        The directory, a set's list, an image or an annotation is missing.
    ValueError
        One of them is broken, a set is empty, or a class is not in ``labels.txt``.
    """
    root = _find_root(Path(data_dir))
    labels = _read_labels(root)
    identifiers = {name: _read_set(root, name) for name in sets}
    found: dict[str, Path] = {}
    for identifier in dict.fromkeys(each for names in identifiers.values() for each in names):
        annotation = root / "Annotations" / f"{identifier}.xml"
        names, size = _check_annotation(annotation)
        _check_image(root / "JPEGImages" / f"{identifier}.jpg", size, annotation)
        for name in names:
            found.setdefault(name, annotation)
    classes = labels or tuple(sorted(found))
    _check_classes(classes, found)
    return VocDirectory(root, classes, {name: len(each) for name, each in identifiers.items()})


def _find_root(data_dir: Path) -> Path:
    if not data_dir.is_dir():
        raise FileNotFoundError(f"there is no directory {data_dir}: expected one in Pascal VOC's format; {_MAKE_ONE}")
    for root in (data_dir, data_dir / "VOC2007"):
        if (root / "ImageSets" / "Main").is_dir():
            break
    else:
        raise FileNotFoundError(
            f"{data_dir} is not in Pascal VOC's format: expected {_LAYOUT} in it or in {data_dir / 'VOC2007'}, "
            f"found no ImageSets/Main; {_MAKE_ONE}"
        )
    for part in ("JPEGImages", "Annotations"):
        if not (root / part).is_dir():
            raise FileNotFoundError(f"{root} has no {part}: expected {_LAYOUT} in it")
    return root


def _read_labels(root: Path) -> tuple[str, ...]:
    """Return the names in ``labels.txt``, nothing when there is no such file."""
    for path in (root / LABELS_FILE, root.parent / LABELS_FILE):
        if path.is_file():
            names = [line.strip().lower() for line in path.read_text(encoding="utf-8").splitlines()]
            labels = tuple(name for name in names if name)
            if not labels or len(set(labels)) < len(labels):
                raise ValueError(f"{path}: expected different class names, one a line, found {list(labels)}")
            return labels
    return ()


def _read_set(root: Path, name: str) -> list[str]:
    path = root / "ImageSets" / "Main" / f"{name}.txt"
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: expected the names of the {name} images, one a line")
    identifiers = path.read_text(encoding="utf-8").splitlines()
    if not any(line.strip() for line in identifiers):
        raise ValueError(f"{path} is empty: expected the names of the {name} images, one a line")
    for number, line in enumerate(identifiers, 1):
        # GluonCV takes the whole line as the name
        if len(line.split()) != 1:
            raise ValueError(
                f"{path}, line {number}: expected one image name without .jpg, found {line!r}; "
                "remove what does not belong there"
            )
    return [line.strip() for line in identifiers]


def _check_annotation(path: Path) -> tuple[list[str], tuple[int, int]]:
    """Return the class names of one annotation, and its image's (width, height)."""
    try:
        root = ET.parse(path).getroot()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no annotation {path}: add it, or take its image out of ImageSets/Main"
        ) from None
    except ET.ParseError as error:
        raise ValueError(f"{path} is not well-formed XML ({error}): repair or replace it") from None
    width, height = _number(root, "size/width", path), _number(root, "size/height", path)
    objects = root.findall("object")
    if not objects:
        raise ValueError(
            f"{path} has no <object>: GluonCV's SSD transforms need one at least; take the image out of ImageSets/Main"
        )
    return [_check_object(entry, (width, height), path) for entry in objects], (int(width), int(height))


def _check_object(entry: ET.Element, size: tuple[float, float], path: Path) -> str:
    name = (entry.findtext("name") or "").strip().lower()
    if not name:
        raise ValueError(f"{path}: an <object> has no <name>: expected its class")
    _number(entry, "difficult", path)
    left, top, right, bottom = (_number(entry, f"bndbox/{tag}", path) for tag in ("xmin", "ymin", "xmax", "ymax"))
    # VOC counts pixels from 1; GluonCV allows the far edge to lie one pixel beyond the image
    if not (1 <= left < right <= size[0] + 1 and 1 <= top < bottom <= size[1] + 1):
        raise ValueError(
            f"{path}: expected a box (xmin, ymin, xmax, ymax) with 1 <= min < max inside the image of "
            f"{size[0]:g}x{size[1]:g} pixels, found ({left:g}, {top:g}, {right:g}, {bottom:g}) for {name!r}"
        )
    return name


def _number(element: ET.Element, tag: str, path: Path) -> float:
    text = element.findtext(tag)
    try:
        return float(text or "")
    except ValueError:
        found = "nothing" if text is None else repr(text)
        raise ValueError(f"{path}: expected a number in <{element.tag}>/{tag}, found {found}") from None


def _check_image(path: Path, size: tuple[int, int], annotation: Path) -> None:
    """Look at the image's header only: decoding every image would take long."""
    try:
        with Image.open(path) as image:
            found = image.size
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no image {path} for {annotation}: add it, or take it out of ImageSets/Main"
        ) from None
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} is not a readable image ({error}): replace it") from None
    if found != size:
        raise ValueError(f"{path} has {found[0]}x{found[1]} pixels, but {annotation} says {size[0]}x{size[1]}")


def _check_classes(classes: Iterable[str], found: Mapping[str, Path]) -> None:
    names = list(classes)
    for name in names:
        if not name.islower():
            raise ValueError(
                f"class {name!r}{_where(name, found)}: GluonCV wants a letter in every class name; rename it"
            )
    for name in found:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"unknown class {name!r}{_where(name, found)}: expected one of {LABELS_FILE}: {', '.join(names)}{hint}"
            )


def _where(name: str, found: Mapping[str, Path]) -> str:
    return f" in {found[name]}" if name in found else f" in {LABELS_FILE}"
