"""Digits in Pascal VOC's format, the check of such directories, and short training runs on one."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

for module in ("PIL", "rich", "sklearn", "tqdm"):
    pytest.importorskip(module)

from PIL import Image  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import digits  # noqa: E402
import make_digits_voc  # noqa: E402
from _voc_directory import check_directory  # noqa: E402

IMAGES, VAL, SIZE = 12, 6, 96


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a small directory of digits that no test changes."""
    return make_digits_voc.make(tmp_path_factory.mktemp("voc") / "digits", IMAGES, VAL, SIZE, seed=3)


@pytest.fixture
def broken(made: Path, tmp_path: Path) -> Path:
    """Give a copy to break; its VOC2007 directory."""
    return Path(shutil.copytree(made, tmp_path / "copy")) / "VOC2007"


def annotations(root: Path, name: str) -> dict[str, ET.Element]:
    listing = (root / "VOC2007" / "ImageSets" / "Main" / f"{name}.txt").read_text().split()
    return {each: ET.parse(root / "VOC2007" / "Annotations" / f"{each}.xml").getroot() for each in listing}


def box(entry: ET.Element) -> list[int]:
    return [int(entry.findtext(f"bndbox/{tag}") or "") for tag in ("xmin", "ymin", "xmax", "ymax")]


def pixels(root: Path, identifier: str) -> np.ndarray:
    with Image.open(root / "VOC2007" / "JPEGImages" / f"{identifier}.jpg") as image:
        return np.asarray(image.convert("RGB"), dtype=np.float32)


