"""Differentiate operators in memory full of large numbers, and look for gradients that nobody wrote.

    python tests/helpers/gradient_sweep.py --part 0 --parts 2 --dtype float32 [--all]

Each operator runs behind and before others, outside of graphs and in them, for all gradients and for each alone. A line
of JSON tells of each finding; run it in the environment that ``environment`` gives.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import warnings
import zlib

import gluon_amp as amp  # isort: skip
import mxnet as mx
import numpy as np
from gradient_samples import IN_INFERENCE, SAMPLES
from mxnet import autograd
from operator_samples import LOW, fill

from gluon_amp._mxnet.invoke import invoke
from gluon_amp._mxnet.symbols import dtype_name
from gluon_amp.graph import VARIABLE, Entry, Graph, Node

BEFORE = ("", "_mul_scalar", "shared")
BEHIND = ("", "amp_cast", "_copy", "elemwise_mul", "FullyConnected")
WAYS = ("eager", "graph", "static")
LARGE = 1e25  # what memory is full of is larger


def environment():
    """Return variables that make glibc fill the memory that it hands out with large numbers."""
    return {**os.environ, "MALLOC_PERTURB_": "128", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
            "OMP_NUM_THREADS": "1"}


class Case:
    """A sample, the operators around it, and the values of all variables."""

    def __init__(self, item, dtype):
        self.item, self.constants = item, {}
        self.values = {f"x{i}": fill(each, dtype, f"{item.op} {i}") for i, each in enumerate(item.inputs)}
        self.asked = [f"x{i}" for i, each in enumerate(item.inputs)
                      if not each.aux and each.kind in (LOW, "float32") and each.values != "valid:"]
        made = invoke(item.op, [array(one) for one in self.values.values()], item.attrs_in("float32"))
        self.shapes = {i: one.shape for i, one in enumerate(made) if dtype_name(one.dtype) == "float32"}
        self.outputs = len(made)

    def graph(self, before="", behind="", read=None):
        """Return a graph of the operator between others, in which some outputs are read."""
        self.constants = {}
        inputs = [self._before(before, i) for i in range(len(self.item.inputs))]
        node = Node(self.item.op, "op", self.item.attrs_in("float32"), inputs, max(self.outputs, 1))
        heads = [self._behind(behind, Entry(node, i), i) for i in self.shapes if read is None or i in read]
        if before == "shared":
            heads += [_op("_mul_scalar", f"other{i}", one, scalar=2.0) for i, one in enumerate(inputs)
                      if f"x{i}" in self.asked]
        return Graph(heads, {"mxnet_version": ["int", 10901]})

    def _constant(self, name, value):
        self.constants[name] = value.astype(np.float32)
        return Entry(Node(VARIABLE, name))

    def _before(self, kind, i):
        variable = Entry(Node(VARIABLE, f"x{i}"))
        is_read = kind == "_mul_scalar" and f"x{i}" in self.asked
        return _op(kind, f"before{i}", variable, scalar=1.0) if is_read else variable

    def _behind(self, kind, entry, i):
        shape, draw, name = self.shapes[i], np.random.RandomState(i), f"behind{i}"
        if not shape or not all(shape):
            return entry
        if kind == "amp_cast":
            return _op(kind, f"{name}_back", _op(kind, name, entry, dtype="float16"), dtype="float32")
        if kind == "_copy":
            return _op(kind, name, entry)
        if kind == "elemwise_mul":
            return _op(kind, name, entry, self._constant(f"factor{i}", draw.normal(size=shape)))
        if kind == "FullyConnected" and len(shape) > 1:
            width = int(np.prod(shape[1:]))
            return _op(kind, name, entry, self._constant(f"weight{i}", draw.normal(size=(16, width)) * width ** -0.5),
                       num_hidden=16, no_bias=True)
        return entry


def _op(kind, name, *inputs, **attrs):
    return Entry(Node(kind, name, {key: str(value) for key, value in attrs.items()}, list(inputs)))


def array(value):
    return mx.nd.array(value, dtype=value.dtype)


def interpreted(graph, arrays):
    """Run a graph as code that is not hybridized would."""
    made = {}
    for node in graph.nodes():
        made[id(node)] = ([arrays[node.name]] if node.is_variable else
                          invoke(node.op, [made[id(one.node)][one.output] for one in node.inputs], node.attrs))
    return [made[id(head.node)][head.output] for head in graph.heads]


def caller(graph, arrays, way):
    """Return a function that runs a graph outside of graphs, or as a hybridized network does."""
    if way == "eager":
        return lambda: interpreted(graph, arrays)
    symbol = mx.sym.load_json(graph.to_json())
    names = symbol.list_inputs()
    cached = mx.nd.CachedOp(symbol, [("static_alloc", way == "static"), ("data_indices", tuple(range(len(names)))),
                                     ("param_indices", [])])

    def call():
        made = cached(*(arrays[name] for name in names))
        return made if isinstance(made, list) else [made]
    return call


def gradients(case, graph, way, asked, request="write", trains=True):
    """Return outputs and gradients, those of the second run; they start from 1."""
    arrays = {name: array(one) for name, one in {**case.values, **case.constants}.items()}
    slopes = {name: mx.nd.ones(arrays[name].shape) for name in asked}
    autograd.mark_variables([arrays[name] for name in asked], list(slopes.values()), request)
    call = caller(graph, arrays, way)
    for _ in range(2):
        for one in slopes.values():
            one[:] = 1
        with autograd.record(train_mode=trains):
            made = call()
        autograd.backward(made, [array(np.random.RandomState(i).normal(size=one.shape).astype(np.float32))
                                 for i, one in enumerate(made)])
    found = {name: one.asnumpy() - (request == "add") for name, one in slopes.items()}
    return {**found, **{f"output {i}": one.asnumpy() for i, one in enumerate(made)}}


def faults(expected, found):
    """Say what is not written."""
    for name, one in found.items():
        wanted = expected[name]
        if not np.isfinite(one[np.isfinite(wanted)]).all():
            yield f"{name} is not finite"
        elif np.abs(one).max(initial=0) > LARGE > np.abs(wanted).max(initial=0):
            yield f"{name} is whatever was in memory"


def combinations(item, several, everything):
    """Yield what is before and behind, how it runs, what is asked for, and how; some of all unless all are wanted."""
    every = list(itertools.product(BEFORE, BEHIND, WAYS, ("write", "add"), range(several)))
    if everything:
        return every
    order = np.random.RandomState(zlib.crc32(f"{item.op}{item.condition}".encode())).permutation(len(every))
    picked = [every[i] for i in order]
    return [next(one for one in picked[number:] if one[4] == number % several) for number in range(max(several, 6))]


def check(item, dtype, everything, trains=True):
    """Yield what is wrong with the gradients of a sample."""
    case = Case(item, dtype)
    if not case.shapes or not case.asked:
        return
    sets = [case.asked, *([one] for one in case.asked if len(case.asked) > 1)]  # all, and each alone
    for before, behind, way, request, number in combinations(item, len(sets), everything):
        read = None if number % 2 == 0 else list(case.shapes)[:1]
        graph = case.graph(before, behind, read)
        amp.init("float32")
        expected = gradients(case, graph, "eager", case.asked, trains=trains)
        amp.deinit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            amp.init(dtype)
        found = gradients(case, graph, way, sets[number], request, trains)
        amp.deinit()
        for fault in faults(expected, found):
            yield f"before: {before}, behind: {behind}, {way}, {request}, of {sets[number]}: {fault}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ops", nargs="*")
    options = parser.parse_args()
    every = [(item, True) for item in SAMPLES] + [(item, False) for item in IN_INFERENCE]
    for number, (item, trains) in enumerate(every):
        if number % options.parts != options.part or (options.ops and item.op not in options.ops):
            continue
        print(item.op, item.condition, file=sys.stderr, flush=True)  # what a process that ends was at
        try:
            with mx.util.np_shape(item.numpy_shape):
                for fault in check(item, options.dtype, options.all, trains):
                    print(json.dumps({"fault": fault, "op": item.op, "condition": item.condition}), flush=True)
        except (mx.MXNetError, IndexError):  # some cannot be differentiated for some of their inputs
            amp.deinit()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
