"""Convert one symbol, with its parameters where they are known."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import mxnet as mx

from .._mxnet.arrays import cast_arrays
from .._mxnet.symbols import DTYPE_ATTRIBUTE, DTYPE_FLAGS, analyse, first_line, from_graph, fuse, to_graph
from ..dtypes import FLOAT32, LOW_PRECISION
from ..errors import GraphError
from ..graph import Entry, Graph, Node, unique_name
from ..passes import drop_training, fold_batch_norm, fold_constants, rewrite
from ..graph.attrs import CONVERSION
from ..passes.place_casts import CAST
from ..passes.readers import redirect
from ..rules import Policy
from .settings import Conversion, conversion_of

__all__ = ["Request", "convert", "with_fp32_parameters"]


@dataclass(frozen=True)
class Request:
    """What is to be done to a symbol.

    Attributes
    ----------
    policy : Policy or None
        Decides each operator's precision; None for a network that is to be optimised and stay in FP32.
    disabled : frozenset of str
        The passes that are off; the policy's are the same.
    keep_outputs : bool
        Whether outputs are cast back to FP32.
    on_cpu : bool
        Whether the network will run on a CPU.
    version : str
        Noted in the result.
    """

    policy: Policy | None
    disabled: frozenset[str]
    keep_outputs: bool = True
    on_cpu: bool = True
    version: str = ""

    def runs(self, name: str) -> bool:
        """Whether a pass is on."""
        return name not in self.disabled

    @property
    def target_dtype(self) -> str:
        """The type to convert to."""
        return FLOAT32 if self.policy is None else self.policy.target_dtype

    @property
    def excluded(self) -> frozenset[str]:
        """Names of nodes to keep in FP32."""
        return frozenset() if self.policy is None else self.policy.excluded


def convert(symbol: mx.sym.Symbol, weights: Any, request: Request, dtypes: Mapping[str, str],
            shapes: Mapping[str, tuple[int, ...]]) -> tuple[mx.sym.Symbol, Conversion]:
    """Convert a symbol; the caller's is left as it is.

    Parameters
    ----------
    symbol : Symbol
        In FP32. One that was converted before to the same type is returned as it is.
    weights : Weights
        The parameters, changed with the symbol.
    request : Request
        What to do.
    dtypes, shapes : mapping
        Of inputs, by name, where they are known; other inputs are FP32.

    Raises
    ------
    GraphError
        MXNet finds the symbol and its parameters inconsistent, or the symbol was converted to another type.
    """
    graph = to_graph(symbol)
    earlier = conversion_of(graph)
    if earlier is not None:
        if earlier.target_dtype != request.target_dtype:
            raise GraphError(f"the network is already converted to {earlier.target_dtype}: to get "
                             f"{request.target_dtype} convert the FP32 network that it was made from")
        return symbol, earlier
    outputs = [(head.node.name, head.node.num_outputs) for head in graph.heads]
    counts = _simplify(graph, weights, request)
    if request.policy is not None:
        _analyse(symbol, graph, weights, dtypes, shapes)
        _lower(graph, weights, request, counts)
    low, casts = _low_operators(graph, request.target_dtype), sum(node.op == CAST for node in graph.operators())
    operators = len(graph.operators())
    _note_types(graph, weights)
    if request.runs("fuse"):
        graph, counts["fuse"] = _fused(graph, symbol, request)
    record = Conversion(request.target_dtype, operators, low, casts, counts, tuple(sorted(request.excluded)),
                        request.version)
    _name_outputs(graph, outputs)
    for head in graph.heads:
        head.node.attrs = {**head.node.attrs, CONVERSION: record.to_json()}
    return from_graph(graph, symbol), record


def _simplify(graph: Graph, weights: Any, request: Request) -> dict[str, int]:
    """Apply what is exact in FP32 too."""
    counts = {}
    if request.runs("drop_training"):
        counts["drop_training"] = drop_training.run(graph)
    if request.runs("fold_batch_norm"):
        counts["fold_batch_norm"] = fold_batch_norm.run(graph, weights, request.excluded)
    weights.keep({node.name for node in graph.variables()})
    return counts


def _analyse(symbol: mx.sym.Symbol, graph: Graph, weights: Any, dtypes: Mapping[str, str],
             shapes: Mapping[str, tuple[int, ...]]) -> None:
    names = [node.name for node in graph.variables()]
    untyped = [node.name for node in graph.variables()
               if node.attrs.get(DTYPE_ATTRIBUTE, "-1") == "-1" and node.name not in weights]
    known = {**dict.fromkeys(untyped, FLOAT32), **weights.dtypes(), **dtypes}
    sizes = {**weights.shapes(), **shapes}
    try:
        analyse(symbol, graph, {name: known[name] for name in names if name in known},
                {name: sizes[name] for name in names if name in sizes})
    except mx.MXNetError as error:
        raise GraphError(f"the symbol does not fit its parameters or the example: {first_line(error)}") from error


def _lower(graph: Graph, weights: Any, request: Request, counts: dict[str, int]) -> None:
    before = {id(node): node for node in graph.operators()}  # held: the numbers of dropped nodes are given again
    rewrite(graph, request.policy, keep_outputs=request.keep_outputs)  # type: ignore[arg-type]
    if request.runs("align_channels"):
        counts["align_channels"] = sum(node.op == "slice_axis" and id(node) not in before for node in graph.operators())
    if request.runs("cast_params_offline"):
        counts["cast_params_offline"] = fold_constants.run(graph, weights)


def _low_operators(graph: Graph, target: str) -> int:
    if target == FLOAT32:
        return 0
    return sum(node.op != CAST and any(entry.dtype == target for entry in node.inputs) for node in graph.operators())


def _note_types(graph: Graph, weights: Any) -> None:
    """Say on every parameter in low precision that it is: behind a cast MXNet cannot infer it."""
    types = weights.dtypes()
    for node in graph.variables():
        dtype = types.get(node.name, FLOAT32)
        if dtype != FLOAT32 and dtype in DTYPE_FLAGS:
            node.attrs = {**node.attrs, DTYPE_ATTRIBUTE: DTYPE_FLAGS[dtype]}


def _fused(graph: Graph, symbol: mx.sym.Symbol, request: Request) -> tuple[Graph, int]:
    """Let oneDNN fuse operators; a GPU has no such operators, and imitated types are not oneDNN's."""
    if not request.on_cpu or (request.policy is not None and request.policy.imitated):
        return graph, 0
    shields = _shield_batch_norms(graph)
    fused = to_graph(fuse(from_graph(graph, symbol)))
    redirect(fused, {Entry(node).key: node.inputs[0] for node in fused.operators() if node.name in shields})
    return fused, sum(node.op.startswith("_sg_mkldnn") for node in fused.operators())


