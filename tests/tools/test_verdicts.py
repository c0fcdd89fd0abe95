"""What the operator checker makes of values, messages and names."""
from __future__ import annotations

import numpy as np
from audit.judge import message_of
from audit.page import _short
from audit.samples import reason_of, samples_of
from audit.samples.excluded import is_backward
from audit.samples.sample import low, sample
from audit.values import round_to
from audit.verdicts import bias_of, error_of, overall


def test_verdicts():
    assert error_of(np.array([1.0, 3.0]), np.array([1.0, 1.0])) == 1.0
    assert bias_of(np.full(100, 0.5), np.ones(100)) == -0.5
    assert overall({"eager/plain/write": "ok", "eager/plain/addlow": "wrong"}, {"eager/plain/addlow": "wrong"}) == "ok"
    assert round_to(np.array([1.005], np.float32), "bfloat16")[0] == 1.0078125


def test_words():
    trace = "Traceback (most recent call last):\n  File \"a/src/b.cc\", line 1\nMXNetError: no"
    assert message_of(ValueError(trace)) == "MXNetError: no"
    assert _short(["eager/blocked/write", "cached/blocked/write"]) == "blocked, write (2 modes)"


def test_samples():
    assert samples_of("relu")[0].condition == "default"
    assert sample("clip", low(2, 3), a_min=0, a_max=1).condition == "a_min=0, a_max=1"
    assert reason_of("_zeros") == "creates an array: no data input"
    names = ("_backward_Convolution", "_split_v2_backward", "Convolution")
    assert [is_backward(name) for name in names] == [True, True, False]
