"""``gluon-amp check`` has to say that the null GPU computes nothing. Dispatch is verified, numbers never."""
from __future__ import annotations

import json
import subprocess
import sys

import device
import pytest

pytest.importorskip("mxnet")

from gluon_amp.selftest import SECTIONS

SECONDS = 120  # it takes 35 on two cores


def checked(folder, *arguments, **settings):
    """Run the command; return its process and its report."""
    path = folder / "check.json"
    command = [sys.executable, "-m", "gluon_amp.cli", "check", "--device", "gpu(0)", "--json", str(path), *arguments]
    process = subprocess.run(command, capture_output=True, env=device.environment(memory=1024, **settings), text=True,
                             timeout=SECONDS, check=False)
    assert path.exists(), process.stderr[-2000:]
    return process, json.loads(path.read_text())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Run the whole command once."""
    return checked(tmp_path_factory.mktemp("check"))


def found(report, section, key="verdict"):
    return {each["name"]: each[key] for each in report["findings"] if each["section"] == section}


def test_it_ends_and_says_that_numbers_are_wrong(done):
    process, report = done
    assert process.returncode == 1, process.stderr[-2000:]
    assert (report["format"], report["device"]) == ("gluon_amp check 1", "gpu(0)")
    assert report["failed"] == sum(each["verdict"] in ("wrong", "error") for each in report["findings"]) > 15
    assert f"gpu(0): {report['failed']} of {len(report['findings'])} lines are wrong" in process.stdout
    assert {each["section"] for each in report["findings"]} == set(SECTIONS)


def test_it_knows_the_device_and_what_is_loaded(done):
    _, report = done
    assert found(report, "versions") == {"software": "info", "device": "info", "driver": "ok"}
    assert "null GPU" in json.dumps(report["environment"])
    assert "CUDA 11.8" in found(report, "versions", "detail")["driver"]
    libraries = found(report, "versions", "data")["software"]["libraries"]
    assert {"libmxnet.so", "libcuda.so.1", "libcublas.so.11", "libcudnn.so.8", "libnvrtc.so.11.2"} <= {
        path.rpartition("/")[2] for path in libraries}


def test_no_result_of_a_kernel_is_taken_for_right(done):
    assert set(found(done[1], "operators").values()) == {"wrong"}  # an error would be one of dispatch


def test_the_other_parts_are_wrong_too(done):
    _, report = done
    assert found(report, "fusion") == {"elementwise operators": "wrong"}
    assert found(report, "overflow")["a finite gradient is used"] == "wrong"
    assert set(found(report, "training").values()) == {"wrong"}
    assert set(found(report, "timing").values()) == {"info"}


# In each process: all allocations from one on fail, or one alone, which CUDA tells of again at the next launch.
@pytest.mark.parametrize("fails", ["120", "90,1"])
def test_memory_that_runs_out_is_no_fault_of_later_operators(done, tmp_path, fails):
    _, report = checked(tmp_path, "--only", "operators", memory_fails=fails)
    assert found(report, "operators") == found(done[1], "operators")


def test_a_device_without_memory_is_named_plainly(tmp_path):
    process, report = checked(tmp_path, memory_fails=1)
    tests = [each for each in report["findings"] if each["section"] != "versions"]
    assert process.returncode == 1
    assert {each["verdict"] for each in tests} == {"error"}
    assert all(each["data"]["out_of_memory"] for each in tests)
    assert len(tests) == 9  # the first of each part, and how many more there are
    assert tests[1]["detail"].startswith("not tested: out of memory on gpu(0), which has 1024 of 1024 MiB free")
    assert tests[2]["name"] == f"{len(tests[2]['data']['not_tested'])} more"
    assert tests[2]["detail"] == "not tested: gpu(0) has no memory left, not even 1 MiB. Other processes may hold it"
