"""Every operator that float16's table may run in float16 is accepted by MXNet's GPU code. Dispatch, never numbers."""
from __future__ import annotations

import pytest

pytest.importorskip("mxnet")

from operators import POLICY, dispatch

from gluon_amp.audit.processes import NORMALLY, isolated
from gluon_amp.audit.samples import samples_of
from gluon_amp.rules import LOWER, NEUTRAL, WIDEST
from gluon_amp.rules.tables import float16

RULES = (LOWER, NEUTRAL, WIDEST)
LOW = sorted(name for name, rules in float16.TABLE.items() if any(rule.rule in RULES for rule in rules))
SAMPLED = [op for op in LOW if any(POLICY.decide(op, item.attrs).rule in RULES for item in samples_of(op))]


def test_the_table_is_covered():
    assert sorted(set(LOW) - set(SAMPLED)) == ["_shuffle"]  # random, and without samples


@pytest.mark.parametrize("start", range(0, len(SAMPLED), 20))
def test_every_low_operator_dispatches_forward_and_backward(start):
    failed = {op: ended for op in SAMPLED[start:start + 20] for ended in [_ended(op)] if ended}
    assert failed == {}


def _ended(op):
    """Return what went wrong with an operator in float16 that goes well in FP32."""
    outcome = isolated(dispatch, (op,), 60.0)
    if outcome.ended == NORMALLY and not outcome.value:
        return None
    control = isolated(dispatch, (op, "float32"), 60.0)
    if outcome.ended != NORMALLY:
        return None if control.ended == outcome.ended else (outcome.ended, outcome.said[-300:])
    refused = dict(control.value or ())
    return [each for each in outcome.value if each[0] not in refused]
