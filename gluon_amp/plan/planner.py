"""The rewritten form of a graph under a setting, made once and read by reports and error messages."""
from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Sequence
from weakref import WeakKeyDictionary

import mxnet as mx
from mxnet.ndarray import NDArray

from .. import native, passes
from .._mxnet.symbols import from_graph, infer_shapes
from ..dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..eager.loss_scale import loss_scale
from ..graph import Entry, Graph, Node, Role, has_control_flow
from ..passes import Facts, Shaped, channels_last
from ..passes.gradients import is_scale
from ..passes.native_operators import NATIVE
from ..passes.precisions import WITHOUT_SHAPES
from ..rules import ANY_DEVICE, Policy
from ..state.state import State, remember
from .traced import Dtypes, Shapes, Traced, policy_for

MOST_PLANS = 32  # of one symbol under one setting: shapes may keep ever other operators in FP32
MOST_SHAPES = 256  # networks may be fed thousands of different ones

_CHECK = os.environ.get("GLUON_AMP_VERIFY", "0") not in ("", "0")
_MAKES_SPARSE = "cast_storage"
# Changes nothing of a graph but what has to be changed.
_AS_TRACED = Policy(FLOAT32, disabled_passes=frozenset(passes.list_passes()))


@dataclass(frozen=True, eq=False)
class Plan:
    """What a graph becomes under a setting."""

    traced: Traced  # the symbol that it was made for
    facts: Facts  # what it depends on
    dtypes: Dtypes  # types of the inputs, in which data that a block around gives in bfloat16 counts as FP32
    shapes: Shapes  # shapes of the inputs at the call that it was made for
    policy: Policy | None = None  # what decided; None where nothing in it can change
    # every operator with its decision, types, and shapes for ``shapes``; None without a policy
    rewritten: Graph | None = None
    symbol: mx.sym.Symbol | None = None  # what is to run; None to run the symbol as traced

    @cached_property
    def graph(self) -> Graph:
        """The graph that runs. Not to be edited."""
        return self.traced.analysed(self.dtypes, self.shapes) if self.rewritten is None else self.rewritten

    @property
    def is_native(self) -> bool:
        """Whether operators in C++ are in it."""
        return self.rewritten is not None and any(node.op in NATIVE for node in self.rewritten.operators())

    @cached_property
    def runs_in_turn(self) -> bool:
        """Whether its operators run one after another: on CPUs, where loops or branches are among them."""
        return self.facts.device == "cpu" and has_control_flow(self.traced.graph)

    @cached_property
    def carries_scale(self) -> bool:
        """Whether what runs has the loss scale as its last input."""
        return self.rewritten is not None and any(map(is_scale, self.rewritten.variables()))

    def arguments(self, given: Sequence[NDArray]) -> Sequence[NDArray]:
        """Return what the symbol that runs is called with, of what the symbol as traced is called with."""
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
        """Describe what AMP did to the operator that an error message of MXNet names."""
        remedy = "To see whether AMP is the cause run it inside `with amp.autocast(enabled=False):`"
        named = re.search(r"Error in operator (\S+?):", message)
        node = next((node for node in self.graph.operators() if named and node.name == named[1]), None)
        if node is None:
            return f"The network ran under AMP. {remedy}; MXNET_ENGINE_TYPE=NaiveEngine shows the operator"
        if node.role is not Role.OWN:
            return f"The operator {node.name} ({node.op}) was inserted by AMP. {remedy}"
        return _explained(node, remedy)


def _explained(node: Node, remedy: str) -> str:
    types = ", ".join(str(entry.dtype) for entry in node.inputs)
    rule = f"rule {node.decision.rule}: {node.decision.note}" if node.decision is not None else "as traced"
    return (f"The operator {node.name} ({node.kind}) ran under AMP with inputs of {types} ({rule}). {remedy}; "
            f"{_remedy(node)}")


def _remedy(node: Node) -> str:
    if node.replaced:
        name = "channels_last" if node.op in channels_last.NATIVE else "native_operators"
        return f"it ran in C++ of this package ({node.op}): amp.init(disable_passes=['{name}']) keeps MXNet's"
    return f"amp.init(fp32_ops=['{node.op}']) or amp.exclude(block) keeps it in FP32"


class _Made:
    """What was planned under one setting."""

    def __init__(self) -> None:
        self.shaped: dict[Any, frozenset[Shaped]] = {}  # by the shapes of the data: what they decide
        self.plans: dict[Facts, Plan] = {}


class Planner:
    """Plans one symbol, once for each setting and what is known of the call."""

    def __init__(self, symbol: mx.sym.Symbol, data_positions: Sequence[int] = ()):
        self.traced = Traced(symbol)
        self._data_positions = data_positions  # of the inputs that blocks around may give in low precision
        # A setting that is gone for good takes what was made for it along.
        self._made: WeakKeyDictionary[State, _Made] = WeakKeyDictionary()

    def plan(self, state: State, facts: Facts, changing: Shapes, shapes: Callable[[], Shapes]) -> Plan:
        """Return the plan for a call.

        ``facts`` is what is known of it but for what its shapes decide. ``changing`` are the shapes that are not those
        of every call, and ``shapes`` gives those of all inputs.
        """
        made = self._made.get(state)
        if made is None:
            made = self._made[state] = _Made()
        key = (facts.device, *changing)
        shaped = made.shaped.get(key)
        if shaped is None:
            shaped = self.traced.shaped(state, facts.device, shapes())
            remember(made.shaped, key, shaped, MOST_SHAPES)
        facts = facts._replace(shaped=shaped) if shaped else facts
        plan = made.plans.get(facts)
        if plan is None:
            plan = self._make(state, facts, tuple(shapes()))
            remember(made.plans, facts, plan, MOST_PLANS)
        return plan

    def _make(self, state: State, facts: Facts, shapes: Shapes) -> Plan:
        traced, dtypes = self.traced, list(facts.dtypes)
        low = [position for position in self._data_positions if dtypes[position] == BFLOAT16]
        policy = policy_for(traced, state, facts.device, bool(low), self._is_half(facts))
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
        context = passes.Context.of(graph, policy, device, facts=facts, everywhere=state.enabled,
                                    native=native_for(graph, facts), converted=traced.is_converted, check=_CHECK)
        counts = passes.run(graph, context)
        changed = is_widened or any(counts.values()) or (low and policy.lowers)
        return Plan(traced, facts, dtypes, shapes, policy, graph, from_graph(graph, traced.symbol) if changed else None)

    def _is_half(self, facts: Facts) -> bool:
        """Tell whether float16 data meets FP32 parameters, as where a block around hands it to one without AMP."""
        given = {facts.dtypes[i] for i in self._data_positions}
        parameters = {dtype for i, dtype in enumerate(facts.dtypes) if i not in self._data_positions}
        return FLOAT16 in given and FLOAT32 in parameters and FLOAT16 not in parameters


def native_for(graph: Graph, facts: Facts) -> Callable[[str], bool] | None:
    """Return what tells the operators in C++ for a graph, which take dense arrays; None where there are none."""
    # Beside a while_loop MXNet's engine gives wrong gradients now and then where operators are in C++.
    if (not facts.dense or facts.device != "cpu"
            or any(node.op in (_MAKES_SPARSE, WITHOUT_SHAPES) for node in graph.operators())):
        return None
    return native.is_available if native.any_is_available() else None
