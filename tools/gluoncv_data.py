"""Small data sets in the forms that GluonCV's scripts read: pictures of coloured rectangles and their labels."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Iterator, NamedTuple

import cv2
import numpy as np

CLASSES = ("car", "cat", "dog")
COCO_IDS = {"car": 3, "cat": 17, "dog": 18}
PERSON = 1
JOINTS = 17
HEIGHT, WIDTH = 160, 200


class Sample(NamedTuple):
    """A picture, and the class and the box (left, top, right, bottom) of what is in it."""

    name: str
    picture: np.ndarray
    label: int
    box: tuple[int, int, int, int]


def samples(count: int, first: int = 0) -> Iterator[Sample]:
    """Draw pictures, each with one rectangle whose colour tells its class."""
    for number in range(first, first + count):
        draw = np.random.RandomState(number)
        picture = draw.randint(0, 60, (HEIGHT, WIDTH, 3)).astype(np.uint8)
        left, top = draw.randint(5, WIDTH // 2), draw.randint(5, HEIGHT // 2)
        box = (left, top, left + draw.randint(40, WIDTH // 2 - 5), top + draw.randint(40, HEIGHT // 2 - 5))
        label = number % len(CLASSES)
        picture[box[1]:box[3], box[0]:box[2], label] += 150
        yield Sample(f"{number:06d}", picture, label, box)


def write_all(home: Path, count: int) -> None:
    """Write every data set below ``home/.mxnet/datasets``, where the scripts look for them."""
    root = home / ".mxnet" / "datasets"
    write_voc(root / "voc", count)
    write_coco(root / "coco", count)
    write_ade20k(root / "ade", count)
    write_imagenet(root / "imagenet", count)


def write_voc(root: Path, count: int) -> None:
    """Write Pascal VOC: VOC2007 with trainval and test, and an empty VOC2012."""
    for year, splits in (("2007", {"trainval": count, "test": 1}), ("2012", {"trainval": 0})):
        folder = root / f"VOC{year}"
        first = 0
        for split, number in splits.items():
            found = list(samples(number, first))
            first += number
            _text(folder / "ImageSets" / "Main" / f"{split}.txt", "".join(f"{sample.name}\n" for sample in found))
            for sample in found:
                _picture(folder / "JPEGImages" / f"{sample.name}.jpg", sample.picture)
                _text(folder / "Annotations" / f"{sample.name}.xml", _annotation(sample))


def _annotation(sample: Sample) -> str:
    left, top, right, bottom = sample.box
    return (f"<annotation><size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size><object>"
            f"<name>{CLASSES[sample.label]}</name><difficult>0</difficult><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
            f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object></annotation>")


def write_coco(root: Path, count: int) -> None:
    """Write COCO 2017's instances, and its persons with joints."""
    categories = [{"id": number, "name": name} for number, name in enumerate(_coco_names(), start=1)]
    for split, number, first in (("train2017", count, 0), ("val2017", 1, count)):
        found = list(samples(number, first))
        for sample in found:
            _picture(root / split / f"{sample.name}.jpg", sample.picture)
        images = [{"id": int(sample.name), "file_name": f"{sample.name}.jpg", "width": WIDTH, "height": HEIGHT,
                   "coco_url": f"http://localhost/{split}/{sample.name}.jpg"} for sample in found]
        boxes = [_coco_box(sample, COCO_IDS[CLASSES[sample.label]]) for sample in found]
        persons = [{**_coco_box(sample, PERSON), **_coco_joints(sample)} for sample in found]
        _json(root / "annotations" / f"instances_{split}.json",
              {"images": images, "annotations": boxes, "categories": categories})
        _json(root / "annotations" / f"person_keypoints_{split}.json",
              {"images": images, "annotations": persons, "categories": [{"id": PERSON, "name": "person"}]})


def _coco_names() -> list[str]:
    from gluoncv.data import COCODetection
    return list(COCODetection.CLASSES)


def _coco_box(sample: Sample, category: int) -> dict:
    left, top, right, bottom = sample.box
    return {"id": int(sample.name) + 1, "image_id": int(sample.name), "category_id": category, "iscrowd": 0,
            "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top),
            "segmentation": [[left, top, right, top, right, bottom, left, bottom]]}


def _coco_joints(sample: Sample) -> dict:
    left, top, right, bottom = sample.box
    places = np.random.RandomState(int(sample.name)).uniform(0.1, 0.9, (JOINTS, 2)) * (right - left, bottom - top)
    joints = [value for x, y in places + (left, top) for value in (int(x), int(y), 2)]
    return {"keypoints": joints, "num_keypoints": JOINTS}


def write_ade20k(root: Path, count: int) -> None:
    """Write ADE20K's pictures and masks."""
    folder = root / "ADEChallengeData2016"
    for split, number, first in (("training", count, 0), ("validation", 1, count)):
        for sample in samples(number, first):
            mask = np.ones((HEIGHT, WIDTH), np.uint8)
            mask[sample.box[1]:sample.box[3], sample.box[0]:sample.box[2]] = sample.label + 2
            _picture(folder / "images" / split / f"{sample.name}.jpg", sample.picture)
            _picture(folder / "annotations" / split / f"{sample.name}.png", mask)


def write_imagenet(root: Path, count: int) -> None:
    """Write ImageNet as folders of classes."""
    for split, number, first in (("train", count, 0), ("val", len(CLASSES), count)):
        for sample in samples(number, first):
            _picture(root / split / f"n{sample.label:08d}" / f"{sample.name}.JPEG", sample.picture)


def _picture(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), values)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _json(path: Path, value: object) -> None:
    _text(path, json.dumps(value))
