"""Convert a graph and its parameters, and record what was done."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from typing import Any, Collection, Mapping, Sequence

import mxnet as mx

from .. import passes
from .._machine import keep_freed_memory
from .._mxnet import quantizer
from .._mxnet.arrays import NamesOnly, cast_arrays
from .._mxnet.symbols import dtype_name, from_graph, fuse, to_graph, with_lasting_casts
from ..dtypes import FLOAT32, INT8, LOW_PRECISION
from ..errors import GraphError, some_of, warn
from ..graph import CAST, Consumers, Entry, Graph, Node, Role, cast, redirect, unique_name
from ..graph.attrs import CONVERSION, DTYPE, INFERENCE, NOTE, REGION, TYPE_FLAGS
from ..passes import Context, Facts
from ..rules import Device, Policy
from ..session.hooks import watch_symbols
from .analysis import analyse_network, reason_for_fp32
from .inputs import shapes_in
from .int8 import Int8, decided_in
from .names import name_outputs, name_results


@dataclass(frozen=True)
class Conversion:
    """How a network was converted.

    Attributes
    ----------
    target_dtype : str
        ``'bfloat16'``, ``'float16'``, or ``'float32'`` for one that was optimised only.
    operators : int
        Operators in the converted graph; those in a fused operator count as one.
    low_precision : int
        Operators that read low precision.
    casts : int
        Casts left in the graph.
    steps : mapping of str to int
        Each optimisation that was asked for, and how often it applied.
    excluded : tuple of str
        Nodes kept in FP32 on request.
    version : str
        Version of gluon_amp.
    reason : str
        Why the network stays in FP32; empty where some of it is lowered, and where FP32 was asked for.
    int8 : tuple of str
        Layers in INT8.
    wide : mapping of str to str
        Layers that might have been in INT8, and why they are not.
    error : float, optional
        The relative error of the worst output on some of the data that INT8 was calibrated with.
    layer_errors : mapping of str to float
        Relative errors of the layers in INT8, each by itself on FP32 inputs.
    trials : tuple of dict
        What a search for the fastest network tried: layers in INT8, the type beside it, what was measured, and whether
        that is within the budget.

    Examples
    --------
    >>> Conversion('bfloat16', 10, 4, 2, {'fuse': 3}).summary()
    'bfloat16: 4 of 10 operators in low precision, 2 casts; fuse 3'
    """

    target_dtype: str
    operators: int = 0
    low_precision: int = 0
    casts: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    version: str = ""
    reason: str = ""
    int8: tuple[str, ...] = ()
    wide: Mapping[str, str] = field(default_factory=dict)
    error: float | None = None
    layer_errors: Mapping[str, float] = field(default_factory=dict)
    trials: tuple[Mapping[str, Any], ...] = ()

    @property
    def types(self) -> str:
        """The type that the network was converted to, beside INT8 where layers run in that."""
        return f"int8 and {self.target_dtype}" if self.int8 else self.target_dtype

    def summary(self) -> str:
        """Return one line of text."""
        layers = f"{len(self.int8)} of {len(self.int8) + len(self.wide)} layers in INT8, " if self.int8 else ""
        what = (f"{self.low_precision} of {self.operators} operators in low precision, {self.casts} casts"
                if self.target_dtype in LOW_PRECISION else f"{self.operators} operators" if layers else
                f"{self.reason or 'no low precision'}, {self.operators} operators")
        off = "" if self.error is None else f"; outputs {self.error:.2g} off FP32"
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        return f"{self.types}: {layers}{what}{off}" + (f"; {steps}" if steps else "")

    def to_json(self) -> str:
        """Return the record as JSON text, the form of the symbol attribute."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Conversion:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, **{name: tuple(values.get(name, ())) for name in ("excluded", "int8", "trials")}})


def conversion_of(graph: Graph) -> Conversion | None:
    """Return the record that a converted graph carries, None for one that was not converted."""
    return next((record for record in _records(graph) if record is not None), None)


def _records(graph: Graph) -> list[Conversion | None]:
    """Return the record of each output: a symbol may be made of others, some of which were converted."""
    texts = [_bearer(head.node).attrs.get(CONVERSION) for head in graph.heads]
    return [None if text is None else Conversion.from_json(text) for text in texts]


def _bearer(head: Node) -> Node:
    """Return the node that carries the record for an output: custom operators hand their attributes to users' code."""
    while head.op == "Custom" and head.inputs:
        head = head.inputs[0].node
    return head


def _earlier(graph: Graph, wanted: str) -> Conversion | None:
    """Return the record of a network that is converted already; None where that is to be done, to parts at least."""
    records = _records(graph)
    wrong = next((record for record in records if record and record.types != wanted), None)
    if wrong is not None:
        raise GraphError(f"the network is already converted to {wrong.types}: to get {wanted} convert the FP32 network "
                         "that it was made from")
    return records[0] if all(records) else None


