"""What a plan of a graph depends on, beside the setting."""
from __future__ import annotations

from typing import NamedTuple


class Concern(NamedTuple):
    """The gradient of an operand."""

    name: str  # of the operator's node
    of: int  # the position of the operand


class Shaped(NamedTuple):
    """What the shapes of a call decide on an operator."""

    name: str  # of the operator's node
    what: str  # that it runs in FP32, or as MXNet's, or that a product's factors come before its data


class Facts(NamedTuple):
    """What is known of a call. A symbol has one plan for calls of equal facts, whatever their shapes."""

    dtypes: tuple[str | None, ...] = ()  # data types of the inputs, in order; None where unknown
    device: str = "cpu"  # the device, under the name that policies are kept under
    accumulated: frozenset[str] = frozenset()  # names of inputs whose gradient is accumulated (``grad_req='add'``)
    concerned: frozenset[Concern] = frozenset()  # the gradients of single operators that MXNet would get wrong
    sparse: frozenset[str] = frozenset()  # names of inputs that are sparse arrays
    dense: bool = True  # whether all inputs and gradients are dense arrays, of known shapes
    recorded: bool = True  # whether gradients may be asked for
    trains: bool = False  # whether it is known that operators run in their training mode, and nobody watches them
    evaluates: bool = False  # whether it is known that gradients are those of inference, where that matters
    # operators that make a gradient on their own, and for how many inputs; empty where gradients carry no loss scale
    own_gradients: tuple[tuple[str, int], ...] = ()
    bound: bool = False  # whether the graph is of an executor, which knows all shapes beforehand or never
    shaped: frozenset[Shaped] = frozenset()  # what the shapes decide: a plan depends on nothing else of them


UNKNOWN = Facts()  # of a call of which nothing is known
