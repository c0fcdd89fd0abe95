"""The library of C++ operators: how it is built, installed and loaded, why it is not, and what errors say."""
from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import nd
from native_cases import ROOT, requires_core, run, script

import gluon_amp as amp
from gluon_amp import native

CORE = Path(native.__file__).parent / "_core.so"


def test_can_be_switched_off():
    told = script("import gluon_amp; from gluon_amp import native; print(native.load())", GLUON_AMP_NATIVE="0")
    assert "switched off by GLUON_AMP_NATIVE=0" in told
    assert "operators=frozenset()" in told


# Names those of the two libraries that are in the process.
IN_MEMORY = "print([name for name in ('_core.so', 'libdnnl.so.3') if name in open('/proc/self/maps').read()])"


def test_nothing_is_loaded_by_the_import():
    assert script(f"import gluon_amp; {IN_MEMORY}") == "[]"


STEP = f"""
import mxnet as mx, gluon_amp as amp
amp.init(target_dtype="float32")
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(8, 3), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Activation("relu"), mx.gluon.nn.Flatten(),
        mx.gluon.nn.Dense(512))
net.initialize()
net.hybridize()
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
amp.init_trainer(trainer)
with mx.autograd.record():
    loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.nd.ones((ROWS, 3, 12, 12))), mx.nd.zeros(ROWS))
    with amp.scale_loss(loss, trainer) as scaled_loss:
        mx.autograd.backward(scaled_loss)
trainer.step(1)
{IN_MEMORY}
"""


@requires_core
@pytest.mark.parametrize(("rows", "found"), [(4, ["_core.so"]), (16, ["_core.so", "libdnnl.so.3"])])
def test_onednn_is_loaded_for_networks_that_need_it(rows, found):
    if "libdnnl.so.3" in found and native.load()[1].missing:
        pytest.skip(native.load()[1].missing)
    assert script(STEP.replace("ROWS", str(rows))) == str(found)


@requires_core
def test_library_of_another_version():
    native.load()
    assert native._of_another_version(CORE, frozenset({"_gluon_amp_clip"})) == ""
    told = native._of_another_version(CORE, frozenset({"_gluon_amp_clip", "_gluon_amp_newer"}))
    assert told == "_core.so is of another version, without _gluon_amp_newer: build gluon_amp again"


@requires_core
@pytest.mark.parametrize(("change", "told"), [
    (lambda data: None, "_core.so was not built: no C++17 compiler"),
    (lambda data: b"not a library", "_core.so does not load: "), (lambda data: data[:30], "_core.so does not load: "),
    (lambda data: Path(libm()).read_bytes(), "_core.so does not load: "),
    (lambda data: data.replace(b"GLIBCXX_3.4.21", b"GLIBCXX_9.9.99"), "version `GLIBCXX_9.9.99' not found")],
    ids=["missing", "text", "no header", "another library", "older libstdc++"])
def test_libraries_that_do_not_load(change, told, tmp_path):
    changed = change(CORE.read_bytes())
    if changed is not None:
        (tmp_path / "_core.so").write_bytes(changed)
    said = script("import gluon_amp as amp; from gluon_amp import native; amp.init(); print(native.load()[0].missing)",
                  GLUON_AMP_NATIVE=str(tmp_path))
    assert told in said


@requires_core
def test_another_mxnet_is_refused():
    core = ctypes.CDLL(str(CORE))
    assert (core.initialize(10901), core.initialize(20000)) == (1, 0)


def loaded_onednn(monkeypatch, path):
    monkeypatch.setattr(native, "onednn_files", lambda: iter([path]))
    return native._load_onednn(native.Library("core", frozenset({"one"})))


