"""Symbols that are bound, as by Module: their executors run the plan for the shapes that they have now.

A symbol that was converted for inference is not trained, without AMP, too. A conversion notes on variables how it has
spoilt their gradients. The notes go along into files, into parts of the symbol, and into symbols made of it.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence
from weakref import WeakValueDictionary

import mxnet as mx
from mxnet.executor import Executor
from mxnet.gluon import Parameter
from mxnet.ndarray.sparse import BaseSparseNDArray

from .._mxnet.engine import as_callback, check_waiting, serialize_execution
from .._mxnet.invoke import Callback
from .._mxnet.symbols import dtype_name, input_dtypes, known_shape, of_inputs, text_of, to_graph
from .._mxnet.trainers import trainer_trains
from ..errors import StateError, warn
from ..graph import cast_nodes
from ..graph.attrs import STORAGE
from ..machine import host
from ..machine.dtypes import BFLOAT16
from ..passes import Facts
from ..state.in_force import in_force
from ..state.state import State
from .planner import Plan, Planner, Traced, refuse_inputs_of_loops, spoilt_gradients

_upstream_bind = mx.sym.Symbol.bind
_DENSE = ("default", "0", "-1")  # as symbols and users note it
_TOLD = "_amp_told"  # on executors that a warning was given for
_INSTEAD = "train the FP32 network under amp.init(), and convert it afterwards"


def _by_name(values: Any, names: list[str]) -> dict[str, Any]:
    """Return what is given for inputs by their names: MXNet takes lists, and dicts of more."""
    if values is None:
        return {}
    pairs = values.items() if isinstance(values, dict) else zip(names, values)
    known = set(names)
    return {name: value for name, value in pairs if value is not None and name in known}


def _requests_of(grad_req: Any, symbol: mx.sym.Symbol) -> dict[str, str]:
    """Return the ``grad_req`` of each argument."""
    names = symbol.list_arguments()
    return _by_name([grad_req] * len(names) if isinstance(grad_req, str) else grad_req, names)


def _refuse_training(symbol: mx.sym.Symbol, requests: Mapping[str, str], ctx: Any) -> None:
    """Raise StateError where a gradient is requested that a conversion has spoilt, or that MXNet would lose."""
    for name, reason in spoilt_gradients(symbol).items():
        if requests.get(name, "null") != "null":
            raise StateError(f"the symbol was converted for inference, and cannot be trained: expected grad_req='null' "
                             f"for {name!r} ({reason}), received {requests[name]!r}. To run it bind it with "
                             f"for_training=False, or grad_req='null'; to train it, {_INSTEAD}, or convert it with "
                             "optimize='none'")
    added = {name for name, request in requests.items() if request == "add"}
    if not added or not isinstance(ctx, mx.Context) or ctx.device_type == "gpu":
        return
    lost = {node.inputs[0].node.name for node in cast_nodes(to_graph(symbol))} & added
    if lost:
        raise StateError(f"expected grad_req='write' for {min(lost)!r}, received 'add': amp_cast, which reads it in "
                         "the symbol, loses gradients that are added. Bind it under amp.init(), which mends that")


def refuse_trained(parameters: Mapping[str, Parameter], spoilt: Mapping[str, str], is_frozen: bool) -> None:
    """Raise StateError where the parameters of a converted block are trained; imported ones have gradients anyhow."""
    for name, parameter in parameters.items():
        is_spoilt = name in spoilt and parameter.grad_req != "null"
        trains = trainer_trains(parameter) if is_frozen or is_spoilt else None
        if is_spoilt and (is_frozen or trains is not None):
            raise StateError("the network was converted for inference, and cannot be trained: expected "
                             f"grad_req='null' for {name!r} ({spoilt[name]}), received {parameter.grad_req!r}. To "
                             f"fine-tune it, {_INSTEAD}")
        if is_frozen and trains is False:
            raise StateError("expected a trainer with parameters to train, found one that has those of a converted "
                             f"network only, which get no gradients. To fine-tune it, {_INSTEAD}")


@dataclass(eq=False)
class Binding:
    """The planner and facts of executors of equal symbols and inputs, and of those reshaped from them."""

    planner: Planner
    state: State  # the setting when the first was bound
    facts: Facts  # of its inputs then
    shapes: Sequence[tuple[int, ...]]  # of its inputs then; empty where unknown

    def plan(self, shapes: Sequence[tuple[int, ...]] | None = None) -> Plan:
        """Return the plan for shapes of the inputs, by default the first executor's."""
        shapes = self.shapes if shapes is None else shapes
        return self.planner.plan(self.state, self.facts, shapes, lambda: shapes)


