"""The benchmarks: a small run of each script, and what makes them fail."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness, make_digits_voc

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--network", "ssd_300_mobilenet0.25_voc", "--data-shape", "64", "--batch-size", "1"]
ONCE = ["--rounds", "1", "--steps", "1", "--warmup", "1"]


def script(name, *arguments, codes=(0,), environment=()):
    """Run a script and return its output."""
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments], text=True, cwd=ROOT,
                          capture_output=True, timeout=900, env={**os.environ, **dict(environment)})
    assert done.returncode in codes, done.stderr
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Give a small directory of digits in Pascal VOC's format."""
    pytest.importorskip("sklearn")
    return make_digits_voc.make(tmp_path_factory.mktemp("voc") / "digits", 12, 6, 96, seed=3)


# Small runs


def test_ssd_compares_implementations_from_the_same_weights(tmp_path):
    pytest.importorskip("gluoncv")
    path = tmp_path / "out.json"
    done = script("ssd_synthetic", "--compare", "amp,fp32", *TINY, *ONCE, "--json", str(path), codes=(0, 1))
    assert "| gluon_amp, " in done.stdout
    ours, theirs = json.loads(path.read_text())["implementations"]
    assert (ours["name"], theirs["name"]) == ("amp", "fp32")
    assert ours["losses"][0]["CrossEntropy"] == pytest.approx(theirs["losses"][0]["CrossEntropy"], rel=0.1)


@pytest.mark.parametrize("flags", [["--amp"], ["--network", "ssd_300_mobilenet0.25_coco", "--data-shape", "128"]])
def test_ssd_trains_on_a_directory(made, flags):
    pytest.importorskip("gluoncv")
    done = script("ssd_synthetic", "--data", str(made), *flags, "--steps", "1", "--batch-size", "2")
    assert "VOC mAP (IoU 0.5) = " in done.stdout


def test_zoo(tmp_path):
    path = tmp_path / "zoo.json"
    done = script("zoo", "--networks", "cifar_resnet20_v1", "--batch-sizes", "2", *ONCE, "--output", str(path),
                  codes=(0, 1))
    found = json.loads(path.read_text())["results"]
    assert [each["failures"] for each in found] == [{}, {}]
    assert all(each["kernels"] for each in found)
    assert "| cifar_resnet20_v1 | training | 2 | " in done.stdout


@pytest.mark.slow
def test_regret(tmp_path):
    flags = ["--networks", "lstm,cifar_resnet20_v1", "--batch-sizes", "1", "--only", "training", *ONCE, "--output",
             str(tmp_path / "regret.json")]
    done = script("regret", *flags, "--bound", "1000")
    assert "| lstm | training | 1 | " in done.stdout
    done = script("regret", *flags, "--bound", "0.5", codes=(1,))
    assert "2 rows were measured before" in done.stderr
    assert "wrong choice: training lstm, batch 1, static" in done.stdout


@pytest.mark.slow
def test_digits(made, tmp_path):
    pytest.importorskip("gluoncv")
    path = tmp_path / "out.json"
    script("digits", "--data", str(made), "--steps", "3", "--batch-size", "2", "--data-shape", "64", "--json",
           str(path))
    found = json.loads(path.read_text())
    assert found["fp32"]["initial_weights"] == found["amp"]["initial_weights"]
    assert found["amp"]["losses"]["total"] == pytest.approx(found["fp32"]["losses"]["total"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flags", "shown"), [
    ("int8", ["--networks", "resnet18_v1", "--epochs", "1", "--rounds", "1"], "| resnet18_v1 | INT8 | "),
    ("overhead", ["--rounds", "1", "--calls", "10", "--layers", "3"], "| first step of 3 layers | "),
    ("distributed", ["--engines", "kvstore", "--batch", "4", "--size", "32", "--rounds", "1"],
     "| kvstore, 2 | step | ")])
def test_the_other_scripts(name, flags, shown):
    assert shown in script(name, *flags).stdout


def test_examples_in_docstrings_hold():
    assert doctest.testmod(harness).failed == 0
