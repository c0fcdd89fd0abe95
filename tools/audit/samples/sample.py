"""What samples are made of: an operator, its parameters and its inputs."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

LOW = "low"  # the kind of an input that is cast to the type under test; other kinds are types themselves
_LIBRARY = "_gluon_amp_"  # what names of this package's own operators begin with
_INDEX_VALUES = ("zeros", "length", "labels", "grid_index", "valid")


@dataclass(frozen=True)
class Input:
    """One input of an operator."""

    shape: tuple[int, ...]
    kind: str = LOW  # 'low' when it runs in the type under test, otherwise the type it has
    values: str = "normal"  # what it is filled with: a name of audit.values
    aux: bool = False  # a state that the operator changes, which must be a plain variable

    @property
    def differentiable(self) -> bool:
        """Whether a gradient with respect to it is asked for."""
        return not self.aux and self.kind in (LOW, "float32") and self.values.partition(":")[0] not in _INDEX_VALUES

    @property
    def can_be_blocked(self) -> bool:
        """Whether a oneDNN convolution can produce it in a blocked layout."""
        return self.kind == LOW and 3 <= len(self.shape) <= 5 and self.shape[1] % 16 == 0


@dataclass(frozen=True)
class Sample:
    """One way of calling an operator."""

    op: str
    inputs: tuple[Input, ...]  # auxiliary states last
    attrs: dict[str, str]
    tolerance: float = 4.0  # the largest error that is right, in units of the type's resolution; 0 for indices
    gradient: bool = True  # False when gradients are zero, random or not defined
    note: str = ""  # what the sample is about where attributes do not say it
    # another operator that computes the same of the same inputs, and whose FP32 is right; its own where there is none
    reference: str = ""
    in_graphs: bool = True  # False for operators without outputs, which are called and are no part of graphs

    @property
    def condition(self) -> str:
        """The sample's name among those of its operator: attributes and note."""
        parts = [f"{key}={value}" for key, value in self.attrs.items()] + ([self.note] if self.note else [])
        return ", ".join(parts) or "default"

    @property
    def seed(self) -> str:
        """What the contents of its inputs follow from; an operator and its reference get the same."""
        return self.reference or self.op

    @property
    def runs_low(self) -> bool:
        """Whether an input is in the type under test."""
        return any(each.kind == LOW for each in self.inputs)

    @property
    def needs_identities(self) -> bool:
        """Whether MXNet does not tell the operator that gradients are to be added, so that graphs have identities."""
        return self.op.startswith(_LIBRARY)

    def attrs_in(self, dtype: str) -> dict[str, str]:
        """Return the operator's parameters where the type under test is this one, which some of them name."""
        return {key: dtype if value == LOW else value for key, value in self.attrs.items()}

    @property
    def signature(self) -> str:
        """Types and shapes of the inputs in one line."""
        return ", ".join(f"{each.kind}{each.shape}" for each in self.inputs)

    @property
    def numpy_shape(self) -> bool:
        """Whether it runs under NumPy's shape semantics, in which ``()`` is a scalar."""
        return self.op.startswith(("_np_", "_npi_", "_npx_"))


def low(*shape: int, values: str = "normal") -> Input:
    """Make an input in the type under test."""
    return Input(shape, LOW, values)


def fixed(*shape: int, kind: str = "float32", values: str = "normal", aux: bool = False) -> Input:
    """Make an input that keeps its type: statistics, indices, lengths, labels."""
    return Input(shape, kind, values, aux)


def sample(op: str, inputs: Input | Sequence[Input], tolerance: float = 4.0, gradient: bool = True, note: str = "",
           reference: str = "", in_graphs: bool = True, **attrs: object) -> Sample:
    """Make a sample; every further keyword is an operator parameter."""
    every = (inputs,) if isinstance(inputs, Input) else tuple(inputs)
    return Sample(op, every, {key: str(value) for key, value in attrs.items()}, tolerance, gradient, note, reference,
                  in_graphs)
