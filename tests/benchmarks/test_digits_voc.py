"""Digits in Pascal VOC's format, and the check of such directories."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")

from benchmarks import make_digits_voc  # noqa: E402
from benchmarks.voc import digits  # noqa: E402
from benchmarks.voc.directory import check_directory  # noqa: E402

IMAGES, VAL, SIZE = 12, 6, 96


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a small directory of digits that no test changes."""
    return digits.make(tmp_path_factory.mktemp("voc") / "digits", IMAGES, VAL, SIZE, seed=3)


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
        assert (made / "labels.txt").read_text().split() == list(digits.CLASSES)

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
        blend, painted = digits._blend, []

        def spy(canvas: np.ndarray, *arguments: Any) -> None:
            before = canvas.copy()
            blend(canvas, *arguments)
            painted.append(np.abs(canvas - before).max(axis=2))

        monkeypatch.setattr(digits, "_blend", spy)
        for seed in range(10):
            random_state = np.random.default_rng(seed)
            scans = digits.scan_order(load_digits(), np.arange(100), random_state)
            _, placed = digits.compose(SIZE, scans, random_state)
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
        ink = digits._scale(opacity, 128, np.random.default_rng(0))
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
                    label = digits.CLASSES[target[int(entry.findtext("sample") or "")]]
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
        train, val = digits.split_samples(1797, seed=5)
        assert sorted([*train, *val]) == list(range(1797))

    def test_digits_hardly_overlap(self) -> None:
        scans = digits.scan_order(load_digits(), np.arange(100), np.random.default_rng(0))
        for seed in range(20):
            _, placed = digits.compose(SIZE, scans, np.random.default_rng(seed))
            for number, one in enumerate(placed):
                for other in placed[:number]:
                    assert digits._overlap(one.box, other.box) <= 0.02

    def test_same_seed_gives_the_same_bytes(self, made: Path, tmp_path: Path) -> None:
        again = digits.make(tmp_path / "again", IMAGES, VAL, SIZE, seed=3)
        assert contents(again) == contents(made)

    def test_another_seed_gives_other_images(self, made: Path, tmp_path: Path) -> None:
        other = digits.make(tmp_path / "other", IMAGES, VAL, SIZE, seed=4)
        assert contents(other) != contents(made)

    def test_reuses_the_same_settings_only(self, made: Path) -> None:
        before = (made / "settings.json").stat().st_mtime_ns
        digits.make(made, IMAGES, VAL, SIZE, seed=3)
        assert (made / "settings.json").stat().st_mtime_ns == before
        with pytest.raises(FileExistsError, match=r"other settings: expected .*'seed': 4"):
            digits.make(made, IMAGES, VAL, SIZE, seed=4)

    def test_touches_no_foreign_directory(self, tmp_path: Path) -> None:
        (tmp_path / "precious.txt").write_text("mine")
        with pytest.raises(FileExistsError, match="no digits directory"):
            digits.make(tmp_path, IMAGES, VAL, SIZE)
        assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]

    def test_fills_an_empty_directory(self, tmp_path: Path) -> None:
        digits.make(tmp_path / "empty", 1, 1, 64)
        shutil.rmtree(tmp_path / "empty")
        (tmp_path / "empty").mkdir()
        assert (digits.make(tmp_path / "empty", 1, 1, 64) / "VOC2007").is_dir()

    def test_failure_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(digits, "_annotation", fail)
        with pytest.raises(OSError, match="disk full"):
            digits.make(tmp_path / "digits", 2, 1, 64)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("setting", "value"), [("images", 0), ("val", 0), ("size", 32), ("seed", -1), ("images", 1.5)]
    )
    def test_refuses_bad_settings(self, tmp_path: Path, setting: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"expected {setting} >= "):
            digits.make(tmp_path / "digits", **{setting: value})
        assert list(tmp_path.iterdir()) == []

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = str(tmp_path / "digits")
        assert make_digits_voc.main([target, "--images", "2", "--val", "1", "--size", "64"]) == 0
        assert capsys.readouterr().out.strip() == target
        assert make_digits_voc.main([target, "--images", "3"]) == 1
        assert "other settings" in capsys.readouterr().err

    def test_gluoncv_reads_the_directory(self, made: Path) -> None:
        detection = pytest.importorskip("benchmarks.voc.samples").VOCDetection
        kind = type("Digits", (detection,), {"CLASSES": digits.CLASSES})
        dataset = kind(root=str(made), splits=((2007, "train"),))
        assert len(dataset) == IMAGES
        for number, root in enumerate(annotations(made, "train").values()):
            image, label = dataset[number]
            assert image.shape == (SIZE, SIZE, 3)
            assert (label[:, :4] + 1).tolist() == [box(entry) for entry in root.iter("object")]
            names = [digits.CLASSES[int(index)] for index in label[:, 4]]
            assert names == [entry.findtext("name") for entry in root.iter("object")]


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
            assert found.classes == digits.CLASSES
            assert found.images == {"train": IMAGES, "val": VAL}

    def test_takes_the_classes_from_the_annotations(self, broken: Path) -> None:
        (broken.parent / "labels.txt").unlink()
        classes = check_directory(broken).classes
        assert list(classes) == sorted(classes)
        assert set(classes) <= set(digits.CLASSES)

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
