"""The policy: an operator, its attributes and its shape to a decision; by the operator lists that users give."""
from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from typing import Any, Callable, Mapping, Sequence, Tuple

from ..base.checks import true_or_false, whole
from ..base.files import replacing
from ..errors import PolicyError, closest, expected
from ..machine.costs import Rates, rates_of
from ..machine.dtypes import BFLOAT16, FLOAT32, Support, isa_of_blocks, normalize
from .decision import FP32, KEEP, LOWER, RULES, Cause, Decision, Rule, constants_of, may_lower, within_range
from .shapes import BLOCK, SHAPE_RULES, ShapeRule, can_fold_stride
from .tables import table

ConditionalOp = Tuple[str, str, Sequence[str]]
_FORMAT = "gluon_amp policy 1"
_SQUARES = {"elemwise_mul": "square", "broadcast_mul": "square", "_npi_multiply": "_npi_square"}
# For operators of libraries that were loaded, or of a later MXNet.
_DEFAULT = Rule(FP32, note="not in the operator tables: FP32 is safe for every operator", cause=Cause.DEFAULT)


@dataclass(frozen=True)
class Device:
    """A device, as far as precisions and rewrites depend on it."""

    channel_multiple: int | None = None  # what its fast convolution kernels need; None for the type's usual one
    amx: bool = False  # whether oneDNN uses AMX tiles, some of whose kernels are wrong or slow for some shapes
    imitated: bool = False  # whether low precision is imitated: FP32 kernels, with values rounded at every edge
    mixes: bool = False  # whether operators run in FP32 where that is faster than low precision
    measured: Rates | None = field(default=None, repr=False)  # what its kernels cost; None where that is not known
    reason: str = field(default="", compare=False)  # why everything runs in FP32, for people; empty in low precision

    @classmethod
    def of(cls, support: Support, rates: Rates | None = None) -> Device:
        """Return a device that runs as its support says."""
        reason = support.reason if support.dtype == FLOAT32 else ""
        return cls(support.channel_multiple, support.amx, support.imitated, support.native, rates, reason)

    @property
    def rates(self) -> Rates:
        """What its kernels cost; where nothing is known of it, on a CPU of its instructions."""
        return self.measured or rates_of(None, isa_of_blocks(self.channel_multiple or BLOCK))


ANY_DEVICE = Device()