def test_onednn_of_another_version(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_onednn_version", lambda library: (2, 7))
    found = loaded_onednn(monkeypatch, Path(libm()))
    assert found.operators == frozenset()
    assert found.missing.startswith("expected oneDNN 3.2 or later 3, received 2.7: pip install onednn-cpu-gomp")


def test_onednn_that_is_something_else(monkeypatch, tmp_path):
    assert "dnnl_version" in loaded_onednn(monkeypatch, Path(libm())).missing
    (tmp_path / "libdnnl.so.3").write_bytes(b"not a library")
    assert "pip install onednn-cpu-gomp" in loaded_onednn(monkeypatch, tmp_path / "libdnnl.so.3").missing


@requires_core
@pytest.mark.parametrize("path", [None, "something else"])
def test_one_line_says_what_is_missing(monkeypatch, caplog, tmp_path, path):
    if path:
        (tmp_path / "libdnnl.so.3").write_bytes(Path(libm()).read_bytes())
    monkeypatch.setattr(native, "onednn_files", lambda: iter([tmp_path / "libdnnl.so.3"] if path else []))
    monkeypatch.setattr(native, "_ONEDNN_FILE", "libnone.so.3")
    monkeypatch.setattr(native, "_onednn", native._once(native._onednn.__wrapped__))
    with caplog.at_level("INFO", "gluon_amp"):
        amp.init()
        assert not native.is_available("_gluon_amp_rnn")
    amp.deinit()
    reason = native.load()[1].missing
    assert "pip install onednn-cpu-gomp" in reason
    assert [message for message in caplog.messages if "C++" in message] == [
        f"The CPU does without some operators in C++, which make networks faster: {reason}"]


def libm():
    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm." in line)


def test_other_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    assert "aarch64" in native._load("core", tmp_path / "_core.so", frozenset({"one"})).missing


@requires_core
def test_other_types_are_refused():
    with pytest.raises(mx.MXNetError, match="expected float32 or bfloat16, received data of float64"):
        run("_gluon_amp_clip", [nd.ones(2, dtype="float64")], a_min=0, a_max=1)
    with pytest.raises(mx.MXNetError, match="expected float32, received an array of float16"):
        native.all_finite([nd.ones(2), nd.ones(2, dtype="float16")])


@requires_core
def test_sparse_arrays_are_refused():
    with pytest.raises(mx.MXNetError, match="expected dense arrays"):
        run("_gluon_amp_clip", [nd.ones((2, 2)).tostype("row_sparse")], a_min=0, a_max=1)


FORKED = """
import gluon_amp, mxnet as mx
from mxnet import gluon, nd
from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke
native.load()
def through_all(value, dtype):
    x, = invoke("amp_cast", [nd.ones((64, 2, 96)) * value], {"dtype": dtype})
    x, = invoke("_gluon_amp_clip", [x], {"a_min": "0", "a_max": "6"})
    x, = invoke("_gluon_amp_dense", [x, nd.ones((96, 96)) / 96], {"num_hidden": "96", "flatten": "False",
                "no_bias": "True"})
    x, = invoke("_gluon_amp_attention", [x], {"layout": "joined", "heads": "2"})
    parameters = nd.ones(64 * (32 + 64 + 2)) / 96
    x = invoke("_gluon_amp_rnn", [x, parameters, nd.zeros((1, 2, 64))], {"mode": "rnn_tanh", "state_size": "64",
               "num_layers": "1", "dtype": dtype})[0]
    return nd.amp_cast(x, dtype="float32").sum()

class Samples(gluon.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return through_all(index / 8, DTYPE)
wanted = [through_all(index / 8, DTYPE).asscalar() for index in range(8)]
for _ in range(2):
    found = [value for batch in gluon.data.DataLoader(Samples(), 2, num_workers=2) for value in batch.asnumpy()]
    assert found == wanted, (found, wanted)
assert through_all(0.5, DTYPE).asscalar() == wanted[4]
print("equal")
"""


@pytest.mark.skipif(not native.is_available("_gluon_amp_rnn"), reason=native.load()[1].missing)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.bf16)])
def test_forked_workers_of_a_data_loader(dtype):
    assert script(FORKED.replace("DTYPE", repr(dtype))) == "equal"


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


def python(*argv, cwd, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != native.VARIABLE}  # of `make native-check`
    done = subprocess.run([sys.executable, *map(str, argv)], cwd=cwd, env={**inherited, **environment}, text=True,
                          capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*argv, cwd, **environment):
    python("-m", "pip", argv[0], "--quiet", "--no-deps", "--disable-pip-version-check", *argv[1:], cwd=cwd,
           **environment)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "gluon_amp", folder / "gluon_amp", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def use(folder):
    """Train with what was installed into a folder, without a compiler; return what it said."""
    told = python("-c", USE, cwd=folder, **{**NO_COMPILER, "PYTHONPATH": str(folder)})
    assert f"FILE {folder}" in told
    return told


@pytest.mark.slow
def test_without_a_compiler_everything_else_works(sources, tmp_path):
    pip("install", "--no-build-isolation", "--target", tmp_path, ".", cwd=sources, **NO_COMPILER)
    assert not list(tmp_path.rglob("*.so"))
    told = use(tmp_path)
    assert "NATIVE False" in told
    (line,) = [line for line in told.splitlines() if line.startswith("The CPU does without some operators in C++")]
    assert "no C++17 compiler with OpenMP was found" in line
    assert "Install one (such as the package g++) and install gluon_amp again" in line
    assert "_core.so was not built" in told[told.index("CORE"):]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")
def test_wheel_holds_the_operators_for_any_linux_since_glibc_2_17(sources, tmp_path):
    link = re.search("^WHEEL_LINK = (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    old_glibc = ROOT / "tools" / "old_glibc.cc"
    subprocess.run(["c++", "-fPIC", "-fvisibility=hidden", "-c", old_glibc, "-o", tmp_path / "old.o"], check=True)
    pip("wheel", "--no-build-isolation", "--wheel-dir", tmp_path / "dist", ".", cwd=sources,
        LDFLAGS=f"{tmp_path / 'old.o'} {link}")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    pip("install", "--target", tmp_path / "site", wheel, cwd=tmp_path, **NO_COMPILER)
    (library,) = (tmp_path / "site").rglob("*.so")
    symbols = library.read_bytes()
    assert library.name == "_core.so"
    assert max(map(int, re.findall(rb"GLIBC_2\.(\d+)", symbols))) <= 17
    assert b"GLIBCXX_" not in symbols
    assert not list((tmp_path / "site").rglob("*.cc"))
    told = use(tmp_path / "site")
    assert "NATIVE True" in told
    assert "was not built" not in told
