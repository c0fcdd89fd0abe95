"""Choose how the operators of image networks run: in which type, and by MXNet's kernels or in C++, channels last.

Operators that can run with the channels last are the nodes of a graph whose edges are maps. Each costs something in
each :class:`~gluon_amp.machine.costs.Kernel`, and so do the casts and transpositions between two of them. Along the
first maps of all operators, which are trees, the cheapest assignment is found exactly; at other maps by repetition.
"""
from __future__ import annotations

from math import inf, prod
from typing import Container, Mapping, NamedTuple, Sequence

from ..graph import CAST as CAST_OPERATOR
from ..graph import WISHES, Consumers, Entry, Graph, Node
from ..graph.attrs import integer, integers, is_channels_last, is_set
from ..machine.costs import CALL, CAST, KERNELS, TRANSPOSE, Kernel, Layer, Rates
from ..machine.dtypes import FLOAT32
from ..rules import LOWER, NEUTRAL, WIDEST, Cause
from ..rules.shapes import pools_to_means
from .activations import HARD_SWISH, SWISH
from .context import Context
from .precisions import unknown_forward

BATCH_NORM, _MEANS = "_gluon_amp_batch_norm", "_gluon_amp_channel_means"
_PRODUCTS = ("broadcast_mul", "_npi_multiply")
_POOLS = ("Pooling", "_contrib_AdaptiveAvgPooling2D", "mean")
# The operators in C++ that take NHWC, by what they replace.
IN_CPP: Mapping[str, str] = {"Convolution": "_gluon_amp_convolution", "BatchNorm": BATCH_NORM,
                             **dict.fromkeys(_POOLS, _MEANS), **dict.fromkeys(_PRODUCTS, "_gluon_amp_scale_channels")}
NATIVE = frozenset(IN_CPP.values())
LIMITS = ("clip", "relu", "Activation")  # of which Activation is a rectifier
_ELEMENTWISE = (*LIMITS, "elemwise_add", HARD_SWISH, SWISH)
JOIN, SLICE = "Concat", "slice_axis"  # of channels
AXES: Mapping[str, str] = {JOIN: "dim", SLICE: "axis"}  # the attribute that says of which axis
_RATES: Mapping[str, str] = {"clip": "clip", HARD_SWISH: "swish", SWISH: "swish", "elemwise_add": "add",
                             **dict.fromkeys(_POOLS, "mean"), **dict.fromkeys(_PRODUCTS, "scale")}
_SWEEPS = 4
_DOUBT = 1.1  # how many times faster than MXNet's kernels in the policy's type others have to be: rates are not exact


def candidates(graph: Graph, consumers: Consumers) -> list[Node]:
    """Return the operators that can run with the channels last, in order."""
    unknown = unknown_forward(graph)
    return [node for node in graph.operators()
            if _fits(node, consumers) and not any(
                entry.node in unknown for entry in node.inputs[:None if node.op == JOIN else 2])]


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
    if node.op in _POOLS:
        return _is_mean(node)
    if node.op in AXES:
        return (integer(node.attrs, AXES[node.op], 1) % 4 == 1
                and all(len(entry.shape or ()) == 4 for entry in node.inputs))
    if node.op in IN_CPP:
        return node.shapes[0] == data.shape and node.inputs[1].shape == (*(data.shape or ())[:2], 1, 1)
    return (node.op in _ELEMENTWISE and node.attrs.get("act_type", "relu") == "relu"
            and all(entry.shape == data.shape for entry in node.inputs))


def _is_mean(node: Node) -> bool:
    """Tell whether a pooling, or a mean, is of all pixels of each channel."""
    if node.op == "Pooling":
        return pools_to_means(node.attrs)
    return node.shapes[0] == (*(node.inputs[0].shape or ())[:2], 1, 1) and (
        node.op != "mean" or not is_set(node.attrs, "exclude"))


def _can_lower(node: Node) -> bool:
    """Tell whether C++ runs an operator in low precision that is in FP32 for its data, or for MXNet's kernels."""
    decision = node.decided
    if node.op in (*_POOLS, *_PRODUCTS):
        return decision.cause in (Cause.TABLE, Cause.SHAPE)
    return decision.safe and (decision.rule in (NEUTRAL, WIDEST) or decision.cause is Cause.CHANNELS)


def maps_of(node: Node) -> list[Entry]:
    """Return the inputs of a member that are maps."""
    return node.inputs if node.op in (*_ELEMENTWISE, JOIN) else node.inputs[:1]


def gives_map(node: Node) -> bool:
    """Tell whether a member gives a map with the channels last; means lie as MXNet's do."""
    return node.op not in (*_POOLS, _MEANS)


def is_within(entry: Entry, ids: Container[int]) -> bool:
    """Tell whether a tensor is a map that one of some operators gives, named by the ids of their nodes."""
    return id(entry.node) in ids and gives_map(entry.node)


