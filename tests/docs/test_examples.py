"""Every example runs from its command line, and does what its README says."""
from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import gluon
from networks import sequential

pytest.importorskip("PIL")
pytest.importorskip("sklearn")

from PIL import Image
from sklearn.datasets import load_digits

import gluon_amp as amp

EXAMPLES = Path(amp.__file__).parents[1] / "examples"
SIZE = 32  # pixels of the digits' images
TINY = ["--size", "16", "--batch-size", "8", "--batches", "3", "--epochs", "1"]


def start(script, *arguments, command=(), cwd=None, path=()):
    """Run an example to its end, with directories in front of all that is installed."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
               "PYTHONPATH": os.pathsep.join(map(str, [*path, EXAMPLES.parent]))}
    return subprocess.run([sys.executable, *command, str(EXAMPLES / script), *map(str, arguments)], cwd=cwd,
                          env=environ, capture_output=True, text=True, timeout=900)


def run(script, *arguments, **options):
    """Run an example; return what it printed."""
    done = start(script, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refusal(script, *arguments, **options):
    """Run an example that ends with an error message; return it."""
    done = start(script, *arguments, **options)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def imagenet(*arguments, **options):
    return run("imagenet/main_amp.py", *arguments, **options)


def make_digits(root, train, val):
    """Write scikit-learn's digits as a folder of JPEG files for every class."""
    pixels, labels = load_digits(return_X_y=True)
    for number in range(train + val):
        directory = root / ("train" if number < train else "val") / str(labels[number])
        directory.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels[number].reshape(8, 8) * 15.9).astype("uint8"))
        image.resize((SIZE, SIZE), Image.BICUBIC).convert("RGB").save(directory / f"{number:04}.jpg", quality=95)
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return make_digits(tmp_path_factory.mktemp("few"), 96, 20)


@pytest.fixture(scope="module")
def records(digits, tmp_path_factory):
    """The same images in RecordIO files."""
    root = tmp_path_factory.mktemp("records")
    for part in ("train", "val"):
        images = gluon.data.vision.ImageFolderDataset(str(digits / part))
        writer = mx.recordio.MXIndexedRecordIO(str(root / f"{part}.idx"), str(root / f"{part}.rec"), "w")
        for key, (path, label) in enumerate(images.items):
            writer.write_idx(key, mx.recordio.pack(mx.recordio.IRHeader(0, label, key, 0), Path(path).read_bytes()))
        writer.close()
    return root


