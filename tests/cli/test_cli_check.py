"""gluon-amp check: the self-test of a machine, here of its CPU."""
from __future__ import annotations

import json
import multiprocessing
import os
import signal

import mxnet as mx
import numpy as np
import pytest

import gluon_amp as amp
from gluon_amp import native, selftest
from gluon_amp.cli import main
from gluon_amp.dtypes import cuda_support
from gluon_amp.selftest import ERROR, INFO, OK, SKIPPED, WRONG, isolation, kernels, results
from gluon_amp.selftest.isolation import Section, findings
from gluon_amp.state.devices import support


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
    assert f"gluon-amp check: {path}: its folder does not exist" in capsys.readouterr().err


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


@pytest.mark.bf16
class TestOperators:
    """What AMP makes of single operators, against FP32."""

    @pytest.mark.parametrize("name", kernels.OPERATORS.names(cuda_support((8, 0))))
    def test_they_are_right_here(self, name):
        verdict, said, data = kernels.OPERATORS.test(name, mx.cpu(), support("cpu"))
        assert (verdict, data["dtype"]) == (OK, kernels.low_type(support("cpu"))), said

    def test_convolutions_run_low(self):
        assert kernels.OPERATORS.test("convolution", mx.cpu(), support("cpu"))[2]["error"] > 0

    @pytest.mark.parametrize("wrong", [lambda values: values * 1.1, np.zeros_like, lambda values: values / 0])
    def test_wrong_values_are_found_out(self, wrong, monkeypatch):
        right = kernels._results

        def results(name, dtype, rounding, device):
            *others, last = right(name, dtype, rounding, device)
            return [*others, last if dtype == "float32" else wrong(last)]

        monkeypatch.setattr(kernels, "_results", results)
        with np.errstate(divide="ignore", invalid="ignore"):
            assert kernels.OPERATORS.test("dense", mx.cpu(), support("cpu"))[0] == WRONG


class TestTiming:
    """What the type that AMP chooses gives here."""

    def test_it_is_the_type_that_init_takes(self):
        verdict, said, data = kernels.TIMING.test("dense", mx.cpu(), support("cpu"))
        assert (verdict, data["dtype"]) == (INFO, support("cpu").dtype)
        assert data["dtype"] in said
        assert not amp.is_active()

    def test_an_lstm_in_cpp_is_said_to_be_so(self):
        assert ", in C++)" in kernels.TIMING.test("LSTM", mx.cpu(), support("cpu"))[1]


def test_a_device_without_low_precision_has_none_to_judge(monkeypatch):
    monkeypatch.setattr(selftest, "support", lambda *device: cuda_support((9, 0)))
    (found,) = selftest.check(mx.cpu(), ["operators"])
    assert (found.section, found.name, found.verdict) == ("operators", "all", SKIPPED)


class TestLibraries:
    """The operators in C++ are named with the versions."""

    def test_one_that_is_missing_is_one_line(self, monkeypatch):
        libraries = (native.Library("core", frozenset({"one"})), native.Library("onednn", frozenset(), "no oneDNN"))
        monkeypatch.setattr(native, "load", lambda: libraries)
        lines = {each.name: (each.verdict, each.detail) for each in selftest.check(mx.cpu(), ["versions"])}
        assert lines["core"] == (INFO, "1 operators in C++")
        assert lines["onednn"] == (SKIPPED, "no oneDNN")


@pytest.mark.parametrize(("device", "said"), [
    ("tpu", "expected cpu, gpu or a number in brackets, as in gpu(0), received --device='tpu'"),
    ("gpu(97)", "and no gpu(97)")])
def test_devices_that_there_are_not(device, said, capsys):
    assert main(["check", "--device", device]) == 1
    assert said in capsys.readouterr().err
