"""The policy of each device of this machine: the user's lists, passes that are off, and measurements."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Mapping, Sequence

from .. import native, passes
from .._mxnet.operators import parameters_of, registered_operators
from ..dtypes import BFLOAT16, FLOAT32, Support
from ..errors import PolicyError
from ..rules import Policy, make_policy
from ..rules.measurements import Tuning, default_cache
from .devices import choose, device_supports, machine

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


def tuned(policies: Mapping[str, Policy], tuning: Tuning | str | os.PathLike | bool | None) -> dict[str, Policy]:
    """Give policies the measurements of this machine that the user named."""
    if tuning is None or tuning is False:
        return dict(policies)
    machines = {device: machine(device, policy.target_dtype) for device, policy in policies.items()}
    if isinstance(tuning, Tuning):
        return _measured(policies, machines, [tuning])
    path = default_cache() if tuning is True else tuning
    return _measured(policies, machines, Tuning.load_all(path))


def _measured(policies: Mapping[str, Policy], machines: Mapping[str, str],
              tunings: Sequence[Tuning]) -> dict[str, Policy]:
    """Give each policy what was measured of its device and type."""
    known = {tuning.machine: tuning for tuning in tunings}
    if not known.keys() & set(machines.values()):
        raise PolicyError(f"the measurements are of another machine ({'; '.join(known) or 'none'}), this is "
                          f"{'; '.join(machines.values())}: call amp.tune(net, data) here")
    return {device: replace(policy, slow=own.slow, fast=own.fast) for device, policy in policies.items()
            for own in [known.get(machines[device], Tuning(""))]}
