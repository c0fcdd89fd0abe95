"""The benchmarks: a small run of each script, and what makes them fail."""

from __future__ import annotations

import doctest
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import digits, harness, make_digits_voc, networks, regret, ssd_synthetic, zoo
from benchmarks.harness import Comparison, Track

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


def test_ssd_prints_the_tutorials_lines_and_trains(tmp_path):
    pytest.importorskip("gluoncv")
    path = tmp_path / "out.json"
    done = script("ssd_synthetic", *TINY, "--steps", "2", "--json", str(path))
    assert "[Epoch 0][Batch 3], Speed: " in done.stdout
    (track,) = json.loads(path.read_text())["implementations"]
    assert track["about"]["dtype"] == "float32"
    assert 0 < track["losses"][-1]["CrossEntropy"] < track["losses"][0]["CrossEntropy"]


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
     "| kvstore, 2 | step | "),
])
def test_the_other_scripts(name, flags, shown):
    assert shown in script(name, *flags).stdout


# What is refused


@pytest.mark.parametrize(("program", "arguments", "message"), [
    (ssd_synthetic, ["--budget", "0"], "--budget: expected a number above 0, received 0"),
    (ssd_synthetic, ["--batch-size", "many"], "--batch-size: expected an integer of at least 1, received many"),
    (ssd_synthetic, ["--device", "tpu"], "--device: expected cpu, gpu or gpu:1, received 'tpu'"),
    (ssd_synthetic, ["--compare", "fp32,apm"], "unknown implementation 'apm'; did you mean amp?"),
    (ssd_synthetic, ["--compare", "fp32,fp32"], "expected different names"),
    (ssd_synthetic, ["--compare", "fp32", "--amp"], "--amp goes without --compare"),
    (ssd_synthetic, ["--compare", "amp-int8"], "amp-int8 is not for training"),
    (ssd_synthetic, ["--data", "folder", "--compare", "fp32"], "--data goes without --compare"),
    (ssd_synthetic, ["--json", "no/such/folder/out.json"], "its folder does not exist"),
    (zoo, ["--networks", "resnet5"], "unknown network 'resnet5'"),
    (zoo, ["--compare", "fp32~fuse"], "expected amp~ and the name of a graph pass"),
    (regret, ["--batch-sizes", "1,none"], "--batch-sizes: expected an integer of at least 1, received none"),
    (digits, ["--steps", "0"], "--steps: expected an integer of at least 1"),
])
def test_bad_arguments_give_one_line_and_exit_code_2(program, arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # put back after the test: the scripts set it
    assert harness.main(program.run, arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("arguments", "environment", "message"), [
    (["--network", "ssd_512_resnet50_v1_coc"], {}, "did you mean ssd_512_resnet50_v1_coco"),
    (["--network", "ssd_300_vgg16_atrous_voc", "--data-shape", "32"], {}, "data shape 32 is not possible"),
    (["--compare", "amp", "--dtype", "bfloat16"], {"DNNL_MAX_CPU_ISA": "AVX2"}, "needs a CPU with AVX512"),
    (["--data", "no/such/folder"], {}, "there is no directory no/such/folder"),
])
def test_a_request_that_mxnet_refuses(arguments, environment, message):
    pytest.importorskip("gluoncv")
    said = script("ssd_synthetic", "--batch-size", "1", *arguments, codes=(2,), environment=environment).stderr
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("path", "old", "new", "message"), [
    ("ImageSets/Main/val.txt", "\n", " -1\n", "'val_00000 -1'"),
    ("ImageSets/Main/val.txt", "val_00000", "val_99999", "val_99999.xml: expected an annotation"),
    ("Annotations/val_00000.xml", "</annotation>", "", "expected an annotation in Pascal VOC's format"),
    ("Annotations/val_00000.xml", "<width>96<", "<width>95<", "96x96 pixels, its annotation says 95x96"),
    ("Annotations/val_00000.xml", "<xmax>", "<xmax>9", "is not inside of the image"),
    ("../labels.txt", "nine", "nien", "unknown class 'nine'; did you mean nien"),
])
def test_a_broken_directory(made, tmp_path, path, old, new, message):
    pytest.importorskip("gluoncv")
    from benchmarks import voc
    subprocess.run(["cp", "-r", str(made), str(tmp_path / "copy")], check=True)
    root = tmp_path / "copy" / "VOC2007"
    text = (root / path).read_text()
    assert old in text
    (root / path).write_text(text.replace(old, new, 1))
    with pytest.raises(harness.UsageError) as caught:
        voc.check_directory(root)
    assert message in str(caught.value)


