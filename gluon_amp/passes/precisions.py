"""Give every operator a precision, by propagation from the inputs to the outputs, and cast where two of them meet.

::

    Convolution(x, w)   ->   amp_cast(Convolution(amp_cast(x), amp_cast(w)))

A join of FP32 with low precision, as of a network's stem with its first dense block, runs in FP32 by its rule, and so
do the operators behind it. In bfloat16 it is lowered where all its users are lowered too: they would round its inputs.
"""
from __future__ import annotations

import operator as arithmetic
from dataclasses import replace
from typing import Callable, Collection, Mapping, MutableMapping, Sequence

from ..graph import CAST, Consumers, Entry, Graph, Node, cast, redirect
from ..graph.attrs import REGION_ON, integer, integers, is_set, region
from ..machine.dtypes import BFLOAT16, FLOAT32, FORMATS
from ..rules import KEEP, LOWER, NEUTRAL, WIDEST, Cause, Decision, precision
from ..rules import decision as decisions
from ..rules.decision import constants_of, in_fp32, may_lower, number
from ..rules.tables import groups
from .context import Context


def assign_dtypes(graph: Graph, context: Context) -> int:
    """Write each operator's decision and the data types of its outputs; return how many give low precision."""
    nodes, lowered = graph.operators(), 0
    exact = _whole_numbers(nodes)
    sparse = consumers_of_sparse(graph, context.facts.sparse)
    behind_loops: set[Node] = set()  # what reads a while_loop's results, also through others
    for node in nodes:
        node.decision = decisions.READS_SPARSE if id(node) in sparse else decide(node, context)
        if context.facts.bound and any(entry.node.op == WITHOUT_SHAPES or entry.node in behind_loops
                                       for entry in node.inputs):
            behind_loops.add(node)
            node.decision = decisions.BEHIND_LOOP if may_lower(node.decided) else node.decision
        if id(node) in exact and may_lower(node.decided):
            node.decision = in_fp32(node.decided, f"gives positions, which {context.target} does not count exactly")
    joins = _joins(graph, nodes) if context.target == BFLOAT16 and not context.device.imitated else ()
    for node in nodes:
        if id(node) in joins and {FLOAT32, context.target} <= {entry.dtype for entry in node.inputs}:
            node.decision = replace(node.decided, rule=LOWER, cause=Cause.CONSUMERS,
                                    note="all that reads it is lowered")
        lowered += plan_outputs(node, context)
    return lowered


def _joins(graph: Graph, nodes: Sequence[Node]) -> set[int]:
    """Return the ids of joins that only operators in low precision read, also through operators that follow them."""
    kept = {id(head.node) for head in graph.heads}  # read as they are
    joins = set()
    for node in reversed(nodes):  # its users first
        decision, follows = node.decided, id(node) not in kept
        if follows and decision.rule == WIDEST and decision.cause is Cause.TABLE:
            joins.add(id(node))
        lowers = decision.rule == LOWER or id(node) in joins
        kept.update(id(entry.node) for position, entry in enumerate(node.inputs) if position in decision.fp32_inputs
                    or not (lowers or (follows and decision.rule == NEUTRAL and position == 0)))
    return joins


def propagate_dtypes(graph: Graph, context: Context) -> None:
    """Let operators take the precision of their data again, after others have changed theirs."""
    for node in graph.operators():
        if node.decision is not None and node.decision.rule in (NEUTRAL, WIDEST):
            plan_outputs(node, context)


def decide(node: Node, context: Context) -> Decision:
    """Return the precision of a node by its region and the user's exclusions, else by the policy."""
    setting = region(node.attrs)
    if setting is None and not context.everywhere:
        return decisions.OUTSIDE
    if setting not in (None, REGION_ON, context.target):
        return decisions.SWITCHED_OFF
    if node.name in context.policy.excluded:
        return decisions.EXCLUDED
    if context.int8 is not None and node.name in context.int8.layers:
        return decisions.IN_INT8
    is_squared = len(node.inputs) == 2 and node.inputs[0].key == node.inputs[1].key
    square = context.policy.square_of(node.op) if is_squared else None
    op, attrs = (square, {}) if square else (node.op, node.attrs)
    decision = context.decide(op, attrs, _data_shape(node))
    for position, entry in enumerate(node.inputs) if may_lower(decision) else ():
        value = constant(entry) if position not in decision.fp32_inputs and context.is_float(entry) else None
        if value is not None and not FORMATS[context.target].holds(value):
            return in_fp32(decision, f"{context.target} cannot hold the constant {value:g} that it reads")
    return decision


def _data_shape(node: Node) -> tuple[int, ...] | None:
    """Return the shape of a node's data; of convolutions and BatchNorm at least the channels, which parameters tell."""
    shape = node.inputs[0].shape if node.inputs else None
    weight = node.inputs[1].shape if shape is None and len(node.inputs) > 1 else None
    if weight and node.op == "BatchNorm":
        return 0, weight[0]
    if weight and node.op == "Convolution" and len(weight) > 1:  # a variable may state any shape, a wrong one too
        return 0, weight[1] * integer(node.attrs, "num_group", 1)
    return shape


