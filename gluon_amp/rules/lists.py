"""Policies from the operator lists that users give."""
from __future__ import annotations

import re
from itertools import combinations
from typing import Callable, Mapping, Sequence, Tuple

from ..errors import PolicyError, closest, expected
from .decision import FP32, LOWER, Cause, Rule
from .policy import Policy, refused_rules
from .tables import table

ConditionalOp = Tuple[str, str, Sequence[str]]


def make_policy(target_dtype: str, known_ops: Mapping[str, str], *, target_precision_ops: Sequence[str] | None = None,
                fp32_ops: Sequence[str] | None = None,
                conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                custom_ops: Mapping[str, str] | None = None,
                parameters: Callable[[str], Mapping[str, str]] | None = None) -> Policy:
    """Build a policy from operator lists as MXNet's ``amp.init`` takes them."""
    lower = _names("target_precision_ops", target_precision_ops, known_ops)
    forced = _names("fp32_ops", fp32_ops, known_ops)
    conditional = [_possible(condition, parameters) for condition in _conditions(conditional_fp32_ops, known_ops)]
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
    return Policy(target_dtype, overrides)


def _lower_overrides(target_dtype: str, names: list[str]) -> dict[str, tuple[Rule, ...]]:
    known = table(target_dtype)
    lowered = {name for name, rules in known.items() if any(rule.rule == LOWER for rule in rules)}
    if lowered == set(names):
        return {}  # the table's own list
    made: dict[str, tuple[Rule, ...]] = {}
    for name in names:
        # Of the table's conditions those hold that say where the kernel is not sound.
        refused = refused_rules("target_precision_ops", target_dtype, name)
        fp32_inputs = next((rule.fp32_inputs for rule in known.get(name, ())), ())
        made[name] = (*refused, Rule(LOWER, fp32_inputs=fp32_inputs, note="in the target_precision_ops list",
                                     cause=Cause.USER_LIST))
    for name in lowered.difference(names):
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


def _possible(condition: ConditionalOp, parameters: Callable[[str], Mapping[str, str]] | None) -> ConditionalOp:
    """Return a condition with its values in every spelling; raise PolicyError for one that no operator can meet."""
    op, attribute, values = condition
    texts = [str(value).replace(" ", "") for value in values]
    if parameters is None or op in _ANY_ATTRIBUTE:
        return op, attribute, texts
    known = {name: kind for name, kind in parameters(op).items() if not kind.startswith(_INPUTS)}
    if attribute not in known:
        raise PolicyError(f"conditional_fp32_ops: the operator {op!r} has no attribute {attribute!r}."
                          f"{closest(attribute, known)}")
    choices = _choices(known[attribute])
    wrong = [text for text in texts if choices and text not in choices]
    if wrong or not texts:
        raise PolicyError(f"conditional_fp32_ops: the attribute {attribute!r} of {op!r} is never "
                          f"{', '.join(map(repr, wrong)) or values}: expected some of "
                          f"{', '.join(choices) or 'its values'}")
    return op, attribute, [spelling for text in texts for spelling in _SPELLINGS.get(text, (text,))
                           if choices == _BOOLEANS or spelling == text]


_ANY_ATTRIBUTE = ("Custom",)  # operators that take parameters which MXNet does not know
_INPUTS = ("NDArray", "Symbol", "ndarray", "tuple of <NDArray")  # the types of what is an input
_FALSE, _TRUE = ("False", "false", "0"), ("True", "true", "1")
_BOOLEANS = (*_FALSE, *_TRUE)
_SPELLINGS = {**dict.fromkeys(_FALSE, _FALSE), **dict.fromkeys(_TRUE, _TRUE)}


def _choices(kind: str) -> tuple[str, ...]:
    """Return the values that a parameter may have, from what MXNet says of its type; none where they are not listed."""
    if kind.startswith("boolean"):
        return _BOOLEANS
    return (*re.findall("'([^']*)'", kind.split("}")[0]), "None") if kind.startswith("{") else ()


def _registered(argument: str, name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise PolicyError(f"{argument}: MXNet has no operator {name!r}.{closest(name, known)}")
    return known[name]


def _check_disjoint(listed: Mapping[str, Sequence[str]]) -> None:
    for first, second in combinations(listed, 2):
        common = sorted(set(listed[first]) & set(listed[second]))
        if common:
            raise PolicyError(f"operators can be in one list only; in both {first} and {second}: {', '.join(common)}")
