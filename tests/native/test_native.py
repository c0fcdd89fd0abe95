"""The libraries of C++ operators: what is loaded, why not, and what errors say."""
from __future__ import annotations

import ctypes
import threading
import types
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from native_cases import normal, replaced, requires_core, run, script

import gluon_amp as amp
from gluon_amp import native
from gluon_amp._mxnet.invoke import invoke
from gluon_amp.native import loader

CORE = Path(native.__file__).parent / "_core.so"


def load_path(path):
    return loader._load("core", path, frozenset({"one"}))


@requires_core
def test_loaded_library_has_no_reason_to_be_missing():
    core = native.load()[0]
    assert core.missing == ""
    assert native.is_available("_gluon_amp_layer_norm")
    assert not native.is_available("LayerNorm")
    assert all(invoke_exists(op) for op in core.operators)


def invoke_exists(op):
    with pytest.raises(mx.MXNetError) as error:
        invoke(op, [], {})
    return "not find" not in str(error.value)


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


def test_library_that_was_not_built(tmp_path):
    library = load_path(tmp_path / "_core.so")
    assert library.operators == frozenset()
    assert "was not built" in library.missing
    assert "compiler" in library.missing


def test_the_source_folder_of_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "setup.py").touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "_core.so").touch()
    installed = types.SimpleNamespace(name="_core.so", locate=lambda: tmp_path / "site" / "_core.so")
    monkeypatch.setattr(loader.metadata, "files", lambda name: [installed])
    told = load_path(tmp_path / "gluon_amp" / "native" / "_core.so").missing
    assert told.startswith(f"this is the source folder {tmp_path}, in which _core.so was not built")
    assert told.endswith("Start Python in another folder, or run: python -m pip install -e .")


def test_library_that_does_not_load(tmp_path):
    (tmp_path / "_core.so").write_bytes(b"not a library")
    assert "does not load" in load_path(tmp_path / "_core.so").missing


@requires_core
def test_library_of_another_version():
    native.load()
    assert loader._of_another_version(CORE, frozenset({"_gluon_amp_clip"})) == ""
    told = loader._of_another_version(CORE, frozenset({"_gluon_amp_clip", "_gluon_amp_newer"}))
    assert told == "_core.so is of another version, without _gluon_amp_newer: build gluon_amp again"


def test_library_of_something_else(tmp_path):
    other = tmp_path / "_core.so"
    other.write_bytes(Path(next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
                                if "libz" in line or "libm." in line or "libgomp" in line)).read_bytes())
    assert "does not load" in load_path(other).missing


@requires_core
@pytest.mark.parametrize(("change", "told"), [
    (lambda data: data[:100_000], "_core.so is cut short: install gluon_amp again"),  # would be a bus error
    (lambda data: data[:80], "_core.so is cut short"),
    (lambda data: data[:30], "_core.so does not load: "),
    (lambda data: data.replace(b"GLIBCXX_3.4.21", b"GLIBCXX_9.9.99"), "version `GLIBCXX_9.9.99' not found")],
    ids=["cut short", "no segments", "no header", "older libstdc++"])
def test_damaged_library_or_older_system(change, told, tmp_path):
    (tmp_path / "_core.so").write_bytes(change(CORE.read_bytes()))
    said = script("import gluon_amp as amp; from gluon_amp import native; amp.init(); print(native.load()[0].missing)",
                  GLUON_AMP_NATIVE=str(tmp_path))
    assert told in said


@requires_core
def test_another_mxnet_is_refused():
    core = ctypes.CDLL(str(CORE))
    assert (core.initialize(10901), core.initialize(20000)) == (1, 0)


def loaded_onednn(monkeypatch, path):
    monkeypatch.setattr(loader, "onednn_files", lambda: iter([path]))
    return loader._load_onednn(loader.Library("core", frozenset({"one"})))


def test_onednn_of_another_version(monkeypatch, tmp_path):
    monkeypatch.setattr(loader, "_onednn_version", lambda library: (2, 7))
    found = loaded_onednn(monkeypatch, Path(libm()))
    assert found.operators == frozenset()
    assert found.missing.startswith("expected oneDNN 3.2 or later 3, received 2.7: pip install onednn-cpu-gomp")


def test_onednn_that_is_something_else(monkeypatch, tmp_path):
    assert "dnnl_version" in loaded_onednn(monkeypatch, Path(libm())).missing
    (tmp_path / "libdnnl.so.3").write_bytes(b"not a library")
    assert "pip install onednn-cpu-gomp" in loaded_onednn(monkeypatch, tmp_path / "libdnnl.so.3").missing
    (tmp_path / "libdnnl.so.3").write_bytes(Path(libm()).read_bytes()[:5000])
    assert "is cut short: pip install" in loaded_onednn(monkeypatch, tmp_path / "libdnnl.so.3").missing


