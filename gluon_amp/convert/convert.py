"""Convert a graph and its parameters, and record what was done."""
from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any, Callable, Collection, Mapping, Sequence

import mxnet as mx
from mxnet.gluon import Block, HybridBlock

from .. import passes
from .._mxnet import blocks
from .._mxnet.arrays import NDArrayWeights
from .._mxnet.symbols import analyse, dtype_name, first_line, from_graph, fuse, to_graph, with_lasting_casts
from ..errors import GraphError, some_of, warn
from ..graph import CAST, MULTICAST, Consumers, Entry, Graph, Node, Role, has_control_flow, operator, unique_name
from ..graph.attrs import CONVERSION, DTYPE, INFERENCE, REGION, TYPE_FLAGS
from ..machine.dtypes import FLOAT16, FLOAT32, FLOAT64, INT8, LOW_PRECISION
from ..machine.host import keep_freed_memory
from ..passes import Context, Facts
from ..passes.float16 import widen
from ..rules import ANY_DEVICE, Cause, Device, Policy
from ..session.hooks import watch_symbols
from ..state.state import State
from .options import ConversionOptions
from .parameters import shapes_in

# Why the operators of a network stay in FP32, where none is lowered; the first reason found counts.
_REASONS = {
    Cause.REGION: "its operators were made with AMP off, in amp.autocast(enabled=False) or in an excluded block",
    Cause.EXCLUSION: "its operators are excluded",
    **dict.fromkeys((Cause.USER_LIST, Cause.NOT_LISTED, Cause.REGISTERED),
                    "the given lists of operators leave nothing else")}


@dataclass(frozen=True)
class Conversion:
    """The record of a conversion, which symbols carry as JSON text."""

    target_dtype: str  # 'bfloat16', 'float16', or 'float32' for a network that was optimised only
    operators: int = 0  # in the converted graph; operators in a fused one count as one
    low_precision: int = 0  # operators that read low precision
    casts: int = 0  # left in the graph
    steps: Mapping[str, int] = field(default_factory=dict)  # optimisations asked for, and how often each applied
    excluded: tuple[str, ...] = ()  # nodes kept in FP32 on request
    version: str = ""  # of gluon_amp
    reason: str = ""  # why all of the network stays in FP32; empty elsewhere, and where FP32 was asked for
    int8: tuple[str, ...] = ()  # layers in INT8
    wide: Mapping[str, str] = field(default_factory=dict)  # why other layers are not in INT8
    error: float | None = None  # of the worst output on some of the data that INT8 was calibrated with, relative
    layer_errors: Mapping[str, float] = field(default_factory=dict)  # of layers in INT8, each alone on FP32 inputs
    # of a search: layers in INT8, the type beside it, the measured value, and whether it is within the budget
    trials: tuple[Mapping[str, Any], ...] = ()

    @property
    def types(self) -> str:
        """The type that the network was converted to, beside INT8 where layers run in that."""
        return f"{INT8} and {self.target_dtype}" if self.int8 else self.target_dtype

    def summary(self) -> str:
        """Return one line of text."""
        layers = f"{len(self.int8)} of {len(self.int8) + len(self.wide)} layers in INT8, " if self.int8 else ""
        what = (f"{self.low_precision} of {self.operators} operators in low precision, {self.casts} casts"
                if self.target_dtype in LOW_PRECISION else f"{self.operators} operators" if layers else
                f"{self.reason or 'no low precision'}, {self.operators} operators")
        off = "" if self.error is None else f"; outputs {self.error:.2g} off FP32"
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        return f"{self.types}: {layers}{what}{off}" + (f"; {steps}" if steps else "")

    @classmethod
    def from_json(cls, text: str) -> Conversion:
        """Read the attribute of a symbol."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, **{name: tuple(values.get(name, ())) for name in ("excluded", "int8", "trials")}})

    def write(self, graph: Graph) -> None:
        """Write the record on the outputs of a graph."""
        for node in map(_bearer, graph.heads):
            node.attrs = {**node.attrs, CONVERSION: json.dumps(asdict(self))}


def _bearer(head: Entry) -> Node:
    """Return the node that carries the record for an output: custom operators hand their attributes to users' code."""
    node = head.node
    while node.op == "Custom" and node.inputs:
        node = node.inputs[0].node
    return node


def _records(graph: Graph) -> list[Conversion | None]:
    """Return the record of each output: a symbol may be made of others, some of which were converted."""
    texts = [_bearer(head).attrs.get(CONVERSION) for head in graph.heads]
    return [None if text is None else Conversion.from_json(text) for text in texts]


