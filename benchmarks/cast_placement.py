"""Compare the bytes that the graph passes cast with the fewest possible, by a minimum cut.

Operators that have to run in low precision, or in FP32, are given; the others may run in either. A tensor costs its
size once when its producer and some reader run in different precisions. Placing the others so that the sum is smallest
is a minimum cut between the two kinds; the passes of gluon_amp decide them in one sweep, each by its inputs. Parameters
are left out: they are cast once for each use, whatever is decided.

    python benchmarks/cast_placement.py
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Callable, Mapping, Sequence

import gluon_amp  # noqa: F401  before MXNet

# isort: split
import mxnet as mx
import numpy as np
from gluoncv.model_zoo import get_model
from mxnet.gluon.model_zoo import vision
from rich.console import Console
from rich.table import Table
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from gluon_amp._mxnet import blocks
from gluon_amp._mxnet.symbols import analyse, to_graph
from gluon_amp.graph import Entry, Graph, Node
from gluon_amp.op_lists import FP32, KEEP, LOWER
from gluon_amp.passes import place_casts, rewrite, shape_operands
from gluon_amp.passes.assign_dtypes import run as assign_dtypes
from gluon_amp.policy import Policy

LOW = "bfloat16"
UNIT = 256  # bytes: capacities are 32-bit integers
INFINITE = 2**30

NETWORKS: Mapping[str, Callable[[], tuple[Any, tuple[int, ...]]]] = {
    "resnet50_v1": lambda: (vision.resnet50_v1(), (1, 3, 224, 224)),
    "mobilenet_v2": lambda: (vision.mobilenet_v2_1_0(), (1, 3, 224, 224)),
    "mobilenetv3_large": lambda: (get_model("mobilenetv3_large", pretrained=False), (1, 3, 224, 224)),
    "densenet121": lambda: (vision.densenet121(), (1, 3, 224, 224)),
    "inceptionv3": lambda: (vision.inception_v3(), (1, 3, 299, 299)),
    "yolo3_darknet53": lambda: (
        get_model("yolo3_darknet53_coco", pretrained=False, pretrained_base=False), (1, 3, 416, 416)),
    "ssd_512_resnet50_v1": lambda: (
        get_model("ssd_512_resnet50_v1_coco", pretrained=False, pretrained_base=False), (1, 3, 512, 512)),
}


def analysed(net: Any, shape: tuple[int, ...]) -> Graph:
    """Return a network's graph with the types and shapes of all tensors."""
    net.initialize(mx.init.Uniform())
    net(mx.nd.zeros(shape))
    traced = blocks.trace(net)
    arrays = blocks.parameters_of(net, traced.symbol.list_inputs())
    graph = to_graph(traced.symbol)
    shapes = {**{name: array.shape for name, array in arrays.items()}, traced.inputs[0].name: shape}
    analyse(traced.symbol, graph, dict.fromkeys(shapes, "float32"), shapes)
    return graph


def placed(graph: Graph) -> int:
    """Return the bytes of the tensors that the passes cast, parameters left out, after rewriting the graph."""
    pipeline = [shape_operands.run, assign_dtypes, place_casts.run]
    rewrite(graph, Policy(LOW), pipeline=pipeline)
    return sum(_bytes(cast.inputs[0]) for cast in place_casts.cast_nodes(graph)
               if not _is_parameter(cast.inputs[0]) and cast.decision is None)


def fewest(graph: Graph) -> int:
    """Return the smallest number of bytes cast, over all placements of the operators that may run in either."""
    nodes = graph.operators()
    low, fp32 = 0, 1
    number = {id(node): position for position, node in enumerate(nodes, start=2)}
    edges: list[tuple[int, int, int]] = []
    readers: dict[tuple[int, int], tuple[Entry, list[int]]] = {}
    for node in nodes:
        side = _fixed(node)
        if side is not None:
            one, other = (low, number[id(node)]) if side == LOW else (number[id(node)], fp32)
            edges.append((one, other, INFINITE))
        for entry in node.inputs:
            if _counts(entry, graph):
                readers.setdefault(entry.key, (entry, []))[1].append(number[id(node)])
    for head in graph.heads:
        readers.setdefault(head.key, (head, []))[1].append(fp32)
    free = len(nodes) + 2
    for entry, reading in readers.values():
        producer = number.get(id(entry.node), fp32)  # data comes in FP32
        size, down, up = -(-_bytes(entry) // UNIT), free, free + 1
        free += 2
        edges += [(producer, down, size), (up, producer, size)]
        edges += [edge for reader in reading for edge in ((down, reader, INFINITE), (reader, up, INFINITE))]
    rows, columns, sizes = (np.array(part, dtype=np.int32) for part in zip(*edges))
    matrix = csr_matrix((sizes, (rows, columns)), shape=(free, free), dtype=np.int32)
    return int(maximum_flow(matrix, low, fp32).flow_value) * UNIT


def _fixed(node: Node) -> str | None:
    """Return the precision that an operator has to run in, None when it may run in either."""
    if node.decision.rule == LOWER:
        return LOW
    return "float32" if node.decision.rule in (FP32, KEEP) else None


def _counts(entry: Entry, graph: Graph) -> bool:
    return not _is_parameter(entry) and entry.node.dtypes[entry.output] == "float32"


def _is_parameter(entry: Entry) -> bool:
    return entry.node.is_variable and not entry.node.name.startswith("data")


def _bytes(entry: Entry) -> int:
    return 4 * prod(entry.shape or (0,))


def measure(name: str) -> tuple[int, int]:
    """Return the bytes cast by the passes, and the fewest possible, for a network of :data:`NETWORKS`."""
    net, shape = NETWORKS[name]()
    graph = analysed(net, shape)
    cast = placed(graph)
    again = analysed(net, shape)
    rewrite(again, Policy(LOW), pipeline=[shape_operands.run, assign_dtypes])
    return cast, fewest(again)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for the networks that are named, all by default."""
    table = Table("network", "MB cast by the passes", "fewest possible", "ratio", title="Activations cast, FP32 bytes")
    for name in argv or NETWORKS:
        cast, least = measure(name)
        table.add_row(name, f"{cast / 1e6:.2f}", f"{least / 1e6:.2f}", f"{cast / least:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