@requires_core
@pytest.mark.parametrize("path", [None, "cut short", "something else"])
def test_one_line_says_what_is_missing(monkeypatch, caplog, tmp_path, path):
    if path:
        (tmp_path / "libdnnl.so.3").write_bytes(Path(libm()).read_bytes()[:5000 if path == "cut short" else None])
    monkeypatch.setattr(loader, "onednn_files", lambda: iter([tmp_path / "libdnnl.so.3"] if path else []))
    monkeypatch.setattr(loader, "_ONEDNN_FILE", "libnone.so.3")
    monkeypatch.setattr(loader, "_onednn", loader._once(loader._onednn.__wrapped__))
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
    monkeypatch.setattr(loader.platform, "machine", lambda: "aarch64")
    assert "aarch64" in load_path(tmp_path / "_core.so").missing


@requires_core
@pytest.mark.parametrize(("op", "shapes", "attrs", "told"), [
    ("layer_norm", [(2, 3), (4,), (3,)], {}, "expected shape (3), received gamma of shape (4)"),
    ("layer_norm", [(2, 3), (3,), (3,)], {"axis": 0}, "expected the last axis, received axis=0"),
    ("layer_norm", [(2, 3), (3,), (3,)], {"eps": "small"}, "expected a number, received eps='small'"),
    ("clip", [(2, 3)], {"a_min": 0}, "the attribute a_max is missing"),
    ("sgd", [(2,), (3,)], {"lrs": [1], "wds": [0]}, "expected shape (2), received a gradient or a state of shape (3)"),
    ("sgd", [(2,), (2,)], {"lrs": [1, 2], "wds": [0]}, "received 2 lrs and 1 wds for 1 weights"),
    ("sgd", [(2,), (2,)], {"lrs": [1], "wds": [0], "num_weights": 0}, "received num_weights=0"),
    ("sgd", [(2,), (2,)], {"lrs": [1], "wds": [0], "num_weights": 1.5}, "expected an integer"),
    ("all_finite", [(2,)], {"num_arrays": -1}, "expected a positive number, received num_arrays=-1"),
])
def test_errors_say_what_was_expected(op, shapes, attrs, told):
    arrays = [nd.ones(shape) for shape in shapes]
    with pytest.raises(mx.MXNetError) as error:
        invoke(f"_gluon_amp_{op}", arrays, {name: str(value) for name, value in attrs.items()})
    assert told in str(error.value)


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


@requires_core
def test_an_error_does_not_stick():
    for _ in range(2):
        with pytest.raises(mx.MXNetError, match="a_max"):
            run("_gluon_amp_clip", [nd.ones(2)], a_min=0)
        assert run("_gluon_amp_clip", [nd.array([2.0])], a_min=0, a_max=1).asscalar() == 1


@requires_core
def test_symbols_are_saved_and_loaded(tmp_path):
    symbol = replaced(mx.sym.clip(mx.sym.var("x"), 0, 6, name="limited"), {"clip": "_gluon_amp_clip"})
    symbol.save(str(tmp_path / "s.json"))
    loaded = mx.sym.load(str(tmp_path / "s.json"))
    assert loaded.tojson() == symbol.tojson()
    executor = loaded.simple_bind(mx.cpu(), x=(2, 3))
    assert executor.forward(x=nd.ones((2, 3)) * 9)[0].asnumpy().tolist() == [[6.0] * 3] * 2


@requires_core
def test_threads_and_contexts():
    data = [normal(64, 96, seed=seed).as_in_context(mx.cpu(seed % 2)) for seed in range(6)]
    gamma = [nd.ones(96, ctx=array.context) for array in data]
    wanted = [nd.LayerNorm(array, scale, scale).asnumpy() for array, scale in zip(data, gamma)]
    received = [None] * len(data)

    def work(index):
        for _ in range(20):
            out = run("_gluon_amp_layer_norm", [data[index], gamma[index], gamma[index]])
        assert out.context == data[index].context
        received[index] = out.asnumpy()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, array in enumerate(wanted):
        np.testing.assert_allclose(received[index], array, atol=1e-5)


@requires_core
def test_forked_processes():
    told = script("""
import multiprocessing, gluon_amp, mxnet as mx
from gluon_amp import native
native.load()
def clipped(value):
    return invoke("_gluon_amp_clip", [mx.nd.ones((300, 300)) * value], {"a_min": "0", "a_max": "6"})[0].max().asscalar()
print(clipped(9.0))
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(clipped, [1.0, 9.0]))
print(clipped(2.0))
""")
    assert told.split("\n") == ["6.0", "[1.0, 6.0]", "2.0"]


@requires_core
def test_a_second_library_of_the_same_operators(tmp_path):
    """Whatever MXNet says of it, the operators of the first one go on working."""
    (tmp_path / "_core.so").write_bytes(CORE.read_bytes())
    told = script(f"""
import gluon_amp as amp, mxnet as mx
from pathlib import Path
from gluon_amp import native
from gluon_amp.native import loader
native.load()
print(loader._load("core", Path({str(tmp_path)!r}) / "_core.so", frozenset()).missing.partition(":")[0])
print(invoke("_gluon_amp_clip", [mx.nd.ones(2) * 9], {{"a_min": "0", "a_max": "6"}})[0].sum().asscalar())
amp.init()
""")
    assert told.splitlines()[-1] == "12.0"