# By everything that plans depend on: Module binds a symbol for every context. They go with their executors.
_bindings: WeakValueDictionary[tuple, Binding] = WeakValueDictionary()


def _binding(state: State, symbol: mx.sym.Symbol, ctx: mx.Context, dtypes: Mapping[str, str | None],
             shapes: Mapping[str, tuple[int, ...]], requests: Mapping[str, str], sparse: frozenset[str],
             dense: bool) -> Binding:
    """Return the binding of a symbol for inputs of these types, shapes and requests for gradients."""
    device = state.key(ctx)
    key = (text_of(symbol), type(symbol), mx.util.is_np_shape(), state, device,
           *(frozenset(known.items()) for known in (dtypes, shapes, requests)), sparse, dense)
    binding = _bindings.get(key)
    if binding is None:
        planner = Planner(symbol)
        names = planner.traced.names
        requested = {**dict.fromkeys(names, "null"), **requests}  # nobody asks for gradients of auxiliary states
        facts = Facts(dtypes=tuple(dtypes.get(name) for name in names), device=device,
                      accumulated=frozenset(name for name, request in requested.items() if request == "add"),
                      concerned=planner.traced.concerned(lambda name: requested[name] != "null"), sparse=sparse,
                      dense=dense and all(name in shapes for name in names), bound=True,
                      recorded=any(request != "null" for request in requested.values()))
        binding = _bindings[key] = Binding(planner, state, facts, [shapes.get(name, ()) for name in names])
    return binding


