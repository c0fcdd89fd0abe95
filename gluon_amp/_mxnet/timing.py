"""Time functions in turns, and an operator by itself, forward and backward."""
from __future__ import annotations

import time
from statistics import median
from typing import Callable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet import autograd

from ..dtypes import FLOAT32
from ..graph import VARIABLE, Entry, Graph, Node
from .arrays import cast_arrays
from .invoke import StockCachedOp


def time_in_both(op: str, attrs: Mapping[str, str], shapes: Sequence[tuple[int, ...]], low: str, training: bool,
                 rounds: int, device: mx.Context, of: Callable[[Sequence[float]], float] = median
                 ) -> tuple[float, float]:
    """Return an operator's median time in FP32 and in low precision, or its least one, measured in turns."""
    random = np.random.RandomState(0)  # MXNet's own numbers are the program's
    arrays = [mx.nd.array(random.normal(scale=0.1, size=shape), ctx=device, dtype=FLOAT32) for shape in shapes]
    runs = [_prepared(op, attrs, arrays, dtype, training) for dtype in (FLOAT32, low)]
    fp32, lower = interleaved(runs, rounds, of=of)
    return fp32, lower


def interleaved(runs: Sequence[Callable[[], object]], rounds: int, warm_up: int = 1,
                of: Callable[[Sequence[float]], float] = median) -> list[float]:
    """Run functions in turns; return the median milliseconds of each, or their least, without those of the warm-up."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(warm_up + rounds):
        for run, kept in zip(runs, times):
            begin = time.perf_counter()
            run()
            if number >= warm_up:
                kept.append((time.perf_counter() - begin) * 1e3)
    return list(map(of, times))


def _prepared(op: str, attrs: Mapping[str, str], arrays: Sequence[mx.nd.NDArray], dtype: str,
              training: bool) -> Callable[[], None]:
    inputs = [cast_arrays(arrays[0], dtype), *(array.copy() for array in arrays[1:])]
    if training:
        for array in inputs:
            array.attach_grad()
    return _call_of(_symbol(op, attrs, len(arrays), dtype), inputs, training)


def _call_of(symbol: mx.sym.Symbol, inputs: Sequence[mx.nd.NDArray], training: bool) -> Callable[[], None]:
    cached = StockCachedOp(symbol, [("static_alloc", True), ("static_shape", True)])

    def run() -> None:
        if training:
            with autograd.record():
                results = cached(*inputs)
            autograd.backward(results if isinstance(results, list) else [results])
        else:
            cached(*inputs)
        mx.nd.waitall()
    return run


def _symbol(op: str, attrs: Mapping[str, str], count: int, dtype: str) -> mx.sym.Symbol:
    variables = [Node(VARIABLE, f"input{position}") for position in range(count)]
    entries = [Entry(variables[0])]
    for variable in variables[1:]:
        cast = Node("amp_cast", f"{variable.name}_cast", {"dtype": dtype}, [Entry(variable)])
        entries.append(Entry(variable if dtype == FLOAT32 else cast))
    graph = Graph([Entry(Node(op, "measured", dict(attrs), entries))], {"mxnet_version": ["int", 10901]})
    return mx.sym.load_json(graph.to_json())
