"""gluon-amp check: the self-test of a machine, here of its CPU."""
from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest

from gluon_amp import selftest
from gluon_amp.audit.judge import Judge
from gluon_amp.audit.modes import Mode
from gluon_amp.audit.processes import NORMALLY, isolated
from gluon_amp.audit.verdicts import Result
from gluon_amp.cli import main
from gluon_amp.dtypes import cuda_support
from gluon_amp.rules import Policy
from gluon_amp.selftest import ERROR, OK, SKIPPED, WRONG, Finding


def checked(tmp_path, *arguments):
    status = main(["check", "--device", "cpu", "--json", str(tmp_path / "c.json"), *arguments])
    return status, json.loads((tmp_path / "c.json").read_text())


def test_what_is_right_ends_with_0(tmp_path, capsys):
    status, report = checked(tmp_path, "--only", "versions", "--only", "fusion", "--only", "overflow")
    assert (status, report["failed"], report["device"]) == (0, 0, "cpu(0)")
    found = {each["name"]: each["verdict"] for each in report["findings"]}
    assert found["an infinite gradient is not"] == found["a finite gradient is used"] == OK
    libraries = next(each["data"]["libraries"] for each in report["findings"] if each["name"] == "software")
    assert any(path.endswith("libmxnet.so") for path in libraries)
    assert "everything that was tested is right" in capsys.readouterr().out


def test_kernels_that_compute_nothing_are_found_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", lambda self: np.zeros(self.shape, np.float32))
    status, report = checked(tmp_path, "--only", "fusion")
    assert (status, report["findings"][0]["verdict"]) == (1, WRONG)
    assert "1 of 1 lines are wrong" in capsys.readouterr().out


def test_a_part_that_fails_does_not_hide_the_others(tmp_path, monkeypatch):
    def fail(device, found):
        raise mx.MXNetError("CUDA: out of memory")
        yield

    monkeypatch.setattr(selftest, "SECTIONS", {**selftest.SECTIONS, "fusion": fail})
    found = list(selftest.check(mx.cpu(), ["fusion", "overflow"]))
    assert [each.verdict for each in found] == [ERROR, OK, OK]
    assert found[0].detail == "CUDA: out of memory"


def test_operators_are_judged_together_and_alone_where_one_ends_the_process(monkeypatch):
    def isolated(function, arguments, timeout):
        names = arguments[0]
        ended = "SIGSEGV" if "relu" in names else selftest.NORMALLY
        return type("Outcome", (), {"ended": ended, "value": dict.fromkeys(names, (OK, ""))})

    monkeypatch.setattr(selftest, "isolated", isolated)
    assert selftest._judged(["abs", "relu", "clip"], "bfloat16", "cpu(0)") == {
        "abs": (OK, ""), "relu": (ERROR, "its process ended with SIGSEGV"), "clip": (OK, "")}


def test_the_reference_of_a_deconvolution_does_not_end_the_process():
    # The backward of oneDNN's writes to memory that is not its own where the weight is not a variable itself.
    assert isolated(trusted_tensors, ("Deconvolution",), 60.0).ended == NORMALLY


def trusted_tensors(name):
    item = selftest._low_condition(name, Policy("float16"))
    judge = Judge(item, "float16", "float16", "cpu(0)", reference="cpu(0)")
    return sorted(judge._reference(Mode("plain", "write", "eager")))


@pytest.mark.parametrize(("detail", "verdict"), [
    ("Operator X is not implemented for GPU.", SKIPPED), ("CUDA: out of memory", ERROR)])
def test_operators_that_mxnet_does_not_have_for_gpus_are_skipped(monkeypatch, detail, verdict):
    monkeypatch.setattr(Judge, "run", lambda self, mode: Result("error", detail))
    assert selftest._judge(["relu"], "float16", "cpu(0)") == {"relu": (verdict, detail)}


def test_a_device_without_low_precision_has_none_to_judge():
    found = list(selftest._operators(mx.cpu(), cuda_support((9, 0))))
    assert found == [Finding("operators", "all", SKIPPED, found[0].detail)]


@pytest.mark.parametrize(("device", "said"), [
    ("tpu", "expected cpu, gpu or a number in brackets, as in gpu(0), received --device='tpu'"),
    ("gpu(97)", "and no gpu(97)")])
def test_devices_that_there_are_not(device, said, capsys):
    assert main(["check", "--device", device]) == 1
    assert said in capsys.readouterr().err
