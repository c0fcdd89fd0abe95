"""The facts that passes need to know beside the graph."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, NamedTuple, Sequence, Tuple

from ..graph import Entry, Graph
from ..machine.dtypes import FLOAT32
from ..rules import ANY_DEVICE, Decision, Device, Policy

Concern = Tuple[str, int]  # the gradient of an operand: the operator's name, and the operand's position
# An operator's name, and what the shapes of a call decide: in FP32, MXNet's own rather than in C++, or factors first.
Shaped = Tuple[str, str]


class Facts(NamedTuple):
    """Facts that are known of a call. A symbol has one plan for calls of equal facts, whatever their shapes."""

    dtypes: tuple[str | None, ...] = ()  # data types of the inputs, in order; None where unknown
    device: str = "cpu"  # the device, under the name that policies are kept under
    accumulated: frozenset[str] = frozenset()  # names of inputs whose gradient is accumulated (``grad_req='add'``)
    concerned: frozenset[Concern] = frozenset()  # the gradients of single operators that MXNet would get wrong
    sparse: frozenset[str] = frozenset()  # names of inputs that are sparse arrays
    dense: bool = True  # whether all inputs and gradients are dense arrays, of known shapes
    recorded: bool = True  # whether gradients may be asked for
    trains: bool = False  # whether it is known that operators run in their training mode, and nobody watches them
    evaluates: bool = False  # whether it is known that operators run as in inference, where that matters
    # operators that make a gradient on their own, and for how many inputs; empty where gradients carry no loss scale
    own_gradients: tuple[tuple[str, int], ...] = ()
    bound: bool = False  # whether the graph is of an executor, which knows all shapes beforehand or never
    shaped: frozenset[Shaped] = frozenset()  # decided by the shapes, of which a plan depends on nothing else


@dataclass(frozen=True)
class Int8:
    """What is to run in INT8, by the names of operators."""

    layers: frozenset[str]
    wide: frozenset[str]  # operators behind layers that are not


@dataclass(frozen=True)
class Context:
    """Everything that a rewrite depends on."""

    policy: Policy  # decides the precision of each operator, and which passes are off
    device: Device = ANY_DEVICE  # where the graph runs
    facts: Facts = field(default_factory=Facts)  # known of the calls that the graph is for
    # the data types that the graph's outputs had, and are to have; None for outputs that may have any
    outputs: tuple[str | None, ...] = ()
    # the inputs before the rewrite. Training passes them by position: their order must not change.
    variables: tuple[str, ...] = ()
    everywhere: bool = True  # False when only operators traced inside an autocast region are to run in low precision
    # tells whether an operator in C++ may take the place of MXNet's, by its registered name; None where none may
    native: Callable[[str], bool] | None = None
    converted: bool = False  # whether the graph is one that was converted for inference, and is about to run
    check: bool = False  # whether the result is verified
    weights: Any = None  # the trained parameters, _mxnet.arrays.NDArrayWeights, which passes change; None in training
    int8: Int8 | None = None  # what runs in INT8; None where nothing does

    @classmethod
    def of(cls, graph: Graph, policy: Policy, device: Device = ANY_DEVICE, *, keep_outputs: bool = True,
           **others: Any) -> Context:
        """Return the context of a rewrite of a graph; without ``keep_outputs`` its outputs may take any type."""
        outputs = tuple(head.node.dtypes[head.output] if keep_outputs else None for head in graph.heads)
        variables = tuple(node.name for node in graph.variables())
        return cls(policy, device, outputs=outputs, variables=variables, **others)

    @property
    def target(self) -> str:
        """The low-precision type."""
        return self.policy.target_dtype

    def decide(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None) -> Decision:
        """Return the precision of an operator, and why."""
        return self.policy.decide(op, attrs, shape, self.device)

    def runs_natively(self, op: str) -> bool:
        """Tell whether an operator in C++ may take the place of MXNet's."""
        return self.native is not None and self.native(op)

    def is_float(self, entry: Entry) -> bool:
        """Tell whether the tensor is one that passes may cast: FP32, or low precision by an earlier decision."""
        return entry.dtype in (FLOAT32, self.target)