def test_digits_go_into_no_foreign_directory(made, tmp_path):
    assert make_digits_voc.make(made, 12, 6, 96, seed=3) == made
    with pytest.raises(harness.UsageError, match="was not made with these settings"):
        make_digits_voc.make(made, 12, 6, 96, seed=4)
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(harness.UsageError, match="was not made with these settings"):
        make_digits_voc.make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


# When they fail


def comparison(**seconds):
    about = {"dtype": "float32", "notes": ["float32 on the cpu, because so"], "samples": 1}
    return Comparison([Track(name, about, turns=[[each] for each in rounds]) for name, rounds in seconds.items()], 1.0,
                      0.0)


@pytest.mark.parametrize(("ours", "code"), [
    ([1.2, 1.2, 1.2, 0.9], 1),  # slower in three of four rounds
    ([1.2, 1.2, 0.8, 0.9], 0),
    ([0.5, 0.5, 0.5, 0.5], 0),
])
def test_ssd_fails_where_gluon_amp_is_slower_in_three_quarters_of_the_rounds(ours, code, capsys):
    found = comparison(**{"amp": ours, "fp32": [1.0] * 4, "mxnet-amp": [2.0] * 4, "torch": [0.1] * 4})
    assert ssd_synthetic.broken_promise(found) == code
    assert ("gluon_amp is slower than MXNet FP32 here. It ran float32: float32 on the cpu, because so"
            in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(("memory", "seconds", "batch"), [
    (40e9, 1000.0, 8), (12e9, 1000.0, 4), (0, 1000.0, 8), (1e9, 1000.0, 1), (40e9, 100.0, 4), (40e9, 1.0, 1)])
def test_the_batch_fits_memory_and_time(memory, seconds, batch):
    probes = [Track(name, startup=5.0, warmup=[3.0, 1.0]) for name in ("fp32", "amp")]
    assert ssd_synthetic.fitting_batch(probes, ["fp32", "amp"], 512, memory, seconds, 2)[0] == batch


def result(network, ours=(1.0, 1.0, 1.0), memory=(80, 100), batch_size=4, what="training", **others):
    others = {"fp32": (2.0, 2.2, 1.8), **{name.replace("_", "-"): times for name, times in others.items()}}
    return {"row": {"what": what, "network": network, "batch_size": batch_size, "mode": "static"}, "failures": {},
            "groups": [{"amp": list(ours), name: list(times)} for name, times in others.items()],
            "memory": dict(zip(("amp", "fp32"), memory)), "dtype": {"amp": "bfloat16"}, "notes": {"amp": ["because"]},
            "other_load": 0.0, "kernels": []}


@pytest.mark.parametrize(("found", "text"), [
    (result("alexnet"), ""),
    (result("alexnet", fp32=(0.9, 1.1, 0.98)), "slower than FP32: training alexnet, batch 4, static: 0.98x"),
    (result("alexnet", memory=(110, 100)), "more memory than FP32: training alexnet, batch 4, static: 1.10x"),
    (result("alexnet", memory=(110, 100), batch_size=1), ""),
    ({**result("alexnet"), "groups": [{"fp32": [1.0]}], "failures": {"amp": "crashed"}},
     "not compared: training alexnet, batch 4, static: crashed")])
def test_zoo_fails_where_gluon_amp_is_slower_or_takes_more_memory(found, text):
    assert "; ".join(zoo.failures([found])) == text


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """Give the rows that were measured, a script's flags, and the seconds of the modes, without any process."""
    measured, modes = [], {"amp_fp32": (1.0, 1.0, 1.0), "amp_bf16": (1.0, 1.0, 1.0)}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(zoo, "measure", lambda row, *_: measured.append(row.network) or result(
        row.network, batch_size=row.batch_size, what=row.what, **modes))
    return measured, ["--only", "training", "--output", str(tmp_path / "out.json")], modes


def test_regret_fails_where_another_mode_is_faster_twice(pretended, capsys):
    measured, flags, modes = pretended
    assert harness.main(regret.run, ["--networks", "alexnet", *flags]) == 0
    modes["amp_fp32"] = (0.8, 0.7, 1.0)
    assert harness.main(regret.run, ["--networks", "alexnet,vgg16", *flags]) == 1
    assert measured == ["alexnet", "vgg16", "vgg16"]
    said = capsys.readouterr().out
    assert ("wrong choice: training vgg16, batch 4, static: bfloat16 takes 1.25 times as long as gluon_amp, FP32, the "
            "bound is 1.03. because") in said
    assert "| **1.25x** | gluon_amp, FP32 |" in said
    assert harness.main(regret.run, ["--networks", "alexnet,vgg16", "--bound", "1.25", *flags]) == 0
    modes["amp_fp32"] = (1.0, 1.0, 1.0)
    assert harness.main(regret.run, ["--networks", "alexnet,vgg16", "--again", "vgg16", *flags]) == 0
    assert measured == ["alexnet", "vgg16", "vgg16", "vgg16"]


def test_zoo_keeps_rows_of_the_same_machine_alone(pretended, monkeypatch, capsys):
    measured, flags, _ = pretended
    assert harness.main(zoo.run, ["--networks", "alexnet", *flags]) == 0
    assert harness.main(zoo.run, ["--networks", "alexnet,vgg16", "--add", *flags]) == 0
    assert harness.main(zoo.run, ["--networks", "alexnet", *flags]) == 0
    assert measured == ["alexnet", "vgg16", "alexnet"]
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    assert harness.main(zoo.run, ["--networks", "alexnet", "--add", *flags]) == 2
    assert "on another machine" in capsys.readouterr().err


def trained(mean_ap, loss=1.0, weights="abc", converted=0.0, steps=600):
    return {"mean_ap": mean_ap, "converted_mean_ap": mean_ap + converted, "initial_weights": weights, "steps": steps,
            "losses": {name: [2.0, loss] for name in ("cls", "box", "total")}}


@pytest.mark.parametrize(("amp", "message"), [
    (trained(0.914), ""), (trained(0.90, converted=0.004), ""),
    (trained(0.90, converted=-0.006), "AMP: conversion changes the mAP by -0.60 points"),
    (trained(0.92), "AMP's mAP is +2.00 points"), (trained(math.nan), "AMP: mAP nan, expected 0.6 at least"),
    (trained(0.90, loss=math.nan), "AMP: a loss is not finite"), (trained(0.90, weights="def"), "the same weights")])
def test_digits_fail_where_the_runs_differ(amp, message):
    found = "; ".join(digits.failures(trained(0.90), amp))
    assert message in found
    assert bool(message) == bool(found)


def test_digits_expect_less_of_fewer_steps():
    assert digits.failures(trained(0.88, steps=300), trained(0.90, steps=300)) == []
    assert digits.failures(trained(0.1, steps=30), trained(0.3, steps=30, loss=1.1)) == []
    assert "between them" in digits.failures(trained(0.1, steps=30), trained(0.1, steps=30, loss=2.0))[0]


def test_a_process_that_dies_is_left_out_with_its_last_words():
    commands = [harness.Command(name, [sys.executable, "-c", text]) for name, text in (
        ("amp", "import sys; sys.exit('the bottom fell out')"), ("fp32", "print('hello')"))]
    found = harness.compare(commands, harness.Plan(rounds=1))
    assert str(found.failures["amp"]) == "amp: ended with exit code 1: the bottom fell out"
    with pytest.raises(harness.ChildFailed):
        found.require()


@pytest.mark.parametrize(("flags", "limit", "kind"), [
    ("avx2", "", "AVX2"), ("avx2 avx512f", "", "AVX512 without BF16"), ("avx2 avx512f avx512_bf16", "", "AVX512-BF16"),
    ("avx2 avx512f avx512_bf16 amx_bf16", "", "AMX-BF16"), ("avx2 avx512f avx512_bf16", "AVX2", "AVX2"),
    ("avx2 avx512f avx512_bf16 amx_bf16", "AVX512_CORE_BF16", "AVX512-BF16"),
    ("avx2 avx512f avx512_bf16", "avx512_core", "AVX512 without BF16")])
def test_machines_are_told_apart_and_imitated(flags, limit, kind, monkeypatch):
    monkeypatch.setattr(harness, "_read", lambda path: f"flags : {flags}\n" if path == "/proc/cpuinfo" else "")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
    assert harness.kind() == kind


def test_examples_in_docstrings_hold():
    assert doctest.testmod(harness).failed == 0


def test_every_family_is_there_with_peers():
    assert {member.family for member in networks.MEMBERS.values()} == {
        "classification", "detection", "segmentation", "pose", "action", "text"}
    assert {member.peer.partition(":")[0] for member in networks.MEMBERS.values()} == {"", "torchvision", "timm"}