def _shield_batch_norms(graph: Graph) -> set[str]:
    """Put identities before BatchNorms: MXNet's fusion folds them in bfloat16 arithmetic, a percent off per layer."""
    names = {node.name for node in graph.nodes()}
    shields = set()
    for node in graph.operators():
        if node.op == "BatchNorm":
            shield = Node("_mul_scalar", unique_name(f"{node.name}_shield", names), {"scalar": "1.0"}, [node.inputs[0]])
            node.inputs[0] = Entry(shield)
            shields.add(shield.name)
    return shields


def _name_outputs(graph: Graph, outputs: Sequence[tuple[str, int]]) -> None:
    """Give the outputs the names that users know them by, also where another operator gives them now."""
    nodes = graph.nodes()
    names = {node.name for node in nodes}
    for head, (name, count) in zip(graph.heads, outputs):
        if head.node.name == name or count > 1:
            continue
        for node in nodes:
            if node.name == name:
                node.name = unique_name(f"{name}_low", names)
        head.node.name = name


def with_fp32_parameters(symbol: mx.sym.Symbol, arrays: Mapping[str, Any]) -> tuple[mx.sym.Symbol, dict[str, Any]]:
    """Undo ``cast_params_offline``: parameters are FP32 again and cast in the graph, to the same values."""
    graph = to_graph(symbol)
    names = {node.name for node in graph.nodes()}
    low = {node: _LOW_FLAGS[node.attrs[DTYPE_ATTRIBUTE]] for node in graph.variables()
           if node.name in arrays and node.attrs.get(DTYPE_ATTRIBUTE) in _LOW_FLAGS}
    casts = {node: Node(CAST, unique_name(f"{node.name}_{dtype}", names), {"dtype": dtype})
             for node, dtype in low.items()}
    redirect(graph, {Entry(node).key: Entry(cast) for node, cast in casts.items()})
    for node, cast in casts.items():
        cast.inputs = [Entry(node)]
        node.attrs = {key: value for key, value in node.attrs.items() if key != DTYPE_ATTRIBUTE}
    return from_graph(graph, symbol), {name: cast_arrays(array, FLOAT32) for name, array in arrays.items()}


_LOW_FLAGS = {DTYPE_FLAGS[dtype]: dtype for dtype in LOW_PRECISION}
