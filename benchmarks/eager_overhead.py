"""Measure what AMP adds to an imperative operator call that needs no cast, and to one that does.

    python benchmarks/eager_overhead.py

The sides take turns within one process; the medians of the rounds' differences are printed.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from typing import Any, Callable, Mapping, Sequence

import _cli
import _machine
import _report
import _tables
import mxnet as mx
from _errors import Parser

import gluon_amp as amp

ROUNDS, CALLS = 15, 3000
SMALL, WEIGHT = mx.nd.ones((2, 2)), mx.nd.ones((2, 2))
CALL = {
    "relu(x)": lambda: mx.nd.relu(SMALL),
    "broadcast_add(x, y)": lambda: mx.nd.broadcast_add(SMALL, WEIGHT),
    "softmax(x)": lambda: mx.nd.softmax(SMALL),
    "FullyConnected(x, w)": lambda: mx.nd.FullyConnected(SMALL, WEIGHT, no_bias=True, num_hidden=2),
}


def seconds_a_call(call: Callable) -> float:
    """Time a call, without the work that it leaves to the engine."""
    mx.nd.waitall()
    taken = timeit.timeit(call, number=CALLS) / CALLS
    mx.nd.waitall()
    return taken


def measure(call: Callable) -> tuple[float, float, float]:
    """Return the medians, in microseconds: off, on, and on minus off round by round."""
    off, on = [], []
    for _ in range(ROUNDS):
        amp.deinit()
        off.append(seconds_a_call(call) * 1e6)
        amp.init()
        on.append(seconds_a_call(call) * 1e6)
    amp.deinit()
    return statistics.median(off), statistics.median(on), statistics.median(b - a for a, b in zip(off, on))


def dtype_in_force() -> str:
    """Return the type that gluon_amp chooses here."""
    amp.init()
    dtype = amp.active_dtype()
    amp.deinit()
    return dtype or "float32"


def measure_all() -> dict[str, tuple[float, float, float]]:
    """Measure every call."""
    return {name: measure(call) for name, call in CALL.items()}


def markdown(measured: Mapping[str, Any]) -> str:
    """Return the table of what `measure_all` returned."""
    rows = [[f"`{name}`", *(f"{value:.1f}" for value in values)] for name, values in measured["microseconds"].items()]
    return _tables.table(["microseconds a call", "AMP off", f"AMP on, {measured['dtype']}", "added"], rows)


def _run(argv: Sequence[str] | None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write everything that was measured")
    args = parser.parse_args(argv)
    _report.check_writable(args.json)
    measured = {"machine": _machine.describe(), "versions": _machine.versions(), "dtype": dtype_in_force(),
                "microseconds": measure_all()}
    print(markdown(measured))
    _cli.write_json(args.json, measured)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code: 2 for a request that cannot be met, 1 for a failure."""
    return _cli.run(_run, argv)


if __name__ == "__main__":
    sys.exit(main())
