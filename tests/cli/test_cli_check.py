"""gluon-amp check: the self-test of a machine, here of its CPU."""
from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from functools import partial

import mxnet as mx
import numpy as np
import pytest

from gluon_amp import native, selftest
from gluon_amp.audit.judge import Judge
from gluon_amp.audit.modes import Mode
from gluon_amp.audit.processes import NORMALLY, isolated
from gluon_amp.audit.samples import samples_of
from gluon_amp.audit.verdicts import Result
from gluon_amp.cli import main
from gluon_amp.dtypes import cuda_support
from gluon_amp.runtime.devices import support
from gluon_amp.selftest import ERROR, OK, SKIPPED, WRONG, isolation, results, speed
from gluon_amp.selftest.isolation import Section, findings


def checked(tmp_path, *arguments):
    status = main(["check", "--device", "cpu", "--json", str(tmp_path / "c.json"), *arguments])
    return status, json.loads((tmp_path / "c.json").read_text())


def test_what_is_right_ends_with_0(tmp_path, capsys):
    status, report = checked(tmp_path, "--only", "versions", "--only", "fusion", "--only", "overflow")
    assert (status, report["failed"], report["device"]) == (0, 0, "cpu(0)")
    found = {each["name"]: each["verdict"] for each in report["findings"]}
    assert found["an infinite gradient is left out"] == found["a finite gradient is used"] == OK
    libraries = next(each["data"]["libraries"] for each in report["findings"] if each["name"] == "software")
    assert any(path.endswith("libmxnet.so") for path in libraries)
    assert "everything that was tested is right" in capsys.readouterr().out


def test_kernels_that_compute_nothing_are_found_out(monkeypatch):
    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", lambda self: np.zeros(self.shape, np.float32))
    verdict, _, data = results.FUSION.test("elementwise operators", mx.cpu(), support("cpu"))
    assert (verdict, data) == (WRONG, {"error": 1.0})


