"""Shared fixtures: AMP is off before and after every test, and rewrites are verified."""
from __future__ import annotations

import os

os.environ.setdefault("GLUON_AMP_VERIFY", "1")

import pytest
from cpu_kinds import NO_BF16, RUNS_BFLOAT16, take_for

import gluon_amp as amp
from gluon_amp.runtime.devices import support


@pytest.fixture(autouse=True)
def _amp_off():
    amp.deinit()
    yield
    amp.deinit()


@pytest.fixture(params=NO_BF16)
def lesser(request, monkeypatch):
    """A CPU without BF16 instructions, as far as this package knows."""
    take_for(monkeypatch, request.param)
    return request.param


def pytest_collection_modifyitems(items):
    if RUNS_BFLOAT16:
        return
    skip = pytest.mark.skip(reason=f"cannot run bfloat16, not even emulated: {support('cpu').reason}")
    for item in items:
        if "bf16" in item.keywords:
            item.add_marker(skip)
