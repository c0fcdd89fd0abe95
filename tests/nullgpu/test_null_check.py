"""``gluon-amp check`` has to say that the null GPU computes nothing. Dispatch is verified, numbers never."""
from __future__ import annotations

import json
import subprocess
import sys

import device
import pytest

pytest.importorskip("mxnet")

SECONDS = 120


def checked(folder, **settings):
    """Run the command; return its process and its report."""
    path = folder / "check.json"
    command = [sys.executable, "-m", "gluon_amp", "check", "--device", "gpu(0)", "--json", str(path)]
    process = subprocess.run(command, capture_output=True, env=device.environment(memory=1024, **settings), text=True,
                             timeout=SECONDS, check=False)
    assert path.exists(), process.stderr[-2000:]
    return process, json.loads(path.read_text())


def test_it_names_the_device_and_says_that_numbers_are_wrong(tmp_path):
    process, report = checked(tmp_path)
    found = {each["name"]: each["verdict"] for each in report["findings"]}
    assert process.returncode == 1, process.stderr[-2000:]
    assert (report["device"], found["driver"]) == ("gpu(0)", "ok")
    assert found["float16 gradients"] == found["float16 losses"] == found["float16 overflow"] == "wrong"
    assert f"{report['wrong']} of {len(found)} lines are wrong" in process.stdout
    assert "null GPU" in report["GPUs"]
    assert {"libmxnet.so", "libcuda.so.1", "libcublas.so.11", "libcudnn.so.8", "libnvrtc.so.11.2"} <= {
        path.rpartition("/")[2] for path in report["libraries"]}


def test_memory_that_runs_out_is_said(tmp_path):
    process, report = checked(tmp_path, memory_fails=1)
    assert process.returncode == 1
    assert "out of memory" in report["findings"][-1]["detail"]
