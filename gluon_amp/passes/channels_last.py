"""Let chains of convolutions train with the channels last, in C++, where MXNet has no good kernels for them.

::

    clip(BatchNorm(Convolution(x, w), ...), 0, 6)
    ->   nchw(_gluon_amp_batch_norm(_gluon_amp_convolution(nhwc(x), w), ..., a_min=0, a_max=6))

MXNet runs convolutions and BatchNorm in oneDNN's own layouts, and hands plain arrays to all other operators: three
times a map is written again forward and backward for each ``clip``. Operators in C++ whose maps are NHWC need none of
that, and BatchNorm takes the limits along. Where a chain begins and ends maps are transposed.

Behind convolutions in groups that are no whole blocks of 16 channels, MXNet's oneDNN runs BatchNorm by loops of
reference where the CPU has AVX512, and BatchNorm of such channels on plain arrays: chains with those are NHWC, too.
Without AVX512 it has no kernels for convolutions of odd channels, nor for large depthwise ones, as in NASNet.

A chain is of one type: FP32, or bfloat16 where that is the low-precision type and not imitated. Its weights stay FP32:
the operators round them. An operator that goes along with its data, or was kept in FP32 for its few channels alone,
joins a chain in bfloat16 where nothing but the chain reads it. MXNet transposes in FP32 only, so that casts come before
and behind: a transposition has to save more there.

Whether a chain is NHWC follows from what its operators cost, by a table for every machine.
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod
from typing import Callable, NamedTuple, Sequence

from ..dtypes import AVX2_VALUES, BFLOAT16, FLOAT32
from ..graph import Consumers, Entry, Graph, Node, operator, redirect
from ..graph.attrs import integer, integers, is_channels_last, is_set
from ..rules import LOWER, NEUTRAL, WIDEST, Cause
from ..rules.shapes import BLOCK, has_avx2_kernel, pools_to_means
from .activations import HARD_SWISH
from .context import Context
from .precisions import plan_outputs, propagate_dtypes, unknown_forward

_BATCH_NORM, _MEANS = "_gluon_amp_batch_norm", "_gluon_amp_channel_means"


# The operators in C++ that take NHWC, and their inputs that stay FP32 in low precision, where the rule does not say it.
_IN_CPP = {"Convolution": "_gluon_amp_convolution", "BatchNorm": _BATCH_NORM, "Pooling": _MEANS,
           **dict.fromkeys(("broadcast_mul", "_npi_multiply"), "_gluon_amp_scale_channels")}
_FP32_INPUTS = {"Convolution": (1, 2), "broadcast_mul": (1,), "_npi_multiply": (1,)}
NATIVE = frozenset(_IN_CPP.values())
_LIKE_CLIP = ("clip", HARD_SWISH)
_LIMITS = ("clip", "relu", "Activation")  # of which Activation is a rectifier
_ELEMENTWISE = (*_LIMITS, "elemwise_add", HARD_SWISH)


class _Costs(NamedTuple):
    """The cost of a value of a map in MXNet beyond that in a chain, in units of handing one to a chain."""

    transposition: float = 1  # where a chain begins or ends; with casts in bfloat16
    by_reference: float = 10  # BatchNorm by oneDNN's reference loops: 77 ms in place of 4 for a map of ResNeXt-50
    partial: float = 1  # BatchNorm, or a depthwise convolution, of channels that are no whole blocks
    clip: float = 1
    by_product: float = 0  # convolutions that oneDNN has no kernel for, and computes as products of matrices
    convolution: float = 0  # others


# Without AVX512 oneDNN has kernels behind convolutions in groups, but none for odd channels and large depthwise ones:
# 3 to 34 ns a value and layer more than in C++ on an AMD EPYC, where others take 3 ns less, a transposition 1.5 ns.
_COSTS = {FLOAT32: _Costs(), BFLOAT16: _Costs(transposition=2)}
_COSTS_OF_AVX2 = _Costs(clip=5, by_product=8, convolution=-2)
_NHWC, _NCHW = (0, 2, 3, 1), (0, 3, 1, 2)  # the axes of a map with the channels last, and first again


def trains_in_cpp(context: Context) -> bool:
    """Tell whether training in FP32 or bfloat16 is about to run on a CPU with operators in C++."""
    return (context.facts.trains and context.facts.recorded and context.target in _COSTS and not context.device.imitated
            and context.native is not None)


def channels_last(graph: Graph, context: Context) -> int:
    """Put operators in C++ in the place of convolutions and BatchNorm in chains that gain; return how many."""
    consumers = Consumers(graph)
    chains = [chain for chain in _chains(_members(graph, consumers, context)) if _gains(chain, consumers, context)]
    if not chains or not all(map(context.runs_natively, NATIVE)):
        return 0
    count = sum(_to_nhwc(graph, chain, consumers, context) for chain in chains)
    propagate_dtypes(graph, context)
    return count


def _members(graph: Graph, consumers: Consumers, context: Context) -> list[Node]:
    """Return the operators that can run with the channels last, in the target type or brought to it, in order."""
    unknown = unknown_forward(graph)
    fitting = [node for node in graph.operators()
               if _fits(node, consumers) and not any(entry.node in unknown for entry in node.inputs[:2])]
    members = {id(node) for node in fitting if Entry(node).dtype == context.target}
    for node in reversed(fitting):
        if id(node) not in members and _is_free(node) and not _leaves(node, members, consumers):
            members.add(id(node))
    return [node for node in fitting if id(node) in members]


def _is_free(node: Node) -> bool:
    """Tell whether an operator in FP32 is so for its data, or for speed in another layout, and may be lowered."""
    decision = node.decided
    return decision.safe and (decision.rule in (NEUTRAL, WIDEST) or decision.cause is Cause.CHANNELS)


def _fits(node: Node, consumers: Consumers) -> bool:
    """Tell whether an operator can run with the channels last: on images, which are FP32 in the program."""
    if not all(len(shape or ()) == 4 for shape in node.shapes[:1]) or any(dtype != FLOAT32 for dtype in node.dtypes):
        return False
    data = node.inputs[0] if node.inputs else None
    if data is None or len(data.shape or ()) != 4:
        return False
    if node.op == "Convolution":  # the gradient of the data is always computed: that of an image is of no use
        return (not data.node.is_variable and not is_channels_last(node.attrs)
                and len(integers(node.attrs, "kernel")) == 2)
    if node.op == "BatchNorm":
        return (integer(node.attrs, "axis", 1) == 1 and not is_set(node.attrs, "use_global_stats")
                and consumers.is_first_only(node))
    if node.op == "Pooling":
        return pools_to_means(node.attrs)
    if node.op in _IN_CPP:
        return node.shapes[0] == data.shape and node.inputs[1].shape == (*(data.shape or ())[:2], 1, 1)
    return (node.op in _ELEMENTWISE and node.attrs.get("act_type", "relu") == "relu"
            and all(entry.shape == data.shape for entry in node.inputs))


def _chains(members: list[Node]) -> list[list[Node]]:
    """Return the groups of members that hand maps to one another, each in the graph's order."""
    chain_of: dict[int, list[Node]] = {}
    for node in members:
        chain = chain_of[id(node)] = [node]
        for entry in _maps(node):
            other = chain_of.get(id(entry.node), chain)
            if other is not chain and _gives_map(entry.node):
                longer, shorter = (other, chain) if len(other) >= len(chain) else (chain, other)
                longer += shorter
                chain_of.update((id(each), longer) for each in shorter)
                chain = longer
    chains: dict[int, list[Node]] = defaultdict(list)
    for node in members:
        chains[id(chain_of[id(node)])].append(node)
    return list(chains.values())


