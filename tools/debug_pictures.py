"""Make the pictures of docs/debugging.md: python tools/debug_pictures.py [directory]."""
from __future__ import annotations

import gluon_amp as amp  # before MXNet, which newer releases of NumPy need help for

# isort: split
import sys
import warnings
from pathlib import Path

import mxnet as mx
from matplotlib.figure import Figure
from mxnet import autograd, gluon
from mxnet.gluon import nn

ROOT = Path(__file__).resolve().parents[1]


def ssd():
    """Return the network and data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from gluoncv.model_zoo import get_model

        net = get_model("ssd_512_resnet50_v1_custom", pretrained_base=False, classes=["a", "b", "c"], transfer=None)
    net.initialize()
    net.hybridize()
    return net, mx.nd.random.uniform(shape=(1, 3, 256, 256))


def transformer():
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from networks import Attention

    net = Attention(units=64, prefix="block_")
    net.initialize()
    net.hybridize()
    return amp.report(net, mx.nd.random.uniform(shape=(8, 32, 64)))


def drift():
    """Train on data that grows until its gradients overflow float16, and return the monitor's rows."""
    mx.random.seed(1)
    net = nn.Dense(1, in_units=16)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    amp.init_trainer(trainer, amp.DynamicLossScaler(2.0 ** 12, growth_interval=20))
    with amp.DriftMonitor(trainer, every=1) as monitor:
        for step in range(120):
            data = mx.nd.random.normal(shape=(8, 16)) * 1.06 ** step
            with autograd.record():
                loss = net(data).sum()
                with amp.scale_loss(loss, trainer) as scaled:
                    scaled.backward()
            trainer.step(8)
    return list(monitor.rows)


def plot_drift(rows, path):
    figure = Figure(figsize=(7, 4), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True)
    steps = [number for number, _ in rows]
    upper.plot(steps, [row.loss_scale for _, row in rows], color="#0072B2", label="loss scale")
    skipped = [(number, row.loss_scale) for number, row in rows if row.skipped]
    upper.plot(*zip(*skipped), "o", color="#D55E00", label="skipped")
    upper.set_yscale("log", base=2)
    lower.plot(steps, [row.float16_headroom for _, row in rows], color="#0072B2", label="float16 headroom")
    lower.axhline(0, color="#999999", linewidth=0.8)
    lower.set(xlabel="step", ylabel="doublings left")
    for axes in (upper, lower):
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main(directory):
    directory.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where it is slow
        amp.init("bfloat16")
    mx.random.seed(1)
    net, data = ssd()
    amp.report(net, data).plot(directory / "report_ssd.png")
    net.set_nms(nms_thresh=0)  # all boxes in order, rather than the few that rounding chooses
    amp.compare(net, data, train_mode=False, gradients=False).plot(directory / "compare_ssd.png")
    transformer().plot(directory / "report_transformer.png")
    amp.deinit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # float16 is imitated
        amp.init("float16")
    plot_drift(drift(), directory / "drift.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img")
