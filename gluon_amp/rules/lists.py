"""Policies from the operator lists that users give."""
from __future__ import annotations

from typing import Mapping, Sequence, Tuple

from ..errors import PolicyError, closest, expected
from .decision import FP32, LOWER, Cause, Rule
from .policy import Policy, refused_rules
from .tables import table

__all__ = ["ConditionalOp", "make_policy"]

ConditionalOp = Tuple[str, str, Sequence[str]]


def make_policy(target_dtype: str, known_ops: Mapping[str, str], *, target_precision_ops: Sequence[str] | None = None,
                fp32_ops: Sequence[str] | None = None,
                conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                custom_ops: Mapping[str, str] | None = None, imitated: bool = False) -> Policy:
    """Build a policy from operator lists as MXNet's ``amp.init`` takes them.

    Examples
    --------
    >>> known = {'Convolution': 'Convolution'}
    >>> make_policy('bfloat16', known, fp32_ops=['Convolution']).decide('Convolution', {}).rule
    'FP32'
    """
    lower = _names("target_precision_ops", target_precision_ops, known_ops)
    forced = _names("fp32_ops", fp32_ops, known_ops)
    conditional = _conditions(conditional_fp32_ops, known_ops)
    listed = {"target_precision_ops": lower, "fp32_ops": forced,
              "conditional_fp32_ops": [name for name, _, _ in conditional]}
    _check_disjoint(listed)
    overrides: dict[str, tuple[Rule, ...]]
    overrides = {name: (Rule(FP32, note="in the fp32_ops list", cause=Cause.USER_LIST),) for name in forced}
    for name, attribute, values in conditional:
        rule = Rule(FP32, when=(attribute, tuple(map(str, values))), note="in the conditional_fp32_ops list",
                    cause=Cause.USER_LIST)
        overrides[name] = (*overrides.get(name, ()), rule)
    if target_precision_ops is not None:
        overrides.update(_lower_overrides(target_dtype, lower))
    overrides["Custom"] = tuple(Rule(rule, when=("op_type", (name,)), note="by register_op", cause=Cause.REGISTERED)
                                for name, rule in (custom_ops or {}).items())
    return Policy(target_dtype, overrides, imitated)


def _lower_overrides(target_dtype: str, names: list[str]) -> dict[str, tuple[Rule, ...]]:
    known = table(target_dtype)
    made: dict[str, tuple[Rule, ...]] = {}
    for name in names:
        rules = known.get(name, ())
        refused = refused_rules("target_precision_ops", target_dtype, name)
        # What the table runs in low precision anyway keeps the table's conditions.
        if not any(rule.rule == LOWER for rule in rules):
            fp32_inputs = next((rule.fp32_inputs for rule in rules), ())
            made[name] = (*refused, Rule(LOWER, fp32_inputs=fp32_inputs, note="in the target_precision_ops list",
                                         cause=Cause.USER_LIST))
    for name, rules in known.items():
        if name not in names and any(rule.rule == LOWER for rule in rules):
            made[name] = (Rule(FP32, note="not in the target_precision_ops list", cause=Cause.NOT_LISTED),)
    return made


def _names(argument: str, value: Sequence[str] | None, known: Mapping[str, str]) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise PolicyError(expected("a list of operator names", argument, value))
    return [_registered(argument, name, known) for name in value]


def _conditions(value: Sequence[ConditionalOp] | None, known: Mapping[str, str]) -> list[ConditionalOp]:
    argument = "conditional_fp32_ops"
    for item in value or ():
        shaped = isinstance(item, (tuple, list)) and len(item) == 3
        if not (shaped and all(isinstance(part, str) for part in item[:2]) and isinstance(item[2], (tuple, list))):
            raise PolicyError(expected("a list of (operator, attribute, [values]) tuples", argument, value))
    return [(_registered(argument, op, known), attribute, values) for op, attribute, values in value or ()]


def _registered(argument: str, name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise PolicyError(f"{argument}: MXNet has no operator {name!r}.{closest(name, known)}")
    return known[name]


def _check_disjoint(listed: Mapping[str, Sequence[str]]) -> None:
    arguments = list(listed)
    for position, first in enumerate(arguments):
        for second in arguments[position + 1:]:
            common = sorted(set(listed[first]) & set(listed[second]))
            if common:
                raise PolicyError(f"operators can be in one list only; in both {first} and {second}: "
                                  f"{', '.join(common)}")
