"""A symbol as traced, and the rewritten form of it under a setting: made once, read by reports and error messages."""
from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Tuple
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import native, passes
from .._mxnet.symbols import analyse, from_graph, infer_shapes, to_graph
from ..eager.custom_operators import inputs_with_own_gradient
from ..eager.loss_scale import loss_scale
from ..errors import StateError
from ..graph import Entry, Graph, Node, Role, loops_and_branches, subgraphs_of
from ..graph.attrs import CONVERSION, INFERENCE, MADE, region
from ..machine.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..passes import Concern, Facts, Shaped, channels_last
from ..passes.float16 import widen
from ..passes.gradient_fixes import CONCERNED, concerns_of
from ..passes.gradients import is_scale
from ..passes.native_operators import NATIVE, factors_come_first, following, may_replace, replacement_of
from ..passes.precisions import MAKES_SPARSE, WITHOUT_SHAPES
from ..rules import ANY_DEVICE, Policy
from ..rules.tables.groups import CUSTOM, WITH_OWN_GRADIENT
from ..state.state import State, remember

Shapes = Sequence[Tuple[int, ...]]
Dtypes = Sequence[Optional[str]]

MOST_PLANS = 32  # of one symbol under one setting: shapes may keep ever other operators in FP32
MOST_SHAPES = 256  # networks may be fed thousands of different ones

_CHECK = os.environ.get("GLUON_AMP_VERIFY", "0") not in ("", "0")
# Runs none of the passes that can be switched off.
_AS_TRACED = Policy(FLOAT32, disabled_passes=frozenset(passes.list_passes()))


