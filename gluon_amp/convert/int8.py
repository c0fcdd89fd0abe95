"""MXNet's INT8 quantizer on a graph whose precisions are decided, and the error of each operator in INT8."""
from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Collection, NamedTuple

import mxnet as mx

from .._mxnet import quantizer
from .._mxnet.arrays import NDArrayWeights, values_of
from .._mxnet.engine import Program
from .._mxnet.symbols import analyse, from_graph, fuse, to_graph
from ..base.metrics import relative_error
from ..graph import CAST, VARIABLE, Consumers, Entry, Graph, Node, Role, identity
from ..graph.attrs import integer, integers, is_set
from ..machine.dtypes import FLOAT32
from ..passes import Int8, shield, unshield
from ..passes.inference import FLATTEN, LAYERS
from ..rules import Policy
from ..state.in_force import under
from .calibration import Batch, Calibration
from .convert import Network

_AT_ONCE = 8  # operators whose errors are measured together: their FP32 tensors are in memory
_PARTS = 3  # of a tensor in INT8: its values, and its range
_QUANTIZE, _REQUANTIZE = "_contrib_quantize_v2", "_contrib_requantize"
_TAKE_RANGES = (_QUANTIZE, _REQUANTIZE, "_contrib_quantized_batch_norm")
_RANGE = ("min_calib_range", "max_calib_range")
_SAME_VALUES = (FLATTEN, CAST)  # what they give has the range of what they read
_DENSE = "_sg_mkldnn_fully_connected"
MADE = "quantized_"  # the beginning of the names of MXNet's INT8 operators
_PREFIXES = re.compile(rf"^(?:requantize_|{MADE})+")
# MXNet prints two lines for each join that it leaves out. This one computes the same, and has no INT8 operator.
_JOIN, _HIDDEN_JOIN = "Concat", "_rnn_param_concat"
# mkldnn_conv.cc gives oneDNN a scale for each filter, and tells it that there is one for each group: filters of group 2
# are rounded by the scale of filter 2. One filter in a group is right.
_WRONG_GROUPS = "MXNet rounds weights of convolutions in groups by wrong scales"


class _Origin(NamedTuple):
    """What an operator of MXNet's quantized graph was made from."""

    tensor: str  # of the program, that it gives
    decides: str  # the operator of the program whose precision decides


