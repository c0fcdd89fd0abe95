"""Measure what a training step does outside the network, on the parameters of SSD-512 ResNet-50.

    python benchmarks/step_costs.py

The overflow check of gluon_amp and of MXNet's AMP, the optimizer's update at several aggregation sizes, entering and
leaving `scale_loss`, and reading the losses. Each takes its turn in every round, in one process.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, Mapping, Sequence

from benchmarks.harness import cli, tables
from benchmarks.harness.stats import spread

ROUNDS = 15
AGGREGATION = (1, 4, 16, 45)  # weights in one call of the optimizer: MXNet takes 4, and its kernel holds 60
SGD = {"learning_rate": 0.0, "momentum": 0.9, "wd": 0.0005}

Part = Callable[[], object]


def _network(small: bool) -> Any:
    """Return the network with gradients in place."""
    import mxnet as mx
    from mxnet import autograd

    from benchmarks.networks.gluon_networks import create

    name, side = ("resnet50", 32) if small else ("ssd512", 64)
    net = create(name, {"side": side, "classes": 10}, seed=0)
    with autograd.record():
        outputs = net(mx.nd.ones((2, 3, side, side)))
        loss = sum(each.mean() for each in (outputs if isinstance(outputs, (list, tuple)) else [outputs]))
    loss.backward()
    mx.nd.waitall()
    return net


def parts(small: bool = False) -> tuple[dict[str, Part], int]:
    """Return what to measure, by name, and the number of values that the optimizer updates."""
    import gluon_amp as amp  # before mxnet

    # isort: split
    import mxnet as mx
    from mxnet import gluon
    from mxnet.contrib.amp.loss_scaler import LossScaler

    from benchmarks.networks.gluon_networks import parameter_count

    net = _network(small)
    parameters = net.collect_params()
    checked = gluon.Trainer(parameters, "sgd", dict(SGD))
    amp.init()
    amp.init_trainer(checked)
    amp.deinit()
    values = [each for each in parameters.values() if each.grad_req != "null"]
    theirs, ours = LossScaler(), checked._amp_loss_scaler
    losses = [mx.nd.ones(8), mx.nd.ones(8)]

    def scaling() -> None:
        with mx.autograd.record(), amp.scale_loss(losses[0], checked):
            pass

    found: dict[str, Part] = {
        "overflow check, gluon_amp": lambda: ours.has_overflow(values),
        "overflow check, mxnet.contrib.amp": lambda: theirs.has_overflow(values),
        "update, gluon_amp": _update(values, checked._updaters[0], [checked._param2idx[each.name] for each in values]),
        **{f"update by MXNet, {size} weights a call": _update(values, _mxnets_updater(size), range(len(values)))
           for size in AGGREGATION},
        "scale_loss": scaling,
        "reading two losses": lambda: [float(each.asnumpy().sum()) for each in losses],
    }
    return found, parameter_count(net)


def _mxnets_updater(aggregated: int) -> Any:
    from mxnet import optimizer

    sgd = optimizer.SGD(**SGD)
    sgd.aggregate_num = aggregated
    return optimizer.get_updater(sgd)


def _update(parameters: Sequence[Any], updater: Any, indices: Sequence[int]) -> Part:
    """Return an update as a trainer calls it, that leaves the weights as they are."""
    arrays = [[each.grad() for each in parameters], [each.data() for each in parameters]]
    return lambda: updater(list(indices), *arrays)


def _seconds(part: Part) -> float:
    import mxnet as mx

    mx.nd.waitall()
    begin = time.perf_counter()
    part()
    mx.nd.waitall()
    return time.perf_counter() - begin


def measure(rounds: int = ROUNDS, small: bool = False) -> dict[str, Any]:
    """Return the seconds of each part, over the rounds, ready for JSON."""
    found, count = parts(small)
    for part in found.values():
        _seconds(part)
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, part in found.items():
            taken[name].append(_seconds(part))
    return {"parameters": count, "seconds": {name: vars(spread(times)) for name, times in taken.items()}}


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table of what `measure` returned."""
    rows = [[name, tables.seconds(times["median"]), tables.span(times, 1e3) + " ms"]
            for name, times in measured["seconds"].items()]
    return tables.table([f"{measured['parameters'] / 1e6:.1f}M parameters", "median", "lowest to highest"], rows)


def run(argv: Sequence[str] | None) -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--rounds", type=cli.positive, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--small", action="store_true", help="another network, to see whether everything works")
    args = parser.parse_args(argv)
    cli.use_threads(args)
    cli.show(args, measure(args.rounds, args.small), markdown)



if __name__ == "__main__":
    sys.exit(cli.main(run))