def plan_outputs(node: Node, context: Context) -> bool:
    """Give the outputs of a node the types that follow from its decision; return whether that lowers one of them."""
    node.planned = []
    types = [entry.dtype for entry in node.inputs]
    if node.decided.rule == KEEP or precision(node.decided, types, FLOAT32, context.target) != context.target:
        return False
    # The hidden outputs of operators with FP32 inputs (BatchNorm's mean and variance) are FP32 as well.
    count = 1 if node.decided.fp32_inputs else len(node.dtypes)
    node.planned = [context.target if dtype == FLOAT32 and index < count else dtype
                    for index, dtype in enumerate(node.dtypes)]
    return node.planned != node.dtypes


def input_dtypes(node: Node, context: Context) -> list[str | None]:
    """Return the type that each input must have; None where the input is left as it is."""
    if node.decided.rule == KEEP:
        return [FLOAT32 if entry.is_lowered else None for entry in node.inputs]
    wanted = precision(node.decided, [entry.dtype for entry in node.inputs], FLOAT32, context.target)
    return [None if not context.is_float(entry)
            else FLOAT32 if position in node.decided.fp32_inputs
            else wanted
            for position, entry in enumerate(node.inputs)]


def place_casts(graph: Graph, context: Context) -> int:
    """Cast tensors, once for each type, to the types that users need; outputs keep theirs. Return how many casts."""
    made: Made = {}
    nodes = graph.nodes()
    # A pass that puts a node in without a decision may have planned its precision.
    asked = [input_dtypes(node, context) if node.decision is not None else node.planned[:1] * len(node.inputs)
             for node in nodes]
    for node, types in zip(nodes, asked):
        for position, wanted in enumerate(types):
            if wanted is not None:
                node.inputs[position] = in_type(graph, node.inputs[position], wanted, made)
    graph.heads = [in_type(graph, head, FLOAT32, made) if dtype == FLOAT32 else head
                   for head, dtype in zip(graph.heads, context.outputs)]
    return len(made)


Made = MutableMapping["tuple[tuple[int, int], str]", Entry]  # casts by tensor and type


def in_type(graph: Graph, entry: Entry, dtype: str, made: Made, consumers: Consumers | None = None) -> Entry:
    """Return a tensor in a type, by one cast for all; ``consumers`` of a converted graph may be such casts already."""
    if entry.dtype == dtype:
        return entry
    if consumers is not None and dtype == BFLOAT16 and is_widened(entry):
        return entry.node.inputs[0]
    key = (entry.key, dtype)
    if key not in made:
        readers = consumers.of(entry) if consumers is not None else ()
        found = next((Entry(node) for node in readers if node.op == CAST and node.dtypes == [dtype]), None)
        made[key] = found or cast(entry, dtype, graph.new_name(f"{entry.label}_{dtype}"))
    return made[key]


def is_widened(entry: Entry) -> bool:
    """Tell whether a tensor is one in bfloat16, cast to FP32."""
    return entry.node.op == CAST and entry.dtype == FLOAT32 and entry.node.inputs[0].dtype == BFLOAT16


def give_low(graph: Graph, node: Node) -> None:
    """Let a node give its first output in bfloat16; users that need FP32 read a cast."""
    consumers = Consumers(graph).of(Entry(node))
    node.dtypes[0] = BFLOAT16
    redirect(graph, {Entry(node).key: cast(Entry(node), FLOAT32, graph.new_name(f"{node.name}_{FLOAT32}"))})
    redirect(graph, {Entry(consumer).key: Entry(node) for consumer in consumers
                     if consumer.op == CAST and consumer.dtypes == [BFLOAT16]})


_FILLED: Mapping[str, float] = {**dict.fromkeys(("_ones", "_npi_ones", "ones_like"), 1.0),
                                **dict.fromkeys(("_zeros", "_npi_zeros", "zeros_like"), 0.0)}
_FILLED_WITH = ("_full", "_npi_full_like")
_ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("_plus_scalar", "_npi_add_scalar"), arithmetic.add),
    **dict.fromkeys(("_minus_scalar", "_npi_subtract_scalar"), arithmetic.sub),
    **dict.fromkeys(("_mul_scalar", "_npi_multiply_scalar"), arithmetic.mul),
    **dict.fromkeys(("negative", "_npi_negative"), lambda value, _: -value),
    **dict.fromkeys(("_div_scalar", "_npi_true_divide_scalar"), lambda value, by: value / by if by else value)}
_PASSING = ("Reshape", "_np_reshape", "_npx_reshape", "expand_dims", "squeeze", "broadcast_to", "broadcast_like",
            "_npi_broadcast_to", "tile", "BlockGrad", "_copy")


