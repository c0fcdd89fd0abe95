"""Short training runs on digits in Pascal VOC's format, and the comparison of FP32 with AMP."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for module in ("PIL", "rich", "sklearn", "tqdm"):
    pytest.importorskip(module)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import digits  # noqa: E402
import make_digits_voc  # noqa: E402

IMAGES, VAL, SIZE = 12, 6, 96


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a small directory of digits that no test changes."""
    return make_digits_voc.make(tmp_path_factory.mktemp("voc") / "digits", IMAGES, VAL, SIZE, seed=3)


def run_result(mean_ap: float, loss: float = 1.0, weights: str = "abc", converted: float = 0.0) -> dict[str, Any]:
    losses = {name: [2.0, loss] for name in ("cls", "box", "total")}
    settings = {"network": "digits", "data_shape": 128, "batch_size": 16, "steps": 2, "seed": 0}
    return {
        "mean_ap": mean_ap,
        "converted_mean_ap": mean_ap + converted,
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
            (run_result(0.90, converted=0.004), None),
            (run_result(0.90, converted=-0.006), "AMP: conversion changes the mAP by -0.60 points"),
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
    return voc.open_set(voc.check_directory(root), name)


def anchors(voc: Any) -> Any:
    """Give sixteen anchors over a picture of 96 pixels."""
    return voc.mx.nd.array([[[24 + 16 * x, 24 + 16 * y, 24, 24] for x in range(4) for y in range(4)]])


def loaded(voc: Any, dataset: Any, transform: Any) -> list[list[np.ndarray]]:
    """Give what three batches of a training run hold."""
    loader = voc.batches(dataset, transform(SIZE, SIZE, anchors(voc)), steps=3, batch_size=4, seed=0)
    return [[part.asnumpy() for part in batch] for batch in loader]


class TestTraining:
    def test_samples_depend_on_seed_and_number_alone(self, voc: Any) -> None:
        from _voc_samples import TrainingSamples

        def transform(image: int, label: int) -> tuple[int, int, float, float]:
            return image, label, random.random(), float(np.random.uniform())

        data = [(number, -number) for number in range(5)]
        one = TrainingSamples(data, transform, count=12, seed=1)
        first = [one[number] for number in range(12)]
        assert len(one) == 12
        assert [one[number] for number in reversed(range(12))] == first[::-1]
        assert sorted(image for image, *_ in first[:5]) == list(range(5))
        assert len({sample[2:] for sample in first}) == 12
        assert TrainingSamples(data, transform, count=12, seed=2)[0] != first[0]

    def test_augments_for_large_networks_only(self, made: Path, voc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        class Training:
            def __init__(self, settings: Any, *_: Any) -> None:
                asked.append(settings.augment)

            def run(self, _: str) -> None: ...

        monkeypatch.setattr(voc, "_Training", Training)
        for network, augment in (("digits", None), ("ssd_300_mobilenet0.25_voc", None), ("digits", True)):
            voc.train(made, network=network, augment=augment)
        assert asked == [False, True, True]

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
        roots = [ET.parse(path).getroot() for path in (made / "VOC2007" / "Annotations").glob("val_*.xml")]
        shown = {entry.findtext("name") for root in roots for entry in root.iter("object")}
        assert set(first.average_precision) == shown
        assert len(first.losses) == len(first.step_seconds) == 3
        assert first.samples_per_second > 0
        json.dumps(first.as_dict())

    @pytest.mark.bf16
    def test_amp_begins_where_fp32_does(self, made: Path, voc: Any) -> None:
        arguments = {"steps": 3, "batch_size": 2, "data_shape": 64, "progress": False}
        fp32, mixed = (voc.train(made, amp=amp, **arguments) for amp in (False, True))
        assert not voc.gluon_amp.is_active()
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
        plain = loaded(voc, dataset, kind)
        amp.init()
        try:
            mixed = loaded(voc, dataset, kind)
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
        with pytest.raises((ValueError, TypeError), match=message):
            voc.train(made, progress=False, **arguments)
        assert not voc.gluon_amp.is_active()

    def test_checks_the_directory_first(self, tmp_path: Path, voc: Any) -> None:
        data = make_digits_voc.make(tmp_path / "digits", 1, 1, 64)
        (data / "VOC2007" / "ImageSets" / "Main" / "val.txt").unlink()
        with pytest.raises(FileNotFoundError, match=r"val\.txt"):
            voc.train(data, amp=True, progress=False)
        assert not voc.gluon_amp.is_active()

    def test_trains_a_network_of_the_model_zoo(self, made: Path, voc: Any) -> None:
        arguments = {"network": "ssd_300_mobilenet0.25_coco", "data_shape": 128, "augment": True}
        result = voc.train(made, steps=2, batch_size=2, progress=False, **arguments)
        assert all(math.isfinite(loss) for step in result.losses for loss in step)

    def test_initializes_vectors_by_their_name(self, voc: Any) -> None:
        net = voc.create_network("ssd_300_mobilenet0.25_voc", ("one", "two"), 300)
        assert tuple(net.classes) == ("one", "two")
        voc.initialize(net, voc.mx.cpu())
        with voc.autograd.train_mode():
            net(voc.mx.nd.zeros((1, 3, 128, 128)))
        vectors = net.collect_params(".*(gamma|beta)$")
        assert len(list(vectors)) > 50
        for name, parameter in vectors.items():
            assert (parameter.data().asnumpy() == float(name.endswith("gamma"))).all(), name

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
        arguments = {"data_dir": str(data), "steps": 200, "progress": False}
        runs = [digits.train(str(amp), {**arguments, "amp": amp}, threads=2) for amp in (False, True)]
        assert all(run["mean_ap"] > 0.35 for run in runs)
        assert abs(digits.points(*runs)) < 10  # so early in training it moves fast
        assert digits.final_loss(runs[1], "total") == pytest.approx(digits.final_loss(runs[0], "total"), rel=0.15)
