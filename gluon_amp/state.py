"""What AMP is doing now: the process-wide setting, the current thread's regions, and excluded blocks."""
from __future__ import annotations

import fnmatch
import os
import re
import threading
import weakref
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Protocol, Sequence

import mxnet as mx
from mxnet.gluon import Block, Trainer

from . import passes
from ._mxnet import hooks
from ._mxnet.arrays import cast_arrays, first_array
from ._mxnet.cached_op import Inputs
from ._mxnet.eager import EagerPolicy
from ._mxnet.symbols import analyse, from_graph, to_graph, was_converted, was_traced_in_a_region
from .dtypes import BFLOAT16, FLOAT32
from .graph import Graph, Role
from .graph.attrs import REGION, REGION_OFF, REGION_ON
from .rules import Policy

__all__ = ["Level", "Network", "State", "controller", "region"]

_CHECK = os.environ.get("GLUON_AMP_VERIFY", "0") not in ("", "0")


class State:
    """One way of running in mixed precision: a policy per kind of device.

    Parameters
    ----------
    policies : mapping of str to Policy
        Kind of device (``'cpu'``, ``'gpu'``) to the policy for its arrays.
    arguments : tuple
        What the user asked for, to compare.
    enabled : bool
        False when only what was traced inside autocast regions is to run in low precision.
    """

    def __init__(self, policies: Mapping[str, Policy], arguments: tuple = (), enabled: bool = True):
        self.policies = policies
        self.arguments = arguments
        self.enabled = enabled
        self._disabled: State | None = None
        self._eager = {device: EagerPolicy(policy, enabled) for device, policy in policies.items() if policy.lowers}
        # Without a GPU every array takes the same policy, which saves asking for its device at every call.
        self._by_device = bool(mx.context.num_gpus())
        self.eager_anywhere = None if self._by_device else self._eager.get("cpu")

    def disabled(self) -> State:
        """Return the state of a region without AMP inside this one."""
        if self._disabled is None:
            self._disabled = State(self.policies, enabled=False) if self.enabled else self
        return self._disabled

    @property
    def disabled_passes(self) -> frozenset[str]:
        """The graph passes that are off, on any device."""
        return frozenset().union(*(policy.disabled_passes for policy in self.policies.values()))

    @property
    def lowers(self) -> bool:
        """Whether anything runs in low precision, on any device."""
        return any(policy.lowers for policy in self.policies.values())

    def policy(self, device_type: str) -> Policy | None:
        """Return the policy for arrays on a device, None where they stay in FP32."""
        return self.policies.get("gpu" if device_type == "gpu" else "cpu")

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        if not (self._by_device and self._eager):
            return self.eager_anywhere
        array = first_array(inputs)
        return None if array is None else self._eager.get("gpu" if array.context.device_type == "gpu" else "cpu")

    def __call__(self, symbol: mx.sym.Symbol, inputs: Inputs) -> mx.sym.Symbol | None:
        """Rewrite a symbol for its inputs; None when nothing in it runs in low precision."""
        policy = self._policy_for(symbol, inputs)
        if policy is None:
            return None
        graph, changed = self._rewritten(symbol, inputs, policy)
        return from_graph(graph, symbol) if changed or (inputs.low and policy.lowers) else None

    def plan(self, symbol: mx.sym.Symbol, inputs: Inputs) -> Graph:
        """Return the graph that a symbol is rewritten to for its inputs, with the decisions taken."""
        policy = self._policy_for(symbol, inputs)
        return self._analysed(symbol, inputs) if policy is None else self._rewritten(symbol, inputs, policy)[0]

    def _policy_for(self, symbol: mx.sym.Symbol, inputs: Inputs) -> Policy | None:
        """Return the policy to rewrite a symbol by, None where nothing in it can change."""
        idle = not self.enabled and not inputs.low and not was_traced_in_a_region(symbol)
        policy = None if idle or was_converted(symbol) else self.policy(inputs.device_type)
        # A user who hands bfloat16 to a network that runs in FP32 gets what MXNet makes of it.
        return None if policy is not None and inputs.low and not policy.lowers else policy

    def _rewritten(self, symbol: mx.sym.Symbol, inputs: Inputs, policy: Policy) -> tuple[Graph, bool]:
        graph = self._analysed(symbol, inputs)
        counts = passes.rewrite(graph, policy, guarded=inputs.guarded, check=_CHECK, everywhere=self.enabled)
        return graph, any(counts.values())

    def _analysed(self, symbol: mx.sym.Symbol, inputs: Inputs) -> Graph:
        graph = to_graph(symbol)
        # What a block around hands over in bfloat16 stands for FP32 data.
        dtypes = {name: FLOAT32 if name in inputs.low else dtype
                  for name, dtype in zip(inputs.names, inputs.dtypes) if dtype}
        shapes = {name: shape for name, shape in zip(inputs.names, inputs.shapes) if shape}
        analyse(symbol, graph, dtypes, shapes)
        _plan_low_inputs(graph, inputs.low)
        return graph

    def shape_rules(self, symbol: mx.sym.Symbol, inputs: Inputs) -> frozenset[str]:
        """Name the operators that these inputs' shapes keep in FP32: another set needs another graph."""
        policy = self._policy_for(symbol, inputs)
        if policy is None:
            return frozenset()
        try:
            graph = self._analysed(symbol, inputs)
        except mx.MXNetError:  # shapes that do not fit: the call that follows says so, and is explained
            return frozenset()
        return frozenset(node.name for node in graph.operators() if node.inputs
                         and policy.kept_for(node.op, node.attrs, node.inputs[0].shape))

    def explain(self, symbol: mx.sym.Symbol, inputs: Inputs, message: str) -> str:
        """Say what AMP did to the operator that an error message of MXNet is about."""
        policy = self.policies["gpu" if inputs.device_type == "gpu" else "cpu"]
        graph, _ = self._rewritten(symbol, inputs, policy)
        named = re.search(r"Error in operator (\S+?):", message)
        node = next((node for node in graph.operators() if named and node.name == named[1]), None)
        remedy = "To see whether AMP is the cause run it inside `with amp.autocast(enabled=False):`"
        if node is None:
            return f"The network ran under AMP. {remedy}; MXNET_ENGINE_TYPE=NaiveEngine shows the operator"
        if node.role is not Role.OWN:
            return f"The operator {node.name} ({node.op}) was inserted by AMP. {remedy}"
        types = ", ".join(str(entry.dtype) for entry in node.inputs)
        rule = f"rule {node.decision.rule}: {node.decision.note}"
        return (f"The operator {node.name} ({node.op}) ran under AMP with inputs of {types} ({rule}). {remedy}; "
                f"amp.init(fp32_ops=['{node.op}']) or amp.exclude(block) keeps it in FP32")


