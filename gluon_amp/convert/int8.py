"""What runs in INT8: MXNet's quantizer on a graph whose precisions are decided, and the error of each layer."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Collection, Mapping, NamedTuple

import mxnet as mx

from .. import passes
from .._mxnet import quantizer
from .._mxnet.arrays import NDArrayWeights, values_of
from .._mxnet.invoke import Program
from .._mxnet.symbols import from_graph, to_graph
from ..dtypes import FLOAT32
from ..graph import VARIABLE, Entry, Graph, Node, unique_name
from ..graph.attrs import integer
from ..metrics import relative_error
from ..passes import Context, Facts
from ..passes.inference import FLATTEN, LAYERS
from ..rules import Policy
from ..state.in_force import under
from .analysis import analyse_network
from .calibration import Batch, Calibration

_RANGE = ("min_calib_range", "max_calib_range")
_MADE, _ROUNDED = "quantized_", "requantize_"  # what MXNet puts before the names of operators
_QUANTIZE = "_contrib_quantize_v2"
_TAKE_RANGES = (_QUANTIZE, "_contrib_requantize", "_contrib_quantized_batch_norm")
# MXNet prints two lines for each join that it leaves out. This one computes the same, and has no INT8 operator.
_JOIN, _HIDDEN_JOIN = "Concat", "_rnn_param_concat"
_PARTS = 3  # of a tensor in INT8: its values, and its range
_AT_ONCE = 8  # operators whose errors are measured together: their FP32 tensors are in memory


@dataclass
class Int8:
    """The layers of one network that run in INT8; see :class:`gluon_amp.passes.context.Quantizer`."""

    calibration: Calibration
    layers: frozenset[str]
    apart: frozenset[str]  # operators between layers that stay wide
    weights: NDArrayWeights
    like: mx.sym.Symbol
    between: Collection[str] = ()
    made: Graph = field(default_factory=lambda: Graph([]))  # what became of the network
    sources: dict[str, Entry] = field(default_factory=dict)  # by names of fused operators: what gives their results

    def quantized(self, graph: Graph) -> Graph:
        """Return a fused graph with operators of these names in INT8."""
        chosen = self.layers | (set(self.between) - self.apart)
        for node in graph.nodes():
            self.sources[node.name] = (Entry(node) if node.is_variable else self._source(node.inputs[0])
                                       if node.op == FLATTEN else _result_of(node))
        kept = [node for node in graph.operators() if not self._may_run(node, chosen)]
        joins = [node for node in kept if node.op == _JOIN]
        for node in joins:
            node.op = _HIDDEN_JOIN
        symbol = quantizer.quantized(from_graph(graph, self.like), [node.name for node in kept],
                                     list(self.weights.arrays))
        made, names = to_graph(symbol), {node.name for node in joins}
        for node in made.operators():
            node.op = _JOIN if node.name in names else node.op
        symbol = quantizer.fused(from_graph(self._with_ranges(made), self.like))
        self.weights.arrays = quantizer.quantized_parameters(symbol, self.weights.arrays)
        self.made = self._with_ranges(to_graph(symbol))  # MXNet's fusion writes ranges with six decimals
        return self.made.copy()

    def _may_run(self, node: Node, chosen: Collection[str]) -> bool:
        tensors = [self.sources[node.name], *(self._source(entry) for entry in node.inputs
                                              if entry.node.name not in self.weights)]
        return (all(inner in chosen for inner in decided_in(node))
                and all(self.calibration.of(tensor) for tensor in tensors))

    def _source(self, entry: Entry) -> Entry:
        source = self.sources[entry.node.name]
        return source if entry.output == 0 else Entry(source.node, entry.output)

    def _with_ranges(self, graph: Graph) -> Graph:
        """Write the ranges of tensors where MXNet looks for them."""
        for node in graph.operators():
            if node.op in _TAKE_RANGES or _RANGE[0] in node.attrs:
                node.attrs = {**node.attrs, **self.range_of(self.tensor(node))}
        return graph

    def range_of(self, tensor: Entry) -> dict[str, str]:
        """Return the attributes that tell MXNet the range of a tensor of the program."""
        return dict(zip(_RANGE, map(repr, self.calibration.of(tensor) or ())))

    def tensor(self, node: Node) -> Entry:
        """Return the tensor of the program that an operator of the quantized graph gives in INT8."""
        if node.op == _QUANTIZE:
            return self._source(node.inputs[0])
        return self.sources[node.name.replace(_ROUNDED, "", 1).replace(_MADE, "", 1)]


def _inside(node: Node) -> tuple[list[Node], Node]:
    """Return the operators that a fused one holds, and that which gives its result; one that is not holds itself."""
    if not node.extra.get("subgraphs"):
        return [node], node
    inner = Graph.from_json(json.dumps(node.extra["subgraphs"][0]))
    return inner.operators(), inner.heads[0].node


def _result_of(node: Node) -> Entry:
    return Entry(_inside(node)[1])


def decided_in(node: Node) -> list[str]:
    """Name the operators whose precision decides for one: of a fused one its layer."""
    inner = _inside(node)[0]
    return [each.name for each in inner if each.op in LAYERS] or [each.name.replace(_MADE, "", 1) for each in inner]


# mkldnn_conv.cc gives oneDNN a scale for each filter, and tells it that there is one for each group: filters of group 2
# are rounded by the scale of filter 2. One filter in a group is right.
_WRONG_GROUPS = "MXNet rounds weights of convolutions in groups by wrong scales"


def layers_of(graph: Graph, weights: Collection[str], policy: Policy) -> dict[str, str]:
    """Name the layers that might run in INT8, and say why not, or nothing."""
    return {node.name: "excluded by name" if node.name in policy.excluded else
            _WRONG_GROUPS if 1 < integer(node.attrs, "num_group", 1) < integer(node.attrs, "num_filter", 1) else ""
            for node in graph.operators() if node.op in LAYERS
            and node.inputs[0].node.name not in weights and node.inputs[1].node.name in weights}


def uniquely_named(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a symbol whose operators have names of their own: ranges and errors go by names. Outputs keep theirs."""
    graph = to_graph(symbol)
    taken = {node.name for node in graph.variables()}
    for node in dict.fromkeys([*(head.node for head in graph.heads), *graph.operators()]):
        if not node.is_variable:
            node.name = unique_name(node.name, taken)
    return from_graph(graph, symbol)