class _Member(NamedTuple):
    """An operator to choose for."""

    node: Node
    costs: list[float]  # in each kernel, with those of its surroundings; infinite where it cannot run so
    maps: list[tuple[int, int, bool]]  # read from others: their number, values, and whether a BatchNorm gives them


def choose(nodes: Sequence[Node], consumers: Consumers, context: Context) -> dict[int, Kernel]:
    """Return the kernel of each of the :func:`candidates`, by the id of its node."""
    rates = context.device.rates
    number = {id(node): position for position, node in enumerate(nodes)}
    low, normed = _lowerable(nodes, consumers, context), _normed(nodes)
    members = [_Member(node, [_cost(node, kernel, own, number, consumers, context) if
                              _may_run(node, kernel, id(node) in low, context) else inf
                              for kernel, own in zip(KERNELS, _own_costs(node, rates))],
                       [(number[id(entry.node)], prod(entry.shape or ()), id(_behind_limit(entry)) in normed)
                        for entry in maps_of(node) if is_within(entry, number)])
               for node in nodes]
    return {id(node): KERNELS[choice] for node, choice in zip(nodes, _cheapest(members, rates))}


def _behind_limit(entry: Entry) -> Node:
    return entry.node.inputs[0].node if entry.node.op in LIMITS else entry.node


def _normed(nodes: Sequence[Node]) -> set[int]:
    """Return the ids of BatchNorm, and of sums, joins and slices of its results, which hand gradients on."""
    found: set[int] = set()
    for node in nodes:
        read = [_behind_limit(entry) for entry in node.inputs]
        found.update(id(each) for each in (node, *read) if each.op == "BatchNorm")
        if node.op in ("elemwise_add", *AXES) and any(id(each) in found for each in read):
            found.add(id(node))
    return found


def _lowerable(nodes: Sequence[Node], consumers: Consumers, context: Context) -> set[int]:
    """Return the ids of operators that may run in low precision in C++: users that want FP32 get no rounded map."""
    found: set[int] = set()
    for node in reversed(nodes) if context.policy.lowers else ():
        is_inner = not consumers.is_head(Entry(node)) and all(id(each) in found for each in consumers.of(Entry(node)))
        if Entry(node).dtype == context.target or (_can_lower(node) and is_inner):
            found.add(id(node))
    return found


def _may_run(node: Node, kernel: Kernel, can_lower: bool, context: Context) -> bool:
    """Tell whether an operator may run in a kernel."""
    is_low = context.policy.lowers and Entry(node).dtype == context.target
    if kernel.low:
        return is_low or (kernel.nhwc and can_lower)
    return not is_low or (context.device.mixes and node.decided.cause not in WISHES)


def _own_costs(node: Node, rates: Rates) -> Sequence[float]:
    """Return the cost of an operator in each kernel."""
    values, behind = prod(node.shapes[0] or ()), node.inputs[0].node
    if node.op == "Convolution":
        return rates.convolution(_layer(node))
    if node.op == "BatchNorm":
        return rates.batch_norm(values, _layer(behind if behind.op == "Convolution" else node))
    if node.op in ("relu", "Activation") and behind.op == "BatchNorm":
        return (0.0,) * len(KERNELS)  # was measured with it
    return rates.map(_RATES.get(node.op, "activation"), values if node.op in AXES else prod(node.inputs[0].shape or ()))


