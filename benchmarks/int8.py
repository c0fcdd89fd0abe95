"""Measure what INT8 costs in accuracy and gains in speed, on classifiers of handwritten digits that it trains.

    python benchmarks/int8.py
    python benchmarks/int8.py --networks mobilenetv2_1.0 --budget 0.002

The scans are those that scikit-learn bundles, at 32x32 pixels. A fifth of them calibrates and is searched on, another
fifth, which nothing else sees, gives the accuracies. Times are of 64 images, the least of interleaved rounds.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from benchmarks import harness

NETWORKS = ("resnet18_v1", "mobilenetv2_1.0", "vgg11_bn")
CLASSES, SIDE, BATCH = 10, 32, 64


class Images(NamedTuple):
    """Images and their classes."""

    data: Any
    labels: Any

    def batches(self) -> list[tuple[Any, Any]]:
        """Return pairs of arrays, the last shorter."""
        return [(self.data[start:start + BATCH], self.labels[start:start + BATCH])
                for start in range(0, len(self.labels), BATCH)]


def digits(seed: int) -> list[Images]:
    """Return scans for training, for calibration and search, and for the accuracies."""
    import mxnet as mx
    import numpy as np
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.RandomState(seed).permutation(len(found.target))
    scans = np.kron(found.images / 8 - 1, np.ones((1, SIDE // 8, SIDE // 8)))
    data = np.repeat(scans[:, None], 3, axis=1).astype("float32")[order]
    labels, cuts = found.target.astype("float32")[order], [len(order) * 3 // 5, len(order) * 4 // 5]
    return [Images(mx.nd.array(data[part]), mx.nd.array(labels[part]))
            for part in np.split(np.arange(len(order)), cuts)]


def trained(name: str, images: Images, epochs: int, seed: int) -> Any:
    """Train a network of MXNet's zoo."""
    import mxnet as mx

    mx.random.seed(seed)
    net = mx.gluon.model_zoo.vision.get_model(name, classes=CLASSES, prefix=f"{name.replace('.', '_')}_")
    net.initialize(mx.init.Xavier(magnitude=2))
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 1e-3}, update_on_kvstore=False)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(epochs):
        trainer.set_learning_rate(1e-3 * (1 - epoch / epochs))
        for data, labels in images.batches():
            with mx.autograd.record():
                loss = loss_function(net(data), labels)
            loss.backward()
            trainer.step(len(labels))
    mx.nd.waitall()
    return net


def accuracy(net: Any, images: Images) -> float:
    """Return the share of images whose class a network finds."""
    right = [(net(data).argmax(axis=1) == labels).sum().asscalar() for data, labels in images.batches()]
    return float(sum(right) / len(images.labels))


def conversions(net: Any, known: Images, budget: float) -> dict[str, Callable[[], Any]]:
    """Return what makes the networks to compare, by their names."""
    import gluon_amp as amp

    data = [pair[0] for pair in known.batches()]
    return {"FP32": lambda: amp.convert_hybrid_block(net, "float32"),
            "converted": lambda: amp.convert_hybrid_block(net),
            "INT8": lambda: amp.convert_hybrid_block(net, "int8", calib_data=data, dtypes=["int8"]),
            f"INT8, {budget:.1%} points": lambda: amp.convert_hybrid_block(
                net, calib_data=data, metric=lambda each: accuracy(each, known), budget=budget)}


def measure(name: str, args: Any) -> list[dict[str, Any]]:
    """Train a network and measure its conversions."""
    parts = digits(args.seed)
    net = trained(name, parts[0], args.epochs, args.seed)
    made = {kind: make() for kind, make in conversions(net, parts[1], args.budget).items()}
    batch = parts[2].data[:BATCH]
    times = harness.in_turns([lambda each=each: each(batch).asnumpy() for each in made.values()], args.rounds, 2)
    return [{"network": name, "kind": kind, "accuracy": accuracy(each, parts[2]), "milliseconds": 1e3 * min(seconds),
             "conversion": each.conversion.summary()} for (kind, each), seconds in zip(made.items(), times)]


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table."""
    lines, fp32 = [], {each["network"]: each for each in results if each["kind"] == "FP32"}
    for each in results:
        plain = fp32[each["network"]]
        lines.append([each["network"], each["kind"], f"{each['accuracy']:.2%}",
                      f"{(each['accuracy'] - plain['accuracy']) * 100:+.2f}", f"{each['milliseconds']:.1f} ms",
                      f"**{plain['milliseconds'] / each['milliseconds']:.2f}x**"])
    return harness.table(["network", "", "accuracy", "points", "64 images", "speed"], lines)


def run(argv: Sequence[str] | None) -> None:
    parser = harness.Parser(__doc__)
    add = parser.add_argument
    add("--networks", metavar="NAMES", default=",".join(NETWORKS), help="with commas (default: %(default)s)")
    add("--epochs", type=harness.integer(1), default=12, help="of training (default: %(default)s)")
    add("--rounds", type=harness.integer(1), default=20, help="of timing (default: %(default)s)")
    add("--budget", type=float, default=0.005, help="accuracy to give away (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and of the split (default: 0)")
    args = parser.parse_args(argv)
    names = harness.names("--networks", args.networks, "network", NETWORKS)
    harness.use_threads(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        results = [row for name in names for row in measure(name, args)]
    print(markdown(results), harness.machine_line(), sep="\n")
    harness.write_json(args.json, {"threads": args.threads, "results": results})


if __name__ == "__main__":
    sys.exit(harness.main(run))
