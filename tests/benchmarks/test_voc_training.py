"""Short training runs on digits in Pascal VOC's format, and the comparison of FP32 with AMP."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_kinds import in_bfloat16

for module in ("PIL", "sklearn"):
    pytest.importorskip(module)

from benchmarks import digits  # noqa: E402
from benchmarks.harness import cli  # noqa: E402
from benchmarks.harness.children import Child  # noqa: E402
from benchmarks.harness.errors import Refused  # noqa: E402
from benchmarks.harness.stats import spread  # noqa: E402
from benchmarks.voc import turns  # noqa: E402
from gluon_amp.state.devices import device_supports  # noqa: E402

IMAGES, VAL, SIZE = 12, 6, 96


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a small directory of digits that no test changes."""
    return digits.make(tmp_path_factory.mktemp("voc") / "digits", IMAGES, VAL, SIZE, seed=3)


def run_result(mean_ap: float, loss: float = 1.0, weights: str = "abc", converted: float = 0.0, steps: int = 600,
               dtype: str = "bfloat16") -> dict[str, Any]:
    losses = {name: [2.0, loss] for name in ("cls", "box", "total")}
    settings = {"network": "digits", "data_shape": 128, "batch_size": 16, "steps": steps, "seed": 0}
    return {
        "mean_ap": mean_ap,
        "converted_mean_ap": mean_ap + converted,
        "average_precision": {"one": mean_ap},
        "losses": losses,
        "initial_weights": weights,
        "dtype": dtype,
        "converted_dtype": dtype,
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

    def test_expects_less_of_fewer_steps(self) -> None:
        """Half the steps: twice the difference. Very few: the losses alone."""
        assert digits.failures(run_result(0.88, steps=300), run_result(0.90, steps=300)) == []
        assert digits.failures(run_result(0.86, steps=300), run_result(0.90, steps=300)) != []
        few = run_result(0.1, steps=30)
        assert digits.failures(few, run_result(0.3, steps=30, loss=1.1)) == []
        assert "expected at most 10% between them" in digits.failures(few, run_result(0.1, steps=30, loss=2.0))[0]
        assert digits.failures(few, run_result(0.1, steps=30, loss=math.nan)) != []

    def test_says_what_a_machine_shows_that_stays_in_fp32(self) -> None:
        def said(other_load: float = 0.02, **given: Any) -> str:
            run = run_result(0.9, **given)
            choice = turns.Choice(600, 128, 600, math.inf, 0.0, "as asked for")
            return digits.verdict(run, turns.Outcome((run, run), spread([1.1, 1.0, 1.2]), choice), other_load)

        meanwhile = "; other programs used {}% of the processors meanwhile"
        assert said() == ("gluon_amp trained in bfloat16, 1.10x (1.00-1.20 over 3 turns) as fast as FP32"
                          + meanwhile.format(2))
        assert said(0.4) == "the speeds are no finding" + meanwhile.format(40) + " (too much: measure again)"
        assert "gluon_amp keeps FP32 on this machine, so both runs trained in FP32" in said(dtype="float32")
        assert "10 steps are too few to expect a mAP" in said(steps=10)

    @pytest.mark.parametrize("other_load", [0.0, 0.5])
    def test_shows_a_table_a_plot_and_json(
        self,
        other_load: float,
        made: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        pytest.importorskip("matplotlib")
        asked = []

        def train(halves: Any, *given: Any) -> turns.Outcome:
            asked.extend([[half.name for half in halves], *given[:3]])
            return turns.Outcome((run_result(0.9), run_result(0.7)), spread([1.3]),
                                  turns.Choice(600, 128, 600, math.inf, 0.0, "as asked for"))

        monkeypatch.setattr(turns, "train", train)
        monkeypatch.setattr(digits.machine.OtherLoad, "share", lambda self: other_load)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # put back after the test: the benchmark sets it
        monkeypatch.setattr(digits, "Child", lambda command: contextlib.nullcontext(command))
        files = [str(tmp_path / name) for name in ("out.json", "out.png")]
        arguments = ["--data", str(made), "--steps", "2", "--threads", "1"]
        assert cli.main(digits.run, [*arguments, "--json", files[0], "--plot", files[1]]) == 1
        captured = capsys.readouterr()
        assert "-20.00 points" in captured.out
        assert ("1.30x" in captured.out) == (not other_load)
        assert ("the machine was busy" in captured.out) == bool(other_load)
        assert "expected 1.5 at most" in captured.err
        assert json.loads(Path(files[0]).read_text())["points"] == pytest.approx(-20.0)
        assert Path(files[1]).stat().st_size > 1000
        assert asked == [["FP32", "AMP"], 2, None, math.inf]

    def test_both_halves_get_the_same_arguments(self) -> None:
        one, other = (digits.command(name, {"data_dir": "here", "seed": 3, "amp": amp}, 2)
                      for name, amp in (("FP32", False), ("AMP", True)))
        assert {**json.loads(one.argv[-1]), "amp": True} == json.loads(other.argv[-1])
        assert one.environment == other.environment
        assert one.environment["OMP_NUM_THREADS"] == "2"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--steps", "0"], "--steps: expected an integer of at least 1"),
            (["--seed", "-1"], "--seed: expected an integer of at least 0"),
            (["--threads", "x"], "--threads: expected an integer of at least 1, received x"),
            (["--json", "no/such/folder/out.json"], "its folder does not exist"),
        ],
    )
    def test_refuses_bad_arguments(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(digits.run, arguments) == 2
        assert message in capsys.readouterr().err


class Half:
    """Speaks the protocol of `worker`, and takes its seconds on a fake clock."""

    def __init__(self, name: str, clock: list[float], step: float, image: float = 0.01):
        self.name, self.clock, self.step, self.image, self.timeout = name, clock, step, image, math.inf
        self.progress: list[float] = []
        self.steps = 0

    def ready(self) -> dict[str, Any]:
        return {"about": {"dtype": "float32", "images": 600}}

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        before = self.clock[0]
        answer = getattr(self, command)(**arguments)
        assert self.clock[0] - before <= self.timeout
        return answer

    def probe(self, data_shape: int, steps: int, images: int) -> dict[str, Any]:
        self.clock[0] += 2.0 + steps * self.step
        return {"startup": 2.0, "step": self.step, "image": self.image}

    def begin(self, steps: int, data_shape: int) -> dict[str, Any]:
        self.clock[0] += 2.0
        self.shape = data_shape
        return {}

    def run(self, steps: int, progress: list[float]) -> dict[str, Any]:
        self.clock[0] += steps * self.step
        self.steps += steps
        self.progress += progress
        return {"seconds": [self.step] * steps}

    def finish(self, images: int) -> dict[str, Any]:
        self.clock[0] += 2.0 + images * self.image
        return {"result": {"settings": {"steps": self.steps}}}


class TestTurns:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        clock = [0.0]
        monkeypatch.setattr(turns, "monotonic", lambda: clock[0])
        return clock

    def train(self, clock: list[float], steps: tuple[float, float], wanted: int | None = None) -> tuple[Any, Any, Any]:
        halves = [Half(name, clock, step) for name, step in zip(("FP32", "AMP"), steps)]
        said: list[str] = []
        outcome = turns.train(halves, wanted, None, math.inf if wanted else 320.0, said.append)  # type: ignore[arg-type]
        return halves, outcome, said

    @pytest.mark.parametrize(("steps", "done", "side"), [
        ((0.15, 0.1), 600, 128), ((0.4, 0.3), (300, 420), 128), ((0.8, 0.6), (150, 210), 96),
        ((5.0, 5.0), (15, 32), 96),
    ])
    def test_ends_in_time_with_as_many_steps_of_both(
        self, clock: list[float], steps: tuple[float, float], done: Any, side: int
    ) -> None:
        (fp32, amp), outcome, said = self.train(clock, steps)
        lowest, highest = (done, done) if isinstance(done, int) else done
        assert fp32.steps == amp.steps == outcome.steps
        assert lowest <= outcome.steps <= highest
        assert fp32.shape == amp.shape == side
        assert clock[0] <= 330.0
        assert f"chosen: {side}x{side} pixels" in said[2]
        assert outcome.ratio.median == pytest.approx(steps[0] / steps[1])

    def test_the_learning_rate_always_comes_to_its_end(self, clock: list[float]) -> None:
        for steps in ((0.1, 0.1), (1.0, 2.0)):
            clock[0] = 0.0
            (fp32, amp), *_ = self.train(clock, steps)
            assert fp32.progress == amp.progress == sorted(fp32.progress)
            assert (fp32.progress[0], fp32.progress[-1]) == (0.0, 1.0)

    def test_a_machine_that_becomes_slow_takes_fewer_steps(self, clock: list[float]) -> None:
        def slower(half: Half, steps: int, progress: list[float]) -> dict[str, Any]:
            half.step = 0.1 if clock[0] < 60.0 else 1.0
            return ordinary(half, steps, progress)

        ordinary = Half.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Half, "run", slower)
            (fp32, amp), _, said = self.train(clock, (0.1, 0.1))
        assert fp32.steps == amp.steps < 600
        assert "the time allowed" in said[-1]
        assert clock[0] <= 345.0

    def test_steps_that_are_asked_for_are_all_done(self, clock: list[float]) -> None:
        _, outcome, _ = self.train(clock, (10.0, 10.0), wanted=70)
        assert outcome.steps == 70
        assert clock[0] > 1000.0


