"""C++ operators against MXNet's own, both in turn, as ratios of medians.

    python benchmarks/native_operators.py [--rounds 20] [--only adam,layer_norm] [--output table.md]
    python benchmarks/native_operators.py --only dense,dense_bfloat16 --rounds 7

Ratios above 1 say how many times as fast the C++ operator is. Short calls are measured many at a time.
``OMP_NUM_THREADS`` sets the threads for both; ``DNNL_MAX_CPU_ISA`` and ``ONEDNN_MAX_CPU_ISA`` take instruction sets
from MXNet's oneDNN and from that of the C++ operators.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np

from gluon_amp import _isa, dtypes, native  # isort: skip (before MXNet)
from gluon_amp._mxnet.invoke import invoke
from gluon_amp.dtypes import BFLOAT16, BFLOAT16_DTYPE, FLOAT32

import mxnet as mx  # isort: skip
from mxnet import autograd, nd  # isort: skip


class Case(NamedTuple):
    """Two ways to the same result; ``stock`` runs in FP32 where MXNet has no bfloat16 kernel."""

    name: str
    what: str
    stock: Callable[[], object]
    ours: Callable[[], object]


def normal(*shape, seed=0):
    return nd.array(np.random.RandomState(seed).standard_normal(shape))


def lower(array):
    return nd.amp_cast(array, dtype=BFLOAT16_DTYPE)


def trained(function, inputs, out_grad):
    """Return a function that runs a function of arrays forward and backward."""
    for array in inputs:
        array.attach_grad()

    def run():
        with autograd.record():
            out = function(*inputs)
        out.backward(out_grad)
    return run


def layer_cases(name, stock, ours, inputs, out_grad, what):
    yield Case(name, f"{what}, forward", lambda: stock(*inputs), lambda: ours(*inputs))
    yield Case(name, f"{what}, both ways", trained(stock, inputs, out_grad), trained(ours, list(inputs), out_grad))
    if not dtypes.cpu_support().requested(BFLOAT16):
        return
    low = [lower(inputs[0]), *inputs[1:]]
    yield Case(name, f"{what}, both ways, bfloat16 against FP32", trained(stock, list(inputs), out_grad),
               trained(ours, low, lower(out_grad)))


def with_operator(symbol, name, op):
    """Return a symbol in which another operator computes a node."""
    graph = json.loads(symbol.tojson())
    next(node for node in graph["nodes"] if node["name"] == name)["op"] = op
    return mx.sym.load_json(json.dumps(graph))


def layer_norm() -> Iterator[Case]:
    def ours(*inputs):
        return invoke("_gluon_amp_layer_norm", inputs, {})[0]

    for length in (128, 384):
        inputs = [normal(4, length, 768), normal(768, seed=1), normal(768, seed=2)]
        yield from layer_cases("layer_norm", nd.LayerNorm, ours, inputs, normal(4, length, 768, seed=3),
                               f"4x{length}x768")


def clip() -> Iterator[Case]:
    def ours(data):
        return invoke("_gluon_amp_clip", [data], {"a_min": "0", "a_max": "6"})[0]

    yield from layer_cases("clip", lambda data: nd.clip(data, 0, 6), ours, [normal(4, 96, 56, 56)],
                           normal(4, 96, 56, 56, seed=1), "ReLU6, 4x96x56x56")


def scale_rows() -> Iterator[Case]:
    def ours(*inputs):
        return invoke("_gluon_amp_scale_rows", inputs, {})[0]

    for shape in ((4, 64, 8, 8), (4, 72, 28, 28), (32, 120, 28, 28), (32, 672, 14, 14), (32, 960, 7, 7)):
        inputs = [normal(*shape), normal(*shape[:2], 1, 1, seed=1)]
        yield from layer_cases("scale_rows", nd.broadcast_mul, ours, inputs, normal(*shape, seed=2),
                               "x".join(map(str, shape)))


def global_pool() -> Iterator[Case]:
    """Means of what a convolution gives, in the order of axes that MXNet keeps it in."""
    flags = (("static_alloc", True), ("static_shape", True))
    for shape in ((4, 72, 28, 28), (4, 120, 28, 28), (2, 64, 56, 56), (8, 16, 24, 24)):
        inputs = [normal(shape[0], 8, *shape[2:]), normal(shape[1], 8, 1, 1, seed=1), normal(shape[1], seed=2)]
        out_grad = normal(*shape[:2], 1, 1, seed=3)
        layer = mx.sym.Convolution(*map(mx.sym.var, ("data", "weight", "bias")), kernel=(1, 1), num_filter=shape[1])
        pool = mx.sym.Pooling(layer, kernel=(1, 1), global_pool=True, pool_type="avg", name="pool")
        stock, ours = (nd.CachedOp(with_operator(pool, "pool", op), flags)
                       for op in ("Pooling", "_gluon_amp_global_pool"))
        yield Case("global_pool", "x".join(map(str, shape)) + " behind a convolution, both ways",
                   trained(stock, inputs, out_grad), trained(ours, inputs, out_grad))


def log_softmax() -> Iterator[Case]:
    def ours(data):
        return invoke("_gluon_amp_log_softmax", [data], {})[0]

    for shape in ((560, 10000), (96, 128, 128), (64, 1000), (560, 50), (8, 24564, 21), (8192, 2)):
        yield from layer_cases("log_softmax", nd.log_softmax, ours, [normal(*shape)], normal(*shape, seed=1),
                               "x".join(map(str, shape)))


def _lamb(weight, grad, mean, variance, **rates):
    direction = nd.lamb_update_phase1(weight, grad, mean, variance, t=3, wd=0.01)
    nd.lamb_update_phase2(weight, direction, weight.norm(), direction.norm(), **rates)


def _adamw(weight, grad, mean, variance, **rates):
    nd.contrib.adamw_update(weight, grad, mean, variance, nd.ones(1), eta=1.0, **rates)


STOCK_UPDATES = {"sgd": nd.sgd_update, "sgd_momentum": nd.sgd_mom_update, "nag": nd.nag_mom_update,
                 "adam": nd.adam_update, "adamw": _adamw, "lamb": _lamb}


def update_cases(kind) -> Iterator[Case]:
    sizes = [4_000_000, 2_000_000, 1_000_000, *[50_000] * 40, *[512] * 60]
    weights, grads = [normal(size) for size in sizes], [normal(size, seed=1) for size in sizes]
    states = [[nd.zeros(size) for size in sizes] for _ in range(native.UPDATES[kind])]
    options = {"momentum": 0.9} if kind in ("sgd_momentum", "nag") else {}
    more = {"steps": [3] * len(sizes)} if kind == "lamb" else {}

    def stock():
        for weight, grad, *own in zip(weights, grads, *states):
            STOCK_UPDATES[kind](weight, grad, *own, out=weight, lr=1e-3, **options)

    def ours(grads):
        return lambda: native.update(kind, weights, grads, states, [1e-3] * len(sizes), [0.0] * len(sizes),
                                     **options, **more)

    yield Case(kind, "103 weights, 9.0M values", stock, ours(grads))
    yield Case(kind, "103 weights, 9.0M values, bfloat16 gradients against FP32", stock,
               ours([lower(grad) for grad in grads]))


ROWS, UNITS = (1, 4, 16, 64, 256), ((64, 64), (256, 256), (768, 768), (1024, 1024), (2048, 1000), (4096, 4096))


def dense_graph(op, units, dtype):
    """Return a graph of a dense layer within a network: MXNet's reads casts of its weights, that in C++ the weights."""
    data, *weights = map(mx.sym.var, ("data", "weight", "bias"))
    if dtype == BFLOAT16 and op == "FullyConnected":
        weights = [mx.sym.amp_cast(each, dtype=BFLOAT16_DTYPE) for each in weights]
    data = mx.sym.amp_cast(data, dtype=BFLOAT16_DTYPE) if dtype == BFLOAT16 else mx.sym.identity(data)
    layer = mx.sym.FullyConnected(data, *weights, num_hidden=units, name="layer")
    return with_operator(mx.sym.amp_cast(layer, dtype=FLOAT32), "layer", op)


