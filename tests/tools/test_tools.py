"""A short real run of each tool."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MXNETS_TESTS = '''
import os
import mxnet as mx
from mxnet.contrib.amp import amp
from mxnet.test_utils import assert_almost_equal
from nose.tools import assert_raises, raises

data, weight = mx.nd.array([[1.003, 2.007]]), mx.nd.array([[1.0, 1.0]])

def test_of_what_amp_leaves():
    assert_raises(ValueError, int, "one")

@raises(ZeroDivisionError)
def test_that_raises():
    1 / 0

def test_that_fails_everywhere():
    raise ValueError

def test_of_a_product():
    found = mx.nd.FullyConnected(data, weight, no_bias=True, num_hidden=1)
    assert_almost_equal(found, mx.nd.array([[3.01]]), rtol=1e-6, atol=1e-6)

def test_of_a_trained_network():
    net = mx.gluon.model_zoo.vision.mobilenet0_25(pretrained=True)
    assert abs(net.features[0].weight.data()).sum() > 0

def test_that_amp_breaks():
    assert not amp._amp_initialized

def test_that_ends_the_process_with_amp():
    if amp._amp_initialized:
        os._exit(9)

def test_behind_it():
    pass
'''


def run(tool, *arguments):
    return subprocess.run([sys.executable, str(ROOT / "tools" / tool), *map(str, arguments)], cwd=ROOT, text=True,
                          capture_output=True, timeout=900)


@pytest.mark.slow
def test_fuzz():
    done = run("fuzz.py", "--seconds", 10, "--kind", "layers", "--check", "conversion", "--dtype", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("0 findings in ")
    done = run("fuzz.py", "--plant", "converted_output_order", "--kind", "layers", "--check", "conversion", "--shrink",
               20)
    assert done.returncode == 0, done.stdout + done.stderr
    repeated = done.stdout.splitlines()[-2]
    assert repeated.startswith("python tools/fuzz.py --case 'Case(kind=")


@pytest.mark.slow
def test_plans(tmp_path):
    assert "resnet18_v1.0.train.bfloat16  " in run("plans.py", "--write", tmp_path, "resnet18_v1").stdout
    assert run("plans.py", "--compare", tmp_path, "resnet18_v1").stdout == "all plans of 1 networks are equal\n"


@pytest.mark.slow
def test_machines():
    done = run("run_machines.py", "tests/state/test_machines.py", "-k", "float16_is_never_chosen")
    assert done.returncode == 0, done.stdout
    for limit in ("AVX2", "AVX512_CORE"):
        assert f"{limit}: passed" in done.stdout or f"{limit}: left out" in done.stdout


@pytest.mark.bf16
@pytest.mark.slow
def test_peers(tmp_path):
    folder = tmp_path / "tests" / "python" / "unittest"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(MXNETS_TESTS)
    done = run("peers.py", tmp_path, "--files", "unittest/test_small.py", "--modes", "install", "bfloat16", "--native")
    assert done.returncode == 1, done.stderr
    summary, breaks, died, _, total = done.stdout.splitlines()
    assert summary == "unittest/test_small.py: 8 tests; pass stock 7, install 7, bfloat16 5 (1 by rounding)"
    assert breaks.startswith("  bfloat16: test_that_amp_breaks failed: NO REASON: E ")
    assert died == "  bfloat16: test_that_ends_the_process_with_amp died: NO REASON: the process ended with code 9"
    assert total == "2 tests fail with AMP only, 2 of them without a reason"


def test_packages(tmp_path):
    """Of other people's packages those run that are installed; the others are named, with the reason."""
    done = run("packages.py", "sockeye", "gluonnlp", "--modes", "float32")
    assert done.returncode == 0
    assert "insightface: not run: its package runs ONNX files" in done.stdout
    for package, ran in (("gluonnlp", "float32 8 losses, off by"), ("sockeye", "float32 1 losses, off by")):
        missing = f"not run: ModuleNotFoundError: No module named '{package}'"
        assert any(line.startswith(package) and (ran in line or missing in line) for line in done.stdout.splitlines())
