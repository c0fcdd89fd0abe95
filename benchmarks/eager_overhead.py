"""Measure what AMP adds to an imperative operator call that needs no cast, and to one that does.

    python benchmarks/eager_overhead.py

The sides take turns within one process; the medians of the rounds' differences are printed.
"""
from __future__ import annotations

import statistics
import sys
import timeit
from typing import Any, Callable, Mapping, Sequence

from benchmarks.harness import cli, tables

ROUNDS, CALLS = 15, 3000


def measure() -> dict[str, Any]:
    """Return the type that gluon_amp chooses here, and microseconds of each call: off, on, on minus off by rounds."""
    import gluon_amp as amp  # before MXNet

    # isort: split
    import mxnet as mx

    x, w = mx.nd.ones((2, 2)), mx.nd.ones((2, 2))
    calls = {
        "relu(x)": lambda: mx.nd.relu(x),
        "broadcast_add(x, y)": lambda: mx.nd.broadcast_add(x, w),
        "softmax(x)": lambda: mx.nd.softmax(x),
        "FullyConnected(x, w)": lambda: mx.nd.FullyConnected(x, w, no_bias=True, num_hidden=2),
    }

    def microseconds(call: Callable[[], Any]) -> float:
        mx.nd.waitall()
        taken = timeit.timeit(call, number=CALLS) / CALLS  # without the work that it leaves to the engine
        mx.nd.waitall()
        return taken * 1e6

    found = {}
    for name, call in calls.items():
        off, on = [], []
        for _ in range(ROUNDS):
            off.append(microseconds(call))
            amp.init()
            on.append(microseconds(call))
            dtype = amp.active_dtype() or "float32"
            amp.deinit()
        found[name] = [statistics.median(each) for each in (off, on, [b - a for a, b in zip(off, on)])]
    return {"dtype": dtype, "microseconds": found}


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table of what was measured."""
    rows = [[f"`{name}`", *(f"{value:.1f}" for value in values)] for name, values in measured["microseconds"].items()]
    return tables.table(["microseconds a call", "AMP off", f"AMP on, {measured['dtype']}", "added"], rows)


def run(argv: Sequence[str] | None) -> None:
    args = cli.Parser(__doc__).parse_args(argv)
    cli.use_threads(args)
    cli.show(args, measure(), markdown)


if __name__ == "__main__":
    sys.exit(cli.main(run))