def constant(entry: Entry) -> float | None:
    """Return the value of a tensor that is one constant; None for all others."""
    node = entry.node
    if node.op in _FILLED:
        return _FILLED[node.op]
    if node.op in _FILLED_WITH:
        return number(node.attrs.get(constants_of(node.op)[0]))
    if node.op in _PASSING:
        return constant(node.inputs[0])
    if node.op in _ARITHMETIC:
        first, second = constant(node.inputs[0]), number(node.attrs.get("scalar", "0"))
        return None if first is None or second is None else _ARITHMETIC[node.op](first, second)
    return None


_CHOSEN = frozenset((  # numbers that the program chooses, or zeros and ones
    "_arange", "_npi_arange", "_contrib_arange_like", "_eye", "_npi_eye", "one_hot", *groups.COMPARISONS,
    *groups.SCALAR_COMPARISONS, *_FILLED, *_FILLED_WITH))
_MOVING = frozenset((
    *groups.IDENTITIES, *groups.RESHAPES, *groups.FLATTENING, *groups.REPETITIONS, *groups.MOVED_AXES, *groups.SPLITS,
    *groups.JOINS, "transpose", "SwapAxis", "slice_axis", "slice", "_npi_broadcast_to", "broadcast_like", "Cast"))
_CALCULATING = frozenset((*groups.ROUNDING, "clip", *groups.SCALAR_ARITHMETIC, *groups.ELEMWISE_ADDITIONS,
                          *groups.ADDITIONS, *groups.SUMS, *groups.NUMPY_SUMS))
_PRODUCTS = frozenset((*groups.PLAIN_PRODUCTS, *groups.BATCHED_PRODUCTS, "FullyConnected"))


def _whole_numbers(nodes: Sequence[Node]) -> set[int]:
    """Return the ids of products with chosen numbers, such as ``dot(one_hot, arange)``, that are read as positions."""
    found: set[int] = set()
    waiting = [node.inputs[groups.POSITIONS[node.op]] for node in nodes
               if len(node.inputs) > groups.POSITIONS.get(node.op, len(node.inputs))]
    seen = {entry.key for entry in waiting}
    while waiting:
        node = waiting.pop().node
        if node.op in _PRODUCTS and any(map(_is_chosen, node.inputs)):
            found.add(id(node))
        elif node.op in _MOVING or node.op in _CALCULATING:
            waiting += [entry for entry in node.inputs if entry.key not in seen]
            seen.update(entry.key for entry in node.inputs)
    return found


def _is_chosen(entry: Entry) -> bool:
    node = entry.node
    while node.op in _MOVING:
        node = node.inputs[0].node
    return node.op in _CHOSEN


# Their results are dense whatever they read. Of others a result may be sparse: they are the safer guess.
_GIVE_DENSE = {"FullyConnected", "Embedding", "_contrib_SparseEmbedding", "sum", "mean", "norm", "take"}
MAKES_SPARSE, _DENSE = "cast_storage", "default"


def consumers_of_sparse(graph: Graph, variables: Collection[str]) -> set[int]:
    """Return the ids of operators that may read a sparse tensor: casts would make it, and its gradient, dense."""
    found: set[int] = set()
    sparse = {id(node) for node in graph.variables() if node.name in variables}
    for node in graph.operators():
        reads = [id(entry.node) in sparse for entry in node.inputs]
        if any(reads):
            found.add(id(node))
        # Of a product one is dense that comes first, as it is, and nothing else is asked for.
        is_dense = node.op in _GIVE_DENSE or (
            node.op == "dot" and reads[0] and not is_set(node.attrs, "transpose_a")
            and node.attrs.get("forward_stype", "None") == "None")
        gives = node.attrs.get("stype") != _DENSE if node.op == MAKES_SPARSE else any(reads) and not is_dense
        if gives:
            sparse.add(id(node))
    return found


WITHOUT_SHAPES = "_while_loop"  # with it in a graph MXNet knows no shapes behind it before it runs the operators
_OF_ONE_SHAPE = ("elemwise_add", "elemwise_sub", "elemwise_mul", "elemwise_div", "add_n")  # taken from any input
_OF_DATA = ("RNN",)  # says the shapes of its other inputs, as of its first states, by that of its data


def unknown_forward(graph: Graph) -> set[Node]:
    """Return the operators whose outputs have no known shape before MXNet infers shapes backward."""
    # The first state of an unrolled recurrent cell is ``zeros(shape=(0, 50))``, whose batch MXNet finds from its users.
    # Operators of libraries are asked for shapes on the way forward, once, and see none of their outputs.
    unknown: set[Node] = set()
    for node in graph.operators():
        lacking = [entry.node in unknown for entry in node.inputs[:1 if node.op in _OF_DATA else None]]
        is_open = not node.inputs and "shape" in node.attrs and min(integers(node.attrs, "shape"), default=0) <= 0
        if is_open or (all(lacking) and lacking if node.op in _OF_ONE_SHAPE else any(lacking)):
            unknown.add(node)
    return unknown