def predicted(node: Node, kernel: Kernel, rates: Rates) -> float:
    """Return about how many milliseconds an operator takes in training; 0.0 where shapes are unknown, or empty."""
    number, known = KERNELS.index(kernel), [shape for shape in (
        *node.shapes[:1], *(entry.shape for entry in node.inputs[:2])) if shape is not None and all(shape)]
    if len(known) < 1 + len(node.inputs[:2]):
        return 0.0
    shape, values = known[0], max(prod(each) for each in known[:2])
    if node.op in ("Convolution", "FullyConnected"):
        weight = known[2]
        layer = _layer(node) if node.op == "Convolution" else Layer((1, 1), 1, weight[1], weight[0],
                                                                    prod(shape) // weight[0])
        # Images have no gradient; a weight is moved as often as in a transposition.
        cost = rates.convolution(layer)[number] * (2 / 3 if node.inputs[0].node.is_variable else 1)
        return max(cost, rates.maps[TRANSPOSE][0] * prod(weight) / 1e6)
    if node.op in ("relu", "Activation"):
        return rates.map("activation", values)[number]
    if len(shape) > 1 and node.op in ("BatchNorm", *_PRODUCTS, *_ELEMENTWISE):
        return _own_costs(node, rates)[number]
    return rates.maps[CAST if node.op == CAST_OPERATOR else TRANSPOSE][0] * values / 1e6 + rates.maps[CALL][0]


def _layer(node: Node) -> Layer:
    """Return a convolution as the rates see it; of another operator a pointwise one that gives such a map."""
    images, after, *sides = node.shapes[0] or (1, 1, 1, 1)
    is_convolution = node.op == "Convolution"
    before = (node.inputs[0].shape or (1, 1))[1] if is_convolution else after
    return Layer(tuple(integers(node.attrs, "kernel")) if is_convolution else (1, 1),
                 integer(node.attrs, "num_group", 1), before, after, images * prod(sides))


def _cost(node: Node, kernel: Kernel, own: float, number: Mapping[int, int], consumers: Consumers,
          context: Context) -> float:
    """Return the cost of an operator, and of the maps that it takes from other operators and gives to these."""
    rates, entry = context.device.rates, Entry(node)
    if kernel != Kernel(context.policy.lowers and Entry(node).dtype == context.target, False):
        own *= _DOUBT
    given = [(prod(each.shape or ()), Kernel(each.dtype != FLOAT32, False)) for each in maps_of(node)
             if not is_within(each, number)]
    if node.op == "BatchNorm" and not kernel.nhwc and any(each.low != kernel.low for _, each in given):
        return inf  # on maps in plain layout, as casts give them, it is slow
    cost = own + sum(rates.conversion(values, each, kernel) for values, each in given)
    if not gives_map(node):
        return cost
    wanted = {Kernel(kernel.low if each.decided.rule in (NEUTRAL, WIDEST) else each.decided.rule == LOWER, False)
              for each in consumers.of(entry) if id(each) not in number and each.decision is not None}
    if consumers.is_head(entry):
        wanted.add(Kernel(False, False))
    return cost + sum(rates.conversion(prod(entry.shape or ()), kernel, each) for each in wanted)


def _cheapest(members: Sequence[_Member], rates: Rates) -> list[int]:
    """Return the number of the kernel of each member by which all cost least."""
    best: list[int] = []
    least = inf
    swept: dict[tuple[int, ...], tuple[float, list[int]]] = {}  # the cost of choices, and what a sweep makes of them
    for kernel in range(len(KERNELS)):
        choice = [kernel if member.costs[kernel] < inf else member.costs.index(min(member.costs)) for member in members]
        for _ in range(_SWEEPS):
            key = tuple(choice)
            if key not in swept:
                swept[key] = _total(members, choice, rates), _along_trees(members, choice, rates)
            total, after = swept[key]
            if total < least:
                best, least = choice, total
            choice = after
    return best


def _total(members: Sequence[_Member], choice: Sequence[int], rates: Rates) -> float:
    return sum(member.costs[mine] + sum(_edge(member, number, choice[maker], mine, rates)
                                        for number, (maker, *_) in enumerate(member.maps))
               for member, mine in zip(members, choice))


def _edge(member: _Member, number: int, given: int, mine: int, rates: Rates) -> float:
    """Return the cost of a map that comes from another member's kernel, infinite where it may not."""
    # MXNet's BatchNorm runs backward by loops of reference where its gradient comes from a transposition. Otherwise
    # what stands behind a convolution runs as it does, where it can: it was measured so.
    if given == mine:
        return 0.0
    (_, values, is_normed), before, after = member.maps[number], KERNELS[given], KERNELS[mine]
    begins = after.nhwc and not before.nhwc
    if begins and is_normed:
        return inf
    may_change = member.node.op in ("Convolution", *AXES) or number > 0 or member.costs[given] == inf or (
        begins and before.low == after.low and member.node.op == "BatchNorm")
    return rates.conversion(values, before, after) if may_change else inf


def _along_trees(members: Sequence[_Member], before: Sequence[int], rates: Rates) -> list[int]:
    """Choose exactly along each member's first map; at other maps one of both sides is as it was before."""
    costs = [{kernel: cost for kernel, cost in enumerate(member.costs) if cost < inf} for member in members]
    for position, member in enumerate(members):
        for number, (maker, *_) in enumerate(member.maps[1:], 1):
            for kernel in costs[position]:
                costs[position][kernel] += _edge(member, number, before[maker], kernel, rates)
            for kernel in costs[maker]:
                costs[maker][kernel] += _edge(member, number, kernel, before[position], rates)
    answers: list[dict[int, int]] = [{} for _ in members]  # the best kernel for each kernel of the first map's maker
    for position, member in reversed(list(enumerate(members))):  # consumers first
        of_maker = costs[member.maps[0][0]] if member.maps else {}
        for given in of_maker:
            ways = {kernel: cost + _edge(member, 0, given, kernel, rates) for kernel, cost in costs[position].items()}
            answers[position][given] = best = min(ways, key=lambda kernel: ways[kernel])
            of_maker[given] += ways[best]
    choice: list[int] = []
    for position, member in enumerate(members):
        of_own = costs[position]
        choice.append(answers[position][choice[member.maps[0][0]]] if member.maps
                      else min(of_own, key=lambda kernel: of_own[kernel]))
    return choice
