"""The audit of this package's operators in C++: they are all there, MXNet's say what is right, and none is needed."""
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import audit_operators as command
import pytest
from audit.judge import Judge, _stock
from audit.modes import Mode, modes_for
from audit.samples import FAMILIES, NATIVE, samples_of
from audit.verdicts import UNUSABLE
from native_cases import requires_core

from gluon_amp import native

ROOT = Path(__file__).parents[2]
WITH_REFERENCE = sorted({item.op for item in FAMILIES[NATIVE] if item.reference})
WRITE, ADD = Mode("plain", "write", "cached"), Mode("plain", "add", "cached")


FP32_ONLY = {"_gluon_amp_all_finite", "_gluon_amp_box_nms", "_gluon_amp_pooling", "_gluon_amp_resize",
             "_gluon_amp_sum"}


def test_every_operator_has_samples_in_the_types_that_it_takes():
    assert {item.op for item in FAMILIES[NATIVE]} == native.OPERATORS
    for op in FP32_ONLY:
        assert not any(item.runs_low for item in samples_of(op))
        assert len({item.inputs[0].shape for item in samples_of(op)}) > 1
    for op in native.OPERATORS - FP32_ONLY:
        low = [item for item in samples_of(op) if item.runs_low]
        assert len(low) * 2 == len(samples_of(op))
        assert len({item.inputs[0].shape for item in low}) > 1 or len(low[0].inputs) > 5  # or many weights


def test_references_are_mxnets_operators_with_the_parameters_that_they_have():
    item = samples_of("_gluon_amp_rnn")[0]
    assert (item.attrs["dtype"], item.attrs_in("bfloat16")["dtype"]) == ("low", "bfloat16")
    stock = _stock(item)
    assert stock.op == "RNN"
    assert stock.seed == item.seed == "RNN"
    assert set(item.attrs) - set(stock.attrs) == {"training", "dtype"}
    assert not any(item.op.startswith("_gluon_amp") for family, items in FAMILIES.items() if family != NATIVE
                   for item in items)


def small(op):
    return next(item for item in samples_of(op) if not item.runs_low)


@requires_core
@pytest.mark.parametrize("op", sorted(native.OPERATORS))
def test_fp32(op):
    if not native.is_available(op):
        pytest.skip(native.obstacle_to(op))
    judge = Judge(small(op), "bfloat16", "bfloat16", "cpu(0)")
    for mode in modes_for(judge.item, "bfloat16", "cpu") if not judge.item.in_graphs else (WRITE, ADD):
        result = judge.run(mode)
        assert (result.verdict, result.detail) == ("ok", ""), mode
    assert result.gradient == judge.item.in_graphs


@requires_core
def test_wrong_values_are_found_in_fp32():
    judge = Judge(small("_gluon_amp_clip"), "bfloat16", "bfloat16", "cpu(0)")
    judge.run(WRITE)
    judge.item = replace(judge.item, attrs={"a_min": "-0.5", "a_max": "1.001"})
    assert judge.run(WRITE).verdict == "wrong"


@requires_core
def test_a_gradient_that_is_not_added_is_found_without_the_identity(monkeypatch):
    monkeypatch.setattr(type(small("_gluon_amp_clip")), "needs_identities", False)
    result = Judge(small("_gluon_amp_clip"), "bfloat16", "bfloat16", "cpu(0)").run(ADD)
    assert (result.verdict, result.detail[:25]) == ("wrong", "gradient of input 0 off b")


@requires_core
def test_updates_are_run_by_calls():
    item = samples_of("_gluon_amp_adam")[0]
    assert [str(mode) for mode in modes_for(item, "bfloat16", "cpu")] == ["eager/plain/infer"]
    judge = Judge(item, "float32", "float32", "cpu(0)")
    assert judge.run(Mode("plain", "infer", "eager")).verdict == "ok"
    judge.item = replace(item, attrs={**item.attrs, "lrs": "[0.1, 0.01, 0.03]"})
    assert judge.run(Mode("plain", "infer", "eager")).detail.startswith("state input 8 off by")


@pytest.mark.parametrize(("arguments", "status"), [(["--ops", "_gluon_amp_clip"], 2),
                                                   (["--ops", "_gluon_amp_clip,abs"], 2)])
def test_without_the_library_the_reason_is_said(arguments, status, tmp_path):
    done = subprocess.run([sys.executable, command.__file__, *arguments], cwd=ROOT, text=True,
                          env={**os.environ, "GLUON_AMP_NATIVE": "0"}, capture_output=True, timeout=120, check=False)
    assert done.returncode == status
    assert "_gluon_amp_clip: switched off by GLUON_AMP_NATIVE=0" in done.stderr


def test_without_the_library_all_others_are_audited(monkeypatch, capsys):
    monkeypatch.setattr(command, "sampled_operators", lambda: ["abs", "_gluon_amp_clip"])
    monkeypatch.setattr(native, "obstacle_to", lambda op: "not built" if op in native.OPERATORS else "")
    run = []
    monkeypatch.setattr(command, "run", lambda names, *rest: run.append(names))
    assert command.main(["--all"]) == 0
    assert run == [["abs"]]
    assert "_gluon_amp_clip: not built" in capsys.readouterr().err


def test_a_reference_that_does_not_run_judges_nothing(monkeypatch):
    item = replace(samples_of("abs")[0], reference="_contrib_box_iou")
    assert Judge(item, "float32", "float32", "cpu(0)").run(Mode("plain", "infer", "eager")).verdict == UNUSABLE
