"""Every operator that float16's table may run in float16 is accepted by MXNet's GPU code. Dispatch, never numbers."""
from __future__ import annotations

import pytest

pytest.importorskip("mxnet")

from apart import NORMALLY, apart
from operator_samples import SAMPLES
from operators import POLICY, conditions, dispatch

from gluon_amp.rules import LOWER, NEUTRAL, WIDEST
from gluon_amp.rules.tables import table

RULES = (LOWER, NEUTRAL, WIDEST)
LOW = sorted(name for name, rules in table("float16").items() if any(rule.rule in RULES for rule in rules))
SAMPLED = [op for op in LOW if any(POLICY.decide(op, item.attrs).rule in RULES for item in SAMPLES.get(op, ()))]


# What FP32 does not run either, so that nothing is lost by float16: rrelu ends the process on a CPU as well. Whether an
# index is out of bounds is read from memory that no kernel of this device clears: anything may be there.
NOT_ON_A_GPU = {"_contrib_BatchNormWithReLU": "is not implemented for GPU", "LeakyReLU": "SIGSEGV",
                "take": "indices out of bound",
                **dict.fromkeys(("_npi_copysign_scalar", "_npi_rcopysign_scalar"), "Number of inputs to operator")}


def test_the_table_is_covered():
    assert sorted(set(LOW) - set(SAMPLED)) == []


@pytest.mark.parametrize("start", range(0, len(SAMPLED), 20))
def test_every_low_operator_dispatches_forward_and_backward(start):
    failed = {op: found for op in SAMPLED[start:start + 20] for found in [_failures(op)] if found}
    unexpected = {op: found for op, found in failed.items()
                  if not all(NOT_ON_A_GPU.get(op, "nothing of the kind") in said for said in found.values())}
    assert unexpected == {}


def _failures(op):
    """Return what went wrong with an operator, by the condition; those of one that ends its process one by one."""
    outcome = apart(dispatch, op, seconds=60.0)
    if outcome.ended == NORMALLY:
        return dict(outcome.value)
    ended = {condition: apart(dispatch, op, "float16", condition, seconds=60.0) for condition in conditions(op)}
    return {condition: f"{each.ended} {each.value} {each.said[-300:]}" for condition, each in ended.items()
            if each.ended != NORMALLY or each.value}