def dense_cases(dtype) -> Iterator[Case]:
    flags = (("static_alloc", True), ("static_shape", True))
    for width, units in UNITS:
        for rows in ROWS:
            inputs = [normal(rows, width), normal(units, width, seed=1), normal(units, seed=2)]
            out_grad = normal(rows, units, seed=3)
            stock, ours = (nd.CachedOp(dense_graph(op, units, dtype), flags)
                           for op in ("FullyConnected", "_gluon_amp_dense"))
            what = f"{rows} rows, {width} to {units}, {dtype}"
            yield Case("dense", f"{what}, forward", partial(stock, *inputs), partial(ours, *inputs))
            yield Case("dense", f"{what}, both ways", trained(stock, inputs, out_grad), trained(ours, inputs, out_grad))


FAMILIES = {"dense": partial(dense_cases, FLOAT32), "dense_bfloat16": partial(dense_cases, BFLOAT16),
            "layer_norm": layer_norm, "clip": clip, "scale_rows": scale_rows,
            "global_pool": global_pool, "log_softmax": log_softmax,
            **{kind: (lambda kind=kind: update_cases(kind)) for kind in native.UPDATES}}


LEAST = 0.003  # seconds that are measured at a time


def measure(case, rounds):
    """Return the medians of both, in seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    calls = 1
    for warm_up in range(rounds + 3):
        for which, run in enumerate((case.stock, case.ours)):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            nd.waitall()
            took = (time.perf_counter() - start) / calls
            if warm_up >= 3:
                times[which].append(took)
        if warm_up == 2:
            calls = max(1, int(LEAST / took))
    return tuple(map(statistics.median, times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, joined by commas")
    parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    for library in native.load():
        if library.missing:
            parser.error(f"{library.name}: {library.missing}")
    lines = [f"{_isa.cpu_name()}, {os.environ.get('OMP_NUM_THREADS', 'default')} threads, MXNet {mx.__version__}", "",
             "| operator | | times as fast as MXNet's | ms |", "|---|---|---|---|"]
    for family in options.only.split(","):
        for case in FAMILIES[family]():
            stock, ours = measure(case, options.rounds)
            lines.append(f"| {case.name} | {case.what} | {stock / ours:.2f} | {ours * 1e3:.3f} |")
            print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
