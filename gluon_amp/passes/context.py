"""What every pass needs to know beside the graph."""
from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import FLOAT32
from ..graph import Entry, Node
from ..policy import Policy

__all__ = ["CONVERSION_ATTRIBUTE", "REGION_ATTRIBUTE", "REGION_OFF", "REGION_ON", "Context", "operator"]

# The symbol attribute that operators traced inside an autocast region carry, and its values beside a data type.
REGION_ATTRIBUTE = "__amp__"
REGION_ON, REGION_OFF = "on", "off"
# The symbol attribute, on the nodes that give the outputs, that tells how a symbol was converted for inference.
CONVERSION_ATTRIBUTE = "__gluon_amp__"


@dataclass(frozen=True)
class Context:
    """The settings of one rewrite.

    Attributes
    ----------
    policy : Policy
        Decides the precision of each operator.
    guarded : frozenset of str
        Names of variables whose gradient is accumulated rather than written.
    outputs : tuple of str
        The data types that the graph's outputs had, and are to have.
    everywhere : bool
        False when only operators traced inside an autocast region are to run in low precision.
    """

    policy: Policy
    guarded: frozenset[str] = frozenset()
    outputs: tuple[str | None, ...] = ()
    everywhere: bool = True

    @property
    def target(self) -> str:
        """The low-precision type."""
        return self.policy.target_dtype

    def is_float(self, entry: Entry) -> bool:
        """Whether the tensor is one that passes may cast: FP32, or low precision by an earlier decision."""
        return entry.dtype in (FLOAT32, self.target)


def operator(op: str, name: str, inputs: list[Entry], like: Entry, **attrs: object) -> Node:
    """Make a single-output operator node with the data type and shape of ``like``."""
    return Node(op, name, {key: str(value) for key, value in attrs.items()}, inputs,
                dtypes=[like.dtype], shapes=[like.shape])
