"""The operators in C++ on the samples of tests/helpers/operator_samples.py: FP32 as MXNet's own operators have it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from audit import OK, WRONG, Judge, Mode, modes_for
from native_cases import requires_core
from operator_samples import NATIVE, SAMPLES

from gluon_amp import native

FP32_ONLY = {"_gluon_amp_all_finite", "_gluon_amp_box_nms", "_gluon_amp_mean", "_gluon_amp_pooling",
             "_gluon_amp_resize", "_gluon_amp_sum"}
WRITE, ADD = Mode("plain", "write", "cached"), Mode("plain", "add", "cached")


def judge(op):
    return Judge(next(item for item in SAMPLES[op] if not item.runs_low), "bfloat16", "bfloat16")


def test_every_operator_has_samples_in_the_types_that_it_takes():
    assert {item.op for item in NATIVE} == native.OPERATORS
    for op in native.OPERATORS:
        assert sum(item.runs_low for item in SAMPLES[op]) * 2 == (0 if op in FP32_ONLY else len(SAMPLES[op]))


@requires_core
@pytest.mark.parametrize("op", sorted(native.OPERATORS))
def test_fp32(op):
    if not native.is_available(op):
        pytest.skip(native.obstacle_to(op))
    one = judge(op)
    for mode in (WRITE, ADD) if one.item.in_graphs else modes_for(one.item, "bfloat16", "cpu"):
        assert one.run(mode)[:2] == (OK, ""), mode


@requires_core
def test_wrong_values_are_found():
    one = judge("_gluon_amp_clip")
    one.run(WRITE)
    one.item = replace(one.item, attrs={"a_min": "-0.5", "a_max": "1.001"})
    assert one.run(WRITE).verdict == WRONG


@requires_core
def test_wrong_updates_are_found():
    one, mode = judge("_gluon_amp_adam"), Mode("plain", "infer", "eager")
    assert one.run(mode).verdict == OK
    one.item = replace(one.item, attrs={**one.item.attrs, "lrs": "[0.1, 0.01, 0.03]"})
    assert one.run(mode).detail.startswith("state input 8 off by")


@requires_core
def test_a_gradient_that_is_not_added_is_found_without_the_identity(monkeypatch):
    one = judge("_gluon_amp_clip")
    monkeypatch.setattr(type(one.item), "needs_identities", False)
    assert one.run(ADD)[1].startswith("gradient of input 0 off by")