@pytest.fixture(scope="module")
def voc() -> Any:
    pytest.importorskip("gluoncv")
    from benchmarks.voc import training as module

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
        from benchmarks.voc.samples import TrainingSamples

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

            def run(self, _: int) -> None: ...

            def finish(self) -> None: ...

        monkeypatch.setattr(voc, "Training", Training)
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

    def test_amp_begins_where_fp32_does(self, made: Path, voc: Any) -> None:
        arguments = {"steps": 3, "batch_size": 2, "data_shape": 64, "progress": False}
        fp32, mixed = (voc.train(made, amp=amp, **arguments) for amp in (False, True))
        assert not voc.gluon_amp.is_active()
        assert mixed.dtype == device_supports()["cpu"].dtype
        assert mixed.initial_weights == fp32.initial_weights
        assert mixed.dtype == "float32" or mixed.losses[0] != fp32.losses[0]
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
        data = digits.make(tmp_path / "digits", 1, 1, 64)
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
        given = {"data_dir": str(tmp_path / "nowhere"), "amp": False, "dtype": None, "batch_size": 2, "seed": 0}
        with Child(digits.command("FP32", given, threads=1)) as child, pytest.raises(Refused, match="there is no dir"):
            child.ready()

    def test_worker_trains_when_it_is_told_to(self, made: Path, voc: Any) -> None:
        """What it gives is what one run without turns gives."""
        given = {"data_dir": str(made), "amp": False, "dtype": None, "batch_size": 2, "seed": 0}
        with Child(digits.command("FP32", given, threads=1)) as child:
            assert child.ready()["about"] == {"dtype": "float32", "images": VAL}
            probed = child.ask("probe", data_shape=64, steps=2, images=2)
            assert min(probed["startup"], probed["step"], probed["image"]) > 0
            child.ask("begin", steps=4, data_shape=64)
            for progress in ([0.0, 0.5], [0.5, 1.0]):
                child.ask("run", steps=2, progress=progress)
            result = child.ask("finish", images=VAL)["result"]
        assert result["settings"]["steps"] == 4
        assert result["converted_dtype"] in ("bfloat16", "float32")
        whole = voc.train(made, steps=4, batch_size=2, data_shape=64, progress=False)
        assert result["initial_weights"] == whole.initial_weights
        np.testing.assert_allclose(result["losses"]["total"], [step.total for step in whole.losses], rtol=1e-4)

    @pytest.mark.slow
    @in_bfloat16
    def test_both_precisions_learn_the_digits(self, tmp_path: Path, voc: Any) -> None:
        """The whole benchmark, shortened."""
        data = digits.make(tmp_path / "digits", images=800, val=200)
        given = {"data_dir": str(data), "batch_size": 16, "seed": 0, "dtype": None}
        with contextlib.ExitStack() as stack:
            halves = [stack.enter_context(Child(digits.command(str(amp), {**given, "amp": amp}, threads=2)))
                      for amp in (False, True)]
            runs = turns.train(halves, 200, None, math.inf, print).runs
        assert all(run["mean_ap"] > 0.35 for run in runs)
        assert abs(digits.points(*runs)) < 10  # so early in training it moves fast
        assert digits.final_loss(runs[1], "total") == pytest.approx(digits.final_loss(runs[0], "total"), rel=0.15)
