"""A symbol as traced, and what of it depends on a call."""
from __future__ import annotations

from functools import cached_property
from typing import Callable, Iterator, Mapping, Optional, Sequence, Tuple

import mxnet as mx

from .. import native
from .._mxnet.symbols import analyse, from_graph, infer_shapes, to_graph
from ..dtypes import FLOAT16
from ..eager.custom_operators import inputs_with_own_gradient
from ..graph import Graph, Node, has_control_flow, subgraphs_of
from ..graph.attrs import CONVERSION, region
from ..passes import Concern, Shaped
from ..passes.channels_last import may_gain
from ..passes.float16 import widen
from ..passes.gradient_fixes import CONCERNED, DEPEND_ON_MODE, concerns_of
from ..passes.native_operators import factors_come_first, following, may_replace, replacement_of
from ..rules import Policy
from ..rules.tables.groups import CUSTOM, WITH_OWN_GRADIENT
from ..state.state import State
from .converted_symbols import spoilt_gradients

Shapes = Sequence[Tuple[int, ...]]
Dtypes = Sequence[Optional[str]]


class Traced:
    """A symbol as traced, read once."""

    def __init__(self, symbol: mx.sym.Symbol):
        self.symbol = symbol
        self.names = tuple(symbol.list_inputs())  # arguments and auxiliary states, in order
        self._probes: dict[frozenset[str], _Probe] = {}

    @cached_property
    def graph(self) -> Graph:
        """The symbol's graph. Not to be edited."""
        return to_graph(self.symbol)

    @cached_property
    def is_marked(self) -> bool:
        """Tell whether some of its operators were traced inside an autocast region."""
        return any(region(node.attrs) for node in self.graph.nodes())

    @cached_property
    def is_converted(self) -> bool:
        """Tell whether it, or a part of it, was converted for inference, and has its casts already."""
        return any(CONVERSION in node.attrs for node in self.graph.nodes())

    @cached_property
    def spoilt(self) -> Mapping[str, str]:
        """The inputs whose gradients a conversion has spoilt, and how."""
        return spoilt_gradients(self.symbol)

    @cached_property
    def depends_on_recording(self) -> bool:
        """Tell whether it runs otherwise where no gradients are asked for."""
        return (bool(self.own_gradients) or self.has_defects or has_control_flow(self.graph)
                or any(replacement_of(node) is not None for node in self.graph.operators()))

    @cached_property
    def own_gradients(self) -> tuple[tuple[str, int], ...]:
        """The operators that make a gradient on their own, and for how many inputs."""
        counts = ((node.name, _own_gradients(node)) for node in self.graph.operators())
        return tuple((name, count) for name, count in counts if count)

    @cached_property
    def unscaled(self) -> str:
        """The name of an operator whose own gradient cannot carry a loss scale; empty where there is none."""
        inner = [node.name for node in self.graph.operators() if any(map(_own_gradients, _inside(node)))]
        kept = [] if self.keeps_inputs else [name for name, _ in self.own_gradients]
        return next(iter(inner + kept), "")

    @cached_property
    def depends_on_training(self) -> bool:
        """Tell whether it runs otherwise where operators are in their training mode."""
        return may_gain(self.graph)

    @cached_property
    def has_defects(self) -> bool:
        """Tell whether it has operators whose gradients MXNet may get wrong."""
        return any(node.op in CONCERNED for node in self.graph.operators())

    @cached_property
    def depends_on_evaluating(self) -> bool:
        """Tell whether it has operators whose gradients MXNet gets wrong in inference only."""
        return any(node.op in DEPEND_ON_MODE for node in self.graph.operators())

    def concerned(self, is_asked: Callable[[str], bool], evaluates: bool = False) -> frozenset[Concern]:
        """Name the gradients that MXNet would get wrong, where those of some inputs are asked for."""
        return concerns_of(self.graph, is_asked, evaluates) if self.has_defects else frozenset()

    @cached_property
    def keeps_inputs(self) -> bool:
        """Whether its graph has its inputs, in order: partitions may have some that no operator reads."""
        return [node.name for node in self.graph.variables()] == list(self.names)

    def analysed(self, dtypes: Dtypes, shapes: Shapes) -> Graph:
        """Return a graph of one's own with the types and shapes of all tensors, by those of the inputs in order."""
        # Where a user's float16 meets FP32, which MXNet refuses, the graph holds casts to FP32 that the symbol lacks.
        graph, types = self.graph.copy(), {name: dtype for name, dtype in zip(self.names, dtypes) if dtype}
        known = {name: shape for name, shape in zip(self.names, shapes) if shape}
        try:
            analyse(self.symbol, graph, types, known)
            if FLOAT16 not in types.values() or all(None not in node.dtypes for node in graph.operators()):
                return graph
        except mx.MXNetError:
            if not widen(graph, types, self._written):
                raise
        else:
            widen(graph, types, self._written)
        analyse(self.symbol, graph, types, known)
        return graph

    @cached_property
    def _written(self) -> list[str]:
        return self.symbol.list_auxiliary_states()

    def shaped(self, state: State, kind: str, shapes: Shapes) -> frozenset[Shaped]:
        """Return what the shapes of all inputs decide on a kind of device."""
        policy, device = policy_for(self, state, kind, low=False), state.device(kind)
        if policy is None:
            return frozenset()
        lowered = frozenset(node.op for node in self.graph.operators()
                            if not self.is_converted and policy.depends_on_shape(node.op, device))
        is_native = kind == "cpu" and policy.runs_native(device) and native.any_is_available()
        replaced = following(self.graph) if is_native else frozenset()
        ops = lowered | replaced
        if ops not in self._probes:
            self._probes[ops] = _Probe(self, ops)
        read = self._probes[ops].shapes(dict(zip(self.names, shapes)))
        decided = {
            "in FP32": lambda node, found: (node.op in lowered
                                            and policy.kept_for(node.op, node.attrs, found[0], device)),
            "MXNet's": lambda node, found: node.op in replaced and not may_replace(node, found),
            "factors first": factors_come_first}
        return frozenset(Shaped(node.name, what) for what, holds in decided.items() for node, found in read
                         if holds(node, found))


