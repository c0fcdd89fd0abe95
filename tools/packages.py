"""Train networks of other people's packages stock and with AMP, from the same seed, and compare their losses.

    python tools/packages.py                  # those that are installed; the others are named, with the reason
    python tools/packages.py gluonts sockeye --modes float32

In float32 losses have to be MXNet's but for rounding, in low precision near them. Speeds are of the fastest batch from
the third on, as the first makes plans. The packages are not in this project's environment: `make packages` puts all but
GluonNLP into a folder of their own.
"""
from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Callable, List, Mapping, NamedTuple

STOCK, MODES = "stock", ("float32", "bfloat16")
NEAR = {"float32": 2e-5, "bfloat16": 0.1}
Losses = List[float]


class _Noted(Losses):
    """Losses, and when each was known."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def append(self, loss: float) -> None:
        super().append(loss)
        self.times.append(time.perf_counter())


class Program(NamedTuple):
    """A program that trains a network of a package."""

    package: str
    run: Callable[[str], Losses]  # takes the mode, with AMP on
    near: Mapping[str, float] = NEAR  # how far losses may be from stock MXNet's, relatively


def _forecasts(module: str, estimator: str, **settings: Any) -> Callable[[str], Losses]:
    """Make a program that trains a model of GluonTS."""
    def run(mode: str) -> Losses:
        import mxnet as mx
        import numpy as np
        from gluonts.dataset.common import ListDataset
        from gluonts.mx.trainer import Trainer

        draw, losses, backward = np.random.RandomState(0), _Noted(), mx.nd.NDArray.backward

        def noted(loss: mx.nd.NDArray, *args: Any, **kwargs: Any) -> None:
            losses.append(float(loss.mean().asscalar()))
            backward(loss, *args, **kwargs)

        mx.nd.NDArray.backward = noted
        series = ListDataset([{"target": draw.normal(size=200).cumsum(), "start": "2020-01-01"} for _ in range(20)],
                             freq="D")
        made = getattr(__import__(f"gluonts.mx.model.{module}", fromlist=[estimator]), estimator)(
            freq="D", prediction_length=10, trainer=Trainer(epochs=1, num_batches_per_epoch=8), **settings)
        made.train(series)
        return losses
    return run


def _translation(mode: str) -> Losses:
    """Train Sockeye to turn sentences round, and translate some; return its perplexity."""
    import runpy

    draw, words = random.Random(1), [f"w{number}" for number in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("train", 400), ("dev", 20)):
            lines = [[draw.choice(words) for _ in range(draw.randint(3, 8))] for _ in range(count)]
            for side, step in (("source", 1), ("target", -1)):
                Path(folder, f"{name}.{side}").write_text("".join(f"{' '.join(line[::step])}\n" for line in lines))
        given = {"s": "train.source", "t": "train.target", "vs": "dev.source", "vt": "dev.target", "o": "model"}
        paths = [text for name, file in given.items() for text in (f"-{name}", f"{folder}/{file}")]
        sys.argv = ["sockeye.train", *paths, "--use-cpu", "--num-layers", "1:1", "--transformer-model-size", "32",
                    "--transformer-attention-heads", "4", "--transformer-feed-forward-num-hidden", "64", "--num-embed",
                    "32:32", "--batch-size", "200", "--max-updates", "40", "--checkpoint-interval", "20",
                    "--decode-and-evaluate", "0", "--seed", "3", "--max-seq-len", "12", "--quiet"]
        runpy.run_module("sockeye.train", run_name="__main__")
        found = re.findall(r"Validation-ppl=([0-9.]+)", Path(folder, "model", "log").read_text())
        sys.argv = ["sockeye.translate", "-m", f"{folder}/model", "--use-cpu", "-i", f"{folder}/dev.source", "-o",
                    f"{folder}/translated"]
        runpy.run_module("sockeye.translate", run_name="__main__")
        if len(Path(folder, "translated").read_text().splitlines()) != 20:
            raise RuntimeError("sockeye.translate: expected 20 lines")
    return [float(text) for text in found]


def _chapter(mode: str) -> Losses:
    """Train the encoder of the book's Transformer to name the words that it was given."""
    import mxnet as mx
    from d2l import mxnet as d2l
    from mxnet import autograd, gluon

    mx.npx.set_np()
    encoder = d2l.TransformerEncoder(50, 32, 64, 4, 2, 0.1)
    dense = gluon.nn.Dense(50, flatten=False)
    for block in (encoder, dense):
        block.initialize(mx.init.Xavier())
        block.hybridize()
    trainer = gluon.Trainer({**encoder.collect_params(), **dense.collect_params()}, "adam", {"learning_rate": 0.005})
    loss_of, losses = d2l.MaskedSoftmaxCELoss(), _Noted()
    for _ in range(8):
        words, lengths = mx.np.random.randint(0, 50, size=(16, 10)), mx.np.random.randint(3, 11, size=(16,))
        with autograd.record():
            loss = loss_of(dense(encoder(words, lengths)), words, lengths)
        loss.backward()
        d2l.grad_clipping(encoder, 1)
        trainer.step(16)
        losses.append(float(loss.mean()))
    return losses