def _maps(node: Node) -> list[Entry]:
    """Return the inputs of a member that are maps."""
    return node.inputs if node.op in _ELEMENTWISE else node.inputs[:1]


def _gives_map(node: Node) -> bool:
    """Tell whether a member gives a map with the channels last; means lie as MXNet's do."""
    return node.op not in ("Pooling", _MEANS)


def _gains(chain: list[Node], consumers: Consumers, context: Context) -> bool:
    """Tell whether maps that are transposed cost less than what MXNet has no good kernels for."""
    multiple = context.device.channel_multiple or 0
    inside = {id(node) for node in chain}
    costs = _COSTS_OF_AVX2 if multiple == AVX2_VALUES else _COSTS[context.target]
    transposed = [entry.shape for node in chain for entry in _maps(node) if not _is_nhwc(entry, inside)]
    transposed += [node.shapes[0] for node in chain if _leaves(node, inside, consumers)]
    lacks_kernels = multiple >= BLOCK and any(_groups(node) > 1 for node in chain)
    saved = sum(_saved(node, lacks_kernels, costs) * prod(node.shapes[0] or ()) for node in chain)
    return saved > costs.transposition * sum(prod(shape or ()) for shape in transposed)


def _saved(node: Node, lacks_kernels: bool, costs: _Costs) -> float:
    """Return what a value of a member's map costs less in C++."""
    if node.op in _LIKE_CLIP:
        return costs.clip
    cost = 0.0
    if node.op == "Convolution":
        cost = costs.by_product if _lacks_kernel(node) else costs.convolution
    if not lacks_kernels:
        return cost
    groups = _groups(node.inputs[0].node)
    if node.op == "BatchNorm" and 1 < groups < _channels(node) and _channels(node) // groups % BLOCK:
        return costs.by_reference
    is_partial = _channels(node) % BLOCK > 0 and (node.op == "BatchNorm" or _groups(node) == _channels(node))
    return cost + costs.partial * is_partial


def _lacks_kernel(node: Node) -> bool:
    """Tell whether oneDNN has no kernel for a convolution without AVX512.

    Large depthwise ones have one for the forward pass only, and pointwise ones are good products of matrices.
    """
    side, is_depthwise = max(integers(node.attrs, "kernel")), _groups(node) == _channels(node)
    if has_avx2_kernel(node.attrs, node.inputs[0].shape, node.shapes[0]):
        return is_depthwise and side > 3
    return is_depthwise or side > 1


