"""Start GluonCV's training scripts unchanged, in FP32 and with gluon_amp, on small data made here; compare losses.

    python tools/gluoncv_scripts.py CHECKOUT [--scripts ssd yolo3 ...] [--dtype bfloat16] [--steps 4]

CHECKOUT is a copy of dmlc/gluon-cv, version 0.10; its folder ``scripts`` is enough. Scripts with ``--amp`` switch
AMP on themselves, through the stand-in for ``mxnet.contrib.amp``; for the others ``gluon-amp run`` does. Weights are
drawn where a script would download trained ones. The scripts of COCO need ``pycocotools``. The exit code is 1 if a
script fails or its losses leave FP32's.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np

TOOLS = Path(__file__).resolve().parent
FIRST, LATER = 0.05, 0.35  # how far losses may be from FP32's: that of the first step, and the mean of all
CLASSES, COCO_IDS = ("car", "cat", "dog"), (3, 17, 18)
PERSON, JOINTS = 1, 17
HEIGHT, WIDTH = 160, 200


class Script(NamedTuple):
    """A script below CHECKOUT/scripts, its arguments, whether it knows AMP, and whether it reads COCO."""

    path: str
    arguments: str
    knows_amp: bool = False
    reads_coco: bool = False


class Settings(NamedTuple):
    """Where the scripts and their data are, and how long they run."""

    checkout: Path
    home: Path
    dtype: str = "bfloat16"  # for scripts that do not know AMP
    steps: int = 4
    timeout: float = 900  # seconds for one run


_DETECTION = "--gpus= -j 0 --epochs 1 --log-interval 1"
_CLASSIFICATION = "--mode hybrid -j 0 --num-epochs 1 --log-interval 1"
SCRIPTS = {
    "imagenet": Script("classification/imagenet/train_imagenet.py",
                       "--model resnet18_v1 --batch-size 4 --lr 0.01 --input-size 96 --data-dir {data}/imagenet "
                       + _CLASSIFICATION),
    "ssd": Script("detection/ssd/train_ssd.py", "--network mobilenet1.0 --data-shape 512 --batch-size 2 " + _DETECTION,
                  True),
    "yolo3": Script("detection/yolo/train_yolo3.py",
                    "--network mobilenet0.25 --data-shape 224 --no-random-shape --batch-size 2 " + _DETECTION, True),
    "faster_rcnn": Script("detection/faster_rcnn/train_faster_rcnn.py",
                          "--network resnet50_v1b --batch-size 1 --kv-store local " + _DETECTION, True),
    "mask_rcnn": Script("instance/mask_rcnn/train_mask_rcnn.py",
                        "--network resnet18_v1b --use-fpn --batch-size 1 --kv-store local " + _DETECTION, True, True),
    "center_net": Script("detection/center_net/train_center_net.py",
                         "--network resnet18_v1b --data-shape 256 --batch-size 2 " + _DETECTION),
    "segmentation": Script("segmentation/train.py",
                           "--model fcn --backbone resnet50 --dataset ade20k --base-size 130 --crop-size 96 "
                           "--batch-size 2 --test-batch-size 1 --workers 0 --epochs 1 --no-cuda --no-val "
                           "--log-interval 1"),
    "pose": Script("pose/simple_pose/train_simple_pose.py",
                   "--model simple_pose_resnet18_v1b --batch-size 2 --num-joints 17 --lr 0.001 --input-size 128,96 "
                   "--data-dir {data}/coco " + _CLASSIFICATION, reads_coco=True),
}


def main() -> int:
    """Run the scripts and print how far their losses are from FP32's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a copy of dmlc/gluon-cv, version 0.10")
    parser.add_argument("--scripts", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16",
                        help="for scripts that do not know AMP (default: bfloat16)")
    parser.add_argument("--steps", type=int, default=4, help="training steps of each (default: 4)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run (default: 900)")
    arguments = parser.parse_args()
    missing = [SCRIPTS[name].path for name in arguments.scripts
               if not (arguments.checkout / "scripts" / SCRIPTS[name].path).is_file()]
    if missing:
        raise SystemExit(f"gluoncv_scripts: {arguments.checkout}/scripts lacks {', '.join(missing)}: expected a copy "
                         "of dmlc/gluon-cv, version 0.10")
    with tempfile.TemporaryDirectory(prefix="gluoncv-") as folder:
        write_data(Path(folder), 4 * arguments.steps)
        settings = Settings(arguments.checkout, Path(folder), arguments.dtype, arguments.steps, arguments.timeout)
        failed = [name for name in arguments.scripts if not follows(name, settings)]
        return int(bool(failed))


def follows(name: str, settings: Settings) -> bool:
    """Run a script stock and with AMP, print the losses of both, and tell whether they are close."""
    script = SCRIPTS[name]
    mode, flag = ("bare", " --amp") if script.knows_amp else (settings.dtype, "")
    try:
        stock, found = losses_of(script, "stock", "", settings), losses_of(script, mode, flag, settings)
    except RuntimeError as error:
        print(f"{name}: FAILS\n{error}", flush=True)
        return False
    verdict = compared(stock, found)
    shown = (" ".join(f"{loss:.4g}" for loss in losses) for losses in (stock, found))
    print("{}: {}\n  FP32 {}\n  AMP  {}".format(name, verdict or "follows FP32", *shown), flush=True)
    return not verdict