def _plan_low_inputs(graph: Graph, names: frozenset[str]) -> None:
    for node in graph.variables():
        if node.name in names:
            node.planned = [BFLOAT16]


class Network(NamedTuple):
    """How a network given to ``initialize`` runs.

    Attributes
    ----------
    state : State or None
        In force inside its calls; None for the one around.
    output_dtype : str or None
        The type of its floating-point results; None to leave them as they are.
    """

    state: State | None
    output_dtype: str | None = None


class Level(Protocol):
    """What ``initialize`` leaves behind for trainers."""

    def attach(self, trainer: Trainer, warn_after: int = 20) -> None:
        """Give a trainer the loss scalers of the level."""

    def updated(self, trainer: Trainer) -> None:
        """Take note that a trainer has updated its parameters, or skipped that."""


class _Regions(threading.local):
    """The autocast regions that the current thread is in, innermost last; None for one without AMP anywhere."""

    def __init__(self) -> None:
        self.stack: list[State | None] = []


class _Controller:
    """Answers the hooks; see :class:`gluon_amp._mxnet.hooks.Controller`."""

    def __init__(self) -> None:
        self.state: State | None = None  # set by init
        self.marked: State | None = None  # for symbols traced in regions and run outside of them
        self.regions = _Regions()
        self.exclusions: list[Any] = []
        self.custom_ops: dict[str, str] = {}  # by register_op: operator type to rule
        self.replaced: list[tuple[Any, str, Callable]] = []  # by register_float32_function and the like
        self.networks: weakref.WeakKeyDictionary[Block, Network] = weakref.WeakKeyDictionary()  # by initialize
        self.level: Level | None = None  # by initialize
        self.changes = 0

    def current(self) -> State | None:
        """Return the state in force in this thread."""
        stack = self.regions.stack
        return stack[-1] if stack else self.state

    def rewriter(self, marked: bool = False) -> State | None:
        """Return the state that rewrites symbols; ``marked`` when parts of the symbol were traced in a region."""
        current = self.current()
        if current is None and marked and not self.regions.stack and hooks.installed():
            return self.marked
        return current

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        stack = self.regions.stack  # in line: this is asked at every operator call
        current = stack[-1] if stack else self.state
        if current is None:
            return None
        return current.eager_anywhere or current.eager(inputs)

    def region(self, block: Block) -> Any:
        """Return the region that a block's call is to run in, None for the one around it."""
        if self.exclusions and self._is_excluded(block):
            return self.off()
        network = self.networks.get(block) if self.networks else None
        if network is None or network.state is None or self._is_switched_off():
            return None
        return region(network.state)

    def results(self, block: Block, value: Any) -> Any:
        """Return a block's results, in the type that its network is to give."""
        network = self.networks.get(block) if self.networks else None
        return value if network is None or network.output_dtype is None else cast_arrays(value, network.output_dtype)

    def updated(self, trainer: Trainer) -> None:
        """Take note that a trainer has updated its parameters, or skipped that."""
        if self.level is not None:
            self.level.updated(trainer)

    def _is_switched_off(self) -> bool:
        stack = self.regions.stack
        return bool(stack) and (stack[-1] is None or not stack[-1].enabled)

    def off(self) -> Any:
        """Return a region without AMP."""
        current = self.current()
        return region(current.disabled() if current else None, REGION_OFF)

    def epoch(self) -> int:
        """Return a number for what blocks are traced under, 0 for nothing: under others they are traced again."""
        return self.changes if self.exclusions or self.networks else 0

    def exclude(self, targets: Sequence[Any]) -> None:
        """Keep blocks, classes of blocks, or names of blocks (with wildcards) in FP32."""
        self.exclusions.extend(targets)
        self.changes += 1

    def cast(self, networks: Mapping[Block, Network]) -> None:
        """Run whole networks under states of their own."""
        self.networks.update(networks)
        self.changes += 1

    def reset(self) -> None:
        """Forget everything that users set."""
        self.state = self.marked = self.level = None
        self.networks.clear()
        self.custom_ops.clear()
        while self.replaced:
            setattr(*self.replaced.pop())
        self.exclusions.clear()

    def _is_excluded(self, block: Block) -> bool:
        return any(fnmatch.fnmatchcase(block.name, target) if isinstance(target, str)
                   else isinstance(block, target) if isinstance(target, type) else block is target
                   for target in self.exclusions)


controller = _Controller()


@contextmanager
def region(state: State | None, mark: str = REGION_ON) -> Iterator[None]:
    """Run the body under a state, in this thread; operators traced in it carry the mark."""
    stack = controller.regions.stack
    stack.append(state)
    try:
        with mx.AttrScope(**{REGION: mark}):
            yield
    finally:
        stack.pop()
