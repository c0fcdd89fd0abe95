"""Convert a graph and its parameters, and record what was done."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Collection, Mapping, Sequence

import mxnet as mx

from .. import passes
from .._memory import keep_freed_memory
from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import analyse, dtype_name, first_line, from_graph, fuse, to_graph, with_lasting_casts
from .._mxnet.weights import NamesOnly
from ..dtypes import FLOAT32, FLOAT64, LOW_PRECISION
from ..errors import GraphError
from ..graph import CAST, Entry, Graph, Node, Readers, Role, cast, redirect, unique_name
from ..graph.attrs import CONVERSION, DTYPE, INFERENCE, TYPE_FLAGS
from ..passes import Context, Facts
from ..rules import Policy
from ..runtime.hooks import watch_symbols
from .inputs import shapes_in
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
        Why the network stays in FP32; empty for other types.

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

    def summary(self) -> str:
        """Return one line of text."""
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        what = (f"{self.low_precision} of {self.operators} operators in low precision, {self.casts} casts"
                if self.target_dtype in LOW_PRECISION else f"{self.reason or 'no low precision'}, "
                f"{self.operators} operators")
        return f"{self.target_dtype}: {what}" + (f"; {steps}" if steps else "")

    def to_json(self) -> str:
        """Return the record as JSON text, the form of the symbol attribute."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Conversion:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "excluded": tuple(values.get("excluded", ()))})


def conversion_of(graph: Graph) -> Conversion | None:
    """Return the record that a converted graph carries, None for one that was not converted."""
    bearers = [_bearer(head.node) for head in graph.heads]
    records: Sequence[str] = [node.attrs[CONVERSION] for node in bearers if CONVERSION in node.attrs]
    return Conversion.from_json(records[0]) if records else None


def _bearer(head: Node) -> Node:
    """Return the node that carries the record for an output: custom operators hand their attributes to users' code."""
    while head.op == "Custom" and head.inputs:
        head = head.inputs[0].node
    return head


def convert(symbol: mx.sym.Symbol, weights: Any, policy: Policy, example: Mapping[str, Any], *, on_cpu: bool = True,
            cast_outputs: bool = True) -> tuple[mx.sym.Symbol, Conversion]:
    """Convert a symbol, with arrays or shapes of data for an example; the caller's is left as it is."""
    keep_freed_memory()
    dtypes = {name: dtype_name(value.dtype) or "" for name, value in example.items() if hasattr(value, "dtype")}
    shapes = shapes_in(example, "data_example")
    graph = to_graph(symbol)
    earlier = conversion_of(graph)
    if earlier is not None:
        if earlier.target_dtype != policy.target_dtype:
            raise GraphError(f"the network is already converted to {earlier.target_dtype}: to get "
                             f"{policy.target_dtype} convert the FP32 network that it was made from")
        return symbol, earlier
    outputs = symbol.list_outputs()
    _analyse(symbol, graph, weights, dtypes, shapes)
    # A GPU has no fused operators, and imitated types are not oneDNN's.
    has_engine = on_cpu and not policy.imitated
    fuses = has_engine and policy.runs("fuse") and passes.is_fusible(graph)  # behind which there are no gradients
    context = Context.of(graph, policy, Facts(recorded=not fuses), keep_outputs=cast_outputs, weights=weights,
                         engine=(lambda given: to_graph(fuse(from_graph(given, symbol)))) if has_engine else None)
    counts = passes.run(graph, context)
    operators = graph.operators()
    casts = sum(node.op == CAST for node in operators)
    low = sum(node.op != CAST and any(entry.dtype == policy.target_dtype for entry in node.inputs)
              for node in operators if policy.target_dtype != FLOAT32)
    name_results(graph)
    _say_types(graph, set(dtypes))
    counts.update(passes.finish(graph, context))
    steps = {each.name: counts[each.name] for each in passes.PASSES if each.is_step and each.name in counts}
    record = Conversion(policy.target_dtype, len(operators), low, casts, steps, tuple(sorted(policy.excluded)),
                        metadata.version("gluon_amp"), policy.reason)
    name_outputs(graph, outputs, lambda: from_graph(graph, symbol).list_outputs())
    for bearer in [_bearer(head.node) for head in graph.heads]:
        bearer.attrs = {**bearer.attrs, CONVERSION: record.to_json()}
    if fuses or counts.get("fuse"):
        for node in graph.variables():
            node.attrs = {INFERENCE: "MXNet gives zeros behind fused operators", **node.attrs}
    watch_symbols()
    needs_casts = not isinstance(weights, NamesOnly) or policy.runs("cast_params_offline")
    return with_lasting_casts(from_graph(graph, symbol), needs_casts), record


def _analyse(symbol: mx.sym.Symbol, graph: Graph, weights: Any, dtypes: Mapping[str, str],
             shapes: Mapping[str, tuple[int, ...]]) -> None:
    _note_types(graph, weights)
    variables = graph.variables()
    untyped = [node.name for node in variables if node.attrs.get(DTYPE, "-1") == "-1" and node.name not in weights]
    known = {**weights.dtypes(), **dtypes}
    names = {node.name for node in variables}
    sizes = {name: shape for name, shape in {**weights.shapes(), **shapes}.items() if name in names}
    try:
        if FLOAT64 in known.values():  # its data is float64 as well
            analyse(symbol, graph, {name: dtype for name, dtype in known.items() if name in names}, sizes)
            known.update((node.name, FLOAT64) for node in variables if node.dtypes == [FLOAT64])
        floats = {dtype for dtype in known.values() if dtype.startswith(("float", "bfloat"))}
        known = {**dict.fromkeys(untyped, FLOAT64 if floats == {FLOAT64} else FLOAT32), **known}
        analyse(symbol, graph, {name: dtype for name, dtype in known.items() if name in names}, sizes)
    except mx.MXNetError as error:
        raise GraphError(f"the symbol does not fit its parameters or the example: {first_line(error)}. Give "
                         "the parameters of this network, and data of the shapes that it takes") from error


def _note_types(graph: Graph, weights: Any) -> None:
    """Write the type on every parameter in low precision, because MXNet cannot infer it behind a cast."""
    types = weights.dtypes()
    for node in graph.variables():
        if types.get(node.name) in LOW_PRECISION:
            node.attrs = {**node.attrs, DTYPE: str(TYPE_FLAGS[types[node.name]])}


def _say_types(graph: Graph, data: Collection[str]) -> None:
    """Write the type on FP32 variables that only casts and guards read: ``simple_bind`` could not infer it."""
    readers = Readers(graph)
    for node in graph.variables():
        reading = readers.of(Entry(node))
        if (node.name not in data and node.attrs.get(DTYPE, "-1") == "-1" and node.dtypes == [FLOAT32] and reading
                and all(reader.op == CAST or reader.role is Role.GUARD for reader in reading)):
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
