"""Compare what the graph passes cast with and without the choice of precisions by cost, `passes/cut_casts.py`.

    python benchmarks/cast_placement.py

For each network, the bytes of the tensors that are cast and the time that casts and movable operators take by the
measured costs of `rules/costs.py`: as one sweep from the inputs to the outputs decides, and as the minimum
cut does, which finds the least time. Parameters are left out of the bytes: they are cast once for each use, whatever is
decided.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import gluon_amp  # noqa: F401  before MXNet

# isort: split
import mxnet as mx
from gluoncv.model_zoo import get_model
from mxnet.gluon.model_zoo import vision
from rich.console import Console
from rich.table import Table

from gluon_amp._mxnet import blocks
from gluon_amp._mxnet.symbols import analyse, to_graph
from gluon_amp.graph import Entry, Graph, Role, cast_nodes
from gluon_amp.passes import Context, assign_dtypes, cut_casts, rewrite, shape_operands
from gluon_amp.rules import Policy
from gluon_amp.rules.costs import COSTS

LOW = "bfloat16"

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


class Placed(NamedTuple):
    """A network without the cut, and with it: bytes cast, and estimated milliseconds; and how many operators moved."""

    sweep: int
    cut: int
    sweep_milliseconds: float
    cut_milliseconds: float
    moved: int


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


def cast_bytes(graph: Graph, without: Sequence[str]) -> int:
    """Return the bytes of the tensors that the passes but some cast, parameters left out, after rewriting the graph."""
    rewrite(graph, Policy(LOW, disabled_passes=frozenset(without)))
    return sum(4 * prod(cast.inputs[0].shape or (0,)) for cast in cast_nodes(graph)
               if not _is_parameter(cast.inputs[0]) and cast.role is Role.CAST)


def _is_parameter(entry: Entry) -> bool:
    return entry.node.is_variable and not entry.node.name.startswith("data")


def measure(name: str) -> Placed:
    """Return what is cast in a network of :data:`NETWORKS`."""
    net, shape = NETWORKS[name]()
    sweep = cast_bytes(analysed(net, shape), without=("cut_casts", "align_channels"))
    cut = cast_bytes(analysed(net, shape), without=("align_channels",))
    graph = analysed(net, shape)
    context = Context.of(graph, Policy(LOW))
    shape_operands.run(graph, context)
    assign_dtypes.run(graph, context)
    placement = cut_casts.Choice(graph, context, COSTS[LOW]).placement
    before = placement.cost(placement.low)
    moved = sum(len(gain.operators) for gain in placement.gains())
    saved = sum(gain.saved for gain in placement.gains())
    return Placed(sweep, cut, before / 1e6, (before - saved) / 1e6, moved)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for the networks that are named, all by default."""
    table = Table("network", "MB cast: sweep", "cut", "estimated ms: sweep", "cut", "ratio", "operators moved",
                  title="Activations cast (FP32 bytes), and a training step's casts and movable operators")
    for name in argv or NETWORKS:
        found = measure(name)
        table.add_row(name, f"{found.sweep / 1e6:.2f}", f"{found.cut / 1e6:.2f}", f"{found.sweep_milliseconds:.1f}",
                      f"{found.cut_milliseconds:.1f}",
                      f"{found.sweep_milliseconds / found.cut_milliseconds:.2f}x", str(found.moved))
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