class Quantizer:
    """Replaces operators of one network by MXNet's INT8 ones."""

    def __init__(self, int8: Int8, calibration: Calibration, excluded: Collection[str], weights: NDArrayWeights,
                 like: mx.sym.Symbol):
        self.int8, self.calibration, self.weights, self.like = int8, calibration, weights, like
        self._wide = int8.wide.union(excluded)
        self._origins: dict[str, _Origin] = {}  # by the names of operators, without MXNet's prefixes
        self.graph = Graph([])  # the result

    def __call__(self, graph: Graph, between: Collection[str]) -> Graph:
        """Return a fused graph with the chosen layers, and what stands between them, in INT8."""
        chosen = self.int8.layers.union(between) - self._wide
        tensors = {id(node): node.name for node in graph.variables()}
        kept, joins = [], set()
        _separate_readers(graph)
        for node in graph.operators():
            decided = decided_in(node)
            passes_on = node.op in _SAME_VALUES or node.role is Role.IDENTITY
            keys = [Calibration.key(tensors[id(entry.node)], entry.output) for entry in node.inputs]
            given = keys[0] if passes_on else _inside(node)[1].name
            tensors[id(node)] = given
            if _PREFIXES.match(node.name):
                node.name = graph.new_name(f"gluon_amp_{node.name}")
            self._origins[node.name] = _Origin(given, decided[0])
            read = [key for key, entry in zip(keys, node.inputs) if entry.node.name not in self.weights]
            if not (chosen.issuperset(decided) and all(map(self.calibration.range_of, [given, *read]))):
                kept.append(node.name)
                if node.op == _JOIN:
                    node.op = _HIDDEN_JOIN
                    joins.add(node.name)
        # MXNet mixes up an output with what FP32 operators read of the same layer.
        graph.heads = [shield(graph, head) for head in graph.heads]
        made = to_graph(quantizer.quantized(from_graph(graph, self.like), kept, list(self.weights.arrays)))
        unshield(made)
        for node in made.operators():
            node.op = _JOIN if node.name in joins else node.op
        symbol = fuse(from_graph(self._with_ranges(made), self.like), with_int8=True)
        self.weights.arrays = quantizer.quantized_parameters(symbol, self.weights.arrays)
        self.graph = self._with_ranges(to_graph(symbol))  # MXNet's fusion writes ranges with six decimals
        return self.graph.copy()

    def _with_ranges(self, graph: Graph) -> Graph:
        """Write the ranges of tensors where MXNet looks for them."""
        for node in graph.operators():
            if node.op in _TAKE_RANGES or _RANGE[0] in node.attrs:
                node.attrs = {**node.attrs, **self.range_of(self._tensor(node))}
        return graph

    def _origin(self, node: Node) -> _Origin:
        return self._origins[_PREFIXES.sub("", node.name, 1)]

    def _tensor(self, node: Node) -> str:
        """Return the tensor of the program that an operator of a quantized graph gives in INT8, or reads for that."""
        if node.op != _QUANTIZE:
            return self._origin(node).tensor
        given = node.inputs[0]
        tensor = given.node.name if given.node.is_variable else self._origin(given.node).tensor
        return Calibration.key(tensor, given.output)

    def wrong_sums(self) -> set[str]:
        """Name the operators, last of a fused sum, whose result has another type than the addend."""
        # MXNet adds a layer's result in place, whatever the addend's type: int8 is taken for uint8, and loses half its
        # range, or uint8 for int8, and loses negative values.
        graph = self.graph.copy()
        known = {node.name: FLOAT32 for node in graph.variables()}
        analyse(from_graph(graph, self.like), graph, {**known, **{
            name: dtype for name, dtype in self.weights.dtypes().items() if name in known and dtype}})
        wrong = set()
        for node in graph.operators():
            if is_set(node.attrs, "with_sum") and is_set(node.attrs, "quantized"):
                inner, last = _inside(node)
                position = 2 + (not any(is_set(each.attrs, "no_bias") for each in inner))
                if node.inputs[position].dtype != node.dtypes[0]:
                    wrong.add(last.name)
        return wrong

    def range_of(self, tensor: str) -> dict[str, str]:
        """Return the attributes that tell MXNet the range of a tensor of the program."""
        return dict(zip(_RANGE, map(repr, self.calibration.range_of(tensor) or ())))

    def errors(self, plain: Network, batch: Batch) -> dict[str, float]:
        """Return the relative error of every operator in INT8, on FP32 inputs; infinite where MXNet cannot run it."""
        nodes = [node for node in self.graph.operators() if node.name.startswith(MADE)]
        graph = to_graph(plain.symbol)
        entries = {Calibration.key(node.name, output): Entry(node, output)
                   for node in graph.nodes() for output in range(node.num_outputs)}
        found: dict[str, float] = {}
        with under(None):
            for start in range(0, len(nodes), _AT_ONCE):
                alone = [self._alone(node) for node in nodes[start:start + _AT_ONCE]]
                tensors = list(dict.fromkeys(key for _, _, read in alone for key in read))
                program = Program(from_graph(Graph([entries[key] for key in tensors], graph.attrs), plain.symbol),
                                  plain.arrays)
                values = dict(zip(tensors, program(batch)))
                found.update((origin.decides, self._error(made, values[origin.tensor], values))
                             for made, origin, _ in alone)
        return found

    def _alone(self, node: Node) -> tuple[Graph, _Origin, set[str]]:
        """Return a graph of one operator between FP32 tensors, its origin, and the tensors."""
        origin = self._origin(node)
        tensors = {origin.tensor}
        made: dict[str, Node] = {}

        def quantized(entry: Entry) -> Entry:
            if entry.node.num_outputs < _PARTS:  # a parameter
                return entry
            source = self._tensor(entry.node)
            tensors.add(source)
            given = made.setdefault(source, Node(_QUANTIZE, f"{source}_quantize",
                                                 {"out_type": "auto", **self.range_of(source)},
                                                 [Entry(Node(VARIABLE, source))], _PARTS))
            return Entry(given, entry.output)

        layer = replace(node, inputs=[quantized(entry) for entry in node.inputs])
        parts = [Entry(layer, output) for output in range(layer.num_outputs)]
        wide = parts[0] if len(parts) < _PARTS else Entry(Node("_contrib_dequantize", "result", {}, parts))
        return Graph([wide], self.graph.attrs), origin, tensors

    def _error(self, graph: Graph, wide: mx.nd.NDArray, values: Batch) -> float:
        try:
            narrow = values_of(Program(from_graph(graph, self.like), self.weights.arrays)(values)[0])
        except mx.MXNetError:
            return math.inf
        return relative_error([(values_of(wide).astype("float64"), narrow.reshape(wide.shape))])


def _inside(node: Node) -> tuple[list[Node], Node]:
    """Return the operators that a fused one holds, and that which gives its result; one that is not holds itself."""
    if not node.extra.get("subgraphs"):
        return [node], node
    inner = Graph.from_json(json.dumps(node.extra["subgraphs"][0]))
    return inner.operators(), inner.heads[0].node


def _separate_readers(graph: Graph) -> None:
    """Put an identity before each of several that read a dense layer."""
    # MXNet's fusion ends the process where one of these runs in INT8 and another one does not.
    readers = Consumers(graph)
    for node in graph.operators():
        given = Entry(node)
        if node.op == _DENSE and not readers.is_read_once(given):
            for reader in dict.fromkeys(readers.of(given)):
                passed = identity(given, graph.new_name(f"{node.name}_read"))
                reader.inputs = [passed if entry.key == given.key else entry for entry in reader.inputs]


def decided_in(node: Node) -> list[str]:
    """Name the operators whose precision decides for one: of a fused one its layer."""
    inner = _inside(node)[0]
    return [each.name for each in inner if each.op in LAYERS] or [each.name for each in inner]


def layers_of(graph: Graph, weights: Collection[str], policy: Policy) -> dict[str, str]:
    """Name the layers that might run in INT8, and say why not, or nothing."""
    readers = Consumers(graph)

    def reason(node: Node) -> str:
        norms = [each.name for each in readers.of(Entry(node)) if each.op == "BatchNorm"]  # excluded, and not folded
        if not policy.excluded.isdisjoint([node.name, *norms]):
            return "excluded by name"
        if len(integers(node.attrs, "kernel")) == 1:
            return "MXNet has no convolution of sequences in INT8"
        return _WRONG_GROUPS if 1 < integer(node.attrs, "num_group", 1) < integer(node.attrs, "num_filter", 1) else ""

    return {node.name: reason(node) for node in graph.operators() if node.op in LAYERS
            and node.inputs[0].node.name not in weights and node.inputs[1].node.name in weights}