class PlannedExecutor(Executor):
    """An executor whose symbol was rewritten; outputs and hooks keep the names that the user's symbol gives them."""

    handle: Any
    binding: Binding
    plan: Plan
    _callback: Callable | None
    _kept: Callback | None = None  # that, as MXNet calls it
    _is_fresh: bool = True  # whether no forward pass ran since the executor was bound, or since its backward pass

    @classmethod
    def of(cls, executor: Executor, symbol: mx.sym.Symbol, binding: Binding, plan: Plan) -> PlannedExecutor:
        """Make one of an executor that runs a plan for the user's symbol."""
        executor.__class__ = cls
        executor._symbol = symbol
        executor.binding, executor.plan, executor._callback = binding, plan, None
        if plan.runs_in_turn:
            serialize_execution(executor)
        return executor

    def reshape(self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any) -> PlannedExecutor:
        """Return an executor for other shapes that shares memory with this one, as MXNet's does."""
        symbol, base, plan = self._symbol, self, None
        if self.plan.is_native:
            kwargs = self._all_shapes(kwargs, partial_shaping)
            plan = self.binding.plan([kwargs[name] for name in self.plan.traced.names])
            if plan is not self.plan:
                # Its operators in C++ may refuse these shapes: one without them makes the arrays.
                base = self._bound(symbol, self)
        made = Executor.reshape(base, partial_shaping, allow_up_sizing, **kwargs)
        if plan is None:
            shapes = _shapes_of(made, symbol)
            plan = self.binding.plan([shapes[name] for name in self.plan.traced.names])
        if plan is not self.plan:
            # The graph of the shapes before may hold kernels that are not sound for these.
            made = self._bound(plan.runs, made)
        made = PlannedExecutor.of(made, symbol, self.binding, plan)
        if self._callback is not None:
            made.set_monitor_callback(self._callback, self._monitor_all)
        return made

    def _bound(self, symbol: mx.sym.Symbol, like: Executor) -> Executor:
        """Bind a symbol to the arrays of an executor, in the memory of this one."""
        return _upstream_bind(symbol, self._ctx, like.arg_arrays, like.grad_arrays, self._grad_req, like.aux_arrays,
                              self._group2ctx, self)

    def _all_shapes(self, given: Mapping[str, tuple[int, ...]], may_change: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs, which MXNet cannot infer from operators of a library."""
        now = _shapes_of(self, self._symbol)
        partly = _inferred_shapes(self._symbol, given)  # nothing follows for weights inside of branches and loops
        inferred = {name: known_shape(partly.get(name)) or shape for name, shape in now.items()}
        changed = [name for name, shape in now.items() if name not in given and inferred[name] != shape]
        if changed and not may_change:
            raise mx.MXNetError(f"the shape of {', '.join(changed)} changes, which was not given: give it, or "
                                "partial_shaping=True")
        return {**inferred, **given}

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Call a function with the name and handle of every output of the operators that run."""
        refuse_inputs_of_loops(self.plan.traced.graph, monitor_all)
        self._callback = callback
        self._kept = as_callback(callback, waits=self.plan.runs_in_turn)
        super().set_monitor_callback(self._kept, monitor_all)

    def forward(self, is_train: bool = False, **kwargs: Any) -> Any:
        """Run the forward pass; raise what the monitor's function raised."""
        if is_train and not self._is_fresh and self.plan.has_control_flow and self.binding.facts.recorded:
            self._renew()
        self._is_fresh = False
        return self._checked(super().forward, is_train, **kwargs)

    def backward(self, out_grads: Any = None, is_train: bool = True) -> None:
        """Run the backward pass, likewise."""
        self._checked(super().backward, out_grads, is_train)
        self._is_fresh = True

    def _renew(self) -> None:
        """Forget the last forward pass."""
        # MXNet's loops and branches keep what each forward pass computed, of inference, too, until a backward pass
        # runs, which reads the first: a step behind an evaluation trains by the values of its first batch.
        made = PlannedExecutor.of(self._bound(self.plan.runs, self), self._symbol, self.binding, self.plan)
        self.handle, made.handle = made.handle, self.handle
        self._output_dict = None
        if self._callback is not None:
            self.set_monitor_callback(self._callback, self._monitor_all)

    def _checked(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:
            if self.plan.runs_in_turn:
                check_waiting()
            if self._kept is not None:
                self._kept.check()


def _shapes_of(executor: Executor, symbol: mx.sym.Symbol) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an executor's arrays, by the names of the inputs of the user's symbol."""
    names = symbol.list_arguments() + symbol.list_auxiliary_states()
    return {name: array.shape for name, array in zip(names, [*executor.arg_arrays, *executor.aux_arrays])}


def make_bind(original: Callable) -> Callable:
    """Make the function that takes the place of ``Symbol.bind``."""
    @functools.wraps(original)
    def bind(symbol: mx.sym.Symbol, ctx: mx.Context, args: Any, args_grad: Any = None, grad_req: Any = "write",
             aux_states: Any = None, *rest: Any, **kwargs: Any) -> Any:
        gradients = _by_name(args_grad, symbol.list_arguments())
        requests = {name: request if name in gradients else "null"
                    for name, request in _requests_of(grad_req, symbol).items()}

        def bound(runs: mx.sym.Symbol) -> Executor:
            _refuse_training(runs, requests, ctx)
            return original(runs, ctx, args, args_grad, grad_req, aux_states, *rest, **kwargs)

        state = in_force.current()
        if state is None or not isinstance(ctx, mx.Context):
            return bound(symbol)
        arrays = {**_by_name(args, symbol.list_arguments()), **_by_name(aux_states, symbol.list_auxiliary_states())}
        dtypes = {name: dtype_name(array.dtype) for name, array in arrays.items()}
        shapes = {name: array.shape for name, array in arrays.items()}
        sparse = frozenset(name for name, array in arrays.items() if isinstance(array, BaseSparseNDArray))
        dense = not sparse and not any(isinstance(array, BaseSparseNDArray) for array in gradients.values())
        binding = _binding(state, symbol, ctx, dtypes, shapes, requests, sparse, dense)
        try:
            plan = binding.plan()
        except mx.MXNetError:
            bound(symbol)  # says what is wrong with the arguments
            raise
        return PlannedExecutor.of(bound(plan.runs), symbol, binding, plan)
    return bind


def make_simple_bind(original: Callable) -> Callable:
    """Make the function that takes the place of ``Symbol.simple_bind``."""
    @functools.wraps(original)
    def simple_bind(symbol: mx.sym.Symbol, /, ctx: mx.Context, grad_req: Any = "write", type_dict: Any = None,
                    *rest: Any, **kwargs: Any) -> Any:
        requests = _requests_of(grad_req, symbol)

        def bound(runs: mx.sym.Symbol) -> Executor:
            _refuse_training(runs, requests, ctx)
            return original(runs, ctx, grad_req, type_dict, *rest, **kwargs)

        state = in_force.current()
        if state is None or not isinstance(ctx, mx.Context):
            return bound(symbol)
        try:
            dtypes = input_dtypes(symbol, _by_name(type_dict, symbol.list_inputs()))
            shapes = _inferred_shapes(symbol, kwargs)
            noted = {name: attrs[STORAGE] for name, attrs in symbol.attr_dict().items() if STORAGE in attrs}
            kinds = {**noted, **((rest[0] if rest else kwargs.get("stype_dict")) or {})}
            sparse = frozenset(name for name in symbol.list_inputs() if kinds.get(name, _DENSE[0]) not in _DENSE)
            binding = _binding(state, symbol, ctx, dtypes, shapes, requests, sparse, not sparse)
            plan = binding.plan()
        except mx.MXNetError:
            bound(symbol)  # says what is wrong with the arguments
            raise
        if plan.symbol is not None:
            # Behind a cast MXNet cannot infer the type of a variable: say it. It knows no bfloat16 here, which the
            # variables of converted symbols state themselves.
            said = {name: dtype for name, dtype in dtypes.items() if dtype != BFLOAT16}
            type_dict = {**said, **(type_dict or {})}
        if plan.is_native:
            kwargs = {**kwargs, **shapes}  # MXNet cannot infer them from operators of a library
        return PlannedExecutor.of(bound(plan.runs), symbol, binding, plan)
    return simple_bind


def make_forward(original: Callable) -> Callable:
    """Make the function that takes the place of ``Executor.forward``: it tells of executors that AMP does not reach."""
    @functools.wraps(original)
    def forward(executor: Executor, *args: Any, **kwargs: Any) -> Any:
        current = in_force.current()
        if (current is not None and current.enabled and not isinstance(executor, PlannedExecutor)
                and not getattr(executor, _TOLD, False)):
            setattr(executor, _TOLD, True)
            if not Traced(executor._symbol).is_converted:
                outputs = ", ".join(executor._symbol.list_outputs())
                warn(f"the symbol of {outputs} was bound before AMP was switched on, and runs without AMP: bind it "
                     "again. A Module takes its parameters along by module.get_params() and then module.bind(..., "
                     "force_rebind=True)")
        host.note_step("forward")
        return original(executor, *args, **kwargs)
    return forward


def _inferred_shapes(symbol: mx.sym.Symbol, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    known = {name: shape for name, shape in _by_name(given, symbol.list_inputs()).items() if isinstance(shape, tuple)}
    return {name: shape for name, shape in of_inputs(symbol, symbol.infer_shape_partial(**known)).items() if shape}
