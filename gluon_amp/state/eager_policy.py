"""A policy prepared for imperative calls: operators by their handles, each with its rule where no call changes it."""
from __future__ import annotations

from functools import lru_cache
from typing import Mapping, NamedTuple, Sequence

from .._mxnet.invoke import Invocation, handle_of, registered_operators
from ..dtypes import BFLOAT16
from ..graph.attrs import TYPE_FLAGS
from ..rules import ANY_DEVICE, KEEP, Decision, Device, Policy
from ..rules.decision import SWITCHED_OFF, square_of

_ARITHMETIC = ("add", "sub", "mul", "div")
_UNTOUCHED = {"amp_cast", "amp_multicast"}


class Operator(NamedTuple):
    """An operator under a policy."""

    name: str
    rule: Decision | None  # None where it depends on the call
    may_lower: bool  # whether it can run in low precision when none of its inputs is


class EagerPolicy:
    """What a policy says of imperative calls."""

    def __init__(self, policy: Policy, device: Device = ANY_DEVICE, enabled: bool = True):
        self.policy, self.device = policy, device
        self.target = policy.target_dtype
        self.flag = TYPE_FLAGS[policy.target_dtype]
        names = set(registered_operators().values()) - _UNTOUCHED
        self.operators = {handle_of(name): self._operator(name) if enabled else Operator(name, SWITCHED_OFF, False)
                          for name in names if not self._keeps(policy.fixed(name, device))}
        self.twins = twins()

    def _operator(self, name: str) -> Operator:
        return Operator(name, self.policy.fixed(name, self.device), self.policy.may_lower(name))

    def _keeps(self, rule: Decision | None) -> bool:
        # Operators that take inputs as they come know float16, but few know bfloat16.
        return rule is not None and rule.rule == KEEP and self.target != BFLOAT16

    def decide(self, operator: Operator, call: Invocation) -> Decision:
        """Return the rule of a call."""
        square = square_of(operator.name, *map(id, call.inputs))
        if square is not None and operator.name not in self.policy.overrides:
            return self.rule_of(square, {}, call.inputs[0].shape)
        if operator.rule is not None:
            return operator.rule
        return self.rule_of(operator.name, call.attrs(), call.inputs[0].shape)

    def rule_of(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None) -> Decision:
        """Return what follows for an operator."""
        return self.policy.decide(op, attrs, shape, self.device)


@lru_cache(maxsize=1)
def twins() -> Mapping[int, int]:
    """Map handles of arithmetic on arrays to those on symbols."""
    # ``x + y`` is broadcast_add of arrays but elemwise_add of symbols: equal shapes take the one of graphs.
    return {handle_of(f"broadcast_{name}"): handle_of(f"elemwise_{name}") for name in _ARITHMETIC}
