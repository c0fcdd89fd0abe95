"""Measure what AMP adds where little is computed: to imperative calls, to `init`, to a first step and to a new shape.

    python benchmarks/overhead.py

AMP is off and on in turns, within one process; medians of the rounds are printed.
"""

from __future__ import annotations

import statistics
import sys
import time
import timeit
from typing import Any, Callable, Mapping, Sequence

from benchmarks import harness

ROUNDS, CALLS, LAYERS = 5, 3000, 1000
_UNITS, _BATCH, _OTHER_BATCH = 16, 4, 6


def calls() -> Mapping[str, Callable[[], Any]]:
    """Return imperative calls of small arrays: three without a cast, and one whose inputs and result are cast."""
    import mxnet as mx

    x, w = mx.nd.ones((2, 2)), mx.nd.ones((2, 2))
    return {"relu(x)": lambda: mx.nd.relu(x), "broadcast_add(x, y)": lambda: mx.nd.broadcast_add(x, w),
            "softmax(x)": lambda: mx.nd.softmax(x),
            "FullyConnected(x, w)": lambda: mx.nd.FullyConnected(x, w, no_bias=True, num_hidden=2)}


def microseconds(call: Callable[[], Any], number: int) -> float:
    """Return what a call takes, without the work that it leaves to the engine."""
    import mxnet as mx

    mx.nd.waitall()
    taken = timeit.timeit(call, number=number) / number
    mx.nd.waitall()
    return taken * 1e6


def steps(layers: int, on: bool) -> dict[str, float]:
    """Return milliseconds of `init` and of training steps of a new network of dense layers."""
    import mxnet as mx

    import gluon_amp as amp

    net = mx.gluon.nn.HybridSequential()
    for _ in range(layers):
        net.add(mx.gluon.nn.Dense(_UNITS, in_units=_UNITS))
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    found = {}

    def timed(name: str, action: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        action()
        mx.nd.waitall()
        found[name] = (time.perf_counter() - begin) * 1e3

    def step(batch_size: int) -> None:
        with mx.autograd.record():
            loss = net(mx.nd.ones((batch_size, _UNITS))).sum()
        loss.backward()

    if on:
        timed("`amp.init()`", amp.init)
    timed(f"first step of {layers:,} layers", lambda: step(_BATCH))
    timed("a step later", lambda: step(_BATCH))
    timed("first step in a new shape", lambda: step(_OTHER_BATCH))
    if on:
        amp.deinit()
    return found


def measure(rounds: int, number: int, layers: int) -> dict[str, dict[str, list[list[float]]]]:
    """Return by unit and name the times with AMP off and with AMP on, round by round."""
    import gluon_amp as amp

    eager: dict[str, list[list[float]]] = {name: [[], []] for name in calls()}
    graphs: dict[str, list[list[float]]] = {}
    for _ in range(rounds):
        for name, call in calls().items():
            eager[name][0].append(microseconds(call, number))
            amp.init()
            eager[name][1].append(microseconds(call, number))
            amp.deinit()
        for on in (False, True):
            for name, taken in steps(layers, on).items():
                graphs.setdefault(name, [[], []])[on].append(taken)
    return {"microseconds a call": eager, "milliseconds": graphs}


def markdown(unit: str, measured: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Return a table."""
    lines = []
    for name, (off, on) in measured.items():
        added = statistics.median(b - a for a, b in zip(off, on)) if off else statistics.median(on)
        lines.append([name, f"{statistics.median(off):.1f}" if off else "", f"{statistics.median(on):.1f}",
                      f"{added:.1f}"])
    return harness.table([unit, "AMP off", "AMP on", "added"], lines)


def run(argv: Sequence[str] | None) -> None:
    parser = harness.Parser(__doc__)
    for name, default, of in (("rounds", ROUNDS, "turns"), ("calls", CALLS, "imperative calls of a turn"),
                              ("layers", LAYERS, "layers of the network")):
        parser.add_argument(f"--{name}", type=harness.integer(1), default=default, help=f"{of} (default: {default})")
    args = parser.parse_args(argv)
    harness.use_threads(args)
    import gluon_amp as amp  # before MXNet

    amp.init()
    dtype = amp.active_dtype() or "float32"
    amp.deinit()
    found = measure(args.rounds, args.calls, args.layers)
    print(*(markdown(unit, rows) for unit, rows in found.items()), f"type chosen: {dtype}", harness.machine_line(),
          sep="\n")
    harness.write_json(args.json, {"dtype": dtype, **found})


if __name__ == "__main__":
    sys.exit(harness.main(run))
