"""gluon-amp check: the self-test of a machine, here of its CPU."""
from __future__ import annotations

import json

import mxnet as mx
import numpy as np
import pytest

from gluon_amp import selftest
from gluon_amp.cli import main
from gluon_amp.dtypes import cuda_support
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


def test_a_device_without_low_precision_has_none_to_judge():
    found = list(selftest._operators(mx.cpu(), cuda_support((9, 0))))
    assert found == [Finding("operators", "all", SKIPPED, found[0].detail)]


@pytest.mark.parametrize(("device", "said"), [
    ("tpu", "expected cpu, gpu or a number in brackets, as in gpu(0), received --device='tpu'"),
    ("gpu(97)", "and no gpu(97)")])
def test_devices_that_there_are_not(device, said, capsys):
    assert main(["check", "--device", device]) == 1
    assert said in capsys.readouterr().err
