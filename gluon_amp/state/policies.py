"""The policy of each device of this machine: the user's lists, and passes that are off."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

from .. import native, passes
from .._mxnet.invoke import parameters_of, registered_operators
from ..dtypes import BFLOAT16, FLOAT32, Support
from ..rules import Policy, make_policy
from .devices import choose, device_supports

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
        return Policy(FLOAT32, reason=support.reason, channel_multiple=support.channel_multiple)
    policy = make_policy(support.dtype, registered_operators(), parameters=parameters_of,
                         custom_ops=custom_ops, imitated=support.imitated, **lists)
    return replace(policy, channel_multiple=support.channel_multiple, amx=support.amx)


def rewrites(policies: Mapping[str, Policy]) -> str:
    """Name what makes networks faster under some policies, for people."""
    used = {step.name for device, policy in policies.items() for step in passes.pipeline_of(
        passes.Context(policy, native=native.is_available if device == "cpu" and native.any_is_available() else None))}
    return ", ".join([name for name in passes.list_passes() if name in used] + ["faster updates"])


def policies_of(policy: Policy) -> dict[str, Policy]:
    """Fit a policy to the devices of this machine that run its type."""
    passes.checked(policy.disabled_passes, "policy.disabled_passes")
    chosen = choose(policy.target_dtype, device_supports())
    return {device: replace(_policy(each, {}), disabled_passes=policy.disabled_passes) if each.dtype == FLOAT32 else
            replace(policy, imitated=each.imitated, channel_multiple=each.channel_multiple, amx=each.amx)
            for device, each in chosen.items()}
