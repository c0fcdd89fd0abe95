"""One way of running in mixed precision."""
from __future__ import annotations

from typing import Any, Mapping, Sequence

import mxnet as mx

from .._mxnet import gpus
from .._mxnet.arrays import first_array
from ..rules import ANY_DEVICE, Device, Policy
from .eager_policy import EagerPolicy


class State:
    """One way of running in mixed precision: a policy for each kind of device. Equal settings are equal states."""

    def __init__(self, policies: Mapping[str, Policy], devices: Mapping[str, Device] | None = None,
                 enabled: bool = True):
        self.policies = policies  # by kind of device; a GPU that differs from the others has its own, as 'gpu(1)'
        self.devices = devices or {}  # what policies depend on of them
        self.enabled = enabled  # False: only what was traced inside autocast regions runs in low precision
        # asked for at every call of a network
        self._hash = hash((frozenset(policies.items()), frozenset(self.devices.items()), enabled))
        self._disabled: State | None = None
        self._eager = {kind: EagerPolicy(policy, self.device(kind), enabled) for kind, policy in policies.items()
                       if policy.lowers}
        # Without a GPU every array takes the same policy, which saves asking for its device at every call.
        self._by_device = bool(gpus.count())
        self._apart = frozenset(int(device[4:-1]) for device in policies if device.startswith("gpu("))
        self.eager_anywhere = None if self._by_device else self._eager.get("cpu")

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
    def disabled_passes(self) -> frozenset[str]:
        """The graph passes that are off, on any device."""
        return frozenset().union(*(policy.disabled_passes for policy in self.policies.values()))

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
        """Return what policies depend on of a kind of device."""
        return self.devices.get(kind if kind.startswith("gpu") else "cpu", ANY_DEVICE)

    def eager(self, inputs: Sequence[Any]) -> EagerPolicy | None:
        """Return the policy for an imperative call with these inputs."""
        if not (self._by_device and self._eager):
            return self.eager_anywhere
        array = first_array(inputs)
        return None if array is None else self._eager.get(self.key(array.context))
