"""Put operators that change nothing between an operator and a tensor that MXNet gets wrong side by side.

The rows of :data:`IDENTITIES` say which operators must not read some tensors themselves. A multiplication by 1, which
oneDNN does not run, stands between::

    amp_cast(weight)   ->   amp_cast(_mul_scalar(weight, scalar=1))

In the bodies of loops and branches every variable is such a tensor: all steps add to its gradient. Each step of a loop
reads and writes a part of an array, in which an operator of oneDNN cannot leave its own layout: the step fails ("Check
failed: !is_view"), or gradients before the loop are wrong. There, too, an identity stands between.

MXNet adds up to seven gradients of a tensor by an operator of its own. Of more it asks the consumers to add to the
array. Operators of libraries are not told, and casts do not add. Before MXNet makes gradients it merges equal
operators, and a merged operator has the consumers of all.
"""
from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Collection, Mapping

from ..graph import CAST, Entry, Graph, Node, edit_bodies, identity, loops_and_branches, redirect
from ..graph.attrs import integer, integers
from ..machine.dtypes import FLOAT32, FLOAT64, LOW_PRECISION
from .context import Context
from .native_operators import NATIVE

_FLOATS = (FLOAT32, *LOW_PRECISION)
_LIMIT = "MXNET_EXEC_INPLACE_GRAD_SUM_CAP"  # MXNet's: from how many gradients on it asks for additions
_DEFAULT_LIMIT = 8
APART = "__gluon_amp_guard__"  # the attribute in which operators differ that MXNet is not to make one of


class Tensor(Enum):
    """Kinds of tensors that some operators must not read themselves."""

    ADDED = "added"  # MXNet asks its consumers to add their gradients to its array
    ADDED_VARIABLE = "added variable"  # a variable of that kind; beside loops and branches every variable
    GROUPED_WEIGHT = "grouped weight"  # the weight of a convolution in groups


@dataclass(frozen=True)
class Identity:
    """What goes wrong where an operator reads a tensor, and does not where a multiplication by 1 stands between."""

    ops: tuple[str, ...]  # the operators, by registered name
    of: Tensor  # the tensors that they must not read
    why: str  # what goes wrong
    upstream: str  # where MXNet shows it: a file below https://github.com/apache/mxnet/blob/1.9.1/src/
    states: tuple[int, ...] = ()  # positions of inputs that the operators write, which nothing may stand before


_NORM = "_gluon_amp_batch_norm"
_NOT_TOLD = ("MXNet does not tell operators of libraries that a gradient is to be added to what is there",
             "c_api/c_api.cc")

IDENTITIES: tuple[Identity, ...] = (
    Identity(tuple(sorted(NATIVE - {_NORM})), Tensor.ADDED, *_NOT_TOLD),
    Identity((_NORM,), Tensor.ADDED, *_NOT_TOLD, states=(3, 4)),
    Identity((CAST,), Tensor.ADDED, "on CPUs the gradient of a cast is lost where it is to be added to "
             "what is there, as under `grad_req='add'` and from the eighth consumer on", "operator/tensor/amp_cast.h"),
    Identity((CAST,), Tensor.GROUPED_WEIGHT, "the cast fails on a weight that inference in FP32 has left in "
             "oneDNN's five-dimensional layout", "operator/tensor/amp_cast.h"),
    Identity(("elemwise_add",), Tensor.ADDED_VARIABLE, "the gradient of a sum shares its array with those of "
             "what it adds, and what is written there is lost", "operator/tensor/elemwise_binary_op_basic.cc"),
    Identity((
        "clip", "mean", "_npi_mean", "moments", "_npi_norm", "_np_cumsum", "Crop", "_split_v2", "reverse",
        "_contrib_boolean_mask", "_linalg_gemm", "_linalg_gemm2", "_linalg_inverse", "_linalg_trmm", "_linalg_trsm",
        "_npi_solve", "_npi_tensorinv", "_npi_rot90", "_npi_flip", "_np_trace", "_npi_hsplit", "_npi_dsplit",
        "_npi_diff", "_npi_tensordot", "_npi_where", "SoftmaxOutput", "SVMOutput", "LinearRegressionOutput",
        "LogisticRegressionOutput", "MAERegressionOutput", "_contrib_box_nms", "_contrib_box_iou",
        "_contrib_DeformableConvolution", "SpatialTransformer", "amp_multicast"), Tensor.ADDED,
        "the gradient is written, wholly or in part, where it is to be added to what is there",
        "operator/tensor/matrix_op.cc"),
)


def identities(graph: Graph, context: Context) -> int:
    """Follow the table; return how many operators were put in."""
    holders = loops_and_branches(graph) if context.facts.recorded else []
    count = _put_between(graph, _kinds(graph, context), "guard")
    return count + sum(_put_into_body(node, has_types=True) for node in holders)


_Tells = Mapping[Tensor, Callable[[Entry], bool]]  # whether a tensor is of a kind


