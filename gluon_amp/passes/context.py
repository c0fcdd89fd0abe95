"""What passes need to know beside the graph."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import AbstractSet, Callable, Collection, Mapping, Protocol, Sequence

import numpy as np

from ..dtypes import FLOAT32
from ..graph import Entry, Graph
from ..rules import Policy


class Weights(Protocol):
    """The trained parameters of a graph, by the names of its variables."""

    def __contains__(self, name: str) -> bool:
        """Tell whether the variable is a trained parameter."""

    def read(self, name: str) -> np.ndarray:
        """Return a parameter's values."""

    def write(self, name: str, values: np.ndarray) -> None:
        """Give a parameter other values, or add one."""

    def compute(self, name: str, op: str, attrs: Mapping[str, str], inputs: Sequence[str]) -> None:
        """Add the result of an operator on parameters as a parameter."""

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""

    def keep(self, names: Collection[str]) -> None:
        """Forget all other parameters."""


@dataclass(frozen=True)
class Context:
    """The settings of one rewrite."""

    policy: Policy  # decides the precision of each operator, and which passes are off
    # names of variables whose gradient is accumulated (``grad_req='add'``): MXNet's ``amp_cast`` loses it
    guarded: frozenset[str] = frozenset()
    # names of weights of dense layers that get no gradient, while the biases do
    frozen: frozenset[str] = frozenset()
    # the data types that the graph's outputs had, and are to have; None for those that may have any
    outputs: tuple[str | None, ...] = ()
    everywhere: bool = True  # False when only operators traced inside an autocast region are to run in low precision
    weights: Weights | None = None  # the trained parameters, for passes that change them; None in training
    # lets MXNet fuse the operators of a graph, and returns another graph; None where it cannot
    engine: Callable[[Graph], Graph] | None = None
    check: bool = False  # whether the result is verified
    native: AbstractSet[str] = frozenset()  # the operators in C++ that may take the place of MXNet's: registered names
    sparse: frozenset[str] = frozenset()  # names of variables that are sparse
    recorded: bool = True  # whether gradients may be asked for
    # how many inputs get a gradient that does not follow from the one that comes back, by the names of operators;
    # empty where gradients carry no loss scale
    own_gradients: Mapping[str, int] = field(default_factory=dict)
    trains: bool = False  # whether it is known that operators run in their training mode, and nobody watches them
    converted: bool = False  # whether the graph is one that was converted for inference, and is about to run
    # the inputs before the rewrite. Training passes them by position: their order must not change.
    variables: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Graph, policy: Policy, keep_outputs: bool = True, **settings: object) -> Context:
        """Return the settings for a graph as it is now; without ``keep_outputs`` its outputs may take any type."""
        outputs = tuple(head.node.dtypes[head.output] if keep_outputs else None for head in graph.heads)
        return cls(policy, outputs=outputs, variables=tuple(node.name for node in graph.variables()),
                   **settings)  # type: ignore[arg-type]

    @property
    def target(self) -> str:
        """The low-precision type."""
        return self.policy.target_dtype

    def is_float(self, entry: Entry) -> bool:
        """Tell whether the tensor is one that passes may cast: FP32, or low precision by an earlier decision."""
        return entry.dtype in (FLOAT32, self.target)
