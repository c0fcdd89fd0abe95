"""The records that sample inputs and modes are made of."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Mapping, NamedTuple, Sequence

from ..dtypes import BFLOAT16

__all__ = ["LOW", "Input", "Mode", "Sample", "fixed", "low", "modes_for", "sample"]

LOW = "low"  # the kind of an input that is cast to the type under test; other kinds are types themselves


@dataclass(frozen=True)
class Input:
    """One input of an operator.

    Attributes
    ----------
    shape : tuple of int
        Its shape.
    kind : str
        ``'low'`` when it runs in the type under test, otherwise the type it has (``'float32'``, ``'int32'``).
    values : str
        What it is filled with: a name of :mod:`gluon_amp.audit.values`.
    aux : bool
        Whether it is a state that the operator changes, which must be a plain variable.
    """

    shape: tuple[int, ...]
    kind: str = LOW
    values: str = "normal"
    aux: bool = False

    @property
    def differentiable(self) -> bool:
        """Whether a gradient with respect to it is asked for."""
        return not self.aux and self.kind in (LOW, "float32") and self.values.partition(":")[0] not in _INDEX_VALUES


_INDEX_VALUES = ("zeros", "length", "labels", "grid_index", "valid")


@dataclass(frozen=True)
class Sample:
    """One way of calling an operator.

    Attributes
    ----------
    op : str
        Registered name.
    inputs : tuple of Input
        All inputs in order, auxiliary states last where the operator has them.
    attrs : tuple of (str, str)
        Operator parameters.
    tolerance : float
        Largest error that is right, in units of the type's resolution (2^-8 for bfloat16); 0 for indices.
    gradient : bool
        False when gradients say nothing about the operator (they are zero, random or not defined).
    numpy_shape : bool
        Whether it runs under NumPy's shape semantics, in which ``()`` is a scalar.
    note : str
        What the sample is about where attributes do not say it; part of the condition's name.
    """

    op: str
    inputs: tuple[Input, ...]
    attrs: tuple[tuple[str, str], ...] = ()
    tolerance: float = 4.0
    gradient: bool = True
    numpy_shape: bool = False
    note: str = ""

    @property
    def condition(self) -> str:
        """The sample's name among those of its operator: attributes and note."""
        parts = [f"{key}={value}" for key, value in self.attrs] + ([self.note] if self.note else [])
        return ", ".join(parts) or "default"

    @property
    def signature(self) -> str:
        """Types and shapes of the inputs in one line."""
        return ", ".join(f"{item.kind}{item.shape}" for item in self.inputs)


def low(*shape: int, values: str = "normal") -> Input:
    """Make an input in the type under test."""
    return Input(shape, LOW, values)


def fixed(*shape: int, kind: str = "float32", values: str = "normal", aux: bool = False) -> Input:
    """Make an input that keeps its type: statistics, indices, lengths, labels."""
    return Input(shape, kind, values, aux)


def sample(op: str, inputs: Input | Sequence[Input], tolerance: float = 4.0, gradient: bool = True, note: str = "",
           **attrs: object) -> Sample:
    """Make a sample; every further keyword is an operator parameter.

    Examples
    --------
    >>> sample('clip', low(2, 3), a_min=0, a_max=1).condition
    'a_min=0, a_max=1'
    """
    items = (inputs,) if isinstance(inputs, Input) else tuple(inputs)
    return Sample(op, items, tuple((key, str(value)) for key, value in attrs.items()), tolerance, gradient,
                  op.startswith(("_np_", "_npi_", "_npx_")), note)


class Mode(NamedTuple):
    """One way of running a sample.

    Attributes
    ----------
    layout : str
        ``'plain'``; ``'blocked'``: inputs come from, and the first output goes into, a oneDNN convolution, which
        works on blocked layouts; ``'blocked_in'``: only the inputs do; ``'blocked_out'``: only the output does;
        ``'mixed'``: only the first input does.
    grad : str
        ``'infer'``: outside recording, in predict mode; ``'write'`` and ``'add'``: gradients of FP32 variables
        behind a cast; ``'addlow'``: the operator itself adds to low-precision gradients.
    run : str
        ``'eager'``, ``'cached'`` (CachedOp) or ``'static'`` (CachedOp with static_alloc and static_shape).
    """

    layout: str
    grad: str
    run: str

    def __str__(self) -> str:
        return f"{self.run}/{self.layout}/{self.grad}"


_RUNS = ("eager", "cached", "static")


def _modes(layout: str, *grads: str) -> tuple[Mode, ...]:
    return tuple(Mode(layout, grad, run) for grad, run in product(grads, _RUNS))


_PLAIN = _modes("plain", "infer", "write", "add", "addlow")
_BLOCKED = _modes("blocked", "infer", "write", "add") + _modes("blocked_in", "infer", "write")
_BLOCKED_OUT, _MIXED = _modes("blocked_out", "write"), _modes("mixed", "write")


def can_be_blocked(item: Input) -> bool:
    """Whether a oneDNN convolution can produce the input in a blocked layout."""
    return item.kind == LOW and 3 <= len(item.shape) <= 5 and item.shape[1] % 16 == 0


def modes_for(item: Sample, dtype: str, device: str) -> tuple[Mode, ...]:
    """List the modes that make sense for a sample: blocked layouts exist for bfloat16 on the CPU only."""
    modes = _PLAIN
    if device == "cpu" and dtype == BFLOAT16:
        able = any(map(can_be_blocked, item.inputs))
        several = sum(each.kind == LOW for each in item.inputs) > 1
        modes += (_BLOCKED if able else ()) + _BLOCKED_OUT + (_MIXED if able and several else ())
    if not item.gradient:
        modes = tuple(mode for mode in modes if mode.grad in ("infer", "write"))
    return modes


def merge(*tables: Mapping[str, str]) -> dict[str, str]:
    """Join mappings with disjoint keys."""
    merged: dict[str, str] = {}
    for table in tables:
        twice = sorted(merged.keys() & table.keys())
        if twice:
            raise ValueError(f"listed twice: {twice}")
        merged.update(table)
    return merged
