"""Measure what AMP adds to an imperative operator call that needs no cast, and to one that does.

    python benchmarks/eager_overhead.py

The sides take turns within one process; the medians of the rounds' differences are printed.
"""
from __future__ import annotations

import statistics
import timeit
from typing import Callable

import _machine
import mxnet as mx

import gluon_amp as amp

ROUNDS, CALLS = 15, 3000
SMALL, WEIGHT = mx.nd.ones((2, 2)), mx.nd.ones((2, 2))
CALL = {
    "relu(x)": lambda: mx.nd.relu(SMALL),
    "broadcast_add(x, y)": lambda: mx.nd.broadcast_add(SMALL, WEIGHT),
    "softmax(x)": lambda: mx.nd.softmax(SMALL),
    "FullyConnected(x, w), which is cast": lambda: mx.nd.FullyConnected(SMALL, WEIGHT, no_bias=True, num_hidden=2),
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


def main() -> None:
    """Print a table."""
    print({**_machine.describe(), **_machine.versions()})
    print(f"{'microseconds a call':40}{'AMP off':>9}{'AMP on':>9}{'added':>9}")
    for name, call in CALL.items():
        off, on, added = measure(call)
        print(f"{name:40}{off:9.2f}{on:9.2f}{added:9.2f}")


if __name__ == "__main__":
    main()
