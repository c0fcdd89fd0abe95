"""gluon-amp check: what the machine runs, and a self-test, here of its CPU."""
from __future__ import annotations

import json

import mxnet as mx
import pytest

import gluon_amp as amp
from gluon_amp import native
from gluon_amp.cli import check, main
from gluon_amp.cli.check import INFO, OK, WRONG, environment
from gluon_amp.machine.dtypes import Support
from gluon_amp.state.devices import device_supports

pytestmark = pytest.mark.machine
PARTS = ["gradients", "losses", "overflow", "speed"]


def verdicts():
    return {found.name: found.verdict for found in check.tested(mx.cpu())}


def test_a_machine_that_is_right(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["check", "--device", "cpu", "--json", str(tmp_path / "c.json")]) == 0
    out, report = capsys.readouterr().out, json.loads((tmp_path / "c.json").read_text())
    support = device_supports()["cpu"]
    assert next(iter(report)) == "verdict"
    assert report["verdict"].startswith(f"amp.init() runs {support.dtype} on the cpu, because {support.reason}")
    assert " ".join(out.split()).startswith(f"verdict {report['verdict']} versions gluon_amp ")
    assert "MXNet 1.9.1" in report["versions"]
    assert any(path.endswith("libmxnet.so") for path in report["libraries"])
    assert (report["device"], report["wrong"]) == ("cpu(0)", 0)
    types = [support.dtype, *([support.on_request] if support.on_request else [])]
    assert [found["name"] for found in report["findings"]] == [f"{dtype} {part}" for dtype in types for part in PARTS]
    assert out.endswith("nothing is wrong\n")
    assert not any(dump in out for dump in ("True", "False", "None", "{", "['"))
    assert 60 < max(map(len, out.splitlines())) <= 70
    assert not amp.is_active()


def doubled(self, right=check._Training._backward):
    loss = right(self)
    if self._has_amp:
        for value in self.net.collect_params(".*(weight|bias)").values():
            value.grad()[:] *= 2
    return loss


@pytest.mark.parametrize(("part", "name", "planted"), [
    ("gradients", "_backward", doubled), ("losses", "step", lambda self: float("nan") if self._has_amp else 1.0),
    ("overflow", "changes_weights", lambda self, gradient: True)])
def test_a_fault_is_found_and_ends_with_1(part, name, planted, monkeypatch, capsys):
    monkeypatch.setattr(check._Training, name, planted)
    assert main(["check", "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert f"{WRONG}: {device_supports()['cpu'].dtype} {part}" in said
    assert f"{OK}: " in said


def test_an_error_of_the_engine_is_one_line(monkeypatch):
    def fail(trainer):
        raise mx.MXNetError("Stack trace:\n  Check failed: no kernel\n")

    monkeypatch.setattr(check, "unscale", fail)
    found = list(check.tested(mx.cpu()))
    assert {(each.verdict, each.detail) for each in found} == {(WRONG, "Check failed: no kernel")}
    assert not amp.is_active()


@pytest.mark.parametrize("types", [["float32"], ["float32", "float16"]])
def test_each_type_of_a_device_is_tested(types, monkeypatch):
    monkeypatch.setattr(check, "support", lambda *device: Support("float32", True, "", *types[1:]))
    found = verdicts()
    assert list(found) == [f"{dtype} {part}" for dtype in types for part in PARTS]
    assert set(found.values()) == {OK, INFO}


@pytest.mark.parametrize("missing", ["", "install a compiler"])
def test_operators_in_cpp_that_are_missing_are_named_with_what_to_do(missing, monkeypatch):
    monkeypatch.setattr(native, "load", lambda: (native.Library("core", frozenset(), missing),))
    assert environment()["C++ operators, core"] == (missing or "loaded")


@pytest.mark.parametrize(("device", "said"), [
    ("tpu", "expected cpu, gpu or a number in brackets, as in gpu(0), received --device='tpu'"),
    ("gpu(97)", "and no gpu(97)")])
def test_devices_that_there_are_not(device, said, capsys):
    assert main(["check", "--device", device]) == 1
    assert said in capsys.readouterr().err
