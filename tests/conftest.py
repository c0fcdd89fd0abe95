"""Shared fixtures: AMP is off before and after every test, and rewrites are verified."""
from __future__ import annotations

import os

os.environ.setdefault("GLUON_AMP_VERIFY", "1")

import pytest

import gluon_amp as amp
from gluon_amp.dtypes import cpu_support


@pytest.fixture(autouse=True)
def _amp_off():
    amp.deinit()
    yield
    amp.deinit()


def pytest_collection_modifyitems(items):
    if cpu_support().dtype is not None:
        return
    skip = pytest.mark.skip(reason=f"cannot run bfloat16: {cpu_support().reason}")
    for item in items:
        if "bf16" in item.keywords:
            item.add_marker(skip)