class Traced:
    """A symbol as traced, and the questions about it that do not depend on a call, each answered once."""

    def __init__(self, symbol: mx.sym.Symbol):
        self.symbol = symbol
        self.names = tuple(symbol.list_inputs())  # arguments and auxiliary states, in order
        # By kinds of operators: these, where each of their first two inputs stands in a symbol, and the symbol.
        self._probes: dict[frozenset[str], tuple[list[Node], dict[Any, int], mx.sym.Symbol | None]] = {}

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
        return (bool(self.own_gradients) or self.has_defects
                or any(replacement_of(node) is not None for node in self.graph.operators()))

    @cached_property
    def own_gradients(self) -> tuple[tuple[str, int], ...]:
        """The operators that make a gradient on their own, and for how many inputs."""
        return tuple((node.name, count) for node in self.graph.operators()
                     for count in [_own_gradients(node)] if count)

    @cached_property
    def unscaled(self) -> str:
        """The name of an operator whose own gradient cannot carry a loss scale; empty where there is none."""
        inner = [node.name for node in self.graph.operators() if any(map(_own_gradients, _inside(node)))]
        kept = [] if self.keeps_inputs else [name for name, _ in self.own_gradients]
        return next(iter(inner + kept), "")

    @cached_property
    def ops(self) -> frozenset[str]:
        """The registered names of its operators."""
        return frozenset(node.op for node in self.graph.operators())

    @cached_property
    def has_defects(self) -> bool:
        """Tell whether it has operators whose gradients MXNet may get wrong."""
        return not self.ops.isdisjoint(CONCERNED)

    def concerned(self, is_asked: Callable[[str], bool], evaluates: bool = False) -> frozenset[Concern]:
        """Name the gradients that MXNet would get wrong, where gradients of some inputs are asked for."""
        return concerns_of(self.graph, is_asked, evaluates) if self.has_defects else frozenset()

    @cached_property
    def keeps_inputs(self) -> bool:
        """Whether its graph has its inputs, in order: partitions may have some that no operator reads."""
        return [node.name for node in self.graph.variables()] == list(self.names)

    def analysed(self, dtypes: Dtypes, shapes: Shapes) -> Graph:
        """Return a new graph with the types and shapes of all tensors, given the inputs' in order."""
        # Where a user's float16 meets FP32, which MXNet refuses, the graph holds casts to FP32 that the symbol lacks.
        graph, types = self.graph.copy(), {name: dtype for name, dtype in zip(self.names, dtypes) if dtype}
        known = {name: shape for name, shape in zip(self.names, shapes) if shape}
        try:
            analyse(self.symbol, graph, types, known)
            if FLOAT16 not in types.values() or all(None not in node.dtypes for node in graph.operators()):
                return graph
            widen(graph, types, self.symbol.list_auxiliary_states())
        except mx.MXNetError:
            if not widen(graph, types, self.symbol.list_auxiliary_states()):
                raise
        analyse(self.symbol, graph, types, known)
        return graph

    def shaped(self, state: State, kind: str, shapes: Shapes) -> frozenset[Shaped]:
        """Return the decisions that follow from the shapes of all inputs on a kind of device."""
        policy, device = policy_for(self, state, kind, low=False), state.device(kind)
        if policy is None:
            return frozenset()
        lowered = frozenset(node.op for node in self.graph.operators()
                            if not self.is_converted and policy.depends_on_shape(node.op, device))
        is_native = kind == "cpu" and policy.runs_native(device) and native.any_is_available()
        replaced = following(self.graph) if is_native else frozenset()
        read = self._read_by(lowered | replaced, dict(zip(self.names, shapes)))
        decided = {
            "in FP32": lambda node, found: (node.op in lowered
                                            and policy.kept_for(node.op, node.attrs, found[0], device)),
            "MXNet's": lambda node, found: node.op in replaced and not may_replace(node, found),
            "factors first": factors_come_first}
        return frozenset((node.name, what) for what, holds in decided.items() for node, found in read
                         if holds(node, found))

    def _read_by(self, ops: frozenset[str], known: Mapping[str, Sequence[int]]) -> list[tuple[Node, Shapes]]:
        """Return operators of some kinds with the shapes of their first two inputs, which are empty where unknown."""
        if ops not in self._probes:  # to infer these alone is many times faster than an analysis
            nodes = [node for node in self.graph.operators() if node.op in ops and node.inputs]
            data = {entry.key: entry for node in nodes for entry in node.inputs[:2]}
            self._probes[ops] = nodes, {key: position for position, key in enumerate(data)}, from_graph(
                Graph(list(data.values()), self.graph.attrs), self.symbol) if data else None
        nodes, order, symbol = self._probes[ops]
        if symbol is None:
            return []
        try:
            inferred = infer_shapes(symbol, known)
        except mx.MXNetError:  # shapes that do not fit: the call that follows says so, and is explained
            return []
        return [(node, [inferred[order[entry.key]] or () for entry in node.inputs[:2]]) for node in nodes]


def refuse_inputs_of_loops(graph: Graph, monitor_all: bool) -> None:
    """Raise StateError where a hook or monitor asks for what loops or branches read, for which MXNet has no names."""
    names = [node.name for node in loops_and_branches(graph) if monitor_all]
    if names:
        raise StateError(f"expected monitor_all=False for a network with loops or branches ({', '.join(names[:3])}), "
                         "received True: MXNet cannot name their inputs, and fails")


def spoilt_gradients(symbol: mx.sym.Symbol) -> dict[str, str]:
    """Name the variables whose gradients a conversion has spoilt, and say how."""
    return {name: f"made of {attrs[MADE]}" if MADE in attrs else attrs[INFERENCE]
            for name, attrs in symbol.attr_dict().items() if MADE in attrs or INFERENCE in attrs}


def _own_gradients(node: Node) -> int:
    return inputs_with_own_gradient(node.attrs) if node.op == CUSTOM else int(node.op in WITH_OWN_GRADIENT)


def _inside(node: Node) -> Iterator[Node]:
    """Yield the operators of the graphs that an operator holds."""
    for inner in (each for part in subgraphs_of(node) for each in part.operators()):
        yield inner
        yield from _inside(inner)