def test_what_is_wrong_ends_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(selftest._TESTS, "fusion", Section(lambda runs: ["one", "two"], wrong_or_right))
    status, report = checked(tmp_path, "--only", "fusion")
    assert (status, [each["verdict"] for each in report["findings"]]) == (1, [WRONG, OK])
    assert "1 of 2 lines are wrong" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told_of_before_the_tests(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(selftest._TESTS, "fusion", Section(lambda runs: pytest.fail("it was tested"), wrong_or_right))
    path = tmp_path / "absent" / "c.json"
    assert main(["check", "--device", "cpu", "--only", "fusion", "--json", str(path)]) == 1
    assert f"gluon-amp check: {path}: No such file or directory" in capsys.readouterr().err


def wrong_or_right(name, device, runs):
    return (WRONG if name == "one" else OK), "", {}


class TestIsolation:
    """Tests share a process, and none is blamed for what another one left behind."""

    def findings(self, test, names, **options):
        return [(each.name, each.verdict, each.detail) for each in findings(
            "part", Section(lambda runs: names, test, **options), mx.cpu(), support("cpu"))]

    def test_one_that_ends_the_process_is_judged_alone(self):
        assert self.findings(that_ends, ["a", "bad", "c"]) == [
            ("a", OK, "a"), ("bad", ERROR, "its process ended with SIGSEGV"), ("c", OK, "c")]

    def test_one_that_raises_is_an_error_and_hides_no_other(self):
        assert self.findings(that_raises, ["a", "bad", "c"]) == [
            ("a", OK, "a"), ("bad", ERROR, "Check failed: no kernel"), ("c", OK, "c")]

    def test_what_fails_behind_another_one_only_is_right(self):
        names = ["a", "leaves an error", "b", "c"]
        assert self.findings(that_leaves_an_error, names) == [(name, OK, name) for name in names]

    def test_memory_that_runs_out_is_not_the_fault_of_what_was_tested(self):
        found = self.findings(that_runs_out_of_memory, ["a", "large", "c"])
        assert [verdict for _, verdict, _ in found] == [OK, ERROR, OK]
        assert found[1][2] == "not tested: out of memory on cpu(0) (CUDA: out of memory)"

    def test_a_device_that_is_full_is_said_once(self, monkeypatch):
        monkeypatch.setattr(isolation, "_has_memory", lambda device: False)
        found = self.findings(that_runs_out_of_memory, ["large", "b", "c"])
        assert [name for name, *_ in found] == ["large", "2 more"]
        assert found[1][2].startswith("not tested: cpu(0) has no memory left")

    def test_timings_have_all_threads(self):
        (_, _, forked), = self.findings(that_names_its_process, ["a"])
        (_, _, new), = self.findings(that_names_its_process, ["a"], forked=False)
        assert (forked, new) == ("ForkServerProcess", "SpawnProcess")  # MXNet has one thread in the first


def that_ends(name, device, runs):
    if name == "bad":
        os.kill(os.getpid(), signal.SIGSEGV)
    return OK, name, {}


def that_raises(name, device, runs):
    if name == "bad":
        raise mx.MXNetError("Check failed: no kernel")
    return OK, name, {}


left = []


def that_leaves_an_error(name, device, runs):
    if left:
        raise mx.MXNetError(left.pop())
    if name == "leaves an error":
        left.append("CUDA: unspecified launch failure")
    return OK, name, {}


def that_runs_out_of_memory(name, device, runs):
    if name == "large":
        raise mx.MXNetError("CUDA: out of memory")
    return OK, name, {}


def that_names_its_process(name, device, runs):
    return OK, type(multiprocessing.current_process()).__name__, {}


def test_the_reference_of_a_deconvolution_does_not_end_the_process():
    # The backward of oneDNN's writes to memory that is not its own where the weight is not a variable itself.
    assert isolated(trusted_tensors, ("Deconvolution",), 60.0).ended == NORMALLY


def trusted_tensors(name):
    item = results._low_sample(name, "float16")
    judge = Judge(item, "float16", "float16", "cpu(0)", reference="cpu(0)")
    return sorted(judge._reference(Mode("plain", "write", "eager")))


@pytest.mark.parametrize(("found", "verdict"), [
    (Result("error", "Operator X is not implemented for GPU."), SKIPPED), (Result("not applicable", "no"), SKIPPED),
    (Result("error", "CUDA: out of memory"), ERROR), (Result("not applicable", "CUDA: out of memory"), ERROR)])
def test_what_mxnet_does_not_have_is_skipped_and_memory_is_not(monkeypatch, found, verdict):
    monkeypatch.setattr(Judge, "run", lambda self, mode: found)
    told = results.OPERATORS.test("relu", mx.cpu(), cuda_support((8, 0)))
    assert told == (verdict, found.detail, {"dtype": "float16"})


@pytest.mark.parametrize(("context", "said", "verdict"), [
    (mx.cpu(), "does not support bfloat16", SKIPPED), (mx.cpu(), "CUDA: out of memory", None),
    (mx.gpu(0), "unspecified launch failure", None)])
def test_timings_are_skipped_for_types_that_mxnet_lacks_only(monkeypatch, context, said, verdict):
    def fail(*arguments):
        raise mx.MXNetError(said)

    monkeypatch.setattr(speed, "time_in_both", fail)
    run = partial(speed.TIMING.test, "LSTM", context, cuda_support((8, 0)))
    if verdict is None:
        with pytest.raises(mx.MXNetError, match=said):
            run()
    else:
        assert run()[0] == verdict


def test_a_device_without_low_precision_has_none_to_judge(monkeypatch):
    monkeypatch.setattr(selftest, "support", lambda *device: cuda_support((9, 0)))
    found = list(selftest.check(mx.cpu(), ["operators", "timing"]))
    assert [(each.section, each.name, each.verdict) for each in found] == [
        ("operators", "all", SKIPPED), ("timing", "all", SKIPPED)]


class TestOperatorsInCpp:
    """The part of the self-test that runs this package's own operators."""

    def test_each_is_compared_with_mxnets(self):
        name = "_gluon_amp_clip"
        if not native.is_available(name):
            pytest.skip(native.load()[0].missing)
        verdict, _, data = selftest.NATIVE.test(name, mx.cpu(), support("cpu"))
        assert (verdict, data["errors"]["float32"]) == (OK, 0)
        assert ("bfloat16" in data["errors"]) == (results.low_type(support("cpu")) == "bfloat16")

    def test_wrong_values_are_found_out(self, monkeypatch):
        if not native.is_available("_gluon_amp_clip"):
            pytest.skip(native.load()[0].missing)
        wrong = replace(samples_of("_gluon_amp_gelu")[0], op="_gluon_amp_clip", attrs={"a_min": "0", "a_max": "1"})
        monkeypatch.setattr(selftest.native, "samples_of", lambda name: (wrong,))
        assert selftest.NATIVE.test("_gluon_amp_gelu", mx.cpu(), support("cpu"))[0] == WRONG

    def test_a_library_that_is_missing_is_one_line(self, monkeypatch):
        libraries = (native.Library("core", frozenset({"one"})), native.Library("onednn", frozenset(), "no oneDNN"))
        monkeypatch.setattr(native, "load", lambda: libraries)
        monkeypatch.setattr(native, "operators", lambda: frozenset({"one"}))
        assert selftest.NATIVE.names(support("cpu")) == ["one", "onednn"]
        assert selftest.NATIVE.test("onednn", mx.cpu(), support("cpu")) == (SKIPPED, "no oneDNN", {})

    def test_gpus_have_none(self):
        assert selftest.NATIVE.names(cuda_support((8, 0))) == []
        assert selftest.NATIVE.reason(cuda_support((8, 0))) == "operators in C++ are for CPUs"


@pytest.mark.parametrize(("device", "said"), [
    ("tpu", "expected cpu, gpu or a number in brackets, as in gpu(0), received --device='tpu'"),
    ("gpu(97)", "and no gpu(97)")])
def test_devices_that_there_are_not(device, said, capsys):
    assert main(["check", "--device", device]) == 1
    assert said in capsys.readouterr().err
