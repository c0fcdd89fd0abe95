"""The benchmark of the model zoos: its rows, its table and its verdict, and one real row."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import zoo  # noqa: E402
from benchmarks.harness import cli  # noqa: E402
from benchmarks.networks.zoo_table import MEMBERS  # noqa: E402


def result(network, what="training", batch_size=4, ours=(1.0, 1.0, 1.0), theirs=(2.0, 2.2, 1.8), memory=(80, 100),
           **others):
    seconds = {"amp": list(ours), "fp32": list(theirs), **others}
    return {"row": {"what": what, "network": network, "batch_size": batch_size, "mode": "static"}, "failures": {},
            "seconds": seconds, "memory": dict(zip(("amp", "fp32"), memory)), "dtype": {"amp": "bfloat16"},
            "other_load": 0.0}


def test_every_family_is_there():
    assert {member.family for member in MEMBERS.values()} == {
        "classification", "detection", "segmentation", "pose", "action", "text"}
    assert all(member.source in ("mxnet", "gluoncv", "gluonnlp") for member in MEMBERS.values())
    assert {member.peer.partition(":")[0] for member in MEMBERS.values()} == {"", "torchvision", "timm"}


def test_what_has_no_training_mode_is_measured_in_inference():
    args = zoo._parser().parse_args(["--networks", "yolo3_darknet53_coco,alexnet", "--batch-sizes", "1,4"])
    assert [row.key for row in zoo.rows(args)] == [
        "training alexnet 1 static", "training alexnet 4 static",
        "inference yolo3_darknet53_coco 1 static", "inference yolo3_darknet53_coco 4 static",
        "inference alexnet 1 static", "inference alexnet 4 static"]


@pytest.mark.parametrize(("found", "text"), [
    (result("alexnet"), ""),
    (result("alexnet", theirs=(0.9, 1.1, 0.98)), "slower than FP32: training alexnet 4 static: 0.98x"),
    (result("alexnet", memory=(110, 100)), "more memory than FP32: training alexnet 4 static: 1.10x"),
    (result("alexnet", memory=(110, 100), batch_size=1), ""),
    ({**result("alexnet"), "seconds": {"fp32": [1.0]}, "failures": {"amp": "crashed"}},
     "not compared: training alexnet 4 static: crashed")])
def test_the_verdict(found, text):
    assert "; ".join(zoo.failures([found])) == text


def test_the_table_begins_with_what_gains_least():
    slow = {**result("vgg16", theirs=(1.1, 1.2, 1.3)), "kernels": ["convolution jit 70%"]}
    text = zoo.markdown({"results": [result("alexnet", torch=[3.0, 3.0, 3.0]), slow]})
    lines = text.splitlines()
    assert lines[2] == ("| vgg16 | training | 4 | bfloat16 | 1.00 s | **1.20x** (1.10-1.30) | 0.80x |  | "
                        "convolution jit 70% |")
    assert lines[3] == "| alexnet | training | 4 | bfloat16 | 1.00 s | **2.00x** (1.80-2.20) | 0.80x | 3.00x |  |"
    assert "Median of 2 rows: 1.60x." in text


def test_what_was_measured_is_kept(tmp_path, monkeypatch, capsys):
    path, measured = tmp_path / "zoo.json", []
    monkeypatch.setattr(zoo, "measure", lambda row, *_: measured.append(row.key) or result(row.network, row.what))
    monkeypatch.setattr(zoo, "kernels", lambda *_: ["one"])
    assert cli.main(zoo.run, ["--networks", "alexnet", "--output", str(path)]) == 0
    assert cli.main(zoo.run, ["--networks", "alexnet,vgg16", "--output", str(path), "--add"]) == 0
    assert measured == ["training alexnet 4 static", "inference alexnet 4 static",
                        "training vgg16 4 static", "inference vgg16 4 static"]
    assert len(json.loads(path.read_text())["results"]) == 4
    assert cli.main(zoo.run, ["--networks", "vgg16", "--output", str(path), "--total", "0.000001"]) == 0
    assert "Not measured, the time was over: training vgg16" in capsys.readouterr().err


def test_bad_arguments(capsys):
    assert cli.main(zoo.run, ["--networks", "resnet5"]) == 2
    assert "unknown network 'resnet5'" in capsys.readouterr().err


def test_a_real_row(tmp_path):
    path = tmp_path / "zoo.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "zoo.py"), "--networks", "cifar_resnet20_v1",
               "--batch-sizes", "2", "--rounds", "1", "--steps", "1", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(path.read_text())["results"]
    assert [each["failures"] for each in found] == [{}, {}]
    assert all(each["kernels"] for each in found)
    assert "| cifar_resnet20_v1 | training | 2 | " in done.stdout