def policy_for(traced: Traced, state: State, device: str, low: bool, half: bool = False) -> Policy | None:
    """Return the policy to rewrite a symbol by, None where nothing in it can change."""
    idle = not (state.enabled or low or half or traced.is_marked)
    policy = None if idle or not traced.keeps_inputs else state.policy(device)
    # A user who hands bfloat16 to a network that runs in FP32 gets MXNet's own result.
    return None if policy is not None and low and not policy.lowers else policy


@dataclass(frozen=True, eq=False)
class Plan:
    """The rewritten form of a graph under a setting."""

    traced: Traced  # the symbol that it was made for
    facts: Facts  # of the call, as far as it depends on them
    dtypes: Dtypes  # types of the inputs, in which data that a block around gives in bfloat16 counts as FP32
    shapes: Shapes  # shapes of the inputs at the call that it was made for
    policy: Policy | None = None  # that decided; None where nothing in it can change
    # every operator with its decision, types, and shapes for ``shapes``; None without a policy
    rewritten: Graph | None = None
    symbol: mx.sym.Symbol | None = None  # the symbol to run; None for the symbol as traced

    @cached_property
    def graph(self) -> Graph:
        """The graph that runs. Not to be edited."""
        return self.traced.analysed(self.dtypes, self.shapes) if self.rewritten is None else self.rewritten

    @property
    def is_native(self) -> bool:
        """Whether operators in C++ are in it."""
        return self.rewritten is not None and any(node.op in NATIVE for node in self.rewritten.operators())

    @cached_property
    def has_control_flow(self) -> bool:
        """Whether loops or branches are among its operators."""
        return bool(loops_and_branches(self.traced.graph))

    @property
    def runs_in_turn(self) -> bool:
        """Whether its operators run one after another: on CPUs, beside loops and branches."""
        return self.facts.device == "cpu" and self.has_control_flow

    @cached_property
    def carries_scale(self) -> bool:
        """Whether the symbol that runs has the loss scale as its last input."""
        return self.rewritten is not None and any(map(is_scale, self.rewritten.variables()))

    def arguments(self, given: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return the arguments of the symbol that runs, given the arguments of the symbol as traced."""
        return (*given, loss_scale.on(given[0].context)) if self.carries_scale else given

    @property
    def runs(self) -> mx.sym.Symbol:
        """The symbol that runs."""
        return self.traced.symbol if self.symbol is None else self.symbol

    def at(self, shapes: Shapes) -> Graph:
        """Return the graph with its shapes for other shapes of the inputs: one plan serves several."""
        if shapes == self.shapes:
            return self.graph
        if self.rewritten is None:
            return self.traced.analysed(self.dtypes, shapes)
        graph = self.rewritten.copy()
        nodes = graph.nodes()
        entries = [Entry(node, output) for node in nodes for output in range(node.num_outputs)]
        inferred = iter(infer_shapes(from_graph(Graph(entries, graph.attrs), self.traced.symbol),
                                     dict(zip(self.traced.names, shapes))))
        for node in nodes:
            node.shapes = [next(inferred) for _ in range(node.num_outputs)]
        return graph

    def explain(self, message: str) -> str:
        """Describe how AMP changed the operator that an error message of MXNet names."""
        remedy = "To see whether AMP is the cause run it inside `with amp.autocast(enabled=False):`"
        named = re.search(r"Error in operator (\S+?):", message)
        node = next((node for node in self.graph.operators() if named and node.name == named[1]), None)
        if node is None:
            return f"The network ran under AMP. {remedy}; MXNET_ENGINE_TYPE=NaiveEngine shows the operator"
        if node.role is not Role.OWN:
            return f"The operator {node.name} ({node.op}) was inserted by AMP. {remedy}"
        types = ", ".join(str(entry.dtype) for entry in node.inputs)
        rule = f"rule {node.decision.rule}: {node.decision.note}" if node.decision is not None else "as traced"
        told = f"The operator {node.name} ({node.kind}) ran under AMP with inputs of {types} ({rule}). {remedy}; "
        if not node.replaced:
            return f"{told}amp.init(fp32_ops=['{node.op}']) or amp.exclude(block) keeps it in FP32"
        name = "channels_last" if node.op in channels_last.NATIVE else "native_operators"
        return f"{told}it ran in C++ of this package ({node.op}): amp.init(disable_passes=['{name}']) keeps MXNet's"


class Planner:
    """Plans one symbol, once for each setting and the facts of a call."""

    def __init__(self, symbol: mx.sym.Symbol, data_positions: Sequence[int] = ()):
        self.traced = Traced(symbol)
        self._data_positions = data_positions  # of the inputs that blocks around may give in low precision
        # For each setting what shapes of the data decide, and plans by facts. One that is gone takes them along.
        self._made: WeakKeyDictionary[State, tuple[dict[Any, frozenset[Shaped]], dict[Facts, Plan]]]
        self._made = WeakKeyDictionary()

    def plan(self, state: State, facts: Facts, changing: Shapes, shapes: Callable[[], Shapes]) -> Plan:
        """Return the plan for a call."""
        # ``facts`` lack the decisions that depend on shapes. ``changing`` are the shapes that may differ from call to
        # call, and ``shapes`` gives the shapes of all inputs.
        decided, plans = self._made.get(state) or self._made.setdefault(state, ({}, {}))
        key = (facts.device, *changing)
        shaped = decided.get(key)
        if shaped is None:
            shaped = remember(decided, key, self.traced.shaped(state, facts.device, shapes()), MOST_SHAPES)
        facts = facts._replace(shaped=shaped) if shaped else facts
        plan = plans.get(facts)
        return remember(plans, facts, self._make(state, facts, tuple(shapes())), MOST_PLANS) if plan is None else plan

    def _make(self, state: State, facts: Facts, shapes: Shapes) -> Plan:
        traced, dtypes = self.traced, list(facts.dtypes)
        low = [position for position in self._data_positions if dtypes[position] == BFLOAT16]
        parameters = {dtype for i, dtype in enumerate(dtypes) if i not in self._data_positions}
        # float16 data that meets FP32 parameters, as where a block around hands it to one without AMP
        is_half = (FLOAT16 in {dtypes[i] for i in self._data_positions} and FLOAT32 in parameters
                   and FLOAT16 not in parameters)
        policy = policy_for(traced, state, facts.device, bool(low), is_half)
        if policy is None or traced.is_converted:
            low = []
        for position in low:
            dtypes[position] = FLOAT32
        if policy is None and (facts.own_gradients or facts.concerned) and traced.keeps_inputs:
            policy = _AS_TRACED
        if policy is None:
            return Plan(traced, facts, dtypes, shapes)
        graph = traced.analysed(dtypes, shapes)
        is_widened = len(graph.nodes()) != len(traced.graph.nodes())
        given = {traced.names[position] for position in low}
        for node in graph.variables():
            if node.name in given:
                node.planned = [BFLOAT16]
        device = ANY_DEVICE if policy is _AS_TRACED else state.device(facts.device)
        # Operators in C++ take dense arrays. Beside a while_loop MXNet's engine gives wrong gradients now and then.
        runs_native = (facts.dense and facts.device == "cpu" and traced.ops.isdisjoint((MAKES_SPARSE, WITHOUT_SHAPES))
                       and native.any_is_available())
        context = passes.Context.of(graph, policy, device, facts=facts, everywhere=state.enabled, check=_CHECK,
                                    native=native.is_available if runs_native else None, converted=traced.is_converted)
        counts = passes.run(graph, context)
        changed = is_widened or any(counts.values()) or (low and policy.lowers)
        return Plan(traced, facts, dtypes, shapes, policy, graph, from_graph(graph, traced.symbol) if changed else None)