def conversion_of(graph: Graph) -> Conversion | None:
    """Return the record that a converted graph carries, None for one that was not converted."""
    return next(filter(None, _records(graph)), None)


def earlier(graph: Graph, wanted: str) -> Conversion | None:
    """Return the record of a network that is converted to a type already; None where a part of it is not."""
    records = _records(graph)
    for record in filter(None, records):
        if wanted != (INT8 if wanted == INT8 and record.int8 else record.types):
            raise GraphError(f"the network is already converted to {record.types}: to get {wanted} convert the FP32 "
                             "network that it was made from")
    return records[0] if all(records) else None


def uniquely_named(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Return a symbol whose operators have names of their own. Outputs keep theirs."""
    graph = to_graph(symbol)
    taken = {node.name for node in graph.variables()}
    for node in dict.fromkeys([*(head.node for head in graph.heads), *graph.operators()]):
        if not node.is_variable:
            node.name = unique_name(node.name, taken)
    return from_graph(graph, symbol)


@dataclass(frozen=True)
class Network:
    """A traced FP32 network that is to be converted."""

    symbol: mx.sym.Symbol
    arrays: Mapping[str, mx.nd.NDArray]  # its parameters
    inputs: Sequence[str]  # the names of its data
    policy: Policy  # for what does not run in INT8
    device: Device  # where it will run
    devices: Sequence[mx.Context]  # the same, as MXNet names them; of one kind
    example: Mapping[str, Any]  # data, or shapes of data
    cast_outputs: bool = True
    # Of the block that is made of it: its class, its variables, and the nesting of its arguments and results.
    kind: Any = None
    variables: Sequence[mx.sym.Symbol] = ()
    formats: tuple[Any, Any] | None = None

    @classmethod
    def of(cls, symbol: mx.sym.Symbol, arrays: Mapping[str, mx.nd.NDArray], inputs: Sequence[str],
           options: ConversionOptions, devices: Sequence[mx.Context], example: Mapping[str, Any],
           block: Block | None = None, **of_block: Any) -> Network:
        """Return a network as options ask for it, on devices of one kind."""
        before = to_graph(symbol).operators()
        symbol = uniquely_named(symbol) if options.is_int8 else symbol  # ranges and errors go by names
        graph = to_graph(symbol)
        policy, device = options.policy(graph, devices, block)
        again = [node.name for old, node in zip(before, graph.operators()) if old.name in policy.excluded]
        policy = replace(policy, excluded=policy.excluded.union(again))
        return cls(symbol, arrays, inputs, policy, device, devices, example, options.cast_outputs, **of_block)

    @property
    def on_cpu(self) -> bool:
        """Whether it will run on CPUs."""
        return self.devices[0].device_type != "gpu"

    def built(self, made: Made) -> HybridBlock:
        """Make a block of the converted network, hybridized."""
        block = self.kind(made.symbol, self.variables, made.record,
                          State({"cpu": self.policy}, {"cpu": self.device}) if self.on_cpu else None)
        blocks.load_parameters(block, made.arrays, self.devices, self.formats)
        block.hybridize(**memory_flags(to_graph(self.symbol)))
        return block


def memory_flags(graph: Graph) -> dict[str, bool]:
    """Return the flags that a network for inference is hybridized with: it has memory of its own if it has no loops."""
    # Without, fused layers bring their weights into oneDNN's layout, or INT8, in every call: AlexNet takes four times
    # as long. In loops MXNet's _foreach would give what was in that memory before.
    return dict.fromkeys(("static_alloc", "static_shape"), not has_control_flow(graph))


@dataclass(frozen=True)
class Made:
    """A converted network."""

    symbol: mx.sym.Symbol
    arrays: Mapping[str, mx.nd.NDArray]
    record: Conversion
    quantizer: Any = None


def convert(network: Network, trial: Policy | None = None, quantizer: Any = None, weights: Any = None) -> Made:
    """Convert a network; or try another policy on it, and layers in INT8. Values of ``weights`` may be unknown."""
    keep_freed_memory()
    symbol, example, policy = network.symbol, network.example, trial or network.policy
    device = network.device if policy is network.policy else ANY_DEVICE  # FP32, which depends on none
    weights = weights or (NDArrayWeights(network.arrays) if quantizer is None else quantizer.weights)
    dtypes = {name: dtype_name(value.dtype) or "" for name, value in example.items() if hasattr(value, "dtype")}
    graph = to_graph(symbol)
    record = earlier(graph, policy.target_dtype)
    if record is not None:
        return Made(symbol, weights.arrays, record, quantizer)
    not_finite = weights.not_finite()
    if not_finite:
        warn(f"the network is converted with infinite or NaN values in {some_of(not_finite)}: its results are wrong. "
             "Convert a checkpoint from before they came up")
    outputs = symbol.list_outputs()
    analyse_network(symbol, graph, weights, dtypes, shapes_in(example, "data_example"))
    # A GPU has no fused operators, and imitated types are not oneDNN's.
    has_engine = network.on_cpu and not device.imitated
    fuses = has_engine and policy.runs("fuse") and passes.is_fusible(graph)  # there are no gradients behind them
    context = Context.of(graph, policy, device, facts=Facts(recorded=not fuses), keep_outputs=network.cast_outputs,
                         weights=weights, int8=quantizer and quantizer.int8)
    counts = passes.run(graph, context)
    record = _counted(graph, policy, device, counts)
    for node in graph.operators():  # what gives the program's results has their names: behind a padded one the cut
        if node.stands_for and node.inputs[0].node.name == node.stands_for:
            node.inputs[0].node.name, node.name = graph.new_name(f"{node.stands_for}_padded"), node.stands_for
    graph.forget(REGION)
    _say_types(graph, set(dtypes))
    if policy.runs("fuse"):
        counts["fuse"] = _fuse(graph, context, symbol, quantizer) if has_engine else 0
    record = replace(record, steps={each.name: counts[each.name] for each in passes.PASSES
                                  if each.is_step and each.name in counts})
    name_outputs(graph, outputs, lambda: from_graph(graph, symbol).list_outputs())
    record.write(graph)
    for node in graph.variables() if fuses or counts.get("fuse") else ():
        node.attrs = {INFERENCE: "MXNet gives zeros behind fused operators", **node.attrs}
    watch_symbols()
    if record.reason and policy.lowers and trial is None:
        warn(f"the converted network stays in FP32: {record.reason}")
    needs_casts = weights.are_known or policy.runs("cast_params_offline")
    symbol = with_lasting_casts(from_graph(graph, symbol), needs_casts)
    return Made(symbol, weights.arrays, record, quantizer)


def _fuse(graph: Graph, context: Context, symbol: mx.sym.Symbol, quantize: Any) -> int:
    """Replace a graph by what MXNet's fusion, and its quantizer, make of it; return how many fused operators it has."""
    if any(FLOAT64 in node.dtypes for node in graph.operators()):
        return 0  # oneDNN has no kernels for float64
    between = passes.between(graph)
    passes.finish(graph, context)
    made = to_graph(fuse(from_graph(graph, symbol), with_int8=quantize is not None))
    count = passes.unshield(made)
    made = quantize(made, between) if quantize else made
    graph.heads, graph.attrs = made.heads, made.attrs
    return count


def _counted(graph: Graph, policy: Policy, device: Device, counts: Mapping[str, int]) -> Conversion:
    """Record what became of the operators, before they are fused."""
    operators = graph.operators()
    casts = sum(node.op == CAST for node in operators)
    low = sum(node.op != CAST and any(entry.dtype == policy.target_dtype for entry in node.inputs)
              for node in operators if policy.lowers)
    reason = ""  # why it holds no low precision
    if not policy.lowers:
        reason = device.reason
    elif not (counts["assign_dtypes"] if device.imitated else low):
        causes = {node.decision.cause for node in operators if node.decision is not None}
        reason = next((reason for cause, reason in _REASONS.items() if cause in causes), "")
        if not reason and any(FLOAT64 in node.dtypes for node in operators):
            reason = "its tensors are float64, which conversions leave as they are"
        reason = reason or f"none of its operators gains from {policy.target_dtype}"
    return Conversion(policy.target_dtype, len(operators), low, casts, {}, tuple(sorted(policy.excluded)),
                      metadata.version("gluon_amp"), reason)


def _say_types(graph: Graph, data: Collection[str]) -> None:
    """Write the type on FP32 variables that only casts and identities read: ``simple_bind`` could not infer it."""
    readers = Consumers(graph)
    for node in graph.variables():
        reading = readers.of(Entry(node))
        if (node.name not in data and node.attrs.get(DTYPE, "-1") == "-1" and node.dtypes == [FLOAT32] and reading
                and all(reader.op == CAST or reader.role is Role.IDENTITY for reader in reading)):
            node.attrs = {**node.attrs, DTYPE: str(TYPE_FLAGS[FLOAT32])}


def analyse_network(symbol: mx.sym.Symbol, graph: Graph, weights: Any, dtypes: Mapping[str, str],
                    shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the type and shape of every tensor into a symbol's graph, once low precision in it is taken as FP32."""
    is_widened = _widened(graph, weights, dtypes)
    types, variables = weights.dtypes(), graph.variables()
    for node in variables:  # MXNet cannot infer low precision behind a cast
        if types.get(node.name) in LOW_PRECISION:
            node.attrs = {**node.attrs, DTYPE: str(TYPE_FLAGS[types[node.name]])}
    symbol = from_graph(graph, symbol) if is_widened else symbol
    untyped = [node.name for node in variables if node.attrs.get(DTYPE, "-1") == "-1" and node.name not in weights]
    names = {node.name for node in variables}
    known = {name: dtype for name, dtype in {**types, **dtypes}.items() if name in names}
    sizes = {name: shape for name, shape in {**weights.shapes(), **shapes}.items() if name in names}
    try:
        if FLOAT64 in known.values():  # its data is float64 as well
            analyse(symbol, graph, known, sizes)
            known.update((node.name, FLOAT64) for node in variables if node.dtypes == [FLOAT64])
        floats = {dtype for dtype in known.values() if dtype.startswith(("float", "bfloat"))}
        analyse(symbol, graph, {**dict.fromkeys(untyped, FLOAT64 if floats == {FLOAT64} else FLOAT32), **known}, sizes)
    except mx.MXNetError as error:
        raise GraphError(f"the symbol does not fit its parameters or the example: {first_line(error)}. Give "
                         "the parameters of this network, and data of the shapes that it takes") from error


def _widened(graph: Graph, weights: Any, dtypes: Mapping[str, str]) -> bool:
    """Take a network in float16, or with parameters in low precision, as one in FP32; tell whether it changed."""
    if any(CONVERSION in node.attrs for node in graph.nodes()):
        return False  # a part of it was converted before, and has its types
    types, variables = weights.dtypes(), graph.variables()
    has_halves = any(node.attrs.get(DTYPE) == str(TYPE_FLAGS[FLOAT16]) for node in variables)
    low = [node for node in variables if types.get(node.name) in LOW_PRECISION]
    for node in low:
        weights.compute(node.name, CAST, {"dtype": FLOAT32}, [node.name])
        node.attrs = {key: value for key, value in node.attrs.items() if key != DTYPE}
    if not has_halves and FLOAT16 not in dtypes.values() and FLOAT16 not in types.values():
        return bool(low)
    data = [node.name for node in variables if node.name not in weights and DTYPE not in node.attrs]
    return bool(widen(graph, {**dict.fromkeys(data if has_halves else (), FLOAT16), **dtypes})) or bool(low)


def name_outputs(graph: Graph, wanted: Sequence[str], current: Callable[[], Sequence[str]]) -> None:
    """Give the outputs of a graph the names they had, where another operator gives them now."""
    # MXNet appends _output to the name of a node with one output, _out for np.matmul, np.concatenate and their kin, and
    # _output0, _output1 and so on where there are several.
    names = {node.name for node in graph.nodes()}
    joined: dict[str, Node] = {}

    def carrier(head: Entry, name: str, is_out: str | None, number: str | None) -> Node | None:
        """Return the node that gets a name for an output to have its own; None where the output cannot have it."""
        if is_out:
            return None if head.shape == () else operator("_npi_concatenate", name, [head], head, Role.HELPER,
                                                          num_args=1, axis=0)
        if number:  # of a node with several outputs
            count = max([int(number) + 1, *(node.num_outputs for node in graph.nodes() if node.name == name)])
            made = joined.setdefault(name, operator(MULTICAST, name, [head] * count, head, num_outputs=count))
            made.num_outputs, made.inputs[int(number)] = len(made.inputs), head
            return made
        is_shared = head.node.is_variable or head.node.num_outputs > 1 or sum(
            other.node is head.node for other in graph.heads) > 1
        return operator("_copy", name, [head], head) if is_shared else head.node

    for _ in range(2):  # a node that makes room for another may have given an output a name
        for position, (name, other) in enumerate(zip(wanted, current())):
            parts = re.fullmatch(r"(.+)(?:(_out)|_output(\d*))", name)
            owner = carrier(graph.heads[position], *parts.groups()) if parts and name != other else None
            if parts is None or owner is None:
                continue
            # Other nodes of the name get another one, but for several outputs that users know by it.
            known = {id(head.node) for head in graph.heads if head.node.num_outputs > 1}
            for node in graph.nodes():
                if node.name == parts[1] and node is not owner and not node.is_variable and id(node) not in known:
                    node.name = unique_name(f"{parts[1]}_low", names)
            owner.name = parts[1]
            graph.heads[position] = Entry(owner, int(parts[3] or 0))