def _language(mode: str) -> Losses:
    """Train GluonNLP's BERT, of a small size, to tell sentences apart."""
    import gluonnlp as nlp
    import mxnet as mx
    from mxnet import autograd, gluon

    encoder = nlp.model.BERTEncoder(units=64, hidden_size=128, num_layers=2, num_heads=4, max_length=32)
    bert = nlp.model.BERTModel(encoder, vocab_size=100, token_type_vocab_size=2, units=64, embed_size=64,
                               use_decoder=False, use_classifier=False)
    net = nlp.model.BERTClassifier(bert, num_classes=2, dropout=0.1)
    net.initialize(mx.init.Normal(0.02))
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3})
    loss_of, losses = gluon.loss.SoftmaxCELoss(), _Noted()
    for _ in range(8):
        words = mx.nd.random.randint(0, 100, shape=(16, 32)).astype("float32")
        labels = words[:, 0] > 50
        with autograd.record():
            loss = loss_of(net(words, mx.nd.zeros_like(words), mx.nd.full((16,), 32)), labels).mean()
        loss.backward()
        trainer.step(1)
        losses.append(float(loss.asscalar()))
    return losses


# Its losses, of about 100, grow apart from differences in the last digit: stock MXNet's with another number of threads.
_CHAOTIC = {"float32": 0.05, "bfloat16": 0.3}
PROGRAMS: dict[str, Program] = {
    "DeepAR": Program("gluonts", _forecasts("deepar", "DeepAREstimator")),
    "Transformer": Program("gluonts", _forecasts("transformer", "TransformerEstimator")),
    "TFT": Program("gluonts", _forecasts("tft", "TemporalFusionTransformerEstimator")),
    "MQCNN": Program("gluonts", _forecasts("seq2seq", "MQCNNEstimator")),
    "WaveNet": Program("gluonts", _forecasts("wavenet", "WaveNetEstimator")),
    "N-BEATS": Program("gluonts", _forecasts("n_beats", "NBEATSEstimator"), _CHAOTIC),
    "translation": Program("sockeye", _translation), "chapter 11": Program("d2l", _chapter),
    "BERT": Program("gluonnlp", _language)}
# What does not run, and why.
ELSEWHERE = {"insightface": "its package runs ONNX files since 0.2; the scripts for MXNet are in its repository only"}


def main() -> int:
    """Run the programs and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help="all by default")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--child", nargs=2, metavar=("PROGRAM", "MODE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(*given.child)
    wrong = 0
    for name, program in PROGRAMS.items():
        if not given.packages or program.package in given.packages:
            wrong += _compare(name, program, given.modes)
    for package, reason in ELSEWHERE.items():
        print(f"{package}: not run: {reason}")
    return int(wrong > 0)


def _compare(name: str, program: Program, modes: list[str]) -> int:
    """Print how the losses of a program compare; return in how many modes they are wrong."""
    title = f"{program.package} {name}"
    missing = subprocess.run([sys.executable, "-W", "ignore", "-c", f"import gluon_amp, {program.package}"],
                             capture_output=True, text=True)
    if missing.returncode:
        print(f"{title}: not run: {missing.stderr.strip().splitlines()[-1]}")
        return 0
    (expected, stock), wrong = _losses(name, STOCK), 0
    for mode in modes:
        found, seconds = _losses(name, mode)
        off = max((abs(one - other) / abs(one) for one, other in zip(expected, found)), default=math.inf)
        is_wrong = len(found) != len(expected) or not off <= program.near[mode]
        print(f"{title}: {mode} {'WRONG: ' * is_wrong}{len(found)} losses, off by {off:.2g} at most"
              + (f", {1e3 * seconds:.1f} ms a batch, {stock / seconds:.2f}x as fast" if stock and seconds else ""))
        wrong += is_wrong
    return wrong


def _losses(name: str, mode: str) -> tuple[Losses, float]:
    """Return the losses of a program, and the seconds of a batch; 0 where they are not known."""
    child = subprocess.run([sys.executable, __file__, "--child", name, mode], capture_output=True, text=True)
    if child.returncode:
        print(child.stderr[-2000:])
        return [], 0.0
    losses, seconds = json.loads(child.stdout.strip().splitlines()[-1])
    return losses, seconds


def _child(name: str, mode: str) -> int:
    """Run a program, and print its losses and the seconds of its fastest batch."""
    warnings.simplefilter("ignore")
    import gluon_amp as amp  # isort: skip  before MXNet
    import mxnet as mx
    import numpy as np

    for seed in (random.seed, np.random.seed, mx.random.seed):
        seed(7)
    if mode != STOCK:
        amp.init(mode)
    losses = PROGRAMS[name].run(mode)
    times = getattr(losses, "times", [])[2:]
    print(json.dumps([losses, min((after - before for before, after in zip(times, times[1:])), default=0.0)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
