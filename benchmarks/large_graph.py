"""Measure how long AMP takes to rewrite and to convert large networks, and whether that grows linearly.

    python benchmarks/large_graph.py

A layer is a convolution, BatchNorm and ReLU, with a residual connection around it, so a network of 1,000 layers has
4,000 operators. `init` is what AMP adds to a hybridized network's first call.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from typing import Any, Callable, Mapping, Sequence

from benchmarks.harness import cli, tables

SIZES = (125, 250, 500, 1000)
ROUNDS = 3


def network(layers: int) -> Any:
    """Return an initialized Gluon network of so many layers, and an input for it."""
    import mxnet as mx
    from mxnet.gluon import HybridBlock, nn

    class Residual(HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.body = nn.HybridSequential()
                self.body.add(nn.Conv2D(32, 1, in_channels=32, use_bias=False), nn.BatchNorm(in_channels=32),
                              nn.Activation("relu"))

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return x + self.body(x)

    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(Residual())
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    return net, mx.nd.ones((1, 32, 2, 2))


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _first_call(layers: int, is_active: bool) -> float:
    """Return the seconds of a network's first call."""
    import gluon_amp as amp

    net, data = network(layers)
    if is_active:
        amp.init()
    try:
        return _seconds(lambda: net(data).wait_to_read())
    finally:
        amp.deinit()


def _conversion(layers: int) -> float:
    import gluon_amp as amp

    net, data = network(layers)
    net(data).wait_to_read()
    return _seconds(lambda: amp.convert_hybrid_block(net, data_example=data))


def measure(sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the seconds by number of layers, medians of interleaved rounds, ready for JSON.

    Returns
    -------
    dict
        ``first_call`` without AMP, ``init``, ``convert``: mappings of number of layers to seconds; ``growth``, the
        exponents of time over layers between the two largest networks: 1 is linear.
    """
    taken: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes}
                                                for name in ("first_call", "init", "convert")}
    for _ in range(rounds):
        for size in sizes:
            plain = _first_call(size, is_active=False)
            taken["first_call"][size].append(plain)
            taken["init"][size].append(_first_call(size, is_active=True) - plain)
            taken["convert"][size].append(_conversion(size))
    result: dict[str, Any] = {name: {size: statistics.median(times) for size, times in by_size.items()}
                              for name, by_size in taken.items()}
    result["growth"] = {name: growth(result[name]) for name in ("init", "convert")}
    return result


def growth(times: Mapping[int, float]) -> float | None:
    """Return the exponent of time over size between the two largest sizes, None where times are too short for it.

    Examples
    --------
    >>> growth({10: 1.0, 20: 2.0, 40: 8.0})
    2.0
    """
    before, last = sorted(times)[-2:] if len(times) > 1 else (1, 1)
    if before == last or min(times[before], times[last]) <= 0:
        return None
    return math.log(times[last] / times[before]) / math.log(last / before)


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table of what `measure` returned."""
    heading = ["layers", "first call without AMP", "added by init()", "convert_hybrid_block"]
    columns = [measured[name] for name in ("first_call", "init", "convert")]
    rows = [[str(size), *(tables.seconds(column[size]) for column in columns)] for size in columns[0]]
    exponents = ("" if value is None else f"layers^{value:.2f}" for value in measured["growth"].values())
    return tables.table(heading, [*rows, ["growth", "", *exponents]])


def run(argv: Sequence[str] | None) -> None:
    parser = cli.Parser(__doc__)
    parser.add_argument("--layers", type=cli.integers, default=SIZES, help="numbers of layers, with commas")
    parser.add_argument("--rounds", type=cli.positive, default=ROUNDS, help=f"measurements of each (default: {ROUNDS})")
    args = parser.parse_args(argv)
    cli.use_threads(args)
    cli.show(args, measure(args.layers, args.rounds), markdown)



if __name__ == "__main__":
    sys.exit(cli.main(run))
