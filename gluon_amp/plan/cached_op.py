"""A cached op that runs the plan for the setting in force when it is called.

``HybridBlock._build_cache`` instantiates ``mxnet.ndarray.CachedOp`` with the traced symbol. ``RewritingCachedOp`` takes
that place: it keeps the symbol as traced, and makes one of MXNet's cached ops for each plan.

MXNet computes gradients in the order of the inputs. That of the first layer's weight needs all other layers', so that
their casts come last: until then all gradients are kept in low precision, too. ``OrderedCachedOp`` begins its inputs
with the weights of the last layers: each gradient is cast before the next one is computed, and its memory is free.
"""
from __future__ import annotations

from functools import cached_property, lru_cache
from operator import is_
from typing import Any, Mapping, Sequence, Tuple
from weakref import WeakKeyDictionary, WeakSet

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import Block
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.arrays import bring_to_plain_layout, is_recorded
from .._mxnet.blocks import cached_op_of, children_of
from .._mxnet.engine import as_callback, check_waiting, serialize_execution
from .._mxnet.invoke import Callback, UpstreamCachedOp
from .._mxnet.symbols import dtype_name, from_graph, keep_marks
from ..eager.gradient_fixes import TWICE_DIFFERENTIABLE
from ..eager.loss_scale import loss_scale
from ..eager.running_stats import alike, running_stats
from ..graph import Graph, Role, cast_nodes, loops_and_branches
from ..graph.attrs import is_set
from ..machine.dtypes import FLOAT32, LOW_PRECISION
from ..passes import Concern, Facts
from ..passes.gradient_fixes import DEPEND_ON_MODE
from ..passes.gradients import is_scale
from ..state.in_force import frame, in_force
from ..state.state import State, remember
from .planner import Plan, Planner, refuse_inputs_of_loops

_MOST_REQUESTS = 32
_MANY_CALLS = 16  # that make up for the cached op that is made anew when another plan's turn is over
_POSITIONS = ("data_indices", "param_indices")  # flags of cached ops that are positions of inputs
Flags = Sequence[Tuple[str, Any]]