def convert(symbol: mx.sym.Symbol, weights: Any, policy: Policy, device: Device, example: Mapping[str, Any], *,
            on_cpu: bool = True, cast_outputs: bool = True, int8: Int8 | None = None
            ) -> tuple[mx.sym.Symbol, Conversion]:
    """Convert a symbol, with arrays or shapes of data for an example; the caller's is left as it is."""
    keep_freed_memory()
    dtypes = {name: dtype_name(value.dtype) or "" for name, value in example.items() if hasattr(value, "dtype")}
    shapes = shapes_in(example, "data_example")
    graph = to_graph(symbol)
    earlier = _earlier(graph, policy.target_dtype if int8 is None else INT8)
    if earlier is not None:
        return symbol, earlier
    _warn_of_values(weights.not_finite())
    outputs = symbol.list_outputs()
    analyse_network(symbol, graph, weights, dtypes, shapes)
    # A GPU has no fused operators, and imitated types are not oneDNN's.
    has_engine = on_cpu and not device.imitated
    fuses = has_engine and policy.runs("fuse") and passes.is_fusible(graph)  # behind which there are no gradients
    fusion = fuse if int8 is None else quantizer.fused
    engine = (lambda given: to_graph(fusion(from_graph(given, symbol)))) if has_engine else None
    context = Context.of(graph, policy, device, facts=Facts(recorded=not fuses), keep_outputs=cast_outputs,
                         weights=weights, engine=engine, int8=int8)
    counts = passes.run(graph, context)
    made = _counted(graph, policy, device, counts)
    name_results(graph)
    graph.forget(REGION)
    _say_types(graph, set(dtypes))
    counts.update(passes.finish(graph, context))
    record = replace(made, steps={each.name: counts[each.name] for each in passes.PASSES
                                  if each.is_step and each.name in counts})
    name_outputs(graph, outputs, lambda: from_graph(graph, symbol).list_outputs())
    _note(graph, record, fuses or bool(counts.get("fuse")))
    watch_symbols()
    if record.reason and policy.lowers and int8 is None:
        warn(f"the converted network stays in FP32: {record.reason}")
    needs_casts = not isinstance(weights, NamesOnly) or policy.runs("cast_params_offline")
    return with_lasting_casts(from_graph(graph, symbol), needs_casts), record


def with_record(symbol: mx.sym.Symbol, record: Conversion, notes: Mapping[str, str]) -> mx.sym.Symbol:
    """Return a converted symbol that carries another record, and notes on its layers."""
    graph = to_graph(symbol)
    for node in graph.operators():
        told = next((notes[name] for name in decided_in(node) if name in notes), None)
        if told is not None:
            node.attrs = {**node.attrs, NOTE: told}
    for bearer in [_bearer(head.node) for head in graph.heads]:
        bearer.attrs = {**bearer.attrs, CONVERSION: record.to_json()}
    return with_lasting_casts(from_graph(graph, symbol), needed=True)


def _warn_of_values(names: Sequence[str]) -> None:
    if names:
        warn(f"the network is converted with infinite or NaN values in {some_of(names)}: what it computes "
             "from them is wrong. Convert a checkpoint from before they came up")


def _counted(graph: Graph, policy: Policy, device: Device, counts: Mapping[str, int]) -> Conversion:
    """Record what became of the operators, before they are fused."""
    operators = graph.operators()
    casts = sum(node.op == CAST for node in operators)
    low = sum(node.op != CAST and any(entry.dtype == policy.target_dtype for entry in node.inputs)
              for node in operators if policy.lowers)
    is_lowered = counts["assign_dtypes"] if device.imitated else low
    return Conversion(policy.target_dtype, len(operators), low, casts, {}, tuple(sorted(policy.excluded)),
                      metadata.version("gluon_amp"), "" if is_lowered else reason_for_fp32(graph, policy, device))


def _note(graph: Graph, record: Conversion, is_fused: bool) -> None:
    """Write the record on the outputs, and that there are no gradients on the inputs."""
    for bearer in [_bearer(head.node) for head in graph.heads]:
        bearer.attrs = {**bearer.attrs, CONVERSION: record.to_json()}
    for node in graph.variables() if is_fused else ():
        node.attrs = {INFERENCE: "MXNet gives zeros behind fused operators", **node.attrs}


def _say_types(graph: Graph, data: Collection[str]) -> None:
    """Write the type on FP32 variables that only casts and identities read: ``simple_bind`` could not infer it."""
    readers = Consumers(graph)
    for node in graph.variables():
        reading = readers.of(Entry(node))
        if (node.name not in data and node.attrs.get(DTYPE, "-1") == "-1" and node.dtypes == [FLOAT32] and reading
                and all(reader.op == CAST or reader.role is Role.IDENTITY for reader in reading)):
            node.attrs = {**node.attrs, DTYPE: str(TYPE_FLAGS[FLOAT32])}


def with_fp32_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, Any]) -> tuple[mx.sym.Symbol, dict[str, Any]]:
    """Undo ``cast_params_offline``: parameters are FP32 again and cast in the graph, to the same values."""
    graph = to_graph(symbol)
    names = {node.name for node in graph.nodes()}
    moved = {}
    for node in graph.variables():
        dtype = _LOW_FLAGS.get(node.attrs.get(DTYPE, ""))
        if dtype is not None and node.name in arrays:
            moved[Entry(node).key] = cast(Entry(node), dtype, unique_name(f"{node.name}_{dtype}", names))
            node.attrs = {key: value for key, value in node.attrs.items() if key != DTYPE}
    redirect(graph, moved)
    return from_graph(graph, symbol), {name: cast_arrays(array, FLOAT32) for name, array in arrays.items()}


_LOW_FLAGS = {str(TYPE_FLAGS[dtype]): dtype for dtype in LOW_PRECISION}