def losses_of(script: Script, mode: str, flag: str, settings: Settings) -> list[float]:
    """Run a script in a process of its own; return the losses of its steps."""
    home = settings.home
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "losses.json"
        path = (settings.checkout / "scripts" / script.path).resolve()
        options = (script.arguments + flag).format(data=home / ".mxnet" / "datasets").split()
        environment = {**os.environ, "HOME": str(home), "MXNET_HOME": str(home / ".mxnet"), "MPLBACKEND": "agg",
                       "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(TOOLS / "gluoncv_child.py"), str(noted), str(settings.steps), mode, str(path)]
        try:
            done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True,
                                  timeout=settings.timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{script.path} ({mode}) took more than {settings.timeout:g} s") from None
        if done.returncode:
            raise RuntimeError(f"{script.path} ({mode}) ended with {done.returncode}:\n{done.stderr[-3000:]}")
        losses = json.loads(noted.read_text())["losses"]
    if not losses:
        raise RuntimeError(f"{script.path} ({mode}) took no step")
    return losses


def compared(stock: list[float], found: list[float]) -> str:
    """Say how losses leave FP32's; nothing if they do not.

    Examples
    --------
    >>> compared([2.0, 1.0], [2.5, 1.0])
    'the first loss is 25 % off'
    """
    if len(stock) != len(found):
        return f"expected {len(stock)} losses, received {len(found)}"
    if not np.isfinite(found).all():
        return "a loss is not finite"
    first = abs(found[0] - stock[0]) / abs(stock[0])
    mean = abs(np.mean(found) - np.mean(stock)) / abs(np.mean(stock))
    if first > FIRST:
        return f"the first loss is {100 * first:.0f} % off"
    return f"the mean loss is {100 * mean:.0f} % off" if mean > LATER else ""


# Data sets in the forms that the scripts read


class Sample(NamedTuple):
    """A picture of one rectangle, whose colour tells its class, and the box (left, top, right, bottom) of it."""

    number: int
    picture: np.ndarray
    label: int
    box: tuple[int, int, int, int]


def samples(count: int, first: int = 0) -> Iterator[Sample]:
    """Draw pictures."""
    for number in range(first, first + count):
        draw = np.random.RandomState(number)
        picture = draw.randint(0, 60, (HEIGHT, WIDTH, 3)).astype(np.uint8)
        left, top = draw.randint(5, WIDTH // 2), draw.randint(5, HEIGHT // 2)
        box = (left, top, left + draw.randint(40, WIDTH // 2 - 5), top + draw.randint(40, HEIGHT // 2 - 5))
        picture[box[1]:box[3], box[0]:box[2], number % len(CLASSES)] += 150
        yield Sample(number, picture, number % len(CLASSES), box)


def write_data(home: Path, count: int) -> None:
    """Write every data set below ``home/.mxnet/datasets``, where the scripts look for them."""
    root = home / ".mxnet" / "datasets"
    _text(root / "voc/VOC2012/ImageSets/Main/trainval.txt", "")
    for split, number, first in (("train", count, 0), ("val", len(CLASSES), count)):
        found = list(samples(number, first))
        _write_voc(root / "voc/VOC2007", {"train": "trainval", "val": "test"}[split], found)
        _write_coco(root / "coco", f"{split}2017", found)
        for one in found:
            mask = np.ones((HEIGHT, WIDTH), np.uint8)
            mask[one.box[1]:one.box[3], one.box[0]:one.box[2]] = one.label + 2
            for kind, ending, picture in (("images", "jpg", one.picture), ("annotations", "png", mask)):
                folder = {"train": "training", "val": "validation"}[split]
                _picture(root / f"ade/ADEChallengeData2016/{kind}/{folder}/{one.number:06d}.{ending}", picture)
            _picture(root / f"imagenet/{split}/n{one.label:08d}/{one.number:06d}.JPEG", one.picture)


def _write_voc(root: Path, split: str, found: list[Sample]) -> None:
    """Write a split of Pascal VOC."""
    _text(root / f"ImageSets/Main/{split}.txt", "".join(f"{one.number:06d}\n" for one in found))
    for one in found:
        corners = "".join(f"<{name}>{value}</{name}>" for name, value in zip(("xmin", "ymin", "xmax", "ymax"), one.box))
        _picture(root / f"JPEGImages/{one.number:06d}.jpg", one.picture)
        _text(root / f"Annotations/{one.number:06d}.xml",
              f"<annotation><size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size><object><name>"
              f"{CLASSES[one.label]}</name><difficult>0</difficult><bndbox>{corners}</bndbox></object></annotation>")


def _write_coco(root: Path, split: str, found: list[Sample]) -> None:
    """Write a split of COCO 2017: its instances, and persons with joints."""
    from gluoncv.data import COCODetection

    images, boxes, persons = [], [], []
    for one in found:
        _picture(root / split / f"{one.number:06d}.jpg", one.picture)
        images.append({"id": one.number, "file_name": f"{one.number:06d}.jpg", "width": WIDTH, "height": HEIGHT,
                       "coco_url": f"http://localhost/{split}/{one.number:06d}.jpg"})
        left, top, right, bottom = one.box
        boxes.append({"id": one.number + 1, "image_id": one.number, "category_id": COCO_IDS[one.label], "iscrowd": 0,
                      "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top),
                      "segmentation": [[left, top, right, top, right, bottom, left, bottom]]})
        places = np.random.RandomState(one.number).uniform(0.1, 0.9, (JOINTS, 2)) * (right - left, bottom - top)
        joints = [value for x, y in np.add(places, (left, top)) for value in (int(x), int(y), 2)]
        persons.append({**boxes[-1], "category_id": PERSON, "keypoints": joints, "num_keypoints": JOINTS})
    categories = [{"id": number, "name": name} for number, name in enumerate(COCODetection.CLASSES, start=1)]
    for name, labels, kinds in (("instances", boxes, categories),
                                ("person_keypoints", persons, [{"id": PERSON, "name": "person"}])):
        _text(root / f"annotations/{name}_{split}.json",
              json.dumps({"images": images, "annotations": labels, "categories": kinds}))


def _picture(path: Path, values: Any) -> None:
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), values)


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
