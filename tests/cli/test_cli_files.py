"""gluon-amp convert and report: files, figures, exit codes, and what they say of bad input."""
from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import warnings

import mxnet as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mxnet.gluon import nn

import gluon_amp as amp
from gluon_amp._mxnet.symbols import load_symbol, to_graph
from gluon_amp.cli import main
from gluon_amp.errors import AmpError, GraphError
from gluon_amp.graph import Graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with the files of a small network that classifies images."""
    folder = tmp_path_factory.mktemp("model")
    net = nn.HybridSequential(prefix="small_")
    with net.name_scope():
        net.add(nn.Conv2D(16, 3, in_channels=16), nn.BatchNorm(in_channels=16), nn.Activation("relu"),
                nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(4, in_units=16))
    mx.random.seed(2)
    net.initialize(mx.init.Xavier(magnitude=3))
    net.hybridize()
    net(mx.nd.ones((1, 16, 8, 8)))
    net.export(str(folder / "small"), epoch=7)
    return folder


def model(folder):
    return [str(folder / "small-symbol.json"), str(folder / "small-0007.params")]


def run(capsys, *argv):
    code = main([str(part) for part in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


class TestConvert:
    def test_it_writes_the_files_and_says_what_it_did_and_what_data_would_improve(self, folder, tmp_path, capsys):
        code, out, err = run(capsys, "convert", *model(folder), "-o", tmp_path / "new" / "dir", "--data",
                             "data:1,16,8,8")
        assert code == 0
        assert sorted(os.listdir(tmp_path / "new" / "dir")) == ["small-0007.params", "small-symbol.json"]
        assert "fold_batch_norm 1" in " ".join(out.split())
        assert "--data" not in err
        _, out, err = run(capsys, "convert", *model(folder), "-o", tmp_path / "out", "--dtype", "FP32", "--optimize",
                          "fold_batch_norm")
        assert out.startswith("Converted to float32: ")
        assert "--data data:1,3,224,224" in err

    def test_a_disk_that_is_full_is_said_to_be_so(self, folder, tmp_path):
        code = ("import resource, sys, gluon_amp.cli as cli; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
                "sys.exit(cli.main(sys.argv[1:]))")
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, "convert", *model(folder), "-o", tmp_path,
                               "--dtype", "float32"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        assert done.stderr == f"gluon-amp convert: {tmp_path}: No space left on device\n"
        assert list(tmp_path.iterdir()) == []

    def test_exclusions_reach_the_conversion(self, folder, tmp_path, capsys):
        code, _, err = run(capsys, "convert", *model(folder), "-o", tmp_path / "x", "--exclude", "small_dens0_fwd")
        assert code == 1
        assert "Did you mean 'small_dense0_fwd'" in err
        assert not (tmp_path / "x").exists()

    def test_the_fp32_files_are_never_replaced(self, folder, capsys):
        before = [os.path.getmtime(path) for path in model(folder)]
        code, _, err = run(capsys, "convert", *model(folder), "-o", folder)
        assert code == 1
        assert "would replace" in err
        assert [os.path.getmtime(path) for path in model(folder)] == before

    def test_a_target_that_is_a_file(self, folder, tmp_path, capsys):
        (tmp_path / "file").write_text("kept")
        code, _, err = run(capsys, "convert", *model(folder), "-o", tmp_path / "file")
        assert (code, (tmp_path / "file").read_text()) == (1, "kept")
        assert f"{tmp_path / 'file'}: File exists" in err

    @pytest.mark.parametrize(("change", "message"), [
        (lambda symbol, params: (symbol + ".absent", params), "absent"),
        (lambda symbol, params: (symbol, params + ".absent"), "absent"),
        (lambda symbol, params: (params, params), "not the JSON text"),
        (lambda symbol, params: (symbol, symbol), "small-symbol.json: expected parameters as MXNet saves them")])
    def test_files_that_are_not_what_they_should_be(self, folder, tmp_path, capsys, change, message):
        code, _, err = run(capsys, "convert", *change(*model(folder)), "-o", tmp_path / "out")
        assert code == 1
        assert message in err
        assert not (tmp_path / "out").exists()

    def test_parameters_of_another_network(self, folder, tmp_path, capsys):
        mx.nd.save(str(tmp_path / "other.params"), {"arg:other": mx.nd.ones(1)})
        for example in ([], ["--data", "data:1,16,8,8"]):
            code, _, err = run(capsys, "convert", model(folder)[0], tmp_path / "other.params", "-o", tmp_path / "out",
                               *example)
            assert code == 1
            assert "the parameters lack small_conv0_weight" in err
            assert not (tmp_path / "out").exists()

    def test_a_converted_network_is_not_converted_again(self, folder, tmp_path, capsys):
        run(capsys, "convert", *model(folder), "-o", tmp_path / "out", "--dtype", "float32")
        files = [str(tmp_path / "out" / name) for name in ("small-symbol.json", "small-0007.params")]
        code, _, err = run(capsys, "convert", *files, "-o", tmp_path / "again")
        assert code == 1
        assert f"{files[0]} is converted already, to float32" in err
        assert not (tmp_path / "again").exists()

    def test_int8_needs_data(self, folder, tmp_path, capsys):
        np.savez(tmp_path / "data.npz", data=np.random.RandomState(0).normal(size=(4, 16, 8, 8)))
        options = ["-o", tmp_path / "out", "--dtype", "float32"]
        code, _, _ = run(capsys, "convert", *model(folder), *options, "--int8", "--calib-data", tmp_path / "data.npz")
        assert code == 0
        code, _, err = run(capsys, "convert", *model(folder), *options, "--int8")
        assert code == 1
        assert "calib_data: INT8 needs data" in err

    def test_a_file_that_is_slower_here_is_warned_of(self, folder, tmp_path, capsys, lesser):
        code, _, err = run(capsys, "convert", *model(folder), "-o", tmp_path, "--dtype", "bf16")
        assert code == 0
        assert "slower on this machine than one converted in float32" in err or "cannot run on this machine" in err

    @pytest.mark.parametrize("data", ["data", "data:", "data:0,3", "data:a,b", ":1,2"])
    def test_malformed_data_is_a_usage_error(self, folder, tmp_path, capsys, data):
        with pytest.raises(SystemExit) as caught:
            main(["convert", *model(folder), "-o", str(tmp_path), "--data", data])
        assert caught.value.code == 2
        assert "expected a name and a shape" in capsys.readouterr().err


@pytest.fixture(scope="module")
def text(folder):
    return (folder / "small-symbol.json").read_text()


class TestMutations:
    """Damaged symbol files end in an error of ours, or in a symbol: never in a crash or a loop."""

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_characters(self, text, data):
        position = data.draw(st.integers(0, len(text) - 1))
        length = data.draw(st.integers(0, 5))
        put = data.draw(st.text(string.digits + '[]{},:"-null ' + string.ascii_letters, max_size=4))
        self.attempt(text[:position] + put + text[position + length:])

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_structure(self, text, data):
        value = json.loads(text)
        for _ in range(data.draw(st.integers(1, 3))):
            self.mutate(value, data)
        self.attempt(json.dumps(value))

    def mutate(self, value, data):
        scalar = st.one_of(st.none(), st.booleans(), st.integers(-3, 60), st.floats(allow_nan=False),
                           st.text(max_size=5))
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = data.draw(st.sampled_from(keys))
            deeper = isinstance(value[key], (dict, list)) and value[key]
            if deeper and data.draw(st.integers(0, 4)):
                value = value[key]
                continue
            action = data.draw(st.sampled_from(["replace", "delete", "duplicate"]))
            if action == "replace":
                value[key] = data.draw(scalar)
            elif action == "delete":
                del value[key]
            elif isinstance(value, list):
                value.insert(key, value[key])
            return

    @staticmethod
    def attempt(text):
        try:
            graph = Graph.from_json(text)
        except GraphError:
            return
        assert Graph.from_json(graph.to_json()).to_json() == graph.to_json()
        try:
            symbol = load_symbol(text)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one may be left that nothing of is lowered
                converted = amp.convert_symbol(symbol, "float16", device=mx.gpu(0))
        except AmpError:
            return
        assert len(to_graph(converted).heads) == len(graph.heads)


class TestReport:
    """Of exported files, FP32 or converted."""

    def test_the_operators(self, folder, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        names = ["small_conv0_fwd", "small_batchnorm0_fwd", "small_dense0_fwd"]
        code, out, _ = run(capsys, "report", *model(folder), "--data", "data:2,16,8,8")
        assert code == 0
        assert all(word in out for word in (*names, "arithmetic", "Convolution", "Next: "))
        assert not amp.is_active()
        assert max(map(len, out.splitlines())) <= 80
        _, out, _ = run(capsys, "report", *model(folder), "--data", "data:2,16,8,8", "--wide")
        assert all(word in out for word in (*names, "reason", "Convolution", "rule"))

    def test_a_converted_network_is_reported_as_it_is_and_how_it_was_converted(self, folder, tmp_path, capsys):
        run(capsys, "convert", *model(folder), "-o", tmp_path, "--dtype", "half", "--exclude", "small_dense0_fwd")
        files = [tmp_path / "small-symbol.json", tmp_path / "small-0007.params"]
        _, out, err = run(capsys, "report", *files, "--data", "data:2,16,8,8")
        assert "BatchNorm" not in out
        assert "fold_batch_norm 1" in " ".join(out.split())
        assert "gluon-amp report: warning: the float16 network will be slower on this machine" in err
        assert out.startswith("Converted to float16: ")

    def test_without_data_it_says_what_is_missing(self, folder, capsys):
        code, _, err = run(capsys, "report", *model(folder))
        assert code == 1
        assert "--data data:1,3,224,224" in err
        code, _, err = run(capsys, "report", *model(folder), "--data", "dat:1,16,8,8")
        assert code == 1
        assert "no input 'dat', only data" in err

    @pytest.mark.parametrize("shape", ["2,3,8,8", "2,16"])
    def test_data_that_does_not_fit_the_network(self, folder, capsys, shape):
        symbol, params = model(folder)
        code, out, err = run(capsys, "report", symbol, params, "--data", f"data:{shape}")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"gluon-amp report: {symbol}")
        assert "does not run on data of these shapes" in err
        assert "Stack trace" not in err

    def test_parameters_of_another_network_are_refused(self, folder, tmp_path, capsys):
        symbol, _ = model(folder)
        mx.nd.save(str(tmp_path / "other.params"), {"arg:other_weight": mx.nd.ones((1,))})
        code, out, err = run(capsys, "report", symbol, tmp_path / "other.params", "--data", "data:1,16,8,8")
        assert (code, out) == (1, "")
        assert f"{symbol} and {tmp_path / 'other.params'}: the parameters lack small_" in err
        assert "they do not belong together" in err
