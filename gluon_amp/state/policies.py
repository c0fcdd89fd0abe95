"""The policy of each device of this machine: the user's lists, and passes that are off."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

from .. import native, passes
from .._mxnet.invoke import parameters_of, registered_operators
from ..dtypes import BFLOAT16, FLOAT32, Support
from ..rules import Device, Policy, make_policy

custom_ops: dict[str, str] = {}  # by register_op: operator type to rule


def device_policies(chosen: Mapping[str, Support], disabled_passes: frozenset[str] = frozenset(),
                    **lists: Any) -> dict[str, Policy]:
    """Make the policy of each kind of device, with the user's lists (those of :func:`make_policy`)."""
    if all(each.dtype == FLOAT32 for each in chosen.values()):
        # Lists that would be refused on another machine are refused here.
        make_policy(BFLOAT16, registered_operators(), parameters=parameters_of, custom_ops=custom_ops, **lists)
    return {device: replace(_policy(each, lists), disabled_passes=disabled_passes) for device, each in chosen.items()}


def _policy(support: Support, lists: Mapping[str, Any]) -> Policy:
    if support.dtype == FLOAT32:
        return Policy(FLOAT32)
    return make_policy(support.dtype, registered_operators(), parameters=parameters_of, custom_ops=custom_ops, **lists)


def devices_of(chosen: Mapping[str, Support]) -> dict[str, Device]:
    """Return what policies depend on of each kind of device."""
    return {device: Device.of(each) for device, each in chosen.items()}


def rewrites(policies: Mapping[str, Policy], devices: Mapping[str, Device]) -> str:
    """Name what makes networks faster under some policies, for people."""
    runs = native.is_available if native.any_is_available() else None
    used = {step.name for kind, policy in policies.items() for step in passes.pipeline_of(
        passes.Context(policy, devices[kind], native=runs if kind == "cpu" else None))}
    return ", ".join([name for name in passes.list_passes() if name in used] + ["faster updates"])


def policies_of(policy: Policy, chosen: Mapping[str, Support]) -> dict[str, Policy]:
    """Fit a policy to the devices that run its type."""
    passes.checked(policy.disabled_passes, "policy.disabled_passes")
    fp32 = Policy(FLOAT32, disabled_passes=policy.disabled_passes)
    return {device: fp32 if each.dtype == FLOAT32 else policy for device, each in chosen.items()}
