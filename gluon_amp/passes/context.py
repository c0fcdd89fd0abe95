"""What passes need to know beside the graph."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Collection, Mapping, Protocol, Sequence

import numpy as np

from ..dtypes import FLOAT32
from ..graph import Entry, Graph
from ..rules import Policy
from .facts import UNKNOWN, Facts


class Weights(Protocol):
    """The trained parameters of a graph, by the names of its variables."""

    def __contains__(self, name: str) -> bool:
        """Tell whether the variable is a trained parameter."""

    def read(self, name: str) -> np.ndarray:
        """Return a parameter's values."""

    def not_finite(self) -> list[str]:
        """Name the parameters with infinite or NaN values."""

    def write(self, name: str, values: np.ndarray) -> None:
        """Give a parameter other values, or add one."""

    def compute(self, name: str, op: str, attrs: Mapping[str, str], inputs: Sequence[str]) -> None:
        """Add the result of an operator on parameters as a parameter."""

    def rename(self, old: str, new: str) -> None:
        """Give a parameter another name."""

    def keep(self, names: Collection[str]) -> None:
        """Forget all other parameters."""


@dataclass(frozen=True)
class Int8:
    """What is to run in INT8, by the names of operators."""

    layers: frozenset[str]
    wide: frozenset[str]  # operators behind layers that are not


@dataclass(frozen=True)
class Context:
    """What a rewrite depends on."""

    policy: Policy  # decides the precision of each operator, and which passes are off
    facts: Facts = UNKNOWN  # what is known of the calls that the graph is for
    # the data types that the graph's outputs had, and are to have; None for those that may have any
    outputs: tuple[str | None, ...] = ()
    # the inputs before the rewrite. Training passes them by position: their order must not change.
    variables: tuple[str, ...] = ()
    everywhere: bool = True  # False when only operators traced inside an autocast region are to run in low precision
    # tells whether an operator in C++ may take the place of MXNet's, by its registered name; None where none may
    native: Callable[[str], bool] | None = None
    converted: bool = False  # whether the graph is one that was converted for inference, and is about to run
    check: bool = False  # whether the result is verified
    weights: Weights | None = None  # the trained parameters, for passes that change them; None in training
    int8: Int8 | None = None  # what runs in INT8; None where nothing does

    @classmethod
    def of(cls, graph: Graph, policy: Policy, facts: Facts = UNKNOWN, *, keep_outputs: bool = True,
           everywhere: bool = True, native: Callable[[str], bool] | None = None, converted: bool = False,
           check: bool = False, weights: Weights | None = None, int8: Int8 | None = None) -> Context:
        """Return what a rewrite of a graph depends on; without ``keep_outputs`` its outputs may take any type."""
        outputs = tuple(head.node.dtypes[head.output] if keep_outputs else None for head in graph.heads)
        variables = tuple(node.name for node in graph.variables())
        return cls(policy, facts, outputs, variables, everywhere, native, converted, check, weights, int8)

    @property
    def target(self) -> str:
        """The low-precision type."""
        return self.policy.target_dtype

    def runs_natively(self, op: str) -> bool:
        """Tell whether an operator in C++ may take the place of MXNet's."""
        return self.native is not None and self.native(op)

    def is_float(self, entry: Entry) -> bool:
        """Tell whether the tensor is one that passes may cast: FP32, or low precision by an earlier decision."""
        return entry.dtype in (FLOAT32, self.target)