@pytest.fixture
def module(monkeypatch):
    """Import a module of examples/imagenet."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "imagenet"))
    return import_module


class TestTorchRecipe:
    @pytest.mark.machine
    def test_recipe(self):
        printed = run("torch_recipe/recipe.py", *TINY)
        assert "Weights differ from those trained without by nothing" in printed
        assert "Weights of the resumed run differ from the uninterrupted one's by nothing" in printed
        assert numbers(r"Outputs differ from FP32's by ([\d.]+)%", printed)[0] < 2
        assert len(re.findall(r"precision.*: [\d.]+ s", printed)) == 3

    def test_advanced_topics(self):
        printed = run("torch_recipe/advanced.py", *TINY)
        assert numbers(r"4 parts and the whole batch .* by ([\d.]+)%", printed)[0] < 2
        assert numbers(r"Weights trained on cpu\(0\), cpu\(1\) .* by ([\d.]+)%", printed)[0] < 2
        assert numbers(r"gradients differ from FP32's by ([\d.]+)%", printed)[0] < 2
        penalties = re.findall(r"penalty falls from ([\d.]+) to ([\d.]+)", printed)
        assert len(penalties) == 2
        assert all(float(first) > float(last) for first, last in penalties)
        assert "Losses" in printed


class TestTrainerClass:
    @pytest.mark.parametrize("option", [[], pytest.param(["--no-amp"], marks=pytest.mark.slow)])
    def test_learns_digits(self, option):
        printed = run("trainer_class/main.py", "--epochs", 3, *option)
        losses = numbers(r"loss ([\d.]+),", printed)
        assert losses[2] < 0.5 * losses[0]
        assert numbers(r"accuracy ([\d.]+)", printed)[-1] > 0.8
        assert ("loss scale 1024, 0 steps skipped" in printed) is not bool(option)

    def test_estimator(self, tmp_path):
        printed = run("trainer_class/estimator_fit.py", "--epochs", 1, "--checkpoints", tmp_path)
        assert "AMP: loss scale 65536, 0 steps skipped" in printed
        assert numbers(r"Train finished .* training accuracy: ([\d.]+)", printed)[0] > 0.3
        assert len(list(tmp_path.glob("*.scaler"))) == 1

    @pytest.mark.slow
    def test_estimator_resumes(self, tmp_path):
        for epochs in (1, 3):
            printed = run("trainer_class/estimator_fit.py", "--epochs", epochs, "--checkpoints", tmp_path)
        assert "resumed from epoch 0" in printed
        assert numbers(r"Train finished .* training accuracy: ([\d.]+)", printed)[0] > 0.9

    @pytest.mark.parametrize(("script", "arguments", "message"), [
        ("main", ["--epochs", "0"], "argument --epochs: expected a number of at least 1, received 0"),
        ("main", ["--batch-size", "5000"], "expected at most the 1437 images for training in a batch, received "),
        ("estimator_fit", ["--checkpoints", __file__], "which is a file")])
    def test_refuses_options(self, script, arguments, message):
        assert message in refusal(f"trainer_class/{script}.py", *arguments)


FEW = ["-a", "mobilenetv2_0.25", "--image-size", SIZE, "-b", 16, "-j", 1, "-p", 1, "--steps", 2, "--warmup-epochs", 1]

TWO = {"command": [str(EXAMPLES.parent / "tests" / "helpers" / "start_processes.py"), "kvstore", "2"]}  # processes


def scores(printed):
    """The lines with losses and accuracies, without times."""
    return [line for line in printed.splitlines() if "Prec@1" in line]


def parts_of(checkpoint):
    with zipfile.ZipFile(checkpoint) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class TestImagenet:
    def test_deterministic_and_resumed_exactly(self, digits, tmp_path):
        """A run, and another that is interrupted after its first epoch: the same output and the same checkpoint."""
        settings = [digits, *FEW, "--deterministic", "--loss-scale", "dynamic"]
        whole = imagenet(*settings, "--epochs", 2, "--checkpoints", tmp_path / "whole")
        begun = imagenet(*settings, "--epochs", 1, "--checkpoints", tmp_path / "parts")
        rest = imagenet(*settings, "--epochs", 2, "--checkpoints", tmp_path / "parts", "--resume", "auto")
        assert f"Resuming from {tmp_path / 'parts' / 'checkpoint.zip'}, after 1 of 2 epochs" in rest
        again = imagenet(*settings, "--epochs", 2, "--checkpoints", tmp_path / "parts", "--resume", "auto")
        assert "All 2 epochs are done" in again
        assert whole.startswith(begun)
        assert scores(whole) == scores(begun) + scores(rest)
        assert len(scores(whole)) == 6
        assert parts_of(tmp_path / "whole" / "checkpoint.zip") == parts_of(tmp_path / "parts" / "checkpoint.zip")

    @pytest.mark.slow
    def test_levels_reach_the_same_accuracy(self, tmp_path):
        pytest.importorskip("gluoncv")
        root = make_digits(tmp_path / "digits", 1437, 360)
        settings = [root, "-a", "cifar_resnet20_v1", "--image-size", SIZE, "-b", 32, "-j", 1, "--epochs", 3,
                    "--lr", 0.4, "--lr-steps", 2, "--warmup-epochs", 1, "--min-area", 0.7, "--no-flip",
                    "--deterministic", "--checkpoints", tmp_path]
        printed = {level: imagenet(*settings, "--opt-level", level) for level in ("O0", "O1", "O2")}
        accuracy = {level: numbers(r"Validation .*Prec@1 ([\d.]+)", text)[-1] for level, text in printed.items()}
        assert accuracy["O0"] > 92
        assert all(abs(found - accuracy["O0"]) < 5 for found in accuracy.values()), accuracy

    def test_synthetic(self, tmp_path):
        printed = imagenet("--synthetic", *FEW, "--classes", 5, "--epochs", 1, "--opt-level", "O3",
                           "--keep-batchnorm-fp32", "True", "--checkpoints", tmp_path)
        assert "gluon_amp opt_level O2" in printed
        assert len(scores(printed)) == 3
        assert "images/s" in printed

    @pytest.mark.slow
    def test_evaluates_checkpoints_and_other_weights(self, digits, records, tmp_path):
        trained = scores(imagenet(digits, *FEW, "--epochs", 1, "--checkpoints", tmp_path, "--deterministic"))
        (tmp_path / "net.params").write_bytes(parts_of(tmp_path / "best.zip")["net.params"])
        for data in ([digits], [records, "--classes", 10]):
            for weights in (["--resume", tmp_path / "best.zip"], ["--pretrained", tmp_path / "net.params"]):
                assert scores(imagenet(*data, *FEW, "-e", *weights, "--deterministic")) == trained[-1:]

    @pytest.mark.slow
    def test_several_processes(self, digits, tmp_path):
        """They print once, take a share of the images each, and resume exactly."""
        settings = [digits, *FEW, "--deterministic", "--checkpoints"]
        whole = imagenet(*settings, tmp_path / "whole", "--epochs", 2, **TWO)
        imagenet(*settings, tmp_path / "parts", "--epochs", 1, **TWO)
        imagenet(*settings, tmp_path / "parts", "--epochs", 2, "--resume", "auto", **TWO)
        assert len(scores(whole)) == 6
        assert parts_of(tmp_path / "whole" / "checkpoint.zip") == parts_of(tmp_path / "parts" / "checkpoint.zip")

    @pytest.mark.slow
    def test_synchronized_normalization(self, digits, tmp_path):
        """Two processes with half of a batch each train as one with the whole; at every level they begin alike."""
        settings = [digits, *FEW, "-a", "resnet18_v1", "--epochs", 1, "--min-area", 1, "--deterministic",
                    "--checkpoints", tmp_path]

        def losses(*options, **command):
            return numbers(r"Epoch.* loss ([\d.]+)", imagenet(*settings, *options, **command))

        whole = losses("-b", 32, "--opt-level", "O0")
        assert losses("--sync_bn", "--opt-level", "O0", **TWO) == pytest.approx(whole, rel=1e-4)
        assert losses("--opt-level", "O0", **TWO)[1] != pytest.approx(whole[1], rel=1e-2)
        for level in ("O1", "O2"):
            found = losses("--sync_bn", "--opt-level", level, **TWO)
            assert found[0] == pytest.approx(whole[0], rel=1e-2)
            assert len(found) == 2


class TestServing:
    """The page "Serving" says what this shows."""

    ASK = """
