"""The policy of a network that is cast as a whole, as ``O2`` and ``O3`` do."""
from __future__ import annotations

from dataclasses import replace

from ..rules import FP32, WIDEST, Policy, Rule
from ..rules.tables import table
from ..rules.tables.groups.layers import BATCH_NORMS
from ..rules.tables.whole_network import WHOLE_NETWORK

_SCALE_AND_SHIFT = (1, 2)  # inputs of batch normalization


def cast_network(policy: Policy, round_batch_norm: bool = False) -> Policy:
    """Return the policy for a network that is cast as a whole: operators with a correct kernel follow their data."""
    known = table(policy.target_dtype)
    followers = {name: tuple(map(_follower, known[name])) for name in WHOLE_NETWORK[policy.target_dtype]}
    rounding = {name: tuple(replace(rule, rounded_inputs=_SCALE_AND_SHIFT) for rule in known[name])
                for name in BATCH_NORMS if round_batch_norm}
    return replace(policy, overrides={**followers, **rounding, **policy.overrides})


def _follower(rule: Rule) -> Rule:
    if rule.rule != FP32 or not rule.safe:
        return rule
    return replace(rule, rule=WIDEST, note="the network is cast as a whole; mixed inputs widen to FP32")
