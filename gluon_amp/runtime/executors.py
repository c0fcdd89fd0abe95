"""Executors of symbols run what was planned, for the shapes that they have now."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

from mxnet.base import MXNetError
from mxnet.executor import Executor

from .observers import executor_callback
from .plans import Inputs, Plan, Traced, make_plan
from .state import State

__all__ = ["PlannedExecutor", "Planner"]


@dataclass
class Planner:
    """Plans a symbol for an executor and those that are reshaped from it."""

    state: State  # the setting when the first was bound
    traced: Traced  # the user's symbol
    inputs: Inputs  # what was known of its inputs then
    bind: Callable  # MXNet's own ``Symbol.bind``
    _plans: dict[frozenset[str], Plan] = field(default_factory=dict)

    def plan(self, shapes: Sequence[tuple[int, ...]]) -> Plan:
        """Return the plan for shapes of the inputs: the one made before where it does not depend on the difference."""
        kept = self.traced.kept(self.state, self.inputs.device, self.inputs.names, shapes)
        if kept not in self._plans:
            self._plans[kept] = make_plan(self.state, self.traced, self.inputs._replace(shapes=tuple(shapes)))
        return self._plans[kept]


class PlannedExecutor(Executor):
    """An executor whose symbol was rewritten; outputs and hooks keep the names that the user's symbol gives them."""

    planner: Planner
    plan: Plan
    _callback: Callable | None

    @classmethod
    def of(cls, executor: Executor, planner: Planner, plan: Plan) -> PlannedExecutor:
        """Make one of an executor that runs a plan."""
        executor.__class__ = cls
        executor._symbol = planner.traced.symbol
        executor.planner, executor.plan, executor._callback = planner, plan, None
        return executor

    def reshape(self, partial_shaping: bool = False, allow_up_sizing: bool = False, **kwargs: Any) -> PlannedExecutor:
        """Return an executor for other shapes that shares memory with this one, as MXNet's does."""
        if self.plan.is_native:
            kwargs = self._all_shapes(kwargs, partial_shaping)
        made = super().reshape(partial_shaping, allow_up_sizing, **kwargs)
        symbol = self.planner.traced.symbol
        arrays = {**dict(zip(symbol.list_arguments(), made.arg_arrays)),
                  **dict(zip(symbol.list_auxiliary_states(), made.aux_arrays))}
        plan = self.planner.plan([arrays[name].shape for name in self.planner.inputs.names])
        if plan is not self.plan:
            # The graph of the shapes before may hold kernels that are not sound for these.
            made = self.planner.bind(plan.runs, self._ctx, made.arg_arrays, made.grad_arrays,
                                     self._grad_req, made.aux_arrays, self._group2ctx, self)
        made = PlannedExecutor.of(made, self.planner, plan)
        if self._callback is not None:
            made.set_monitor_callback(self._callback, self._monitor_all)
        return made

    def _all_shapes(self, given: Mapping[str, tuple[int, ...]], may_change: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all inputs, which MXNet cannot infer from operators of a library."""
        symbol = self.planner.traced.symbol
        arguments, _, auxiliary = symbol.infer_shape(**given)
        if arguments is None:
            raise MXNetError(f"expected shapes from which those of all inputs follow, received {dict(given)}")
        names = symbol.list_arguments() + symbol.list_auxiliary_states()
        found = dict(zip(names, [*arguments, *auxiliary]))
        changed = [name for name, array in zip(names, [*self.arg_arrays, *self.aux_arrays])
                   if name not in given and found[name] != array.shape]
        if changed and not may_change:
            raise MXNetError(f"the shape of {', '.join(changed)} changes, which was not given: give it, or "
                             "partial_shaping=True")
        return {**found, **given}

    def set_monitor_callback(self, callback: Callable, monitor_all: bool = False) -> None:
        """Call a function with the name and handle of every output of the user's symbol, in the user's types."""
        self._callback = callback
        rewritten = self.plan.symbol is not None
        super().set_monitor_callback(executor_callback(self.plan, callback) if rewritten else callback, monitor_all)
