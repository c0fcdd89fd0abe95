"""What a conversion was asked to do, and what it did."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Iterable, Mapping, Sequence

from .. import passes
from ..dtypes import LOW_PRECISION, normalize
from ..errors import PolicyError, closest, expected
from ..graph import Graph
from ..graph.attrs import CONVERSION

__all__ = ["STEPS", "Conversion", "conversion_of", "disabled_passes"]

STEPS = {each.name: each.summary for each in passes.PASSES if each.is_step}
_OFFLINE = "cast_params_offline"


def disabled_passes(optimize: str | Iterable[str] | None, cast_params_offline: bool | None,
                    disable_passes: Iterable[str] | None = None) -> frozenset[str]:
    """Name the passes that are off, from the three arguments that can say so.

    Parameters
    ----------
    optimize : 'all', 'none' or iterable of str
        Names of :data:`STEPS`.
    cast_params_offline : bool or None
        Adds or removes that step.
    disable_passes : iterable of str, optional
        Names of passes that are off in any case.

    Raises
    ------
    PolicyError
        For unknown steps and passes, and for one that is asked for and switched off.

    Examples
    --------
    >>> sorted(disabled_passes(['fuse'], True, ['shape_operands']))
    ['align_channels', 'drop_training', 'fold_batch_norm', 'shape_operands']
    """
    disabled = passes.checked(disable_passes)
    if cast_params_offline and _OFFLINE in disabled:
        raise PolicyError(f"disable_passes: {_OFFLINE!r} is switched off, and asked for by {_OFFLINE}=True")
    return frozenset(set(STEPS) - _named_steps(optimize, cast_params_offline)) | disabled


def _named_steps(optimize: str | Iterable[str] | None, cast_params_offline: bool | None) -> set[str]:
    if isinstance(optimize, str) or optimize is None:
        named = {"all": set(STEPS), "none": set(), None: set()}.get(optimize)
    else:
        named = set(optimize)
    if named is None or not named <= set(STEPS):
        wrong = next((step for step in sorted(map(str, named or ())) if step not in STEPS), str(optimize))
        raise PolicyError(expected(f"'all', 'none' or some of {', '.join(STEPS)}", "optimize", optimize)
                          + closest(wrong, STEPS))
    if cast_params_offline is not None:
        named = named | {_OFFLINE} if cast_params_offline else named - {_OFFLINE}
    return named


@dataclass(frozen=True)
class Conversion:
    """How a network was converted.

    Attributes
    ----------
    target_dtype : str
        ``'bfloat16'``, ``'float16'``, or ``'float32'`` for one that was optimised only.
    operators : int
        Operators in the converted graph; those in a fused operator count as one.
    low_precision : int
        Operators that read low precision.
    casts : int
        Casts left in the graph.
    steps : mapping of str to int
        Each optimisation that was asked for, and how often it applied.
    excluded : tuple of str
        Nodes kept in FP32 on request.
    version : str
        Version of gluon_amp.
    reason : str
        Why the network stays in FP32; empty for other types.

    Examples
    --------
    >>> Conversion('bfloat16', 10, 4, 2, {'fuse': 3}).summary()
    'bfloat16: 4 of 10 operators in low precision, 2 casts; fuse 3'
    """

    target_dtype: str
    operators: int = 0
    low_precision: int = 0
    casts: int = 0
    steps: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    version: str = ""
    reason: str = ""

    def summary(self) -> str:
        """Return one line of text."""
        steps = ", ".join(f"{name} {count}" for name, count in self.steps.items())
        what = (f"{self.low_precision} of {self.operators} operators in low precision, {self.casts} casts"
                if self.target_dtype in LOW_PRECISION else f"{self.reason or 'no low precision'}, "
                f"{self.operators} operators")
        return f"{self.target_dtype}: {what}" + (f"; {steps}" if steps else "")

    def to_json(self) -> str:
        """Return the record as JSON text, the form of the symbol attribute."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Conversion:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "excluded": tuple(values.get("excluded", ()))})


def conversion_of(graph: Graph) -> Conversion | None:
    """Return the record that a converted graph carries, None for one that was not converted."""
    found: Sequence[str] = [head.node.attrs[CONVERSION] for head in graph.heads
                            if CONVERSION in head.node.attrs]
    return Conversion.from_json(found[0]) if found else None


def target_of(target_dtype: object) -> str | None:
    """Name the type to convert to; None to let the machine choose."""
    return None if target_dtype is None else normalize(target_dtype, or_float32=True)