@dataclass(frozen=True)
class Policy:
    """Decides the precision that an operator runs in.

    Examples
    --------
    >>> policy = Policy('bf16', excluded=frozenset({'net_dense0_fwd'}))
    >>> policy.decide('FullyConnected', {}).rule
    'LOWER'
    """

    # ``'bfloat16'``, ``'float16'``, or ``'float32'`` where low precision would be slower: all operators run in FP32,
    # and only the passes that make FP32 faster rewrite graphs
    target_dtype: str
    overrides: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict, hash=False)  # before the built-in table's
    excluded: frozenset[str] = frozenset()  # names of graph nodes that stay in FP32
    training: bool = True  # False for converted graphs, which have no gradients, and avoid wrong kernels for all shapes
    disabled_passes: frozenset[str] = frozenset()  # names of graph passes (:func:`gluon_amp.list_passes`) that are off

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_dtype", normalize(self.target_dtype, or_float32=True))

    @property
    def lowers(self) -> bool:
        """Whether anything may run in low precision."""
        return self.target_dtype != FLOAT32

    def to_json(self) -> str:
        """Write the policy as JSON."""
        overrides = {op: [asdict(rule) for rule in rules] for op, rules in self.overrides.items()}
        return json.dumps({"format": _FORMAT, "target_dtype": self.target_dtype, "excluded": sorted(self.excluded),
                           "training": self.training, "overrides": overrides,
                           "disabled_passes": sorted(self.disabled_passes)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Read the text of :meth:`to_json`.

        Raises
        ------
        PolicyError
            The text is something else, or lets an operator run in low precision whose kernel is not sound by the
            built-in table.
        """
        try:
            raw = json.loads(text)
            if raw["format"] != _FORMAT:
                raise ValueError(f"its format is {raw['format']!r}, not {_FORMAT!r}")
            target = normalize(raw["target_dtype"], or_float32=True)
            overrides = {op: _sound(target, op, tuple(_read_rule(rule) for rule in rules))
                         for op, rules in raw["overrides"].items()}
            return cls(target, overrides, excluded=frozenset(_texts("excluded", raw["excluded"])),
                       training=true_or_false("training", raw["training"]),
                       disabled_passes=frozenset(_texts("disabled_passes", raw.get("disabled_passes", []))))
        except PolicyError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            told = f"{type(error).__name__}: {error}"
            raise PolicyError(f"not the JSON text of a policy, as Policy.save writes it: {told}") from error

    def save(self, path: str | os.PathLike) -> None:
        """Write the policy to a JSON file, whole or not at all."""
        with replacing(path) as (temporary,), open(temporary, "w", encoding="utf-8") as file:
            file.write(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Policy:
        """Read a file of :meth:`save`; PolicyError where it holds no policy."""
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    def decide(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None = None,
               device: Device = ANY_DEVICE) -> Decision:
        """Return the precision of an operator, and why.

        Parameters
        ----------
        op : str
            Registered operator name.
        attrs : mapping of str to str
            Its parameters, as in symbol JSON.
        shape : sequence of int, optional
            Shape of its data (first) input, None where unknown.
        device : Device, optional
            Where it runs.
        """
        if not self.lowers:
            note = f"float32: {device.reason}" if device.reason else "everything runs in FP32"
            return Decision(FP32, Cause.DEVICE, note)
        kept = self.kept_for(op, attrs, shape, device)
        if kept is not None:
            return kept
        channels = self._channels(op, attrs, shape, device)
        decision = next(rule for rule in self._rules(op) if _holds(rule, attrs, channels)).decision
        return within_range(decision, op, attrs, self.target_dtype)

    def kept_for(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None, device: Device
                 ) -> Decision | None:
        """Return the rule that keeps an operator in FP32 for the shape of its data, which may change between calls."""
        return next((rule.decision for rule in SHAPE_RULES if rule.op == op and self._heeds(rule, device)
                     and rule.holds(attrs, shape or (), device.amx)), None)

    def square_of(self, op: str) -> str | None:
        """Name the operator whose rules hold for a product of a tensor with itself, where the user names none."""
        return None if op in self.overrides else _SQUARES.get(op)

    def depends_on_shape(self, op: str, device: Device) -> bool:
        """Tell whether the shape of its data may keep an operator in FP32."""
        return any(rule.op == op and self._heeds(rule, device) for rule in SHAPE_RULES)

    def _heeds(self, rule: ShapeRule, device: Device) -> bool:
        return (rule.target == self.target_dtype and rule.training in (None, self.training)
                and rule.amx in (None, device.amx) and rule.imitated in (None, device.imitated)
                and not (rule.lifted_by and self.runs(rule.lifted_by)))

    def runs(self, name: str) -> bool:
        """Tell whether a pass is on."""
        return name not in self.disabled_passes

    def trains_on_amx(self, device: Device) -> bool:
        """Tell whether graphs are for training in bfloat16 on AMX tiles."""
        return device.amx and self.training and self.target_dtype == BFLOAT16 and not device.imitated

    def runs_native(self, device: Device) -> bool:
        """Tell whether operators in C++ may take the place of MXNet's: they know no type that is imitated."""
        return self.runs("native_operators") and not device.imitated

    def _channels(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None, device: Device) -> int | None:
        """Return the input channels that count for a rule, None where they do not matter or are unknown."""
        # In inference AMX kernels gain with few channels too, and leave their output in the layout of the others.
        if not shape or len(shape) < 2 or (device.amx and not self.training):
            return None
        # The pass fold_stride gives some convolutions more channels: rules on few do not apply then.
        is_folded = (op == "Convolution" and self.trains_on_amx(device) and self.runs("fold_stride")
                     and can_fold_stride(attrs, shape[1]))
        return None if is_folded else shape[1]

    def fixed(self, op: str, device: Device = ANY_DEVICE) -> Decision | None:
        """Return the decision on every use of an operator; None when it depends on the use."""
        first = self._rules(op)[0]
        depends = (first.when or first.min_channels or self.depends_on_shape(op, device)
                   or (constants_of(op) and may_lower(first.decision)))
        return None if depends else first.decision

    def may_lower(self, op: str) -> bool:
        """Tell whether some use of an operator on FP32 inputs runs in low precision."""
        return any(rule.rule == LOWER for rule in self._rules(op))

    def _rules(self, op: str) -> tuple[Rule, ...]:
        return (*self.overrides.get(op, ()), *table(self.target_dtype).get(op, ()), _DEFAULT)


def refused_rules(argument: str, target_dtype: str, op: str) -> list[Rule]:
    """Return the table's rules that nobody may override; raise PolicyError when they cover the whole operator."""
    refused = [rule for rule in table(target_dtype).get(op, ()) if not rule.safe or rule.rule == KEEP]
    if any(rule.when is None for rule in refused):
        raise PolicyError(f"{argument}: {op!r} cannot run in {target_dtype}: {refused[0].note}. Leave it out of the "
                          "list")
    return refused


def _sound(target_dtype: str, op: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return a file's rules for an operator, after the table's rules that it may not override."""
    if all(rule.rule == FP32 for rule in rules):
        return rules
    refused = refused_rules("overrides", target_dtype, op)
    fixed = {position for rule in table(target_dtype).get(op, ()) for position in rule.fp32_inputs}
    for rule in rules:
        if rule.rule != FP32 and not fixed.issubset(rule.fp32_inputs):
            raise ValueError(f"fp32_inputs of {op!r} lack {sorted(fixed.difference(rule.fp32_inputs))}: its kernels "
                             "read those in FP32")
    return (*(rule for rule in refused if rule not in rules), *rules)


def _read_rule(raw: Mapping[str, Any]) -> Rule:
    # Earlier versions wrote the operator's name, and inputs that Apex's O3 rounded.
    unknown = set(raw) - {each.name for each in fields(Rule)} - {"name", "rounded_inputs"}
    if unknown:
        raise ValueError(f"expected the fields of a rule, received {', '.join(sorted(unknown))}")
    rule, when, note = raw["rule"], raw["when"], raw.get("note", "")
    if rule not in RULES:
        raise ValueError(expected(f"one of {', '.join(RULES)}", "rule", rule))
    if when is not None and not (isinstance(when, list) and len(when) == 2 and isinstance(when[0], str)):
        raise ValueError(expected("an attribute and a list of values, or null", "when", when))
    if not isinstance(note, str):
        raise ValueError(expected("a text", "note", note))
    return Rule(rule, None if when is None else (when[0], _texts("when", when[1])),
                tuple(whole("fp32_inputs", position, 0) for position in raw["fp32_inputs"]),
                whole("min_channels", raw.get("min_channels", 0), 0), true_or_false("safe", raw.get("safe", True)),
                note, Cause(raw.get("cause", Cause.TABLE)))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(expected("a list of texts", name, value))
    return tuple(value)


def _holds(rule: Rule, attrs: Mapping[str, str], channels: int | None) -> bool:
    if rule.min_channels and channels is not None and channels < rule.min_channels:
        return False
    if rule.when is None:
        return True
    attribute, values = rule.when
    value = str(attrs.get(attribute))
    return value in values or value.replace(" ", "") in values


def make_policy(target_dtype: str, known_ops: Mapping[str, str], *, target_precision_ops: Sequence[str] | None = None,
                fp32_ops: Sequence[str] | None = None, conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                custom_ops: Mapping[str, str] | None = None,
                parameters: Callable[[str], Mapping[str, str]] | None = None) -> Policy:
    """Build a policy from operator lists as MXNet's ``amp.init`` takes them."""
    lower = _names("target_precision_ops", target_precision_ops, known_ops)
    forced = _names("fp32_ops", fp32_ops, known_ops)
    conditional = [_possible(condition, parameters) for condition in _conditions(conditional_fp32_ops, known_ops)]
    listed = {"target_precision_ops": lower, "fp32_ops": forced,
              "conditional_fp32_ops": [name for name, _, _ in conditional]}
    for pair in combinations(listed, 2):
        common = sorted(set(listed[pair[0]]) & set(listed[pair[1]]))
        if common:
            raise PolicyError(f"operators can be in one list only; in both {' and '.join(pair)}: {', '.join(common)}")
    overrides: dict[str, tuple[Rule, ...]]
    overrides = {name: (Rule(FP32, note="in the fp32_ops list", cause=Cause.USER_LIST),) for name in forced}
    for name, attribute, values in conditional:
        overrides[name] = (*overrides.get(name, ()), Rule(FP32, when=(attribute, tuple(values)), cause=Cause.USER_LIST,
                                                          note="in the conditional_fp32_ops list"))
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
    if isinstance(value, str) or not all(isinstance(name, str) for name in value or ()):
        raise PolicyError(expected("a list of operator names", argument, value))
    return [_registered(argument, name, known) for name in value or ()]


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
    if parameters is None or op == "Custom":  # which takes parameters that MXNet does not know
        return op, attribute, texts
    known = {name: kind for name, kind in parameters(op).items() if not kind.startswith(_INPUTS)}
    if attribute not in known:
        raise PolicyError(f"conditional_fp32_ops: the operator {op!r} has no attribute {attribute!r}."
                          f"{closest(attribute, known)}")
    kind = known[attribute]  # MXNet's text on the parameter's type, which may list its values
    choices = _BOOLEANS if kind.startswith("boolean") else (
        (*re.findall("'([^']*)'", kind.split("}")[0]), "None") if kind.startswith("{") else ())
    wrong = [text for text in texts if choices and text not in choices]
    if wrong or not texts:
        raise PolicyError(f"conditional_fp32_ops: the attribute {attribute!r} of {op!r} is never "
                          f"{', '.join(map(repr, wrong)) or values}: expected some of "
                          f"{', '.join(choices) or 'its values'}")
    return op, attribute, [spelling for text in texts for spelling in _SPELLINGS.get(text, (text,))
                           if choices == _BOOLEANS or spelling == text]


_INPUTS = ("NDArray", "Symbol", "ndarray", "tuple of <NDArray")  # the types of inputs
_SPELLINGS = {text: texts for texts in (("False", "false", "0"), ("True", "true", "1")) for text in texts}
_BOOLEANS = tuple(_SPELLINGS)


def _registered(argument: str, name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise PolicyError(f"{argument}: MXNet has no operator {name!r}.{closest(name, known)}")
    return known[name]