import io, os, sys
from concurrent.futures import ThreadPoolExecutor
import serve
import numpy as np

images = np.random.RandomState(0).rand(9, 3, 32, 32).astype("float32")

def ask(count):
    data, said = io.BytesIO(), []
    np.save(data, images[:count])
    environ = {"CONTENT_LENGTH": data.tell(), "wsgi.input": io.BytesIO(data.getvalue())}
    body = serve.app(environ, lambda status, headers: said.append(status))
    return np.load(io.BytesIO(body[0])) if body else said[0]

def serves():
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, [1 + number % 8 for number in range(64)]))
    return all(np.allclose(each, whole[:len(each)], atol=0.02) for each in found)

whole = ask(8)
assert whole.shape == (8, 5) and whole.std() > 0.05
assert ask(9) == "413 Content Too Large"
assert serves(), "the parent"
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        os._exit(0 if serves() else 1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
assert serves(), "the parent, again"
print("served")
"""

    def test_threads_and_forked_workers_share_a_network(self, tmp_path):
        net = sequential([gluon.nn.Conv2D(16, 3, in_channels=3), gluon.nn.BatchNorm(in_channels=16),
                          gluon.nn.Activation("relu"), gluon.nn.Dense(5, in_units=16 * 30 * 30)], mx.init.Xavier())
        net(mx.nd.zeros((1, 3, 32, 32)))
        net.export(str(tmp_path / "net"))
        (tmp_path / "ask.py").write_text(self.ASK)
        (tmp_path / "serve.py").write_bytes((EXAMPLES / "serving" / "serve.py").read_bytes())
        environ = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "2"}
        done = subprocess.run([sys.executable, "-W", "ignore", "ask.py"], cwd=tmp_path, capture_output=True, text=True,
                              timeout=120, env=environ)
        assert done.stdout == "served\n", done.stderr
