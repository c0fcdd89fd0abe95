"""Measure what operators that may run in either precision cost in each, and what casts cost: `passes/kernel_costs.py`.

    python benchmarks/kernel_costs.py

An operator's time is the difference between a graph with many copies of it and one with few, per byte that its tensors
have in FP32, behind a convolution that leaves its output in oneDNN's layout, and behind none.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, Mapping, Sequence

import gluon_amp  # noqa: F401  before MXNet

# isort: split
import mxnet as mx
from mxnet import autograd
from rich.console import Console
from rich.table import Table

from gluon_amp._mxnet.invoke import StockCachedOp
from gluon_amp.dtypes import BFLOAT16_DTYPE

SHAPE = (8, 64, 56, 56)
BYTES = 4 * 8 * 64 * 56 * 56
FEW, MANY, ROUNDS = 2, 6, 9
FP32, LOW = "float32", "bfloat16"

Symbol = Any


def cast(tensor: Symbol, dtype: str) -> Symbol:
    """Return a tensor in another type."""
    return mx.sym.amp_cast(tensor, dtype=BFLOAT16_DTYPE if dtype == LOW else dtype)


# Each makes one copy: from the tensor before it in a chain, and the first one. The number counts tensors of SHAPE that
# are read and written.
KINDS: Mapping[str, tuple[float, Callable[[Symbol, Symbol, int], Symbol]]] = {
    "cast": (2, lambda y, x, i: cast(cast(y, LOW), FP32)),
    "BatchNorm": (2, lambda y, x, i: mx.sym.BatchNorm(y, name=f"bn{i}", fix_gamma=False)[0]),
    "Activation": (2, lambda y, x, i: mx.sym.Activation(y, act_type="relu")),
    "LeakyReLU": (2, lambda y, x, i: mx.sym.LeakyReLU(y, slope=0.1)),
    "relu": (2, lambda y, x, i: mx.sym.relu(y)),
    "clip": (2, lambda y, x, i: mx.sym.clip(y, a_min=0, a_max=6)),
    "abs": (2, lambda y, x, i: mx.sym.abs(y)),
    "LRN": (2, lambda y, x, i: mx.sym.LRN(y, nsize=5)),
    "Pooling": (2, lambda y, x, i: mx.sym.Pooling(y, kernel=(3, 3), pad=(1, 1), pool_type="max")),
    "Pooling avg": (2, lambda y, x, i: mx.sym.Pooling(y, kernel=(3, 3), pad=(1, 1), pool_type="avg")),
    "elemwise_add": (3, lambda y, x, i: mx.sym.elemwise_add(y, x)),
    "Concat": (2, lambda y, x, i: mx.sym.Concat(*mx.sym.SliceChannel(y, num_outputs=2), dim=1)),
    "SliceChannel": (2, lambda y, x, i: mx.sym.SliceChannel(y, num_outputs=2)[0]),
    "slice_axis": (2, lambda y, x, i: mx.sym.slice_axis(y, axis=2, begin=0, end=56)),
    "Flatten": (2, lambda y, x, i: mx.sym.Flatten(y)),
    "SwapAxis": (2, lambda y, x, i: mx.sym.SwapAxis(y, dim1=2, dim2=3)),
    "where": (4, lambda y, x, i: mx.sym.where(mx.sym.var("c"), y, x)),
    "stack": (3, lambda y, x, i: mx.sym.slice_axis(mx.sym.stack(y, x, axis=0), axis=0, begin=0, end=1)),
}
BRANCHED = {"SliceChannel", "Flatten", "stack"}


def graph(kind: str, dtype: str, copies: int, blocked: bool) -> Symbol:
    """Return a symbol with copies of an operator, one behind the other or side by side."""
    x = mx.sym.var("x")
    first = cast(x, dtype)
    if blocked:
        weight = cast(mx.sym.var("w"), dtype)
        first = mx.sym.Convolution(first, weight, kernel=(1, 1), num_filter=SHAPE[1], no_bias=True)
    make, tensors = KINDS[kind][1], [first]
    for number in range(copies):
        tensors.append(make(first if kind in BRANCHED else tensors[-1], first, number))
    return mx.sym.Group(tensors[1:] if kind in BRANCHED else tensors[-1:])


def runner(symbol: Symbol, train: bool) -> Callable[[], float]:
    """Return a function that runs a symbol once and returns the seconds it took."""
    shapes = {"x": SHAPE, **({"c": SHAPE} if "c" in symbol.list_inputs() else {})}
    arguments, _, states = symbol.infer_shape(**shapes)
    sizes = {**dict(zip(symbol.list_arguments(), arguments)), **dict(zip(symbol.list_auxiliary_states(), states))}
    inputs = [mx.nd.random.normal(shape=sizes[name]) for name in symbol.list_inputs()]
    for name, array in zip(symbol.list_inputs(), inputs):
        if name not in ("c", *symbol.list_auxiliary_states()):
            array.attach_grad()
    operation = StockCachedOp(symbol, [("static_alloc", True), ("static_shape", True)])

    def run() -> float:
        begin = time.perf_counter()
        if train:
            with autograd.record():
                results = operation(*inputs)
            autograd.backward(results)
        else:
            operation(*inputs)
        mx.nd.waitall()
        return time.perf_counter() - begin
    return run


def nanoseconds(kind: str, train: bool, blocked: bool) -> list[float]:
    """Return what an operator costs per FP32 byte that it reads and writes, in FP32 and in low precision."""
    runs = [[runner(graph(kind, dtype, copies, blocked), train) for copies in (FEW, MANY)] for dtype in (FP32, LOW)]
    least = [[min(times) for times in zip(*([run() for run in pair] for _ in range(ROUNDS)))] for pair in runs]
    return [1e9 * (many - few) / (MANY - FEW) / (KINDS[kind][0] * BYTES) for few, many in least]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for the operators that are named, all by default."""
    columns = [f"{layout}, {phase}" for layout in ("oneDNN's layout", "plain") for phase in ("forward", "training")]
    table = Table("operator", *columns, title="ns per FP32 byte read and written: in FP32, in bfloat16")
    for kind in argv or KINDS:
        cells = [nanoseconds(kind, train, blocked) for blocked in (True, False) for train in (False, True)]
        table.add_row(kind, *(f"{fp32:.3f}, {low:.3f}" for fp32, low in cells))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