class RewritingCachedOp:
    """Runs a traced symbol, as planned as long as AMP is active."""

    def __init__(self, symbol: mx.sym.Symbol, flags: Flags = (),
                 state: State | None = None, had_marks: bool = False):
        self.symbol = symbol
        self.has_marks = keep_marks(symbol)
        self.is_stale = had_marks and not self.has_marks  # read from a file, which leaves them out
        self.state = state  # to run under always, for a converted network; None for that in force at each call
        self.flags = flags
        self.accumulating: frozenset[str] = frozenset()
        self.requests: Mapping[str, str] = {}  # the ``grad_req`` of each parameter, as far as they are known
        self._concerned: dict[Any, frozenset[Concern]] = {}  # by what gradients are asked for
        self.latest: Plan | None = None  # the plan of the latest call under AMP
        self._data_positions = tuple(dict(flags).get("data_indices", ()))
        # the parameters of the latest call, and the types of all of its arguments; none before it
        self._known_dtypes: tuple[list[NDArray], list[str | None]] | None = None
        self.planner = Planner(symbol, self._data_positions)
        self.traced = self.planner.traced
        self.names = self.traced.names  # in the order of the arguments
        self._parameter_positions = [i for i in range(len(self.names)) if i not in set(self._data_positions)]
        states = set(symbol.list_auxiliary_states())
        self._states = [position for position, name in enumerate(self.names) if name in states]
        self._alike: WeakKeyDictionary[Plan, list[list[int]]] = WeakKeyDictionary()  # states that one operator copies
        self._plain: UpstreamCachedOp | None = None
        self._operations: WeakKeyDictionary[Plan, UpstreamCachedOp] = WeakKeyDictionary()  # that run each plan
        self._turn: tuple[Plan | None, int] = None, 0  # what ran last, and how often in a row
        self._left: WeakSet[Plan] = WeakSet()  # plans that have run before another did
        self._hook: tuple[Any, ...] = ()
        self._observed: tuple[Any, ...] = ()  # the cached op that runs, and its hook
        self._callback: Callback | None = None  # the hook, as the cached op that runs knows it

    def __reduce__(self) -> tuple[Any, ...]:
        """Let networks be copied and pickled: plans and cached ops are made again."""
        return type(self), (self.symbol, self.flags, self.state, self.has_marks)

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        """Run the symbol, with the arguments and result of MXNet's cached op."""
        state = self._current()
        if (frame.data_gradients and self.state is None and self._may_differentiate_twice
                and autograd.is_recording() and all(dtype_name(array.dtype) not in LOW_PRECISION for array in args)):
            state = None
        plan = None if state is None else self._planned(state, args)
        operation = self._upstream() if plan is None else self._operation(plan, args)
        if self._hook:
            self._observe(operation, plan)
        if self.traced.unscaled and autograd.is_recording():
            loss_scale.out_of_reach = self.traced.unscaled
        if self._states:
            running_stats.note(args, lambda: self._grouped(plan, args))
        try:
            if plan is None or not plan.carries_scale:
                return operation(*args, **kwargs)
            with loss_scale.lock:
                return operation(*plan.arguments(args), **kwargs)
        except mx.MXNetError as error:
            if plan is None or plan.symbol is None:
                raise
            raise type(error)(f"{error}\n{plan.explain(str(error))}") from error
        finally:
            if plan is not None and plan.runs_in_turn:
                check_waiting()
            if self._callback is not None:
                self._callback.check()

    def note_grad_reqs(self, grad_reqs: Mapping[str, str]) -> None:
        """Take the ``grad_req`` that each parameter has in the next call, by name."""
        self.accumulating = frozenset(name for name, grad_req in grad_reqs.items() if grad_req == "add")
        self.requests = grad_reqs

    @cached_property
    def _safe_flags(self) -> Flags:
        """The flags without memory that is kept from call to call, where MXNet's loops and branches are wrong."""
        if not loops_and_branches(self.traced.graph):
            return self.flags
        return [(name, value) for name, value in self.flags if name not in ("static_alloc", "static_shape")]

    @cached_property
    def _may_differentiate_twice(self) -> bool:
        """Tell whether MXNet would run this operator by operator, and could differentiate it twice."""
        flags, operators = dict(self.flags), self.traced.graph.operators()
        return (not is_set(flags, "static_alloc") and len(operators) <= int(flags.get("inline_limit", 2))
                and not self.traced.ops.isdisjoint(TWICE_DIFFERENTIABLE) and not self.traced.own_gradients)

    def plan(self, args: Sequence[NDArray]) -> Plan | None:
        """Return the plan of a call with these arguments; None where AMP is off."""
        state = self._current()
        return None if state is None else self._planned(state, args)

    def graph(self, args: Sequence[NDArray]) -> Graph:
        """Return the graph that a call with these arguments runs, with the types and shapes of all tensors."""
        plan = self.plan(args)
        return self.traced_graph(args) if plan is None else plan.at(tuple(array.shape for array in args))

    def traced_graph(self, args: Sequence[NDArray]) -> Graph:
        """Return the graph as the program made it, likewise."""
        return self.traced.analysed([dtype_name(array.dtype) for array in args], [array.shape for array in args])

    def _current(self) -> State | None:
        if self.state is not None:
            return self.state
        state = in_force.rewriter()
        # Outside of regions, without init, only parts of graphs that were traced in a region keep its setting.
        if state is in_force.marked and not self.traced.is_marked:
            state = None
        # Gradients that operators make on their own may have to carry a loss scale.
        has_own = state is None and autograd.is_recording() and self.traced.own_gradients
        return _switched_off() if has_own else state

    def _planned(self, state: State, args: Sequence[NDArray]) -> Plan:
        """Return the plan of a call under a setting, and note it as the latest."""
        recording, training, traced = autograd.is_recording(), autograd.is_training(), self.traced
        sparse = frozenset(name for name, array in zip(self.names, args) if isinstance(array, BaseSparseNDArray))
        evaluates = recording and not training and not traced.ops.isdisjoint(DEPEND_ON_MODE)
        trains = "Convolution" in traced.ops and recording and training and not self._hook  # which knows maps as NCHW
        # MXNet does not tell an array's grad_req: a data array with a gradient buffer may accumulate.
        marked = (self.names[i] for i in self._data_positions if args[i].grad is not None)
        facts = Facts(dtypes=self._dtypes(args), device=state.key(args[0].context) if args else "cpu",
                      accumulated=self.accumulating.union(marked) if recording else frozenset(),
                      concerned=self._concerns(args, evaluates) if recording else frozenset(),
                      sparse=sparse, dense=not sparse, recorded=recording or not traced.depends_on_recording,
                      trains=trains, evaluates=evaluates, own_gradients=traced.own_gradients if recording else ())
        self.latest = self.planner.plan(state, facts, [args[i].shape for i in self._data_positions],
                                        lambda: [array.shape for array in args])
        return self.latest

    def _dtypes(self, args: Sequence[NDArray]) -> tuple[str | None, ...]:
        """Name the types of arguments; parameters, the same arrays from call to call, are asked once."""
        parameters = [args[i] for i in self._parameter_positions]
        known = self._known_dtypes
        if known is None or not all(map(is_, parameters, known[0])):
            known = self._known_dtypes = parameters, [dtype_name(array.dtype) for array in args]
        dtypes = list(known[1])
        for i in self._data_positions:
            dtypes[i] = dtype_name(args[i].dtype)
        return tuple(dtypes)

    def _operation(self, plan: Plan, args: Sequence[NDArray]) -> UpstreamCachedOp:
        """Return the cached op that runs a plan with these arguments."""
        last, calls = self._turn
        if plan is not last:
            if last is not None:
                self._leave(last, plan, calls)
            if plan.is_native and autograd.is_recording():
                # Operators in C++ would keep plain copies of what inference has left in oneDNN's layouts, for a step.
                bring_to_plain_layout(args[position] for position in self._parameter_positions)
        self._turn = plan, calls + 1 if plan is last else 1
        operation = self._operations.get(plan)
        if operation is None:
            operation = (self._upstream() if plan.symbol is None and self._safe_flags is self.flags else
                         cached_op(plan, self._safe_flags))
            if plan.runs_in_turn:
                serialize_execution(operation)
            self._operations[plan] = operation
        return operation

    def _leave(self, last: Plan, plan: Plan, calls: int) -> None:
        """Let static memory go where a plan's turn is over: MXNet's cached op has one for training and inference."""
        # A plan whose turns are a few calls stays: its cached op is made anew only once.
        is_static = is_set(dict(self.flags), "static_alloc") and last.facts.device == plan.facts.device
        goes = is_static and (calls >= _MANY_CALLS or last not in self._left)
        if goes and self._operations.pop(last, None) is self._plain:
            self._plain = None
        self._left.add(last)

    def _grouped(self, plan: Plan | None, args: Sequence[NDArray]) -> list[list[int]]:
        """Return the positions of auxiliary states, those together that one operator can copy."""
        if plan is None:
            return alike(args, self._states)
        if plan not in self._alike:
            self._alike[plan] = alike(args, self._states)
        return self._alike[plan]

    def _register_op_hook(self, callback: Any, monitor_all: bool = False) -> None:
        refuse_inputs_of_loops(self.traced.graph, monitor_all)
        self._hook = (callback, monitor_all)

    def _observe(self, operation: UpstreamCachedOp, plan: Plan | None) -> None:
        """Let the hook see the operators that are about to run."""
        if (operation, self._hook) == self._observed:
            return
        callback, monitor_all = self._hook
        self._callback = as_callback(callback, waits=plan is not None and plan.runs_in_turn)
        operation._register_op_hook(self._callback, monitor_all)
        self._observed = (operation, self._hook)

    def _upstream(self) -> UpstreamCachedOp:
        if self._plain is None:
            self._plain = UpstreamCachedOp(self.symbol, self.flags)
        return self._plain

    def _concerns(self, args: Sequence[NDArray], evaluates: bool) -> frozenset[Concern]:
        """Name the gradients that MXNet would get wrong in this call, which is recorded."""
        if not self.traced.has_defects:
            return frozenset()
        asked = frozenset(name for name, array in zip(self.names, args) if (
            self.requests[name] != "null" if name in self.requests else is_recorded(array)))
        known = self._concerned.get((asked, evaluates))
        return known if known is not None else remember(
            self._concerned, (asked, evaluates), self.traced.concerned(asked.__contains__, evaluates), _MOST_REQUESTS)