def _own_gradients(node: Node) -> int:
    return inputs_with_own_gradient(node.attrs) if node.op == CUSTOM else int(node.op in WITH_OWN_GRADIENT)


def _inside(node: Node) -> Iterator[Node]:
    """Yield the operators of the graphs that an operator holds."""
    for inner in (each for part in subgraphs_of(node) for each in part.operators()):
        yield inner
        yield from _inside(inner)


class _Probe:
    """Infers only the shapes that some kinds of operators read, which is many times faster than an analysis."""

    def __init__(self, traced: Traced, ops: frozenset[str]):
        self.nodes = [node for node in traced.graph.operators() if node.op in ops and node.inputs]
        data = {entry.key: entry for node in self.nodes for entry in node.inputs[:2]}
        self.order = {key: position for position, key in enumerate(data)}
        self.symbol = from_graph(Graph(list(data.values()), traced.graph.attrs), traced.symbol) if data else None

    def shapes(self, known: Mapping[str, Sequence[int]]) -> list[tuple[Node, Shapes]]:
        """Return the operators with the shapes of their first two inputs, which are empty where unknown."""
        if self.symbol is None:
            return []
        try:
            inferred = infer_shapes(self.symbol, known)
        except mx.MXNetError:  # shapes that do not fit: the call that follows says so, and is explained
            return []
        return [(node, [inferred[self.order[entry.key]] or () for entry in node.inputs[:2]]) for node in self.nodes]


def policy_for(traced: Traced, state: State, device: str, low: bool, half: bool = False) -> Policy | None:
    """Return the policy to rewrite a symbol by, None where nothing in it can change."""
    idle = not (state.enabled or low or half or traced.is_marked)
    policy = None if idle or not traced.keeps_inputs else state.policy(device)
    # A user who hands bfloat16 to a network that runs in FP32 gets what MXNet makes of it.
    return None if policy is not None and low and not policy.lowers else policy
