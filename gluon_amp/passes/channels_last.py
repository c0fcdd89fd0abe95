"""Train image networks by the kernels that cost least: MXNet's, or in C++ with the channels last.

::

    clip(BatchNorm(Convolution(x, w), ...), 0, 6)
    ->   nchw(_gluon_amp_batch_norm(_gluon_amp_convolution(nhwc(x), w), ..., a_min=0, a_max=6))

MXNet runs convolutions and BatchNorm in oneDNN's own layouts, and hands plain arrays to all other operators: three
times a map is written again forward and backward for each ``clip``. It has loops of reference only for BatchNorm of
channels that are no whole blocks, and without AVX512 for convolutions of odd channels and large depthwise ones.
Operators in C++ whose maps are NHWC need none of that, and BatchNorm takes the limits along. Channels are joined and
cut on the last axis. Where a chain begins and ends maps are transposed.

Weights stay FP32 in bfloat16: the operators round them. MXNet transposes in FP32 only, so that casts come before and
behind. Which operators run so, and in which type, is chosen by cost (:mod:`~gluon_amp.passes.kernels`).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from ..graph import Consumers, Entry, Graph, Node, operator, redirect
from ..machine.dtypes import FLOAT32
from ..rules import FP32, LOWER, Cause, Decision
from .context import Context
from .kernels import AXES, BATCH_NORM, IN_CPP, NATIVE, candidates, choose, gives_map, is_within, maps_of
from .precisions import plan_outputs, propagate_dtypes

# Inputs that stay FP32 in low precision, where the rule does not say it.
_FP32_INPUTS = {"Convolution": (1, 2), "broadcast_mul": (1,), "_npi_multiply": (1,)}
_NHWC, _NCHW = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of a map with the channels last, and first again


def channels_last(graph: Graph, context: Context) -> int:
    """Run image networks by the kernels that cost least; return how many operators run in C++."""
    consumers = Consumers(graph)
    nodes = candidates(graph, consumers)
    kernels = choose(nodes, consumers, context)
    nhwc = [node for node in nodes if kernels[id(node)].nhwc]
    if nhwc and not all(map(context.runs_natively, NATIVE)):  # loads oneDNN
        return 0
    for node in nodes if context.policy.lowers else ():
        kernel = kernels[id(node)]
        if kernel.low and kernel.nhwc:
            _lower(node, context)
        elif not kernel.low and Entry(node).dtype != FLOAT32:
            node.decision = Decision(FP32, Cause.DEVICE, f"its kernels in {FLOAT32} are the faster ones on this device")
            plan_outputs(node, context)
    count = _to_nhwc(graph, nhwc, consumers, context) if nhwc else 0
    propagate_dtypes(graph, context)
    return count


def _others(node: Node, inside: set[int]) -> list[Entry]:
    """Return the inputs of a node that are not maps of the chain."""
    return node.inputs[len(maps_of(node)) if id(node) in inside else 0:]


def _to_nhwc(graph: Graph, chain: list[Node], consumers: Consumers, context: Context) -> int:
    """Let the maps of a chain be NHWC; return how many operators run in C++ then."""
    inside = {id(node) for node in chain}
    # Outputs of the graph, and maps that are read as something else than a map of the chain, as factors, leave it.
    outside = {entry.key for node in graph.nodes() for entry in _others(node, inside)}
    ends = {Entry(node).key: _transposed(graph, Entry(node), _NCHW, node.shapes[0], context) for node in chain
            if gives_map(node) and (Entry(node).key in outside or consumers.is_head(Entry(node)))}
    for node in graph.nodes():
        others = _others(node, inside)
        node.inputs = [*node.inputs[:len(node.inputs) - len(others)], *(ends.get(each.key, each) for each in others)]
    graph.heads = [ends.get(head.key, head) for head in graph.heads]
    for node in chain:
        maps = [entry if is_within(entry, inside) else
                _transposed(graph, entry, _NHWC, _nhwc(entry.shape), context) for entry in maps_of(node)]
        node.inputs = [*maps, *_others(node, inside)]
        if gives_map(node):
            node.shapes = [_nhwc(node.shapes[0]), *node.shapes[1:]]
        if node.op in AXES:
            node.attrs = {**node.attrs, AXES[node.op]: str(_NHWC.index(1))}
        if node.op in IN_CPP:
            node.replaced, node.op = node.op, IN_CPP[node.op]
    fuse_add(graph, chain, consumers, BATCH_NORM)
    return sum(node.op in NATIVE for node in chain)


def _lower(node: Node, context: Context) -> None:
    """Let a member of a chain take its data in low precision, and its parameters in FP32."""
    decision = node.decided
    if Entry(node).dtype == FLOAT32:
        decision = replace(decision, cause=Cause.LAYOUT, note=f"in {context.target} rather than {FLOAT32}: "
                                                              "so are those that it has the channels last with")
    node.decision = replace(decision, rule=LOWER, fp32_inputs=_FP32_INPUTS.get(node.op, decision.fp32_inputs))
    plan_outputs(node, context)


def fuse_add(graph: Graph, nodes: Sequence[Node], consumers: Consumers, op: str) -> None:
    """Fuse a sum, and a clip or rectifier, into the operator in C++ whose only user it is."""
    moved: dict[tuple[int, int], Entry] = {}
    for node in nodes:
        for position, entry in enumerate(node.inputs[:2]):
            source = moved.get(entry.key, entry).node
            if source.op != op or not consumers.is_read_once(entry):
                continue
            others = [other for at, other in enumerate(node.inputs) if at != position]
            taken = _limits_of(source, node)
            if node.op == "elemwise_add" and "adds" not in source.attrs and "a_min" not in source.attrs and (
                    position == 0 or _is_behind(source, others[0].node)):
                taken = {"adds": "True"}
            if taken:
                source.inputs = [*source.inputs, *others]
                source.attrs = {**source.attrs, **taken}
                moved[Entry(node).key] = Entry(source)
                break
    redirect(graph, moved)


def _is_behind(node: Node, other: Node) -> bool:
    """Tell whether an operator's data comes from another's: the order of the graph's variables stays then."""
    while node.inputs and node is not other:
        node = node.inputs[0].node
    return node is other


def _limits_of(source: Node, node: Node) -> dict[str, str]:
    """Return the limits of a ``clip`` or rectifier, as attributes of the operator before it; none if it cannot."""
    rectifies = node.op == "relu" or (node.op == "Activation" and node.attrs.get("act_type") == "relu")
    if source.op != BATCH_NORM:  # a product, which rectifies sums
        return {"rectifies": "True"} if rectifies and "adds" in source.attrs and "rectifies" not in source.attrs else {}
    if "a_min" in source.attrs or not (rectifies or node.op == "clip"):
        return {}
    return {"a_min": "0", "rectifies": "True"} if rectifies else {name: node.attrs[name] for name in ("a_min", "a_max")}


def _transposed(graph: Graph, entry: Entry, axes: tuple[int, ...], shape: tuple[int, ...] | None,
                context: Context) -> Entry:
    """Return a map with its axes in another order, and the shape that it has then; in FP32."""
    made = operator("transpose", graph.new_name(f"{entry.node.name}_turned"), [entry], entry, dtypes=[FLOAT32],
                    shapes=[shape], axes=axes)
    made.decision = context.decide(made.op, made.attrs, entry.shape)
    return Entry(made)


def _nhwc(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple((shape or ())[axis] for axis in _NHWC)