def _channels(node: Node) -> int:
    return (node.shapes[0] or (0, 0))[1]


def _groups(node: Node) -> int:
    return integer(node.attrs, "num_group", 1) if node.op == "Convolution" else 1


def may_gain(graph: Graph) -> bool:
    """Tell whether a graph has convolutions, and operators for which chains of them may gain."""
    operators = graph.operators()
    ops = {node.op for node in operators}
    return "Convolution" in ops and (not ops.isdisjoint(("BatchNorm", "clip"))
                                     or any(_groups(node) > 1 for node in operators))


def _is_nhwc(entry: Entry, inside: set[int]) -> bool:
    return id(entry.node) in inside and _gives_map(entry.node)


def _leaves(node: Node, inside: set[int], consumers: Consumers) -> bool:
    entry = Entry(node)
    is_read = consumers.is_head(entry) or any(id(consumer) not in inside for consumer in consumers.of(entry))
    return is_read and _gives_map(node)


def _to_nhwc(graph: Graph, chain: list[Node], consumers: Consumers, context: Context) -> int:
    """Let the maps of a chain be NHWC; return how many operators run in C++ then."""
    inside = {id(node) for node in chain}
    _back_to_nchw(graph, [node for node in chain if _leaves(node, inside, consumers)], inside, context)
    for node in chain:
        if context.policy.lowers:
            _lower(node, context)
        count = len(_maps(node))
        maps = [entry if _is_nhwc(entry, inside) else
                _transposed(graph, entry, _NHWC, _nhwc(entry.shape), context) for entry in node.inputs[:count]]
        node.inputs = [*maps, *node.inputs[count:]]
        if _gives_map(node):
            node.shapes = [_nhwc(node.shapes[0]), *node.shapes[1:]]
        if node.op in _IN_CPP:
            node.replaced, node.op = node.op, _IN_CPP[node.op]
    fuse_add(graph, chain, consumers, _BATCH_NORM, _limits_of)
    return sum(node.op in NATIVE for node in chain)


def _lower(node: Node, context: Context) -> None:
    """Let a member of a chain take its data in low precision, and its parameters in FP32."""
    decision = node.decided
    if Entry(node).dtype == FLOAT32:
        decision = replace(decision, cause=Cause.LAYOUT, note=f"in {context.target} rather than {FLOAT32}: "
                                                              "so are those that it has the channels last with")
    node.decision = replace(decision, rule=LOWER, fp32_inputs=_FP32_INPUTS.get(node.op, decision.fp32_inputs))
    plan_outputs(node, context)


def _back_to_nchw(graph: Graph, nodes: list[Node], inside: set[int], context: Context) -> None:
    """Let users outside of a chain, and the graph's outputs, have maps of these nodes as they were."""
    ends = {Entry(node).key: _transposed(graph, Entry(node), _NCHW, node.shapes[0], context) for node in nodes}
    for node in graph.nodes():
        if id(node) not in inside:
            node.inputs = [ends.get(entry.key, entry) for entry in node.inputs]
    graph.heads = [ends.get(head.key, head) for head in graph.heads]


def fuse_add(graph: Graph, nodes: Sequence[Node], consumers: Consumers, op: str,
             limits_of: Callable[[Node, Node], dict[str, str]]) -> None:
    """Fuse a sum, and a clip or rectifier, into the operator in C++ whose only user it is.

    ``limits_of`` takes the operator and its user, and returns attributes that stand for the latter's limits; none if
    it has no limits, or the operator cannot set them.
    """
    moved: dict[tuple[int, int], Entry] = {}
    for node in nodes:
        for position, entry in enumerate(node.inputs[:2]):
            source = moved.get(entry.key, entry).node
            if source.op != op or not consumers.is_read_once(entry):
                continue
            others = [other for at, other in enumerate(node.inputs) if at != position]
            if node.op != "elemwise_add":
                taken = limits_of(source, node)
            elif "adds" not in source.attrs and "a_min" not in source.attrs and (
                    position == 0 or _is_behind(source, others[0].node)):
                taken = {"adds": "True"}
            else:
                taken = {}
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


def _limits_of(batch_norm: Node, node: Node) -> dict[str, str]:
    """Return the limits of a ``clip`` or rectifier, of which BatchNorm sets one."""
    if node.op not in _LIMITS or "a_min" in batch_norm.attrs:
        return {}
    if node.op == "clip":
        return {name: node.attrs[name] for name in ("a_min", "a_max")}
    return {"a_min": "0", "rectifies": "True"}


def _transposed(graph: Graph, entry: Entry, axes: tuple[int, ...], shape: tuple[int, ...] | None,
                context: Context) -> Entry:
    """Return a map with its axes in another order, and the shape that it has then; in FP32."""
    made = operator("transpose", graph.new_name(f"{entry.node.name}_turned"), [entry], entry, axes=axes)
    made.dtypes, made.shapes = [FLOAT32], [shape]
    made.decision = context.decide(made.op, made.attrs, entry.shape)
    return Entry(made)


def _nhwc(shape: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple((shape or ())[axis] for axis in _NHWC)
