"""The operator tables as the lists that ``mxnet.contrib.amp`` has functions for.

Every operator is in exactly one of the lists, under its registered name. MXNet knows no rules that depend on
shapes: an operator that runs in low precision for some inputs is listed as one that does.
"""
from __future__ import annotations

from ..dtypes import FLOAT16, normalize
from ..rules.decision import FP32, KEEP, LOWER, NEUTRAL, WIDEST, Rule
from ..rules.tables import table
from ..rules.tables.groups import LOSS_OUTPUTS

_CONDITIONAL = "CONDITIONAL"  # FP32 for some attributes only
_BATCH_NORM = ("data", "gamma", "beta", "moving_mean", "moving_var")
_SEQUENCE = ("data", "sequence_length")

# The inputs of operators some of whose inputs stay FP32 in bfloat16.
INPUT_NAMES = {
    "BatchNorm": _BATCH_NORM,
    "_contrib_BatchNormWithReLU": _BATCH_NORM,
    "SequenceLast": _SEQUENCE,
    "SequenceMask": _SEQUENCE,
    "SequenceReverse": _SEQUENCE,
    "where": ("condition", "x", "y"),
}


def list_lp16_ops(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators that run in low precision, by their registered names.

    The type is ``'float16'`` or ``'bfloat16'``, by name or as a numpy dtype, here and in the other lists.
    """
    return _names(target_dtype, LOWER)


def list_fp32_ops(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators that run in FP32."""
    return _names(target_dtype, FP32)


def list_lp16_fp32_ops(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators that run in the precision of their data, or take inputs as they come."""
    return _names(target_dtype, NEUTRAL, KEEP)


def list_conditional_fp32_ops(target_dtype: object = FLOAT16) -> list[tuple[str, str, list[str]]]:
    """List the operators that run in FP32 for some values of an attribute, and otherwise follow their data.

    Each comes with the attribute, and its values for FP32. MXNet knows one attribute for each operator: where there are
    several this is the first.
    """
    known = table(normalize(target_dtype))
    conditions = {name: next(record.when for record in known[name] if record.rule == FP32 and record.when)
                  for name in _names(target_dtype, _CONDITIONAL)}
    return [(name, attribute, list(values)) for name, (attribute, values) in conditions.items()]


def list_widest_type_cast(target_dtype: object = FLOAT16) -> list[str]:
    """List the operators whose floating-point inputs are all cast to the widest type among them."""
    return _names(target_dtype, WIDEST)


def list_loss_output_functions(target_dtype: object = FLOAT16) -> list[str]:
    """List the output layers whose backward makes its own gradient, times ``grad_scale``: that carries the loss scale.

    The list is the same for all types.
    """
    normalize(target_dtype)
    return list(LOSS_OUTPUTS)


def list_lp16_use_fp32_params(target_dtype: object = FLOAT16) -> dict[str, list[str]] | None:
    """Map operators that run in low precision to the names of their inputs that stay FP32, '' for inputs that are cast.

    None for float16, as in MXNet.
    """
    dtype = normalize(target_dtype)
    if dtype == FLOAT16:
        return None
    return {name: [known if index in records[-1].fp32_inputs else "" for index, known in enumerate(INPUT_NAMES[name])]
            for name, records in sorted(table(dtype).items()) if records[-1].fp32_inputs}


def _names(target_dtype: object, *kinds: str) -> list[str]:
    return sorted(name for name, records in table(normalize(target_dtype)).items() if _kind(records) in kinds)


def _kind(records: tuple[Rule, ...]) -> str:
    """Return the rule that an operator is listed by: LOWER where it may hold, else that without a condition."""
    if any(record.rule == LOWER for record in records):
        return LOWER
    rest = records[-1].rule
    return _CONDITIONAL if rest != FP32 and any(record.rule == FP32 for record in records) else rest