def in_fp32(policy: Policy) -> Policy:
    """Return the policy for the same network in FP32."""
    return Policy(FLOAT32, training=False, excluded=policy.excluded, disabled_passes=policy.disabled_passes)


class Plain(NamedTuple):
    """A network in FP32 before types are decided, whose tensors have the names that ranges go by."""

    symbol: mx.sym.Symbol
    arrays: Mapping[str, mx.nd.NDArray]  # its parameters


def prepared(symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray], policy: Policy) -> Plain:
    """Return a network as all its conversions begin, BatchNorm folded."""
    graph, weights = to_graph(symbol), NDArrayWeights(arrays)
    analyse_network(symbol, graph, weights, {}, {})
    passes.run(graph, Context.of(graph, in_fp32(policy), facts=Facts(recorded=False), weights=weights))
    return Plain(from_graph(graph, symbol), weights.arrays)


def errors(int8: Int8, plain: Plain, batch: Batch) -> dict[str, float]:
    """Return the relative error of every operator in INT8, on inputs in FP32, by the name that decides.

    An error is infinite where MXNet cannot run the operator.
    """
    nodes = [node for node in int8.made.operators() if node.name.startswith(_MADE)]
    graph = to_graph(plain.symbol)
    found: dict[str, float] = {}
    by_name = {node.name: node for node in graph.nodes()}
    with under(None):
        for start in range(0, len(nodes), _AT_ONCE):
            alone = [_alone(int8, node) for node in nodes[start:start + _AT_ONCE]]
            tensors = {key: entry for _, _, read in alone for key, entry in read.items()}
            heads = [Entry(by_name[entry.node.name], entry.output) for entry in tensors.values()]
            program = Program(from_graph(Graph(heads, graph.attrs), plain.symbol), plain.arrays)
            values = dict(zip(tensors, program(batch)))
            found.update((name, _error(made, int8, values[result], values)) for made, (name, result), _ in alone)
    return found


def _alone(int8: Int8, node: Node) -> tuple[Graph, tuple[str, str], dict[str, Entry]]:
    """Return a graph of one operator between FP32 tensors, the names of it and of its result, and the tensors."""
    result = int8.tensor(node)
    tensors = {_key(result): result}
    made: dict[str, Node] = {}

    def quantized(entry: Entry) -> Entry:
        if entry.node.num_outputs < _PARTS:  # a parameter
            return entry
        source = int8.tensor(entry.node)
        tensors[_key(source)] = source
        given = made.setdefault(_key(source), Node(
            _QUANTIZE, f"{_key(source)}_quantize", {"out_type": "auto", **int8.range_of(source)},
            [Entry(Node(VARIABLE, _key(source)))], _PARTS))
        return Entry(given, entry.output)

    layer = replace(node, inputs=[quantized(entry) for entry in node.inputs])
    parts = [Entry(layer, output) for output in range(layer.num_outputs)]
    wide = parts[0] if len(parts) < _PARTS else Entry(Node("_contrib_dequantize", "result", {}, parts))
    return Graph([wide], int8.made.attrs), (decided_in(node)[0], _key(result)), tensors


def _error(graph: Graph, int8: Int8, wide: mx.nd.NDArray, values: Batch) -> float:
    try:
        narrow = values_of(Program(from_graph(graph, int8.like), int8.weights.arrays)(values)[0])
    except mx.MXNetError:
        return math.inf
    return relative_error([(values_of(wide).astype("float64"), narrow.reshape(wide.shape))])


def _key(entry: Entry) -> str:
    return f"tensor_{entry.label}"