class TestMake:
    def test_has_the_layout_of_voc2007(self, made: Path) -> None:
        parts = {path.name: len(list(path.iterdir())) for path in (made / "VOC2007").iterdir()}
        assert parts == {"JPEGImages": IMAGES + VAL, "Annotations": IMAGES + VAL, "ImageSets": 1}
        assert len(annotations(made, "train")) == IMAGES
        assert len(annotations(made, "val")) == VAL
        assert (made / "labels.txt").read_text().split() == list(make_digits_voc.CLASSES)

    def test_annotations_fit_their_images(self, made: Path) -> None:
        for name in ("train", "val"):
            for identifier, root in annotations(made, name).items():
                assert root.findtext("filename") == f"{identifier}.jpg"
                assert [root.findtext(f"size/{tag}") for tag in ("width", "height", "depth")] == ["96", "96", "3"]
                assert pixels(made, identifier).shape == (SIZE, SIZE, 3)
                assert root.findall("object")
                for entry in root.iter("object"):
                    left, top, right, bottom = box(entry)
                    assert 1 <= left < right <= SIZE
                    assert 1 <= top < bottom <= SIZE

    def test_boxes_cover_the_ink(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Painting a digit changes pixels inside its box, at each of the four borders, and nowhere else."""
        blend, painted = make_digits_voc._blend, []

        def spy(canvas: np.ndarray, *arguments: Any) -> None:
            before = canvas.copy()
            blend(canvas, *arguments)
            painted.append(np.abs(canvas - before).max(axis=2))

        monkeypatch.setattr(make_digits_voc, "_blend", spy)
        for seed in range(10):
            random_state = np.random.default_rng(seed)
            scans = make_digits_voc.scan_order(load_digits(), np.arange(100), random_state)
            _, placed = make_digits_voc.compose(SIZE, scans, random_state)
            for digit, change in zip(placed, painted[-len(placed) :]):
                left, top, right, bottom = digit.box
                inside = change[top:bottom, left:right].copy()
                assert min(inside[0].max(), inside[-1].max(), inside[:, 0].max(), inside[:, -1].max()) > 10
                assert inside.max() > 40
                change[top:bottom, left:right] = 0
                assert not change.any()

    def test_box_is_tight(self) -> None:
        opacity = np.zeros((8, 8))
        opacity[1:7, 3:5] = 1.0
        ink = make_digits_voc._scale(opacity, 128, np.random.default_rng(0))
        assert ink[0].max() > 0.3
        assert ink[-1].max() > 0.3
        assert ink[:, 0].max() > 0.3
        assert ink[:, -1].max() > 0.3
        assert ink.shape[0] > 2 * ink.shape[1]

    def test_labels_are_those_of_the_scans(self, made: Path) -> None:
        target = load_digits().target
        for name in ("train", "val"):
            for root in annotations(made, name).values():
                for entry in root.iter("object"):
                    label = make_digits_voc.CLASSES[target[int(entry.findtext("sample") or "")]]
                    assert entry.findtext("name") == label

    def test_train_and_val_share_no_scan(self, made: Path) -> None:
        used = {
            name: {
                int(entry.findtext("sample") or "")
                for root in annotations(made, name).values()
                for entry in root.iter("object")
            }
            for name in ("train", "val")
        }
        assert used["train"]
        assert used["val"]
        assert not used["train"] & used["val"]

    def test_split_is_disjoint_and_complete(self) -> None:
        train, val = make_digits_voc.split_samples(1797, seed=5)
        assert sorted([*train, *val]) == list(range(1797))

    def test_digits_hardly_overlap(self) -> None:
        scans = make_digits_voc.scan_order(load_digits(), np.arange(100), np.random.default_rng(0))
        for seed in range(20):
            _, placed = make_digits_voc.compose(SIZE, scans, np.random.default_rng(seed))
            for number, one in enumerate(placed):
                for other in placed[:number]:
                    assert make_digits_voc._overlap(one.box, other.box) <= 0.02

    def test_same_seed_gives_the_same_bytes(self, made: Path, tmp_path: Path) -> None:
        again = make_digits_voc.make(tmp_path / "again", IMAGES, VAL, SIZE, seed=3)
        assert contents(again) == contents(made)

    def test_another_seed_gives_other_images(self, made: Path, tmp_path: Path) -> None:
        other = make_digits_voc.make(tmp_path / "other", IMAGES, VAL, SIZE, seed=4)
        assert contents(other) != contents(made)

    def test_reuses_the_same_settings_only(self, made: Path) -> None:
        before = (made / "settings.json").stat().st_mtime_ns
        make_digits_voc.make(made, IMAGES, VAL, SIZE, seed=3)
        assert (made / "settings.json").stat().st_mtime_ns == before
        with pytest.raises(FileExistsError, match=r"other settings: expected .*'seed': 4"):
            make_digits_voc.make(made, IMAGES, VAL, SIZE, seed=4)

    def test_touches_no_foreign_directory(self, tmp_path: Path) -> None:
        (tmp_path / "precious.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="no digits directory"):
            make_digits_voc.make(tmp_path, IMAGES, VAL, SIZE)
        assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]

    def test_fills_an_empty_directory(self, tmp_path: Path) -> None:
        make_digits_voc.make(tmp_path / "empty", 1, 1, 64)
        shutil.rmtree(tmp_path / "empty")
        (tmp_path / "empty").mkdir()
        assert (make_digits_voc.make(tmp_path / "empty", 1, 1, 64) / "VOC2007").is_dir()

    def test_failure_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(make_digits_voc, "_annotation", fail)
        with pytest.raises(OSError, match="disk full"):
            make_digits_voc.make(tmp_path / "digits", 2, 1, 64)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("setting", "value"), [("images", 0), ("val", 0), ("size", 32), ("seed", -1), ("images", 1.5)]
    )
    def test_refuses_bad_settings(self, tmp_path: Path, setting: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"expected {setting} >= "):
            make_digits_voc.make(tmp_path / "digits", **{setting: value})
        assert list(tmp_path.iterdir()) == []

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = str(tmp_path / "digits")
        assert make_digits_voc.main([target, "--images", "2", "--val", "1", "--size", "64"]) == 0
        assert capsys.readouterr().out.strip() == target
        assert make_digits_voc.main([target, "--images", "3"]) == 1
        assert "other settings" in capsys.readouterr().err


def load_digits() -> Any:
    from sklearn.datasets import load_digits as load

    return load()


def contents(root: Path) -> dict[str, bytes]:
    names = ("VOC2007", "labels.txt")
    paths = [path for name in names for path in [root / name, *(root / name).rglob("*")] if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


ANNOTATION = "Annotations/val_00000.xml"
IMAGE = "JPEGImages/val_00000.jpg"
LISTING = "ImageSets/Main/val.txt"

# what breaks a VOC2007 directory; the error's type; what its message must name
BREAKAGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no ImageSets": (lambda root: shutil.rmtree(root / "ImageSets"), FileNotFoundError, "no ImageSets/Main"),
    "no images": (lambda root: shutil.rmtree(root / "JPEGImages"), FileNotFoundError, "no JPEGImages"),
    "no annotations": (lambda root: shutil.rmtree(root / "Annotations"), FileNotFoundError, "no Annotations"),
    "no val": (lambda root: (root / LISTING).unlink(), FileNotFoundError, LISTING),
    "empty val": (lambda root: (root / LISTING).write_text("\n"), ValueError, f"{LISTING} is empty"),
    "blank line": (lambda root: rewrite(root / LISTING, "\n", "\n\n"), ValueError, f"{LISTING}, line 2"),
    "class list": (lambda root: rewrite(root / LISTING, "\n", " -1\n"), ValueError, "val_00000 -1"),
    "one image gone": (lambda root: (root / IMAGE).unlink(), FileNotFoundError, IMAGE),
    "no JPEG": (lambda root: (root / IMAGE).write_text("text"), ValueError, f"{IMAGE} is not a readable image"),
    "one annotation gone": (lambda root: (root / ANNOTATION).unlink(), FileNotFoundError, ANNOTATION),
    "broken XML": (
        lambda root: rewrite(root / ANNOTATION, "</annotation>", ""),
        ValueError,
        f"{ANNOTATION} is not well-formed XML",
    ),
    "another size": (
        lambda root: rewrite(root / ANNOTATION, "<width>96<", "<width>95<"),
        ValueError,
        "96x96 pixels, but .* says 95x96",
    ),
    "no size": (lambda root: rewrite(root / ANNOTATION, "width", "breadth"), ValueError, "well-formed"),
    "no number": (
        lambda root: rewrite(root / ANNOTATION, "<xmin>", "<xmin>left"),
        ValueError,
        "expected a number in <object>/bndbox/xmin, found 'left",
    ),
    "no difficult": (
        lambda root: rewrite(root / ANNOTATION, "<difficult>0</difficult>", ""),
        ValueError,
        "<object>/difficult, found nothing",
    ),
    "box outside": (lambda root: rewrite(root / ANNOTATION, "<xmax>", "<xmax>9"), ValueError, "inside the image"),
    "nothing in it": (
        lambda root: (root / ANNOTATION).write_text("<a><size><width>96</width><height>96</height></size></a>"),
        ValueError,
        "no <object>",
    ),
    "unknown class": (
        lambda root: rewrite(root.parent / "labels.txt", "nine", "nien"),
        ValueError,
        "unknown class 'nine' in .*did you mean 'nien'",
    ),
    "class twice": (
        lambda root: rewrite(root.parent / "labels.txt", "nine", "one"),
        ValueError,
        "labels.txt: expected different class names",
    ),
    "class without letters": (
        lambda root: rewrite(root.parent / "labels.txt", "nine", "9"),
        ValueError,
        "class '9'.*letter",
    ),
}


class TestCheckDirectory:
    def test_describes_a_sound_directory(self, made: Path) -> None:
        for path in (made, made / "VOC2007"):
            found = check_directory(path)
            assert found.root == made / "VOC2007"
            assert found.classes == make_digits_voc.CLASSES
            assert found.images == {"train": IMAGES, "val": VAL}

    def test_takes_the_classes_from_the_annotations(self, broken: Path) -> None:
        (broken.parent / "labels.txt").unlink()
        classes = check_directory(broken).classes
        assert list(classes) == sorted(classes)
        assert set(classes) <= set(make_digits_voc.CLASSES)

    @pytest.mark.parametrize("name", BREAKAGES)
    def test_names_what_is_broken(self, broken: Path, name: str) -> None:
        breakage, kind, message = BREAKAGES[name]
        breakage(broken)
        with pytest.raises(kind, match=message) as caught:
            check_directory(broken)
        assert str(broken.parent) in str(caught.value) or name == "class without letters"

    def test_missing_directory_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nowhere: expected .*make_digits_voc\.py"):
            check_directory(tmp_path / "nowhere")


def run_result(mean_ap: float, loss: float = 1.0, weights: str = "abc") -> dict[str, Any]:
    losses = {name: [2.0, loss] for name in ("cls", "box", "total")}
    settings = {"network": "digits", "data_shape": 128, "batch_size": 16, "steps": 2, "seed": 0}
    return {
        "mean_ap": mean_ap,
        "average_precision": {"one": mean_ap},
        "losses": losses,
        "initial_weights": weights,
        "dtype": "bfloat16",
        "samples_per_second": 100.0,
        "seconds": 10.0,
        "peak_memory": 5e8,
        "settings": settings,
        "versions": {"mxnet": "1.9.1"},
    }


class TestDigits:
    @pytest.mark.parametrize(
        ("amp", "message"),
        [
            (run_result(0.90), None),
            (run_result(0.914), None),
            (run_result(0.92), "AMP's mAP is \\+2.00 points"),
            (run_result(0.88), "AMP's mAP is -2.00 points"),
            (run_result(0.5), "AMP: mAP 0.500, expected 0.6 at least"),
            (run_result(math.nan), "AMP: mAP nan"),
            (run_result(0.90, loss=math.nan), "AMP: a loss is not finite"),
            (run_result(0.90, weights="def"), "same weights"),
        ],
    )
    def test_judges_a_pair_of_runs(self, amp: dict[str, Any], message: str | None) -> None:
        found = digits.failures(run_result(0.90), amp)
        if message is None:
            assert found == []
        else:
            assert any(re.search(message, text) for text in found)

    def test_shows_a_table_a_plot_and_json(
        self,
        made: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        pytest.importorskip("matplotlib")
        asked = []

        def train(label: str, arguments: dict[str, Any], threads: int) -> dict[str, Any]:
            asked.append((label, arguments, threads))
            return run_result(0.9 if label == "FP32" else 0.7)

        monkeypatch.setattr(digits, "train", train)
        files = [str(tmp_path / name) for name in ("out.json", "out.png")]
        arguments = ["--data", str(made), "--steps", "2", "--threads", "1"]
        assert digits.main([*arguments, "--json", files[0], "--plot", files[1]]) == 1
        captured = capsys.readouterr()
        assert "-20.00 points" in captured.out
        assert "1.00x" in captured.out
        assert "expected 1.5 at most" in captured.err
        assert json.loads(Path(files[0]).read_text())["points"] == pytest.approx(-20.0)
        assert Path(files[1]).stat().st_size > 1000
        labels = [label for label, _, _ in asked]
        assert labels == ["FP32", "AMP"]
        shared = [{k: v for k, v in given.items() if k not in ("amp", "dtype")} for _, given, _ in asked]
        assert shared[0] == shared[1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--steps", "0"], "--steps: expected at least 1"),
            (["--seed", "-1"], "--seed: expected at least 0"),
            (["--threads", "x"], "invalid int value"),
            (["--json", "no/such/folder/out.json"], "its folder does not exist"),
        ],
    )
    def test_refuses_bad_arguments(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert digits.main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def voc() -> Any:
    pytest.importorskip("gluoncv")
    import voc as module

    return module


def gluoncv_dataset(voc: Any, root: Path, name: str) -> Any:
    kind = type("Digits", (voc.VOCDetection,), {"CLASSES": make_digits_voc.CLASSES})
    return kind(root=str(root), splits=((2007, name),))


def anchors(voc: Any) -> Any:
    """Give sixteen anchors over a picture of 96 pixels."""
    return voc.mx.nd.array([[[24 + 16 * x, 24 + 16 * y, 24, 24] for x in range(4) for y in range(4)]])


class TestTraining:
    def test_gluoncv_reads_the_directory(self, made: Path, voc: Any) -> None:
        dataset = gluoncv_dataset(voc, made, "train")
        assert len(dataset) == IMAGES
        for number, root in enumerate(annotations(made, "train").values()):
            image, label = dataset[number]
            assert image.shape == (SIZE, SIZE, 3)
            assert (label[:, :4] + 1).tolist() == [box(entry) for entry in root.iter("object")]
            names = [make_digits_voc.CLASSES[int(index)] for index in label[:, 4]]
            assert names == [entry.findtext("name") for entry in root.iter("object")]

    def test_samples_depend_on_seed_and_number_alone(self, voc: Any) -> None:
        def transform(image: int, label: int) -> tuple[int, int, float, float]:
            return image, label, random.random(), float(np.random.uniform())

        data = [(number, -number) for number in range(5)]
        one = voc.TrainingSamples(data, transform, count=12, seed=1)
        first = [one[number] for number in range(12)]
        assert len(one) == 12
        assert [one[number] for number in reversed(range(12))] == first[::-1]
        assert sorted(image for image, *_ in first[:5]) == list(range(5))
        assert len({sample[2:] for sample in first}) == 12
        assert voc.TrainingSamples(data, transform, count=12, seed=2)[0] != first[0]

    @pytest.mark.parametrize("augment", [False, True])
    def test_targets_are_those_of_gluoncv(self, made: Path, voc: Any, augment: bool) -> None:
        """Both transforms give targets of one shape; the plain one matches every box with an anchor."""
        kind = voc.SSDDefaultTrainTransform if augment else voc.PlainTrainTransform
        dataset = gluoncv_dataset(voc, made, "val")
        image, cls_targets, box_targets = kind(SIZE, SIZE, anchors(voc))(*dataset[0])
        assert (image.shape, cls_targets.shape, box_targets.shape) == ((3, SIZE, SIZE), (16,), (16, 4))
        if not augment:
            ids = {int(index) + 1 for index in dataset[0][1][:, 4]}
            assert {int(value) for value in cls_targets.asnumpy() if value > 0} == ids

    def test_trains_and_repeats_itself(self, made: Path, voc: Any) -> None:
        arguments = {"steps": 3, "batch_size": 2, "data_shape": 64, "progress": False, "augment": False}
        first, again = (voc.train(made, **arguments) for _ in range(2))
        assert first.losses == again.losses
        assert first.initial_weights == again.initial_weights
        assert first.average_precision == again.average_precision
        assert all(math.isfinite(loss) for step in first.losses for loss in step)
        assert first.dtype == "float32"
        shown = {entry.findtext("name") for root in annotations(made, "val").values() for entry in root.iter("object")}
        assert set(first.average_precision) == shown
        assert len(first.losses) == len(first.step_seconds) == 3
        assert first.samples_per_second > 0
        json.dumps(first.as_dict())

    @pytest.mark.bf16
    def test_amp_begins_where_fp32_does(self, made: Path, voc: Any) -> None:
        import gluon_amp

        arguments = {"steps": 3, "batch_size": 2, "data_shape": 64, "progress": False}
        fp32, mixed = (voc.train(made, amp=amp, **arguments) for amp in (False, True))
        assert not gluon_amp.is_active()
        assert mixed.dtype == "bfloat16"
        assert mixed.initial_weights == fp32.initial_weights
        assert mixed.losses[0] != fp32.losses[0]
        assert mixed.losses[0] == pytest.approx(fp32.losses[0], rel=0.02)

    @pytest.mark.bf16
    @pytest.mark.parametrize("augment", [False, True])
    def test_amp_leaves_the_data_as_they_are(self, made: Path, voc: Any, augment: bool) -> None:
        amp = voc.gluon_amp
        kind = voc.SSDDefaultTrainTransform if augment else voc.PlainTrainTransform
        dataset = gluoncv_dataset(voc, made, "train")
        samples = voc.TrainingSamples(dataset, kind(SIZE, SIZE, anchors(voc)), IMAGES, seed=0)
        plain = [[part.asnumpy() for part in samples[number]] for number in range(IMAGES)]
        amp.init()
        try:
            mixed = [[part.asnumpy() for part in samples[number]] for number in range(IMAGES)]
        finally:
            amp.deinit()
        for one, other in zip(plain, mixed):
            for expected, actual in zip(one, other):
                np.testing.assert_array_equal(actual, expected)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"network": "ssd_512_resnet50_v2_coco"}, "unknown network 'ssd_512_resnet50_v2_coco'; did you mean"),
            ({"network": "yolo"}, "unknown network 'yolo'; expected one of digits, "),
            ({"steps": 0}, "expected steps to be an integer of at least 1, received 0"),
            ({"batch_size": 0.5}, "expected batch_size"),
            ({"data_shape": 8}, "expected data_shape"),
            ({"learning_rate": -1.0}, "expected learning_rate > 0"),
            ({"amp": True, "dtype": "float17"}, "float17"),
        ],
    )
    def test_refuses_bad_settings(self, made: Path, voc: Any, arguments: dict[str, Any], message: str) -> None:
        import gluon_amp

        with pytest.raises((ValueError, TypeError), match=message):
            voc.train(made, progress=False, **arguments)
        assert not gluon_amp.is_active()

    def test_checks_the_directory_first(self, broken: Path, voc: Any) -> None:
        (broken / LISTING).unlink()
        with pytest.raises(FileNotFoundError, match=LISTING):
            voc.train(broken, progress=False)

    def test_makes_a_network_of_the_model_zoo_for_the_classes(self, voc: Any) -> None:
        net = voc.create_network("ssd_300_mobilenet0.25_coco", ("one", "two"), 300)
        assert tuple(net.classes) == ("one", "two")

    def test_worker_says_what_is_wrong(self, tmp_path: Path, voc: Any) -> None:
        worker = [sys.executable, str(digits.WORKER), str(tmp_path / "out.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        arguments = json.dumps({"data_dir": str(tmp_path / "nowhere")})
        done = subprocess.run(
            [*worker, arguments], env=environment, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
        assert done.returncode == 2
        assert f"error: there is no directory {tmp_path / 'nowhere'}" in done.stderr

    @pytest.mark.slow
    @pytest.mark.bf16
    def test_both_precisions_learn_the_digits(self, tmp_path: Path, voc: Any) -> None:
        """The whole benchmark, shortened."""
        data = make_digits_voc.make(tmp_path / "digits", images=800, val=200)
        arguments = {"data_dir": str(data), "steps": 300, "augment": False, "progress": False}
        runs = [digits.train(str(amp), {**arguments, "amp": amp}, threads=2) for amp in (False, True)]
        assert all(run["mean_ap"] > 0.5 for run in runs)
        assert abs(digits.points(*runs)) < 6
        assert digits.final_loss(runs[1], "total") == pytest.approx(digits.final_loss(runs[0], "total"), rel=0.15)
