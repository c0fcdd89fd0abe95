"""The options of ``initialize``: what each level means, what may override it, and how they are printed."""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Callable, Mapping

from ...dtypes import FLOAT32, normalize
from ...errors import PolicyError, closest, expected
from ...training.loss_scaler import LossScaler, scale_of

DYNAMIC = "dynamic"
LOW = "low precision"  # the type that the device at hand runs


@dataclass(frozen=True)
class Options:
    """The settings of a level, or of a level with overrides."""

    # the type that networks run in: ``'float32'``, ``'float16'``, ``'bfloat16'`` or :data:`LOW`; None leaves that to
    # the operators
    cast_model_type: str | None
    # whether scale, shift and statistics of BatchNorm stay FP32 in a network that is cast
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None  # whether the optimizer updates FP32 weights in a network that is cast
    loss_scale: float | str | LossScaler  # what losses are multiplied by
    cast_model_outputs: str | None = None  # the type of networks' outputs; None for FP32


LEVELS: Mapping[str, tuple[str, Options]] = {
    "O0": ("plain FP32", Options(FLOAT32, None, None, 1.0)),
    "O1": ("each operator in the precision that suits it, weights in FP32", Options(None, None, None, DYNAMIC)),
    "O2": ("networks in low precision, BatchNorm and master weights in FP32", Options(LOW, True, True, DYNAMIC)),
    "O3": ("networks and weights in low precision", Options(LOW, False, False, 1.0)),
}

_TRUTH = {"true": True, "false": False}


def as_bool(name: str, value: object) -> bool:
    """Read a bool, or its name as a command line gives it."""
    truth = _TRUTH.get(value.lower()) if isinstance(value, str) else value
    if isinstance(truth, bool):
        return truth
    raise TypeError(expected("True, False, 'True' or 'False'", name, value))


def _as_dtype(name: str, value: object) -> str:
    return normalize(value, name, or_float32=True)


def _as_scale(name: str, value: object) -> float | str | LossScaler:
    if isinstance(value, LossScaler) or value == DYNAMIC:
        return value  # type: ignore[return-value]
    try:
        return scale_of(name, float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(expected("a number above 0, 'dynamic' or a LossScaler", name, value)) from None


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "cast_model_type": _as_dtype, "keep_batchnorm_fp32": as_bool, "master_weights": as_bool, "loss_scale": _as_scale,
    "cast_model_outputs": _as_dtype,
}


def resolve(opt_level: object, overrides: Mapping[str, object]) -> tuple[str, Options]:
    """Return a level's name, and its options with the overrides that are not None."""
    level = _level(opt_level)
    given = {name: _READERS[name](name, value) for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        reason = _contradiction(level, name, value)
        if reason:
            raise PolicyError(f"opt_level {level} with {name}={value!r}: {reason}")
    return level, replace(LEVELS[level][1], **given)


def _level(value: object) -> str:
    if isinstance(value, str) and value.upper() in LEVELS:
        return value.upper()
    hint = " The first character is the letter O." if str(value).startswith("0") else closest(str(value), LEVELS)
    raise PolicyError(expected(f"one of {', '.join(LEVELS)}", "opt_level", value) + "." + hint)


def _contradiction(level: str, name: str, value: object) -> str | None:
    """Return the reason against an override at a level; None when it is allowed."""
    if name == "cast_model_outputs":
        return ("NumPy and plain MXNet code cannot read bfloat16; use 'float16' or 'float32', or leave it out"
                if value == "bfloat16" else None)
    if name == "loss_scale":
        return None
    if level == "O1":
        return "O1 keeps weights in FP32 and casts per operator; leave it out, or use opt_level O2 or O3"
    if level == "O0":
        wanted = {"cast_model_type": FLOAT32, "keep_batchnorm_fp32": True, "master_weights": False}[name]
        return None if value == wanted else "O0 is plain FP32; leave it out, or use opt_level O2 or O3"
    if name == "cast_model_type" and value == FLOAT32:
        return "a network in FP32 is opt_level O0"
    return None


def describe(options: Options) -> str:
    """Return the options, one a line."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return "\n".join(f"  {name:<20} {_shown(value)}" for name, value in values.items())


def _shown(value: object) -> str:
    if isinstance(value, LossScaler):
        return f"{type(value).__name__} at {value.loss_scale:g}"
    return "-" if value is None else str(value)
