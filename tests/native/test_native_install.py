"""Installing where there is no compiler, and from a wheel that needs none: each into a folder of its own."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gluon_amp.native.loader import VARIABLE

ROOT = Path(__file__).parents[2]
NO_COMPILER = {"PATH": "/nowhere", "CC": "false", "CXX": "false"}
USE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import gluon_amp as amp
import mxnet as mx
from gluon_amp import native
from gluon_amp.cli.check import environment
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Dense(64), mx.gluon.nn.LayerNorm())
net.initialize()
net.hybridize()
amp.init()
trainer = mx.gluon.Trainer(net.collect_params(), "adam")
amp.init_trainer(trainer)
for _ in range(2):
    with mx.autograd.record(), amp.scale_loss(net(mx.nd.ones((64, 16))).square().sum(), trainer) as loss:
        loss.backward()
    trainer.step(64)
mx.nd.waitall()
print("CORE", environment()["C++ operators, core"])
print("FILE", amp.__file__)
print("NATIVE", native.is_available("_gluon_amp_layer_norm"))
"""

pytestmark = pytest.mark.slow


def run(*argv, cwd, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}  # `make native-check` sets it
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=cwd, env={**inherited, **environment}, text=True,
                          capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*argv, cwd, **environment):
    run("-m", "pip", argv[0], "--quiet", "--no-deps", "--disable-pip-version-check", *argv[1:], cwd=cwd, **environment)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "gluon_amp", folder / "gluon_amp", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def use(folder):
    """Train with what was installed into a folder, without a compiler; return what it said."""
    told = run("-c", USE, cwd=folder, **{**NO_COMPILER, "PYTHONPATH": str(folder)})
    assert f"FILE {folder}" in told
    return told


def test_without_a_compiler_everything_else_works(sources, tmp_path):
    pip("install", "--no-build-isolation", "--target", tmp_path, ".", cwd=sources, **NO_COMPILER)
    assert not list(tmp_path.rglob("*.so"))
    told = use(tmp_path)
    assert "NATIVE False" in told
    (line,) = [line for line in told.splitlines() if line.startswith("The CPU does without some operators in C++")]
    assert "no C++17 compiler with OpenMP was found" in line
    assert "Install one (such as the package g++) and install gluon_amp again" in line
    assert "_core.so was not built" in told[told.index("CORE"):]


@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_wheel_holds_the_operators(sources, tmp_path):
    pip("wheel", "--no-build-isolation", "--wheel-dir", tmp_path / "dist", ".", cwd=sources)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    pip("install", "--target", tmp_path / "site", wheel, cwd=tmp_path, **NO_COMPILER)
    assert [path.name for path in (tmp_path / "site").rglob("*.so")] == ["_core.so"]
    assert not list((tmp_path / "site").rglob("*.cc"))
    told = use(tmp_path / "site")
    assert "NATIVE True" in told
    assert "was not built" not in told