@lru_cache(maxsize=1)
def _switched_off() -> State:  # for graphs that have to be rewritten all the same
    return State({}, enabled=False)


def prepared_operations(block: Block) -> list[tuple[Block, RewritingCachedOp]]:
    """Return the hybridized blocks inside a block that have been called under AMP, and their cached ops."""
    operation = cached_op_of(block)
    if isinstance(operation, RewritingCachedOp) and operation.latest is not None:
        return [(block, operation)]
    return [pair for child in children_of(block) for pair in prepared_operations(child)]


class OrderedCachedOp(UpstreamCachedOp):
    """A cached op whose symbol has its inputs in another order than its plan."""

    def __init__(self, symbol: mx.sym.Symbol, flags: Flags, order: tuple[int, ...]):
        super().__init__(symbol, flags)
        self.order = order  # which of the plan's arguments each of the inputs is

    def __call__(self, *args: NDArray, **kwargs: Any) -> Any:
        """Run it, with the arguments and result of MXNet's cached op."""
        return super().__call__(*(args[position] for position in self.order), **kwargs)


def cached_op(plan: Plan, flags: Flags) -> UpstreamCachedOp:
    """Make the cached op of a plan; it takes the plan's arguments."""
    if plan.carries_scale:
        last = len(plan.traced.names)
        flags = [(name, [*value, last] if name == "data_indices" else value) for name, value in flags]
    # On GPUs, where MXNet fuses operators by their order, this was never tried.
    if plan.symbol is None or not plan.facts.recorded or plan.facts.device != "cpu":
        return UpstreamCachedOp(plan.runs, flags)
    graph = plan.graph.copy()
    old = {id(node): position for position, node in enumerate(graph.variables())}
    if not put_last_weights_first(graph):
        return UpstreamCachedOp(plan.runs, flags)
    order = tuple(old[id(node)] for node in graph.variables())
    new = {position: place for place, position in enumerate(order)}
    moved = [(name, [new[position] for position in value] if name in _POSITIONS else value) for name, value in flags]
    return OrderedCachedOp(from_graph(graph, plan.traced.symbol), moved, order)


def put_last_weights_first(graph: Graph) -> bool:
    """Let the first input come after the weights that are cast, the last one first; return whether there are any."""
    first, *others = graph.variables()
    for node in others:  # which a pass may have put in the program's order
        node.after = [] if not is_scale(node) else node.after
    sources = [node.inputs[0].node for node in cast_nodes(graph) if node.dtypes != [FLOAT32]]
    sources = [source.inputs[0].node if source.role is Role.IDENTITY else source for source in sources]
    weights = [node for node in sources if node.is_variable and node.dtypes == [FLOAT32] and node is not first]
    first.after = list(dict.fromkeys(reversed(weights)))
    return bool(first.after)
