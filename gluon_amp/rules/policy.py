"""The policy: an operator, its attributes and its shape to a decision."""
from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, Callable, Mapping, Sequence

from ..checks import true_or_false, whole
from ..dtypes import BFLOAT16, FLOAT32, normalize
from ..errors import PolicyError, expected
from ..files import replacing
from .constants import constants_of, within_range
from .decision import FP32, KEEP, LOWER, RULES, Cause, Decision, Rule, may_lower
from .shapes import SHAPE_RULES, ShapeRule, can_fold_stride
from .tables import table

_MOST_SHOWN = 6
_FORMAT = "gluon_amp policy 1"
# For operators of libraries that were loaded, or of a later MXNet.
_DEFAULT = Rule(FP32, note="not in the operator tables: FP32 is safe for every operator", cause=Cause.DEFAULT)


@dataclass(frozen=True)
class Policy:
    """Decides the precision that an operator runs in.

    Attributes
    ----------
    target_dtype : str
        ``'bfloat16'``, ``'float16'``, or ``'float32'`` for a device on which low precision would be slower: all
        operators then run in FP32, and only the passes that make FP32 faster rewrite graphs.
    overrides : mapping of str to tuple of Rule
        Rules that come before those of the built-in table.
    imitated : bool
        Whether low precision is imitated: FP32 kernels, with values and gradients rounded at every edge.
    excluded : frozenset of str
        Names of graph nodes that stay in FP32.
    training : bool
        False in converted graphs, in which no gradients are taken, and which avoid wrong kernels for all shapes.
    amx : bool
        Whether oneDNN uses AMX tiles, some of whose kernels are wrong or slow for some shapes.
    channel_multiple : int, optional
        The multiple of output channels that the device's fast convolution kernels need; None for the type's usual one.
    disabled_passes : frozenset of str
        Names of graph passes (:func:`gluon_amp.list_passes`) that are off.
    reason : str
        Why everything runs in FP32, for people; empty in low precision.

    Examples
    --------
    >>> policy = Policy('bf16', excluded=frozenset({'net_dense0_fwd'}))
    >>> policy
    Policy('bfloat16', excluded={'net_dense0_fwd'})
    >>> policy.decide('FullyConnected', {}).rule
    'LOWER'
    """

    target_dtype: str
    overrides: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict, hash=False)
    imitated: bool = False
    excluded: frozenset[str] = frozenset()
    training: bool = True
    amx: bool = False
    channel_multiple: int | None = None
    disabled_passes: frozenset[str] = frozenset()
    reason: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_dtype", normalize(self.target_dtype, or_float32=True))

    def __repr__(self) -> str:
        """Show the type and what differs from the defaults; of overrides the operators and their rules."""
        plain = Policy(self.target_dtype)
        given = {each.name: getattr(self, each.name) for each in fields(self)
                 if getattr(self, each.name) != getattr(plain, each.name)}
        given["overrides"] = {op: " or ".join(dict.fromkeys(rule.rule for rule in rules))
                              for op, rules in self.overrides.items() if rules}
        shown = [f"{name}={_shown(value)}" for name, value in given.items() if value not in ({}, frozenset())]
        return f"Policy({', '.join([repr(self.target_dtype), *shown])})"

    @property
    def lowers(self) -> bool:
        """Whether anything may run in low precision."""
        return self.target_dtype != FLOAT32

    def to_json(self) -> str:
        """Write the user's decisions as JSON; those of the device are left out.

        Examples
        --------
        >>> policy = Policy('bfloat16', excluded=frozenset({'net_dense0_fwd'}))
        >>> Policy.from_json(policy.to_json()) == policy
        True
        """
        overrides = {op: [asdict(rule) for rule in rules] for op, rules in self.overrides.items()}
        return json.dumps({"format": _FORMAT, "target_dtype": self.target_dtype, "excluded": sorted(self.excluded),
                           "training": self.training, "overrides": overrides,
                           "disabled_passes": sorted(self.disabled_passes)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        PolicyError
            The text is something else, or lets an operator run in low precision whose kernel is not sound: the built-in
            table says which are, not the text.
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
        """Read a file of :meth:`save`.

        Raises
        ------
        OSError
            The file cannot be read.
        PolicyError
            It holds no policy.
        """
        with open(path, encoding="utf-8") as file:
            return cls.from_json(file.read())

    def decide(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None = None) -> Decision:
        """Return the precision of an operator, and why.

        Parameters
        ----------
        op : str
            Registered operator name.
        attrs : mapping of str to str
            Its parameters, as in symbol JSON.
        shape : sequence of int, optional
            Shape of its data (first) input, None where unknown.

        Returns
        -------
        Decision
        """
        if not self.lowers:
            note = f"float32: {self.reason}" if self.reason else "everything runs in FP32"
            return Decision(FP32, Cause.DEVICE, note)
        kept = self.kept_for(op, attrs, shape)
        if kept is not None:
            return kept
        channels = self._channels(op, attrs, shape)
        decision = next(rule for rule in self._rules(op) if _holds(rule, attrs, channels)).decision
        return within_range(decision, op, attrs, self.target_dtype)

    def kept_for(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None) -> Decision | None:
        """Return the rule that keeps an operator in FP32 for the shape of its data, which may change between calls."""
        return next((rule.decision for rule in SHAPE_RULES
                     if rule.op == op and self._heeds(rule) and rule.holds(attrs, shape or (), self.amx)), None)

    def depends_on_shape(self, op: str) -> bool:
        """Tell whether the shape of its data may keep an operator in FP32."""
        return any(rule.op == op and self._heeds(rule) for rule in SHAPE_RULES)

    def _heeds(self, rule: ShapeRule) -> bool:
        return (rule.target == self.target_dtype and rule.training in (None, self.training)
                and rule.amx in (None, self.amx) and rule.imitated in (None, self.imitated)
                and not (rule.lifted_by and self.runs(rule.lifted_by)))

    def runs(self, name: str) -> bool:
        """Tell whether a pass is on."""
        return name not in self.disabled_passes

    @property
    def trains_on_amx(self) -> bool:
        """Whether graphs are for training in bfloat16 on AMX tiles."""
        return self.amx and self.training and self.target_dtype == BFLOAT16 and not self.imitated

    @property
    def runs_native(self) -> bool:
        """Whether operators in C++ may take the place of MXNet's: they know no type that is imitated."""
        return self.runs("native_operators") and not self.imitated

    def _channels(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None) -> int | None:
        """Return the input channels that count for a rule, None where they do not matter or are unknown."""
        # In inference AMX kernels gain with few channels too, and leave their output in the layout of the others.
        if not shape or len(shape) < 2 or (self.amx and not self.training):
            return None
        # The pass fold_stride gives some convolutions more channels: rules on few do not apply then.
        is_folded = (op == "Convolution" and self.trains_on_amx and self.runs("fold_stride")
                     and can_fold_stride(attrs, shape[1]))
        return None if is_folded else shape[1]

    def fixed(self, op: str) -> Decision | None:
        """Return the decision on every use of an operator; None when it depends on the use."""
        first = self._rules(op)[0]
        depends = first.is_conditional or self.depends_on_shape(op) or (constants_of(op) and may_lower(first.decision))
        return None if depends else first.decision

    def may_lower(self, op: str) -> bool:
        """Tell whether some use of an operator on FP32 inputs runs in low precision, or rounds some of them to it."""
        return any(rule.rule == LOWER or rule.rounded_inputs for rule in self._rules(op))

    def _rules(self, op: str) -> tuple[Rule, ...]:
        return (*self.overrides.get(op, ()), *table(self.target_dtype).get(op, ()), _DEFAULT)


def _shown(value: Any) -> str:
    """Write a field's value: sets and dicts in order, and no more of them than fit a line."""
    if not isinstance(value, (frozenset, dict)):
        return repr(value)
    items = sorted(f"{key!r}: {value[key]}" if isinstance(value, dict) else repr(key) for key in value)
    more = [f"and {len(items) - _MOST_SHOWN} more"] if len(items) > _MOST_SHOWN else []
    return "{" + ", ".join(items[:_MOST_SHOWN] + more) + "}"


def refused_rules(argument: str, target_dtype: str, op: str) -> list[Rule]:
    """Return the table's rules that nobody may override; raise PolicyError when they cover the whole operator."""
    refused = [rule for rule in table(target_dtype).get(op, ()) if not rule.safe or rule.rule == KEEP]
    if any(rule.when is None for rule in refused):
        raise PolicyError(f"{argument}: {op!r} cannot run in {target_dtype}: {refused[0].note}. Leave it out of the "
                          "list")
    return refused


def _sound(target_dtype: str, op: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return a file's rules for an operator, after those of the table that it may not override."""
    if all(rule.rule == FP32 and not rule.rounded_inputs for rule in rules):
        return rules
    refused = refused_rules("overrides", target_dtype, op)
    fixed = {position for rule in table(target_dtype).get(op, ()) for position in rule.fp32_inputs}
    for rule in rules:
        if rule.rule != FP32 and not fixed.issubset(rule.fp32_inputs):
            raise ValueError(f"fp32_inputs of {op!r} lack {sorted(fixed.difference(rule.fp32_inputs))}: its kernels "
                             "read those in FP32")
    return (*(rule for rule in refused if rule not in rules), *rules)


def _read_rule(raw: Mapping[str, Any]) -> Rule:
    known = {key: value for key, value in raw.items() if key != "name"}  # earlier versions wrote the operator's
    if raw["rule"] not in RULES:
        raise ValueError(expected(f"one of {', '.join(RULES)}", "rule", raw["rule"]))
    read: dict[str, Any] = {name: tuple(whole(name, position, 0) for position in raw[name])
                            for name in ("fp32_inputs", "rounded_inputs")}
    checks: dict[str, Callable[[str, Any], Any]] = {
        "min_channels": partial(whole, least=0), "safe": true_or_false, "note": _text}
    read.update((name, check(name, raw[name])) for name, check in checks.items() if name in raw)
    when, cause = _condition("when", raw["when"]), Cause(raw.get("cause", Cause.TABLE))
    return Rule(**{**known, **read, "when": when, "cause": cause})


def _condition(name: str, value: Any) -> tuple[str, tuple[str, ...]] | None:
    """Return the attribute and the values for which a rule holds; None for a rule that always does."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
        raise ValueError(expected("an attribute and a list of values, or null", name, value))
    return value[0], _texts(name, value[1])


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(expected("a text", name, value))
    return value


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