def _put_between(graph: Graph, kinds: _Tells, suffix: str) -> int:
    """Follow the table; as many consumers share an identity as MXNet adds gradients of by itself."""
    nodes, most, count = graph.operators(), _most_summed(), 0
    latest: dict[tuple[int, int], tuple[Entry, int]] = {}  # the last identity of a tensor, and its consumers

    def before(entry: Entry) -> Entry:
        nonlocal count
        made, consumers = latest.get(entry.key, (entry, most))
        if consumers == most:
            made, consumers, count = identity(entry, graph.new_name(f"{entry.label}_{suffix}")), 0, count + 1
            made.node.attrs[APART] = made.node.name  # beside others of this tensor, or of one that MXNet takes for it
        latest[entry.key] = made, consumers + 1
        return made

    for row in IDENTITIES:
        for node in nodes:
            if node.op in row.ops:
                node.inputs = [before(entry) if position not in row.states and kinds[row.of](entry) else entry
                               for position, entry in enumerate(node.inputs)]
    return count


def _kinds(graph: Graph, context: Context) -> _Tells:
    accumulated = context.facts.accumulated if context.facts.recorded else frozenset()
    read_often = _read_often(graph) if context.facts.recorded else set()
    everywhere = context.facts.recorded and loops_and_branches(graph)
    added = set(context.variables) if everywhere else accumulated
    weights = [node.inputs[1].node for node in graph.operators()
               if node.op == "Convolution" and integer(node.attrs, "num_group", 1) > 1]
    grouped = {(weight.inputs[0].node if weight.op == CAST else weight).name for weight in weights}

    def is_one_of(entry: Entry, names: Collection[str]) -> bool:
        return entry.node.is_variable and entry.node.name in names

    return {Tensor.ADDED: lambda entry: ((entry.key in read_often and entry.dtype in (*_FLOATS, FLOAT64))
                                         or is_one_of(entry, accumulated)),
            Tensor.ADDED_VARIABLE: lambda entry: is_one_of(entry, added),
            Tensor.GROUPED_WEIGHT: lambda entry: is_one_of(entry, grouped)}


def _read_often(graph: Graph) -> set[tuple[int, int]]:
    """Return the tensors whose consumers are so many that MXNet asks for additions; equal casts become one of them."""
    number, most = _numbers(graph), _most_summed()
    operators = graph.operators()
    casts = {number[id(node)]: node.inputs[0] for node in operators if node.op == CAST}
    reads = [entry for node in operators if node.op != CAST for entry in node.inputs]
    counts = Counter((number[id(entry.node)], entry.output) for entry in (*reads, *casts.values(), *graph.heads))
    return {(id(node), output) for node in graph.nodes() for output in range(node.num_outputs)
            if counts[number[id(node)], output] > most}


def _numbers(graph: Graph) -> dict[int, int]:
    """Give nodes of equal operators and inputs equal numbers: MXNet makes one of them."""
    made: dict[int, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes():
        inputs = tuple((made[id(entry.node)], entry.output) for entry in node.inputs)
        key = id(node) if not inputs else (node.op, frozenset(node.attrs.items()), inputs)
        made[id(node)] = known.setdefault(key, len(known))
    return made


def _most_summed() -> int:
    """Return how many gradients MXNet adds by an operator of its own."""
    return max(1, min(int(os.environ.get(_LIMIT) or _DEFAULT_LIMIT), _DEFAULT_LIMIT) - 1)


def _put_into_body(node: Node, has_types: bool) -> int:
    """Put identities into the bodies of a loop or branch, and those within; of a loop within one no types are known."""
    kinds = {**dict.fromkeys(Tensor, lambda entry: entry.node.is_variable), Tensor.GROUPED_WEIGHT: lambda entry: False}

    def put(_: int, body: Graph) -> int:
        count = (_put_at_parts(node, body) if has_types else 0) + _put_between(body, kinds, "whole")
        return count + sum(_put_into_body(inner, has_types=False) for inner in loops_and_branches(body))

    return edit_bodies(node, put)


def _put_at_parts(node: Node, body: Graph) -> int:
    """Put an identity behind each part that a loop's body reads, and each that it gives; branches have none."""
    def behind(entry: Entry) -> Entry:
        return identity(entry, body.new_name(f"{entry.node.name}_whole"))

    places = integers(node.attrs, "in_data_locs")  # where its body reads parts of the first inputs; a while_loop none
    variables = body.variables()
    read = [Entry(variables[place]) for place, entry in zip(places, node.inputs) if entry.dtype in _FLOATS]
    moved = {entry.key: behind(entry) for entry in read}
    written = [position for position in range(integer(node.attrs, "num_out_data", 0))
               if node.dtypes[position] in _FLOATS]
    for position in written:
        body.heads[position] = behind(body.heads[position])
    redirect(body, moved)
    return len(moved) + len(written)
