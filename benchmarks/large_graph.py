"""Measure how long AMP takes to rewrite and to convert large networks, and whether that grows linearly.

    python benchmarks/large_graph.py

A layer is a convolution, BatchNorm and ReLU, with a residual connection around it, so a network of 1,000 layers has
4,000 operators. `init` is what AMP adds to a hybridized network's first call.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import Any, Callable, Mapping, Sequence

import _cli
import _machine
import _report
import _tables
from _errors import Parser, UsageError

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
    rows = [[str(size), *(_tables.seconds(column[size]) for column in columns)] for size in columns[0]]
    exponents = ("" if value is None else f"layers^{value:.2f}" for value in measured["growth"].values())
    return _tables.table(heading, [*rows, ["growth", "", *exponents]])


def _run(argv: Sequence[str] | None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(map(str, SIZES)), help="numbers of layers, with commas")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measurements of each (default: {ROUNDS})")
    parser.add_argument("--json", metavar="PATH", help="write everything that was measured")
    args = parser.parse_args(argv)
    _report.check_writable(args.json)
    sizes = _cli.names("--layers", args.layers)
    if args.rounds < 1 or not all(size.isdigit() and int(size) for size in sizes):
        raise UsageError(f"expected integers of at least 1, received --layers {args.layers}, --rounds {args.rounds}")
    measured = {"machine": _machine.describe(), **measure([int(size) for size in sizes], args.rounds)}
    print(markdown(measured))
    _cli.write_json(args.json, measured)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _cli.run(_run, argv)


if __name__ == "__main__":
    sys.exit(main())
