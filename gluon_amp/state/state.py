"""One way of running in mixed precision: the policy of each kind of device, also as imperative calls look it up."""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Mapping, NamedTuple, Sequence

import mxnet as mx

from .. import passes
from .._mxnet import gpus
from .._mxnet.arrays import first_array
from .._mxnet.invoke import Invocation, handle_of, parameters_of, registered_operators
from ..graph.attrs import TYPE_FLAGS
from ..machine.dtypes import BFLOAT16, FLOAT32, Support
from ..rules import ANY_DEVICE, KEEP, Decision, Device, Policy, make_policy
from ..rules.decision import SWITCHED_OFF
from .devices import cpu_rates

custom_ops: dict[str, str] = {}  # by register_op: operator type to rule


def device_policies(chosen: Mapping[str, Support], disabled_passes: frozenset[str] = frozenset(),
                    **lists: Any) -> dict[str, Policy]:
    """Make the policy of each kind of device, with the user's lists (those of :func:`make_policy`)."""
    def made(dtype: str) -> Policy:
        return make_policy(dtype, registered_operators(), parameters=parameters_of, custom_ops=custom_ops, **lists)

    if all(each.dtype == FLOAT32 for each in chosen.values()):
        made(BFLOAT16)  # refuses the lists that another machine would refuse
    return {device: replace(Policy(FLOAT32) if each.dtype == FLOAT32 else made(each.dtype),
                            disabled_passes=disabled_passes) for device, each in chosen.items()}


def policies_of(policy: Policy, chosen: Mapping[str, Support]) -> dict[str, Policy]:
    """Fit a policy to the devices that run its type."""
    passes.checked(policy.disabled_passes, "policy.disabled_passes")
    fp32 = Policy(FLOAT32, disabled_passes=policy.disabled_passes)
    return {device: fp32 if each.dtype == FLOAT32 else policy for device, each in chosen.items()}


def remember(entries: dict[Any, Any], key: Any, value: Any, most: int) -> Any:
    """Add an entry, and drop the oldest where there are more than ``most``; return the value."""
    entries[key] = value
    while len(entries) > most:
        entries.pop(next(iter(entries)), None)
    return value


class Operator(NamedTuple):
    """An operator under a policy."""

    name: str
    rule: Decision | None  # None where it depends on the call
    may_lower: bool  # whether it can run in low precision when none of its inputs is
    square: str | None = None  # the operator whose rules hold for an array times itself


class EagerPolicy:
    """A policy for imperative calls: operators by their handles, each with its rule where no call changes it."""

    def __init__(self, policy: Policy, device: Device = ANY_DEVICE, enabled: bool = True):
        self.policy, self.device = policy, device
        self.target = policy.target_dtype
        self.flag = TYPE_FLAGS[policy.target_dtype]
        self.operators: dict[int, Operator] = {}
        self.twins = twins()
        for name in set(registered_operators().values()) - {"amp_cast", "amp_multicast"}:
            rule = policy.fixed(name, device)
            # Operators that take inputs as they come know float16, but few know bfloat16.
            if rule is None or rule.rule != KEEP or self.target == BFLOAT16:
                self.operators[handle_of(name)] = (
                    Operator(name, rule, policy.may_lower(name), policy.square_of(name)) if enabled
                    else Operator(name, SWITCHED_OFF, False))

    def decide(self, operator: Operator, call: Invocation) -> Decision:
        """Return the rule of a call."""
        if operator.square and len(call.inputs) == 2 and call.inputs[0] is call.inputs[1]:
            return self.rule_of(operator.square, {}, call.inputs[0].shape)
        if operator.rule is not None:
            return operator.rule
        return self.rule_of(operator.name, call.attrs(), call.inputs[0].shape)

    def rule_of(self, op: str, attrs: Mapping[str, str], shape: Sequence[int] | None) -> Decision:
        """Return the rule of an operator."""
        return self.policy.decide(op, attrs, shape, self.device)


@lru_cache(maxsize=1)
def twins() -> Mapping[int, int]:
    """Map handles of arithmetic on arrays to handles of arithmetic on symbols."""
    # ``x + y`` is broadcast_add of arrays but elemwise_add of symbols: equal shapes take the operator of graphs.
    return {handle_of(f"broadcast_{name}"): handle_of(f"elemwise_{name}") for name in ("add", "sub", "mul", "div")}


class State:
    """A policy for each kind of device. Equal settings are equal states."""

    def __init__(self, policies: Mapping[str, Policy], devices: Mapping[str, Device] | None = None,
                 enabled: bool = True):
        self.policies = policies  # by kind of device; a GPU that differs from the others has its own, as 'gpu(1)'
        self.devices = devices or {}  # properties of each kind of device that policies depend on
        self.enabled = enabled  # False: only operators traced inside autocast regions run in low precision
        # asked for at every call of a network
        self._hash = hash((frozenset(policies.items()), frozenset(self.devices.items()), enabled))
        self._disabled: State | None = None
        self._eager = {kind: EagerPolicy(policy, self.device(kind), enabled) for kind, policy in policies.items()
                       if policy.lowers}
        # Without a GPU every array takes the same policy, which saves asking for its device at every call.
        self._by_device = bool(gpus.count())
        self._apart = frozenset(int(device[4:-1]) for device in policies if device.startswith("gpu("))
        self.eager_anywhere = None if self._by_device else self._eager.get("cpu")

    @classmethod
    def on(cls, chosen: Mapping[str, Support], policies: Mapping[str, Policy]) -> State:
        """Make the state of policies for the kinds of device that were chosen."""
        return cls(policies, {device: Device.of(each, cpu_rates() if device == "cpu" else None)
                              for device, each in chosen.items()})

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self._hash == other._hash
                                 and self.enabled == other.enabled and self.policies == other.policies
                                 and self.devices == other.devices)

    def disabled(self) -> State:
        """Return the state of a region without AMP inside this one."""
        if self._disabled is None:
            self._disabled = State(self.policies, self.devices, enabled=False) if self.enabled else self
        return self._disabled

    @property
    def lowers(self) -> bool:
        """Whether anything runs in low precision, on any device."""
        return any(policy.lowers for policy in self.policies.values())

    def key(self, context: mx.Context) -> str:
        """Return the name of a device that policies are kept under."""
        if context.device_type != "gpu":
            return "cpu"
        return f"gpu({context.device_id})" if context.device_id in self._apart else "gpu"

    def policy(self, device: str) -> Policy | None:
        """Return the policy for arrays on a device, None where they stay in FP32."""
        return self.policies.get(device if device.startswith("gpu") else "cpu")

    def device(self, kind: str) -> Device:
        """Return the properties of a kind of device that policies depend on."""
        return self.devices.get(kind if kind.startswith("gpu") else "cpu", ANY_DEVICE)

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        if not (self._by_device and self._eager):
            return self.eager_anywhere
        array = first_array(inputs)
        return None if array is None else self._eager.get(self.key(array.context))
