"""The policy: operator and attributes to a precision rule, with the user's overrides."""
from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Mapping, Sequence, Tuple

from . import op_lists, shape_rules
from .dtypes import BFLOAT16, FLOAT32, normalize
from .errors import PolicyError, closest, expected
from .files import replacing
from .op_lists import FP32, KEEP, LOWER, NEUTRAL, RULES, WIDEST, OpRule
from .tuning import signature

__all__ = ["Policy", "make_policy", "precision"]

_SLOW = OpRule("*", FP32, note="measured to be slower in low precision on this machine")

_FORMAT = "gluon_amp policy 1"

ConditionalOp = Tuple[str, str, Sequence[str]]


@dataclass(frozen=True)
class Policy:
    """Decides the precision that an operator runs in.

    Attributes
    ----------
    target_dtype : str
        ``'bfloat16'``, ``'float16'``, or ``'float32'`` for a device on which low precision would be slower: all
        operators then run in FP32, and only the passes that make FP32 faster rewrite graphs.
    overrides : mapping of str to tuple of OpRule
        Records that come before those of the built-in table.
    emulated : bool
        Whether low precision is imitated: FP32 kernels, with values and gradients rounded at every edge.
    excluded : frozenset of str
        Names of graph nodes that stay in FP32.
    training : bool
        False in converted graphs, in which no gradients are taken, and which avoid unsound kernels for all shapes.
    amx : bool
        Whether oneDNN uses AMX tiles, some of whose kernels are not sound, or not fast, for all shapes.
    channel_multiple : int, optional
        The multiple of output channels that the device's fast convolution kernels need; None for the type's usual one.
    slow : frozenset of str
        Uses of operators (:func:`gluon_amp.tuning.signature`) that were measured to be slower in low precision.
    disabled_passes : frozenset of str
        Names of graph passes (:func:`gluon_amp.list_passes`) that are off.
    reason : str
        Why everything runs in FP32, for people; empty in low precision.

    Examples
    --------
    >>> Policy('bfloat16').decide('FullyConnected', {}).rule
    'LOWER'
    """

    target_dtype: str
    overrides: Mapping[str, tuple[OpRule, ...]] = field(default_factory=dict)
    emulated: bool = False
    excluded: frozenset[str] = frozenset()
    training: bool = True
    amx: bool = False
    channel_multiple: int | None = None
    slow: frozenset[str] = frozenset()
    disabled_passes: frozenset[str] = frozenset()
    reason: str = ""

    @property
    def lowers(self) -> bool:
        """Whether anything may run in low precision."""
        return self.target_dtype != FLOAT32

    def to_json(self) -> str:
        """Write what the user decides as JSON; what belongs to the device is left out.

        Examples
        --------
        >>> policy = Policy('bfloat16', excluded=frozenset({'net_dense0_fwd'}))
        >>> Policy.from_json(policy.to_json()) == policy
        True
        """
        overrides = {op: [asdict(rule) for rule in rules] for op, rules in self.overrides.items()}
        return json.dumps({"format": _FORMAT, "target_dtype": self.target_dtype, "excluded": sorted(self.excluded),
                           "slow": sorted(self.slow), "training": self.training, "overrides": overrides,
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
            return cls(target, overrides, excluded=frozenset(raw["excluded"]),
                       slow=frozenset(raw["slow"]), training=bool(raw["training"]),
                       disabled_passes=frozenset(raw.get("disabled_passes", ())))
        except PolicyError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PolicyError(f"not the JSON text of a policy: {type(error).__name__}: {error}") from error

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

    def decide(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None = None) -> OpRule:
        """Return the record that governs an operator.

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
        OpRule
        """
        if not self.lowers:
            return OpRule(op, FP32, note=f"float32: {self.reason}" if self.reason else "everything runs in FP32")
        kept = self.kept_for(op, attrs, shape)
        if kept is not None:
            return kept
        # In inference AMX kernels gain with few channels too, and leave their output in the layout of the others.
        any_channels = self.amx and not self.training
        channels = shape[1] if shape and len(shape) > 1 and not any_channels else None
        if channels and op == "Convolution" and self.folds_strides and shape_rules.can_fold_stride(attrs, channels):
            channels = None  # it will have more
        return next(record for record in self._records(op) if _holds(record, attrs, channels))

    @property
    def folds_strides(self) -> bool:
        """Whether strided convolutions of few channels run as others, of more channels and without a stride."""
        return (self.amx and self.training and self.target_dtype == BFLOAT16 and not self.emulated
                and "fold_stride" not in self.disabled_passes)

    @property
    def has_shape_rules(self) -> bool:
        """Whether :meth:`kept_for` can find anything."""
        return (self.lowers and bool(self.slow)) or (self.training and self.target_dtype == BFLOAT16)

    @property
    def _undilated(self) -> bool:
        """Whether nothing but FP32 keeps pointwise convolutions from a kernel that is not sound for all shapes."""
        return (self.amx and not self.training and self.target_dtype == BFLOAT16
                and "dilate_pointwise" in self.disabled_passes)

    def kept_for(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None) -> OpRule | None:
        """Return what keeps an operator in FP32 for the shape of its data, which may change from call to call."""
        if op == "Convolution" and self._undilated and shape_rules.is_pointwise(attrs):
            return shape_rules.UNDILATED
        if not (self.has_shape_rules and shape):
            return None
        if self.slow and signature(op, attrs, shape) in self.slow:
            return _SLOW
        if self.target_dtype != BFLOAT16 or not self.training:
            return None
        if op == "Pooling" and shape_rules.pools_out_of_order(attrs, shape, self.amx):
            return shape_rules.SINGLE_PIXEL
        return shape_rules.unsound_convolution(attrs, shape, self.amx) if op == "Convolution" else None

    def fixed_rule(self, op: str) -> OpRule | None:
        """Return the record that governs every use of an operator; None when it depends on the use."""
        first = self._records(op)[0]
        return None if first.when or first.min_channels else first

    def may_lower(self, op: str) -> bool:
        """Whether some use of an operator on FP32 inputs runs in low precision, or rounds some of them to it."""
        return any(record.rule == LOWER or record.rounded_inputs for record in self._records(op))

    def _records(self, op: str) -> tuple[OpRule, ...]:
        return (*self.overrides.get(op, ()), *op_lists.table(self.target_dtype).get(op, ()), op_lists.DEFAULT_RULE)


def _read_rule(raw: Mapping[str, Any]) -> OpRule:
    when = None if raw["when"] is None else (raw["when"][0], tuple(raw["when"][1]))
    if raw["rule"] not in RULES:
        raise ValueError(expected(f"one of {', '.join(RULES)}", "rule", raw["rule"]))
    positions = {name: tuple(raw[name]) for name in ("fp32_inputs", "rounded_inputs")}
    return OpRule(**{**raw, "when": when, **positions})


def _sound(target: str, op: str, records: tuple[OpRule, ...]) -> tuple[OpRule, ...]:
    """Return a file's records for an operator behind what the table does not let it do."""
    if all(record.rule == FP32 and not record.rounded_inputs for record in records):
        return records
    refused = _refused("overrides", target, op)
    fixed = {position for record in op_lists.table(target).get(op, ()) for position in record.fp32_inputs}
    for record in records:
        if record.rule != FP32 and not fixed.issubset(record.fp32_inputs):
            raise ValueError(f"fp32_inputs of {op!r} lack {sorted(fixed.difference(record.fp32_inputs))}: its kernels "
                             "read those in FP32")
    return (*(record for record in refused if record not in records), *records)


def _refused(argument: str, target: str, op: str) -> list[OpRule]:
    """Return the table's records that nobody may override; raise when nothing of the operator is left."""
    refused = [record for record in op_lists.table(target).get(op, ()) if not record.safe or record.rule == KEEP]
    if any(record.when is None for record in refused):
        raise PolicyError(f"{argument}: {op!r} cannot run in {target}: {refused[0].note}. Leave it out of the list")
    return refused


def _holds(record: OpRule, attrs: Mapping[str, str], channels: int | None) -> bool:
    if record.min_channels and channels is not None and channels < record.min_channels:
        return False
    if record.when is None:
        return True
    attribute, values = record.when
    return str(attrs.get(attribute)) in values


def precision(rule: OpRule, types: Sequence[Any], fp32: Any, low: Any) -> Any:
    """Return the precision that an operator's floating-point data takes; None when it has no such data.

    Parameters
    ----------
    rule : OpRule
        Governs the operator.
    types : sequence
        The types of its inputs, in any representation.
    fp32, low : object
        FP32 and the low-precision type in that representation; inputs of other types do not count.

    Examples
    --------
    >>> precision(OpRule('Concat', 'WIDEST'), ['bfloat16', 'float32', 'int32'], 'float32', 'bfloat16')
    'float32'
    """
    data = [kind for position, kind in enumerate(types) if kind in (fp32, low) and position not in rule.fp32_inputs]
    if not data:
        return None
    if rule.rule == LOWER:
        return low
    if rule.rule == NEUTRAL:
        return data[0]
    return low if rule.rule == WIDEST and fp32 not in data else fp32


def make_policy(target_dtype: str, known_ops: Mapping[str, str], *, target_precision_ops: Sequence[str] | None = None,
                fp32_ops: Sequence[str] | None = None,
                conditional_fp32_ops: Sequence[ConditionalOp] | None = None,
                custom_ops: Mapping[str, str] | None = None, emulated: bool = False) -> Policy:
    """Build a policy from operator lists as MXNet's ``amp.init`` takes them.

    Parameters
    ----------
    target_dtype : str
        ``'bfloat16'`` or ``'float16'``.
    known_ops : mapping of str to str
        Every name that MXNet knows an operator by, to the one it is registered under.
    target_precision_ops : sequence of str, optional
        The operators that run in ``target_dtype``, in place of the table's.
    fp32_ops : sequence of str, optional
        Operators forced to FP32, beside the table's.
    conditional_fp32_ops : sequence of (str, str, sequence of str), optional
        Operator, attribute, and the attribute's values that force FP32, beside the table's.
    custom_ops : mapping of str to str, optional
        Type of a custom operator to its rule.
    emulated : bool
        As in :class:`Policy`.

    Raises
    ------
    PolicyError
        For an unknown operator, one in two lists, or one that has no sound kernel in ``target_dtype``.

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
    overrides: dict[str, tuple[OpRule, ...]]
    overrides = {name: (OpRule(name, FP32, note="in the fp32_ops list"),) for name in forced}
    for name, attribute, values in conditional:
        record = OpRule(name, FP32, when=(attribute, tuple(map(str, values))), note="in the conditional_fp32_ops list")
        overrides[name] = (*overrides.get(name, ()), record)
    if target_precision_ops is not None:
        overrides.update(_lower_overrides(target_dtype, lower))
    overrides["Custom"] = tuple(OpRule("Custom", rule, when=("op_type", (name,)), note="by register_op")
                                for name, rule in (custom_ops or {}).items())
    return Policy(target_dtype, overrides, emulated)


def _lower_overrides(target_dtype: str, names: list[str]) -> Mapping[str, tuple[OpRule, ...]]:
    table = op_lists.table(target_dtype)
    found: dict[str, tuple[OpRule, ...]] = {}
    for name in names:
        records = table.get(name, ())
        refused = _refused("target_precision_ops", target_dtype, name)
        # What the table runs in low precision anyway keeps the table's conditions.
        if not any(record.rule == LOWER for record in records):
            fp32_inputs = next((record.fp32_inputs for record in records), ())
            forced = OpRule(name, LOWER, fp32_inputs=fp32_inputs, note="in the target_precision_ops list")
            found[name] = (*refused, forced)
    for name, records in table.items():
        if name not in names and any(record.rule == LOWER for record in records):
            found[name] = (OpRule(name, FP32, note="not in the target_precision_ops list"),)
    return found


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
